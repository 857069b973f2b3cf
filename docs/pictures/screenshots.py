"""Takes the screenshots of the pages: `python docs/pictures/screenshots.py`.

It wants what Meshwright itself does not: a Chromium, and `pip install pyte nbconvert
nbclient ipykernel`. What is on them is really run: a training on a terminal, the same
in a notebook, and the report of `meshwright demo`. It takes about two minutes.
"""

import html
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMNS, LINES = 100, 24
SECONDS = 22
"""When the terminal is looked at."""

TRAINING = """\
import meshwright as mw

mw.configure(virtual="GPU:4")  # without a GPU, the CPU plays four of them
import keras
from meshwright.data.mnist import load_digits

digits = load_digits()
with mw.FSDP().scope():
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(2048, activation="relu"),
            keras.layers.Dense(2048, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    digits.x_train,
    digits.y_train,
    batch_size=40,
    epochs={epochs},
    validation_data=(digits.x_test, digits.y_test),
    verbose=0,
    callbacks=[mw.Monitor(look_after=1)],
);
"""
PAGE = """<!doctype html><meta charset="utf-8">
<body style="margin:0;background:#15191d">
<pre style="margin:0;padding:14px;color:#e4e8eb;font:15px/1.35 monospace">{}</pre>"""
COLOURS = {"green": "#67c987", "red": "#f0705a", "brown": "#d9c65a", "blue": "#6cb4f0"}


def main() -> None:
    """Takes all three."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shoot(terminal(work), HERE / "terminal.png", 940, 300)
        shoot(notebook(work), HERE / "notebook.png", 980, 710)
        subprocess.run(
            [sys.executable, "-m", "meshwright.cli.main", "demo"], cwd=work, check=True
        )
        shoot(work / "runs/demo/report.html", HERE / "report.png", 1000, 2700)


def terminal(work: Path) -> Path:
    """A page with what a terminal shows in the middle of a training."""
    import pyte

    script = work / "train.py"
    script.write_text(TRAINING.format(epochs=30))
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    pid, shown = pty.fork()
    if not pid:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        words = [sys.executable, str(script)]
        os.execv(words[0], words)  # noqa: S606 (ours)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if select.select([shown], [], [], 0.1)[0]:
            stream.feed(os.read(shown, 65536))
    os.kill(pid, signal.SIGKILL)
    rows = [line(screen.buffer[y]) for y in range(LINES)]
    words = "\n".join(["$ python train.py", *rows])
    target = work / "terminal.html"
    target.write_text(PAGE.format(words.rstrip()))
    return target


def line(cells: Any) -> str:
    """A row of the terminal, with its colours."""
    found = ""
    for x in range(COLUMNS):
        cell = cells[x]
        colour = COLOURS.get(cell.fg, "#" + cell.fg if len(cell.fg) == 6 else "")
        text = html.escape(cell.data)
        found += f'<span style="color:{colour}">{text}</span>' if colour else text
    return found.rstrip()


def notebook(work: Path) -> Path:
    """A notebook that was run, as a page."""
    import nbclient
    import nbconvert
    import nbformat

    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(TRAINING.format(epochs=4).strip())]
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
    exporter = nbconvert.HTMLExporter(template_name="lab")
    words, _ = exporter.from_notebook_node(book)
    target = work / "notebook.html"
    target.write_text(words)
    return target


def shoot(page: Path, target: Path, width: int, height: int) -> None:
    """A picture of a page in a browser."""
    browser = shutil.which("chromium") or "google-chrome"
    subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--hide-scrollbars"),
            *(f"--window-size={width},{height}", f"--screenshot={target}"),
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
    )


if __name__ == "__main__":
    main()
