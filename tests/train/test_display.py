"""How a training is shown: in what words, and on what."""

import io
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

from meshwright.devices.activity import Activity
from meshwright.devices.occupation import Occupation, Sample
from meshwright.train.display import Lines, Live, Notebook, make_display
from meshwright.train.glance import Glance, complaints_of, describe_sample
from meshwright.train.timeline import Spent

import pytest
from rich.console import Console

GPU = Activity(name="GPU:0", memory=3 * 2**30, limit=2**34, busy=0.5)


def glance(**facts: Any) -> Glance:
    spent = Spent(steps=10, samples=320, devices=0.09, input=0.01)
    known: dict[str, Any] = {
        "epoch": 2,
        "epochs": 5,
        "step": 10,
        "steps": 40,
        "numbers": {"loss": 0.25, "accuracy": 0.5},
        "spent": spent,
        "activities": [GPU],
        "seconds_left": 3725.0,
    }
    return Glance(**known | facts)


def test_a_line_has_all_that_is_known() -> None:
    assert str(glance()).split(" | ") == [
        "epoch 2/5, step 10/40: loss 0.25, accuracy 0.5",
        "3,200 samples/s, 10.0 ms a step (devices 90 %, data 10 %)",
        "GPU:0 50 %, 3.0 GiB of 16.0 GiB",
        "1:02:05 left",
    ]


def test_the_useful_share_of_the_time_is_shown_where_it_is_known() -> None:
    assert str(glance(goodput=0.934)).endswith(" | goodput 93 %, 1:02:05 left")
    assert str(glance(goodput=0.5, epoch=5, is_end=True)).endswith(" | goodput 50 %")


def test_nothing_is_left_of_what_is_over() -> None:
    assert str(glance(epoch=4, is_end=True)).endswith(" left")
    assert "left" not in str(glance(epoch=5, is_end=True))


def test_what_nobody_knows_is_left_out() -> None:
    known = glance(steps=None, seconds_left=None, spent=Spent(), activities=[])
    assert str(known) == "epoch 2/5, step 10: loss 0.25, accuracy 0.5"
    bare = glance(activities=[Activity(name="TPU:0")])
    assert " | TPU:0 | " in str(bare)


@pytest.mark.parametrize("seconds", [2.5, 0.0123, 0.0000456])
def test_steps_are_told_in_units_that_suit_them(seconds: float) -> None:
    words = {2.5: "2.50 s", 0.0123: "12.3 ms", 0.0000456: "46 us"}[seconds]
    spent = Spent(steps=1, samples=1, devices=seconds)
    assert f", {words} a step" in str(glance(spent=spent))


def lines_of(width: int, glances: Sequence[Glance], **options: Any) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, **options)
    live = Live(console)
    for each in glances:
        live.show(each)
    live.close()
    return file.getvalue().splitlines()


def test_a_terminal_of_sixty_columns_without_colour_has_room() -> None:
    text = "\n".join(lines_of(60, [glance()], no_color=True))
    assert "\x1b[3" not in text, "no colour"
    plain = re.sub(r"\x1b\[[?\d;]*\w", "\n", text)
    assert max(map(len, plain.splitlines())) <= 60
    assert "epoch 2/5, step 10/40" in text
    assert "1:02:05 left" in text
    assert "GPU:0 50 %, 3.0 GiB of 16.0 GiB" in text


def test_an_epoch_that_ended_stays_above() -> None:
    text = "\n".join(lines_of(80, [glance(), glance(step=40, is_end=True)]))
    assert "epoch 2/5, step 40/40: loss 0.25, accuracy 0.5" in text


def test_warnings_stand_above_what_is_drawn_again() -> None:
    file = io.StringIO()
    live = Live(Console(file=file, width=80, force_terminal=True))
    live.warn("the devices waited for [data] 50 % of the time")
    live.close()
    assert "slow: the devices waited for [data] 50 % of the time" in file.getvalue()


