"""Ways to show a training while it runs: on a terminal, in a notebook, as lines."""

import html
import sys
from typing import Any, Literal, Protocol, TextIO

from meshwright.train.glance import Glance

How = Literal["auto", "live", "lines", "notebook", "none"]
HOWS: tuple[How, ...] = ("auto", "live", "lines", "notebook", "none")

LINE_SECONDS = 10.0
"""Lines come so often, and at the end of every epoch."""
LIVE_SECONDS = 0.5


class Display(Protocol):
    """Shows glances; `every` is how many seconds lie between them."""

    every: float

    def show(self, glance: Glance) -> None:
        """Shows what there is to see now."""

    def tell(self, words: str) -> None:
        """Says once what glances do not repeat."""

    def warn(self, words: str) -> None:
        """Says what slows the training down."""

    def close(self) -> None:
        """Leaves the last glance where it is."""


def make_display(how: How) -> Display | None:
    """The display of a name; `auto` looks at where the output goes."""
    if how == "auto":
        on_terminal: How = "live" if sys.stdout.isatty() else "lines"
        how = "notebook" if _in_notebook() else on_terminal
    if how == "none":
        return None
    return {"live": Live, "lines": Lines, "notebook": Notebook}[how]()


class Lines:
    """A plain line now and then, for files and pipes."""

    every = LINE_SECONDS

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file

    def show(self, glance: Glance) -> None:
        """Prints a line."""
        self._print(str(glance))

    def tell(self, words: str) -> None:
        """Prints it."""
        self._print(words)

    def warn(self, words: str) -> None:
        """Prints what slows the training down."""
        self._print(f"slow: {words}")

    def close(self) -> None:
        """Nothing is left to do."""

    def _print(self, line: str) -> None:
        file = self._file or sys.stdout
        # A pipe may take less than what Python can print.
        encoding = getattr(file, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=file, flush=True)


class Live:
    """A bar for the epoch and what is known beneath it, drawn again in its place."""

    every = LIVE_SECONDS

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._live = RichLive(
            console=console or Console(), auto_refresh=False, transient=False
        )
        self._live.start()

    def show(self, glance: Glance) -> None:
        """Draws anew; the glance at the end of an epoch stays above."""
        if glance.is_end:
            line = f"{glance.place}: {glance.results}"
            self._live.console.print(line, highlight=False, markup=False)
        self._live.update(_panel(glance), refresh=True)

    def tell(self, words: str) -> None:
        """Nothing: it is among what is drawn again."""

    def warn(self, words: str) -> None:
        """Prints what slows the training down, above what is drawn again."""
        line = f"slow: {words}"
        self._live.console.print(line, style="yellow", highlight=False, markup=False)

    def close(self) -> None:
        """Stops drawing."""
        self._live.stop()


class Notebook:
    """Text that takes its own place again; needs no widgets."""

    every = LIVE_SECONDS

    def __init__(self) -> None:
        self._handle: Any = None
        self._warnings: list[str] = []

    def show(self, glance: Glance) -> None:
        """Shows the newest glance in the place of the last one."""
        from IPython.display import HTML, display

        lines = [*glance.lines, *self._warnings]
        text = HTML(f"<pre>{html.escape(chr(10).join(lines))}</pre>")
        if self._handle is None:
            self._handle = display(text, display_id=True)
        else:
            self._handle.update(text)

    def tell(self, words: str) -> None:
        """Nothing: it is among what is shown."""

    def warn(self, words: str) -> None:
        """Keeps it beneath what is shown."""
        self._warnings.append(f"slow: {words}")

    def close(self) -> None:
        """Nothing is left to do."""


def _in_notebook() -> bool:
    """Whether output goes to a notebook, which can replace what it shows."""
    interactive = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _panel(glance: Glance) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    is_open = glance.steps is None
    bar = ProgressBar(total=glance.steps, completed=glance.step, pulse=is_open)
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    head.add_row(glance.place, bar, glance.rest)
    return Group(head, *(Text(row, style="dim") for row in glance.details))
