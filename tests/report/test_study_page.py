"""The page of a study: one file, everything in it, nothing from elsewhere."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from meshwright.report.page import command, facts, page, paragraph
from meshwright.report.study_page import study_page
from meshwright.trials.results import TrialRecord, TuneReport

VOID = {"meta"}
NAMES = ["lr", "units", "act"]


class Reader(HTMLParser):
    """Checks that every element is closed, and collects what there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def trial(number: int, state: Any, value: float | None, **more: Any) -> TrialRecord:
    params = {"lr": 10.0**-number, "units": 8 * number, "act": None if number else "a"}
    return TrialRecord(number=number, state=state, value=value, params=params, **more)


def report(*trials: TrialRecord, **more: Any) -> TuneReport:
    return TuneReport(
        **{
            "study": "one",
            "direction": "maximize",
            "objective": "train.py:objective",
            "trials": trials,
            "n_trials": 9,
            "storage": "sqlite:///here",
            "folder": Path("runs/one"),
            **more,
        }
    )


def test_a_page_has_everything_and_asks_nobody() -> None:
    found = report(
        trial(0, "complete", 0.5, seconds=1.0, device="GPU:0"),
        trial(1, "complete", 0.75),
        trial(2, "complete", float("inf")),
        trial(3, "pruned", 0.1),
        trial(4, "failed", None, because="ValueError: <b>no</b>"),
        importance={"lr": 0.75, "units": 0.25},
    )
    text = study_page(found)
    read = Reader(text)
    assert not read.attributes & {"src", "href", "onclick"}
    assert "script" not in read.tags
    assert "default-src 'none'" in text
    assert read.tags.count("svg") == read.tags.count("figure") == 3
    assert read.tags.count("details") == 3, "the figures beneath each chart"
    words = " ".join(read.words)
    assert "Study one" in words
    assert "maximize: 3 complete, 1 pruned, 1 failed" in words
    assert "75.0 %" in words
    assert "ValueError: <b>no</b>" in words
    assert "lr (log)" in words
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_a_page_without_a_value_says_so() -> None:
    read = Reader(study_page(report(trial(0, "running", None))))
    assert "No trial has a value yet." in read.words
    assert "svg" not in read.tags
    Reader(study_page(report()))


def test_one_trial_makes_a_page_too() -> None:
    read = Reader(study_page(report(trial(1, "complete", 1.0))))
    assert "Not known: that takes several trials" in " ".join(read.words)


def test_text_stays_text_wherever_it_stands() -> None:
    name = "</title><script>alert(1)</script>"
    odd = TrialRecord(
        number=0, state="complete", value=1.0, params={name: name}, because=name
    )
    whole = study_page(
        report(odd, study=name, objective=name, storage=name, because=name)
    )
    parts = [paragraph(name), command(name), facts({name: name})]
    text = "".join(map(str, [whole, page(name, name, []), *parts]))
    assert "<script" not in text
    assert text.count("</title>") == 2 + text.count("<svg") + text.count("<circle") + (
        text.count("<polyline")
    )
