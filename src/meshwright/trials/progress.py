"""What people see of a search while it goes on."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from meshwright.launch.console import Console
from meshwright.launch.stop import StopRequests
from meshwright.trials.ledger import Ledger, Outcome
from meshwright.trials.results import Direction, TrialRecord, spell

if TYPE_CHECKING:
    from meshwright.trials.running import RunningTrial

    from rich.live import Live

_REFRESH_SECONDS = 0.5


class Progress:
    """A live table on a terminal, and a line for each trial elsewhere.

    Arguments:
        console: Where it is shown.
        study: The study's name.
        total: How many trials it is to have.
    """

    def __init__(
        self, console: Console, study: str, total: int, direction: Direction
    ) -> None:
        self._console = console
        self._study = study
        self._total = total
        self._sign = 1 if direction == "minimize" else -1
        self._records: tuple[TrialRecord, ...] = ()
        self._began = time.monotonic()
        self._ended_before = 0
        self._shown_at = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, where)
            self._live = None

    def begin(self, ledger: Ledger) -> None:
        """Looks at what there is before anything runs here."""
        self._records = ledger.records()
        self._ended_before = self._ended()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Says a line, above the table if there is one."""
        if self._live is not None:
            self._live.console.print(
                f"meshwright: {text}", markup=False, highlight=False
            )
        else:
            self._console.say(text)

    def end(
        self,
        running: "RunningTrial",
        outcome: Outcome,
        ledger: Ledger,
        *,
        again: bool = False,
    ) -> None:
        """Tells what came of a trial, and whether there is to be another attempt."""
        self._records = ledger.records()
        words = {"complete": "", "returned": "was interrupted"}.get(
            outcome.how, outcome.how
        )
        if outcome.value is not None:
            words = f"{outcome.value:.6g}"
        because = f": {outcome.because}" if outcome.because else ""
        once_more = "; once more" if again and outcome.how == "lost" else ""
        self.say(
            f"trial {ledger.number_of(running.trial)} on {running.slot.device} "
            f"({running.seconds:.1f} s): {words}{because}{once_more}; {self._summary()}"
        )

    def say_stopping(self, stop: StopRequests, running: int) -> None:
        """Tells what being asked to stop does."""
        if stop.is_urgent or stop.exit_code != 130 or not running:
            self.say("stops; trials that run are given back to the study")
        else:
            self.say(
                f"stops when the {running} that run have ended; once more stops at once"
            )

    def show(self, running: "Sequence[RunningTrial]") -> None:
        """Shows the table anew, if it is time."""
        now = time.monotonic()
        if self._live is None or now - self._shown_at < _REFRESH_SECONDS:
            return
        self._shown_at = now
        self._live.update(self._table(running), refresh=True)

    def _table(self, running: "Sequence[RunningTrial]") -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for head in ("where", "trial", "time", "last report"):
            table.add_column(head)
        for each in running:
            reported = "-" if each.reported is None else f"{each.reported:.6g}"
            number, seconds = str(each.trial.number), f"{each.seconds:.0f} s"
            table.add_row(each.slot.device, number, seconds, reported)
        lines: list[Any] = [Text(f"{self._study}: {self._summary()}"), table]
        best = self._best()
        if best is not None:
            params = ", ".join(f"{n}={spell(v)}" for n, v in best.params.items())
            words = f"best: {best.value:.6g} of trial {best.number} ({params})"
            lines.append(Text(words))
        return Group(*lines)

    def _summary(self) -> str:
        words = f"{self._ended()} of {self._total}"
        best = self._best()
        if best is not None:
            words += f", best {best.value:.6g} (trial {best.number})"
        return words + self._time_left()

    def _time_left(self) -> str:
        """By how fast trials ended since this launcher began, wherever they ran."""
        ended = self._ended() - self._ended_before
        left = self._total - self._ended()
        if ended < 1 or left < 1:
            return ""
        seconds = (time.monotonic() - self._began) / ended * left
        return f", about {spell_seconds(seconds)} left"

    def _ended(self) -> int:
        return sum(r.state in ("complete", "pruned", "failed") for r in self._records)

    def _best(self) -> TrialRecord | None:
        complete = [r for r in self._records if r.state == "complete"]
        return min(complete, key=lambda r: self._sign * (r.value or 0), default=None)


def spell_seconds(seconds: float) -> str:
    """A duration as people say it.

    >>> spell_seconds(12.3), spell_seconds(200), spell_seconds(8000)
    ('12 s', '3 min', '2.2 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
