"""The planner's answer: its JSON, its table, its argument."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.figures import WIDTH
from meshwright.planner.machines import Machine, parse_machine
from meshwright.planner.money import Wishes, scaling_rows
from meshwright.planner.report import SHOWN, PlanReport

import pytest

from planned import (
    BATCH,
    candidate,
    eight_h200,
    huge_model,
    large_model,
    report,
    small_model,
)

H200 = eight_h200()
LONG = Wishes(samples=1_281_167, epochs=90)


def section(text: str, title: str) -> list[str]:
    """The lines below a title, up to the next empty one."""
    lines = text.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = lines.index("", start) if "" in lines[start:] else len(lines)
    return lines[start + 1 : end]


def test_an_entry_has_exactly_the_agreed_keys_and_more_behind_them() -> None:
    plan = Plan(data=2, stages=2, microbatches=4, remat=True, precision="bfloat16")
    entry = candidate(H200, plan, 0.5, 10, because="why").to_json()
    assert list(entry)[:7] == [
        *("plan", "step_seconds", "memory_bytes", "bubble", "dollars_per_hour"),
        *("fits", "because"),
    ]
    assert entry["plan"] == {
        "data": 2,
        "fsdp": 1,
        "tensor": 1,
        "stages": 2,
        "microbatches": 4,
        "schedule": "1f1b",
        "accumulate": 1,
        "remat": True,
        "precision": "bfloat16",
    }
    assert entry["step_seconds"] == 0.5
    assert entry["memory_bytes"] == 10 * 2**30
    assert entry["bubble"] == pytest.approx(0.2)
    assert entry["dollars_per_hour"] == pytest.approx(4 * 7.912)
    assert (entry["fits"], entry["because"]) == (True, "why")


def test_what_is_not_known_is_null() -> None:
    entry = json.loads(json.dumps(Candidate(plan=Plan()).to_json()))
    unknown = ("step_seconds", "memory_bytes", "bubble", "dollars_per_hour")
    assert [entry[key] for key in unknown] == [None] * 4
    assert entry["plan"]["microbatches"] is None
    assert entry["plan"]["schedule"] is None
    assert entry["plan"]["precision"] is None


def test_a_report_is_json_with_best_candidates_and_rejected() -> None:
    made = report(large_model(H200), H200, LONG)
    facts = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert list(facts)[:3] == ["best", "candidates", "rejected"]
    assert facts["best"] == facts["candidates"][0]
    assert facts["best"]["plan"]["fsdp"] == 2
    assert len(facts["rejected"]) == 5
    assert all(entry["because"] and not entry["fits"] for entry in facts["rejected"])
    assert facts["least_bad"] is None
    assert facts["machine"]["name"] == "8 x H200, NVLink 4"
    assert facts["code"] == "mw.distribute(model, mw.Hybrid(data=4, fsdp=2))"
    assert [row["num_devices"] for row in facts["scaling"]] == [1, 8]


def test_a_report_on_nothing_that_fits_is_json_with_the_least_bad_plan() -> None:
    facts = report(huge_model(H200), H200).to_json()
    assert facts["best"] is None
    assert facts["candidates"] == []
    assert facts["code"] is None
    assert facts["least_bad"]["plan"]["tensor"] == 8


def test_the_head_says_what_was_asked_and_what_predictions_rest_on() -> None:
    made = report(large_model(H200), H200)
    assert str(made).split("\n")[:6] == [
        "Plans for 'net', a global batch of 1,024, on 8 x H200, NVLink 4",
        "  usable memory of a device: 80.0 GiB (as memory= says)",
        "  price of a device: $7.91 an hour, catalog of 2026-08-22",
        "  wanted: the fastest",
        "  predictions: catalog peaks, not calibrated; nine of ten were within 10 % "
        "where it was measured",
        "",
    ]
    cpus = parse_machine("2xCPU")
    unknown = replace(report(small_model(cpus), cpus), error_band=None)
    assert str(unknown).split("\n")[1:4] == [
        "  usable memory of a device: unknown (the memory of the devices is not known)",
        "  wanted: the fastest",
        "  predictions: catalog peaks, not calibrated; their error is not known",
    ]


def test_the_table_has_the_best_plans_with_their_reasons() -> None:
    text = str(report(large_model(H200), H200))
    lines = section(text, "5 plans fit; predicted, the best first")
    assert [" ".join(line.split()) for line in lines[:5]] == [
        "plan predicted step memory bubble $/hour",
        "1 data=4 x fsdp=2 140 ms 60.0 GiB - $63.30",
        "the fastest of the plans that fit",
        "2 fsdp=8 150 ms 14.0 GiB - $63.30",
        "predicted 7 % slower: 7.5 ms more compute",
    ]
    assert len(lines[0]) == len(lines[1]) == len(lines[3]), "flush right"
    assert "16 %  $63.30" in text, "the bubble of the pipeline"


def test_a_measured_time_has_a_column_of_its_own() -> None:
    made = small_model(H200)
    made[0] = replace(made[0], measured_seconds=0.011)
    text = str(report(made, H200))
    head, first, *_ = section(text, "3 plans fit")
    assert "predicted step  measured" in head
    assert "10.0 ms   11.0 ms" in first
    assert "So: one device, measured 11.0 ms a step and predicted 2.0 GiB" in text


def test_long_lists_are_cut_and_say_how_much_is_left() -> None:
    made = [
        candidate(H200, Plan(data=8, accumulate=n), 0.1 * n, 100 if n % 2 else 10)
        for n in range(1, 27)
    ]
    text = str(report(made, H200))
    assert f"  and {13 - SHOWN} more" in section(text, "13 plans fit")
    rejected = section(text, "13 plans rejected")
    assert rejected == [
        "  13 need more memory than a device has",
        "    data=8: predicted 100.0 GiB per device > 80.0 GiB (and 12 like it)",
    ]


def test_rejections_stand_in_groups_with_their_numbers() -> None:
    text = str(report(large_model(H200), H200))
    assert section(text, "5 plans rejected") == [
        "  3 need more memory than a device has",
        "    one device, remat: predicted 90.0 GiB per device > 80.0 GiB",
        "    data=8: predicted 110.0 GiB per device > 80.0 GiB",
        "    one device: predicted 112.0 GiB per device > 80.0 GiB",
        "  2 cannot be split in this way",
        "    tensor=8: 6 heads are not divisible by 8 (and 1 like it)",
    ]


def test_the_decision_for_a_model_that_needs_only_one_device() -> None:
    assert report(small_model(H200), H200).decision() == [
        "Does the model fit on one device? Yes: predicted 2.0 GiB <= 80.0 GiB usable.",
        "Is one device enough? Yes: predicted 10.0 ms a step and 2.0 GiB per device. "
        "The best on several: data=8 has predicted 12.0 ms a step and 1.0 GiB per "
        "device, predicted 20 % slower: 1.5 ms more compute.",
        "Split parameters and optimizer state (fsdp)? No: fsdp=8 has predicted 15.0 ms "
        "a step and 512.0 MiB per device, predicted 50 % slower: 3.8 ms more compute.",
        "So: one device, predicted 10.0 ms a step and 2.0 GiB per device.",
    ]


def test_the_decision_for_a_model_that_must_be_split() -> None:
    assert report(large_model(H200), H200).decision() == [
        "Does the model fit on one device? No: predicted 112.0 GiB > 80.0 GiB usable.",
        "Is one device enough? No: predicted 90.0 GiB per device > 80.0 GiB.",
        "Is it enough to split the batch (data)? No: data=8: predicted 110.0 GiB per "
        "device > 80.0 GiB.",
        "Split parameters and optimizer state (fsdp)? Yes: without it, data=2 x "
        "tensor=4 has predicted 180 ms a step and 40.0 GiB per device, predicted 29 % "
        "slower: 30.0 ms more compute.",
        "Split weights inside of layers (tensor)? No: data=2 x tensor=4 has predicted "
        "180 ms a step and 40.0 GiB per device, predicted 29 % slower: 30.0 ms more "
        "compute.",
        "Cut the model into stages (pipeline)? No: data=2 x stages=4, microbatches=16, "
        "1f1b has predicted 200 ms a step and 40.0 GiB per device, predicted 43 % "
        "slower: 45.0 ms more compute.",
        "Compute activations again (remat)? No: fsdp=8, remat has predicted 350 ms a "
        "step and 10.0 GiB per device, predicted 2.5 x the time: 157 ms more compute.",
        "So: data=4 x fsdp=2, predicted 140 ms a step and 60.0 GiB per device.",
    ]


def test_the_decision_for_a_model_that_fits_nowhere() -> None:
    made = report(huge_model(H200), H200)
    assert made.decision() == [
        "Does the model fit on one device? No: predicted 2.0 TiB > 80.0 GiB usable.",
        "Is one device enough? No: predicted 2000.0 GiB per device > 80.0 GiB.",
        "Split parameters and optimizer state (fsdp)? It does not help: fsdp=8: "
        "predicted 280.0 GiB per device > 80.0 GiB.",
        "Split weights inside of layers (tensor)? It does not help: tensor=8: "
        "predicted 250.0 GiB per device > 80.0 GiB.",
        "So: nothing fits. The least bad: tensor=8: predicted 250.0 GiB per device > "
        "80.0 GiB.",
    ]
    assert section(str(made), "No plan fits. The least bad one, predicted:") == [
        "  tensor=8: predicted 250.0 GiB per device > 80.0 GiB",
        "  predicted 15.0 s a step and 250.0 GiB per device",
        "  predicted 170.0 GiB too much for a device",
    ]
    assert "Use it" not in str(made)


def test_the_decision_where_splitting_the_batch_is_enough() -> None:
    made = [candidate(H200, Plan(), 0.1, 20), candidate(H200, Plan(data=8), 0.015, 15)]
    assert report(made, H200).decision()[1:3] == [
        "Is one device enough? No: one device has predicted 100 ms a step and 20.0 GiB "
        "per device, predicted 6.7 x the time: 63.8 ms more compute.",
        "Is it enough to split the batch (data)? Yes: data=8, predicted 15.0 ms a step "
        "and 15.0 GiB per device.",
    ]


def test_the_decision_where_a_lever_makes_room() -> None:
    one = parse_machine("H200", memory="80GiB")
    made = [
        candidate(one, Plan(), 0.1, 90),
        candidate(one, Plan(accumulate=4), 0.12, 50),
    ]
    assert report(made, one).decision() == [
        "Does the model fit on one device? Not as it is: predicted 90.0 GiB > 80.0 GiB "
        "usable. With accumulate=4 it does: predicted 50.0 GiB <= 80.0 GiB usable.",
        "Compute a batch in parts (accumulate)? Yes: without it nothing fits; one "
        "device: predicted 90.0 GiB per device > 80.0 GiB.",
        "So: one device, accumulate=4, predicted 120 ms a step and 50.0 GiB per "
        "device.",
    ]


def test_a_plan_that_lost_by_its_time_is_not_asked_for_its_memory() -> None:
    slow = candidate(H200, Plan(), 0.12, 1)
    because = "0.2% slower than one device, accumulate=2"
    plain = replace(
        slow, fits=False, memory_bytes=None, reason="slower", because=because
    )
    made = report([candidate(H200, Plan(accumulate=2), 0.1, 2), plain], H200)
    assert made.decision()[0] == (
        "Does the model fit on one device? With accumulate=2: predicted 2.0 GiB <= "
        "80.0 GiB usable."
    )


def test_a_deadline_that_is_missed_is_no_lack_of_memory() -> None:
    wishes = Wishes(samples=100 * BATCH, finish_by=0.0001)
    made = report(small_model(H200), H200, wishes)
    assert made.best is None
    first, *_, last = made.decision()
    assert first == (
        "Does the model fit on one device? Yes: predicted 2.0 GiB <= 80.0 GiB usable."
    )
    assert last == (
        "So: nothing fits. The least bad: one device: the training takes predicted "
        "1.0 s > 360 ms."
    )
    dear = report(small_model(H200), H200, Wishes(samples=10**9, at_most=0.01))
    assert dear.least_bad is not None
    assert dear.least_bad.num_devices == 1


def test_where_nothing_was_looked_at_it_says_so() -> None:
    made = report([], H200)
    assert "No plan fits, and none could be looked at." in str(made)
    assert made.decision() == ["So: nothing fits."]


def test_the_plan_for_one_device_may_come_from_the_scaling_table() -> None:
    best = candidate(H200, Plan(fsdp=8), 0.15, 14)
    alone = candidate(H200, Plan(), 1.0, 112)
    made = PlanReport(
        model="net",
        batch_size=BATCH,
        machine=H200,
        best=best,
        candidates=(best,),
        scaling=scaling_rows({1: alone, 8: best}, batch_size=BATCH),
    )
    assert made.decision()[0] == (
        "Does the model fit on one device? No: predicted 112.0 GiB > 80.0 GiB usable."
    )


def test_a_plan_of_the_scaling_table_is_no_answer_if_none_is_as_wished() -> None:
    wishes = Wishes(samples=100 * BATCH, finish_by=0.0001)
    late = report(small_model(H200)[:1], H200, wishes)
    rows = scaling_rows({8: candidate(H200, Plan(data=8), 1, 1)}, batch_size=BATCH)
    made = replace(late, scaling=rows)
    assert made.decision()[-1].startswith("So: nothing fits. The least bad: one device")


def test_strong_and_weak_scaling_have_tables_of_their_own() -> None:
    made = report(small_model(H200), H200, LONG)
    weak = scaling_rows(
        {each.num_devices: each for each in made.candidates},
        batch_size=128,
        is_weak=True,
    )
    text = str(replace(made, scaling=(*made.scaling, *weak)))
    strong = section(
        text,
        "Strong scaling, predicted: a batch of 1,024, epochs of 1,281,167 samples, 90 "
        "epochs",
    )
    assert strong[1].split()[:2] == ["1", "1,024"]
    grown = section(text, "Weak scaling, predicted: the batch grows with the devices")
    assert [line.split()[:2] for line in grown[1::2]] == [["1", "128"], ["8", "1,024"]]


@pytest.mark.parametrize("models", [small_model, large_model, huge_model])
def test_no_line_is_wider_than_a_screen(
    models: Callable[[Machine], list[Candidate]],
) -> None:
    machine = parse_machine("1024x8xH100", memory="80GiB")
    long = Plan(
        data=64,
        fsdp=8,
        tensor=8,
        stages=2,
        microbatches=1024,
        schedule="interleaved",
        remat=True,
        precision="bfloat16",
    )
    crowd = [
        candidate(machine, replace(long, fsdp=n), 1e4 * n, 70.1) for n in range(1, 9)
    ]
    wishes = Wishes(samples=10**12, epochs=1000)
    text = str(report(models(machine) + crowd, machine, wishes))
    # The code is there to be copied, so it stays in one line.
    lines = [line for line in text.split("\n") if not line.startswith("Use it: ")]
    assert max(map(len, lines)) <= WIDTH == 100


def test_the_output_is_plain_text() -> None:
    text = str(report(large_model(H200), H200, LONG))
    assert text.isascii()
    assert "\x1b" not in text
    assert not [line for line in text.split("\n") if line != line.rstrip()]


def test_every_predicted_number_is_marked_as_predicted() -> None:
    text = str(report(large_model(H200), H200, LONG))
    marked = re.compile(r"predicted|measured", re.I)
    for line in report(large_model(H200), H200).decision():
        if re.search(r"\d (ms|s|GiB|%)", line):
            assert marked.search(line), line
    titles = [line for line in text.split("\n") if line and not line.startswith(" ")]
    tables = [line for line in titles if "fit;" in line or "scaling" in line]
    assert len(tables) == 2
    assert all(marked.search(line) for line in tables)


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (Plan(), "mw.Single()"),
        (Plan(remat=True, precision="float16"), "mw.Single(remat=True, precision="),
        (Plan(data=8, accumulate=2), "mw.Hybrid(data=8, accumulate=2)"),
        (
            Plan(fsdp=2),
            "mw.Hybrid(fsdp=2, devices=mw.devices('GPU')[:2])",
        ),
        (
            Plan(data=4, stages=2, microbatches=2),
            "mw.Hybrid(data=4, stages=2, microbatches=2, schedule='1f1b')",
        ),
        (
            Plan(data=2, stages=4, microbatches=16),
            "mw.Hybrid(data=2, stages=4, microbatches=16, schedule='1f1b')",
        ),
        (
            Plan(stages=8, microbatches=8, schedule="interleaved", chunks=3),
            "mw.Hybrid(stages=8, microbatches=8, schedule='interleaved', chunks=3)",
        ),
        (
            Plan(stages=8, microbatches=8, schedule="interleaved"),
            "mw.Hybrid(stages=8, microbatches=8, schedule='interleaved')",
        ),
    ],
)
def test_the_last_line_is_the_code_to_go_on_with(plan: Plan, code: str) -> None:
    last = str(report([candidate(H200, plan, 1.0, 1)], H200)).split("\n")[-1]
    assert last.startswith(f"Use it: mw.distribute(model, {code}")


def test_the_code_makes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    import meshwright as mw

    monkeypatch.setattr(mw, "distribute", lambda model, strategy: strategy)
    here = parse_machine()
    for plan in (
        Plan(data=8),
        Plan(fsdp=2, tensor=2, remat=True),
        Plan(data=2, stages=4, microbatches=4, schedule="interleaved"),
        Plan(precision="bfloat16", accumulate=2),
    ):
        made = report([candidate(here, plan, 1.0, 0.1)], here)
        assert made.code is not None
        strategy = eval(made.code, {"mw": mw, "model": None})  # noqa: S307
        assert strategy.plan == plan


def test_the_timetable_is_that_of_the_best_plan() -> None:
    plan = Plan(stages=8, microbatches=8)
    made = report([candidate(H200, plan, 1.0, 1)], H200)
    assert made.timeline() == plan.schedule_of().timeline()
    flat = report(small_model(H200), H200)
    assert flat.timeline() == "The plan has no stages, so there is no timetable."
