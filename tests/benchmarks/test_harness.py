"""The harness of the benchmarks: turns, verdicts and failures, with toy contenders.

No test looks at a clock: the toys say how long they took.
"""

import doctest
import json
import math
import subprocess
import sys
from pathlib import Path

import harness
import jobs
import pytest
from harness import Bar, Comparison, Contender, Outcome, Timing
from suites import SUITES, peers

TOY = str(Path(__file__).with_name("toy.py"))


def toy(what: str, name: str = "") -> Contender:
    return Contender(name=name or what, script=TOY, arguments=[what])


def outcome(*medians: float, twin: float = 1.0, **more: list[Bar]) -> Outcome:
    def timing(name: str, seconds: float) -> Timing:
        facts = {"steps": 10, "compile_seconds": 2.0}
        repetitions = [{"seconds": seconds}] * 3
        return Timing(name=name, command=[], facts=facts, repetitions=repetitions)

    named = [timing("abcd"[i], seconds) for i, seconds in enumerate(medians)]
    bars = more.get("bars", [])
    return Outcome(name="toys", timings=named, twin=timing("a", twin), bars=bars)


def test_the_examples_of_the_harness_hold() -> None:
    assert doctest.testmod(harness).failed == 0


def test_the_spread_is_the_larger_of_rounds_and_medians() -> None:
    assert harness.aa_spread([1, 1, 1, 1], [1.1, 0.9, 1.1, 0.9]) == 0.1
    assert harness.aa_spread([1.0, 2.0, 3.0], [1.5, 2.0, 3.0]) == 0.0
    assert harness.aa_spread([1.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 0.0
    assert harness.aa_spread([2.0, 2.0], [3.0, 3.0]) == 0.5
    assert math.isnan(harness.aa_spread([], []))


@pytest.mark.parametrize("seconds", [1.0, 1.049, 1 / 1.049])
def test_a_difference_within_the_spread_is_not_called_one(seconds: float) -> None:
    said = harness.verdict(seconds, 1.0, 0.05)
    assert said == "no difference beyond the A/A spread of 5.0 %"


def test_a_difference_beyond_the_spread_is_told_as_a_speed() -> None:
    assert harness.verdict(0.5, 1.0, 0.05) == "2.00x as fast"
    assert harness.verdict(1.06, 1.0, 0.05) == "0.94x as fast"
    assert harness.verdict(math.nan, 1.0, 0.05) == "not measured"


def test_bars_are_met_or_missed_with_the_figure() -> None:
    found = outcome(1.0, 0.5, 1.02, twin=1.05)
    for bar, said in (
        (
            Bar(ours="b", theirs="a", speedup=1.5),
            "b, at least 1.50x as fast as a: 2.05x, met",
        ),
        (
            Bar(ours="c", theirs="b", speedup=0.95),
            "c, at least 0.95x as fast as b: 0.49x, missed",
        ),
        (
            Bar(ours="b", theirs="c", speedup=2.1),
            "b, at least 2.10x as fast as c: 2.04x, missed "
            "(by less than the A/A spread)",
        ),
        (Bar(ours="b", seconds=0.6), "b, at most 0.6 s: 0.5 s, met"),
        (Bar(ours="c", seconds=0.6), "c, at most 0.6 s: 1.02 s, missed"),
    ):
        assert harness.judge(bar, found) == said


def test_the_reference_counts_with_both_of_its_processes() -> None:
    found = outcome(1.0, 2.0, twin=3.0)
    assert found.reference == 2.0
    assert found.spread == 2.0
    assert found.median_of("a") == 2.0


def test_contenders_take_turns_and_the_reference_has_a_twin() -> None:
    comparison = Comparison(name="toys", contenders=[toy("1.0"), toy("0.25")])
    found = harness.run_comparison(comparison, repeats=3)
    assert [timing.seconds for timing in found.timings] == [[1.0] * 3, [0.25] * 3]
    assert found.twin.seconds == [1.0] * 3
    assert found.timings[1].command[1:] == ["tests/benchmarks/toy.py", "0.25"]
    facts = found.timings[1].facts
    assert (facts["steps"], facts["first_seconds"]) == (10, 0.25)
    rows = harness.table(found).splitlines()
    assert "| 0.25 | 250 ms | 250 ms … 250 ms | 25 ms | 4.00x as fast |" in rows[-1]


def test_a_contender_that_fails_gets_a_row_and_the_others_go_on() -> None:
    contenders = [toy("1.0"), toy("missing"), toy("breaks"), toy("2.0")]
    comparison = Comparison(name="toys", contenders=contenders)
    found = harness.run_comparison(comparison, repeats=2)
    assert [timing.error for timing in found.timings] == [
        "",
        "ImportError: no module named torch",
        "ValueError: the third run broke",
        "",
    ]
    assert found.timings[3].seconds == [2.0, 2.0]
    rows = harness.table(found).splitlines()
    assert rows[-3] == (
        "| missing | failed: ImportError: no module named torch | | | | | |"
    )


def test_a_contender_that_hangs_is_given_up() -> None:
    comparison = Comparison(name="toys", contenders=[toy("1.0"), toy("hangs")])
    found = harness.run_comparison(comparison, repeats=1, patience=3)
    assert found.timings[1].error == "no word for 3 s"
    assert found.timings[0].seconds == [1.0]


def test_without_a_reference_there_is_no_verdict() -> None:
    comparison = Comparison(name="toys", contenders=[toy("missing"), toy("1.0")])
    rows = harness.table(harness.run_comparison(comparison, repeats=1)).splitlines()
    assert "| not measured |" in rows[-1]


def test_results_say_how_to_get_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    settings = {
        "command": "python benchmarks/run.py toys",
        "repeats": 3,
        "hardware": harness.hardware(),
    }
    found = outcome(1.0, 0.5, bars=[Bar(ours="b", theirs="a", speedup=1.5)])
    page = harness.write_results("toys", [found], settings)
    assert "`python benchmarks/run.py toys`" in page.read_text()
    assert "- b, at least 1.50x as fast as a: 2.00x, met" in page.read_text()
    record = json.loads(page.with_suffix(".json").read_text())
    assert record["settings"]["hardware"]["cores"] >= 1
    assert record["comparisons"][0]["aa_spread"] == 0.0
    assert record["comparisons"][0]["timings"][1]["repetitions"][0]["seconds"] == 0.5


def test_every_suite_names_scripts_bars_and_minutes_that_exist() -> None:
    suites = {name: make(False) for name, make in SUITES.items()}
    suites["peers"] = peers(False, sys.executable, sys.executable)
    for name, comparisons in suites.items():
        for comparison in comparisons:
            names = [contender.name for contender in comparison.contenders]
            assert len(set(names)) == len(names), name
            for bar in comparison.bars:
                assert {bar.ours, bar.theirs or bar.ours} <= set(names), name
            for contender in comparison.contenders:
                script = harness.HERE / "contenders" / contender.script
                assert script.is_file(), script
    assert all("minutes" in (make.__doc__ or "") for make in SUITES.values())


def test_an_unknown_suite_is_refused_with_the_names_that_exist() -> None:
    done = subprocess.run(
        [sys.executable, str(harness.HERE / "run.py"), "fast"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    wanted = f"no suite ['fast']; there are {', '.join(SUITES)}"
    assert wanted in " ".join(done.stderr.split())


def test_the_reference_job_is_the_one_that_is_promised() -> None:
    job = jobs.JOBS["cnn"]
    assert (job.parameters, job.batch_size) == (331_370, 256)
    assert jobs.keras_model(job).count_params() == job.parameters
    x, y = jobs.load(job)
    assert x.shape == (job.samples, 28, 28, 1)
    assert sorted(set(y)) == list(range(10))
