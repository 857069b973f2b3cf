"""The page of a real run in a real browser."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, browser, find_browser

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here"),
]

SCRIPT = """
import meshwright as mw
import keras, numpy as np
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="<b>bold")])
model.compile("adam", "mse", metrics=["mae"])
x = np.random.rand(64, 8)
y = np.random.rand(64, 4)
strategy = mw.Hybrid(data=2, stages=1, fsdp=2, devices=[f"CPU:{i}" for i in range(4)])
mw.distribute(model, strategy).fit(
    x,
    y,
    epochs=3,
    verbose=0,
    validation_data=(x, y),
    callbacks=[mw.Monitor("none", look_after=0)],
)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reported")
    (folder / "train.py").write_text(SCRIPT)
    for words in (["train", "train.py"], ["report", "runs/train"]):
        command = [sys.executable, "-m", "meshwright.cli.main", *words]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "MESHWRIGHT_VIRTUAL": "CPU:4"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs/train/report.html"


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Browser]:
    binary = find_browser()
    assert binary is not None
    with browser(binary, "--window-size=1000,1400") as opened:
        opened.open(report)
        yield opened


def test_nothing_leaves_the_file_and_nothing_goes_wrong(
    page: Browser, report: Path
) -> None:
    assert page.requests == [report.as_uri()]
    assert page.complaints == []


def test_all_charts_are_drawn_and_their_figures_open_at_a_click(page: Browser) -> None:
    number = page.evaluate("document.querySelectorAll('figure svg').length")
    titles = "[...document.querySelectorAll('h2')].map(title => title.textContent)"
    assert "What each device did" in page.evaluate(titles)
    assert number == 7
    drawn = page.evaluate(
        "[...document.querySelectorAll('figure svg')]"
        ".filter(s => s.getBoundingClientRect().height > 40).length"
    )
    assert drawn == number
    shown = "[...document.querySelectorAll('details > :not(summary)')]"
    shown += ".filter(t => t.checkVisibility()).length"
    assert page.evaluate(shown) == 0
    page.evaluate("document.querySelectorAll('summary').forEach(s => s.click())")
    assert page.evaluate(shown) == number


def test_names_of_a_model_are_text(page: Browser) -> None:
    assert page.evaluate("document.querySelectorAll('b, script').length") == 0
    assert "<b>bold" in page.evaluate("document.body.innerText")


def test_it_is_light_and_dark_and_as_wide_as_the_window(
    page: Browser, tmp_path: Path
) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    found = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.call("Emulation.setEmulatedMedia", features=features)
        found.add(page.evaluate(colour))
    assert found == {"rgb(255, 255, 255)", "rgb(21, 25, 29)"}
    for width in (360, 1000):
        page.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False},
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    file = tmp_path / "page.png"
    page.screenshot(file)
    assert struct.unpack(">II", file.read_bytes()[16:24]) == (1000, 800)


def test_on_paper_it_has_pages(page: Browser) -> None:
    assert len(page.call("Page.printToPDF")["data"]) > 10_000