def test_a_pipe_that_is_no_utf8_gets_what_it_can_take() -> None:
    raw = io.BytesIO()
    pipe = io.TextIOWrapper(raw, encoding="ascii")
    shown = Lines(pipe)
    shown.show(glance(numbers={"précision": 1.0}))
    shown.warn("the devices waited for data 50 % of the time")
    shown.close()
    first, second = raw.getvalue().decode("ascii").splitlines()
    assert first.startswith("epoch 2/5, step 10/40: pr?cision 1 | ")
    assert second == "slow: the devices waited for data 50 % of the time"


def test_what_each_device_did_has_room_on_terminals_and_is_told_once_in_pipes() -> None:
    devices = {
        "/device:GPU:0": Occupation(0.5, 0.25),
        "/device:GPU:1": Occupation(1, 0),
    }
    seen = glance(sample=Sample(0.2, devices))
    assert "GPU:0: computing 50 %, communicating 25 %, idle 25 %" in seen.details
    assert "GPU:1: computing 100 %, communicating 0 %, idle 0 %" in seen.details
    assert "idle" not in str(seen), "lines are for what changes"
    # What the devices had to do, 90 % of the time, divided as in the sample.
    assert "(computing 75 %, communicating 12 %, pausing 3 %, data 10 %)" in str(seen)
    file = io.StringIO()
    Lines(file).tell("GPU:0: computing 50 %")
    assert file.getvalue() == "GPU:0: computing 50 %\n"


def test_many_devices_are_told_of_together() -> None:
    many = {f"GPU:{i}": Occupation(0.1 * i, 0.1) for i in range(8)}
    assert describe_sample(Sample(0.2, many)) == [
        "8 devices: computing 0-70 %, communicating 10 %, idle 20-90 %"
    ]


def test_a_device_that_stands_idle_beside_others_is_told_of() -> None:
    some = {"GPU:0": Occupation(0.9, 0), "GPU:1": Occupation(0, 0.1)}
    assert complaints_of(Sample(0.2, some)) == [
        "GPU:1 stood idle 90 % of the time, GPU:0 10 %"
    ]
    alike = dict.fromkeys(["GPU:0", "GPU:1"], Occupation(0.3, 0))
    assert complaints_of(Sample(0.2, alike)) == [], "all pause, which the shares say"


def test_devices_that_mostly_exchange_are_told_of() -> None:
    each = dict.fromkeys(["GPU:0", "GPU:1"], Occupation(0.3, 0.6))
    assert complaints_of(Sample(0.2, each)) == [
        "the devices exchanged values, or waited for each other, 60 % of the time"
    ]


def test_a_notebook_gets_one_text_that_replaces_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, text: Any) -> None:
            shown[-1] = text

    def show(text: Any, display_id: bool) -> Handle:
        shown.append(text)
        return Handle()

    module: Any = types.ModuleType("IPython.display")
    module.HTML, module.display = str, show
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    notebook = Notebook()
    notebook.show(glance(numbers={"<b>": 1.0}))
    notebook.warn("steps were compiled anew for 30 % of the time")
    notebook.show(glance(step=20))
    notebook.close()
    (text,) = shown
    assert text.startswith("<pre>epoch 2/5, step 20/40\nloss 0.25, accuracy 0.5\n")
    assert text.endswith("slow: steps were compiled anew for 30 % of the time</pre>")
    notebook.show(glance(numbers={"<b>": 1.0}))
    assert "&lt;b&gt;" in shown[0]


@pytest.mark.parametrize(
    ("is_terminal", "shell", "kind"),
    [
        (True, None, "Live"),
        (False, None, "Lines"),
        (True, "TerminalInteractiveShell", "Live"),
        (False, "ZMQInteractiveShell", "Notebook"),
    ],
)
def test_the_display_suits_where_the_output_goes(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, shell: str | None, kind: str
) -> None:
    if shell is not None:
        module: Any = types.ModuleType("IPython")
        module.get_ipython = type(shell, (), {})
        monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    found = make_display("auto")
    assert type(found).__name__ == kind
    assert found is not None
    found.close()
    assert make_display("none") is None
