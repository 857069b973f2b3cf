"""Schedules are complete, possible, and as short and as small as theory says."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from meshwright.errors import PlanError
from meshwright.parallel.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    check_schedule,
    make_schedule,
)

import numpy as np
import pytest


def schedules(name: str) -> Iterator[Schedule]:
    """Those of a name with up to 6 stages, 12 microbatches and 3 chunks."""
    for stages in range(1, 7):
        for microbatches in range(1, 13):
            if name != "interleaved":
                yield make_schedule(name, stages, microbatches)
            elif stages > 1 and microbatches % stages == 0:
                yield make_schedule(name, stages, microbatches, 2)
                yield make_schedule(name, stages, microbatches, 3)


def kinds_of(name: str) -> tuple[Kind, ...]:
    if name == "zero_bubble":
        return ("forward", "input_gradients", "weight_gradients")
    return ("forward", "backward")


def shape_of(schedule: Schedule) -> tuple[int, int, int]:
    return schedule.num_stages, schedule.num_microbatches, schedule.num_chunks


def ticks_of(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """When each kind is done, by piece and microbatch."""
    p = schedule.num_stages
    return {
        (a.kind, a.chunk * p + a.stage, a.microbatch): a.tick for a in schedule.actions
    }


def most_waiting(schedule: Schedule, stage: int, until: Kind) -> int:
    """The most results of forwards that are kept in a tick, counted tick by tick."""
    begun = [
        a.tick for a in schedule.actions if (a.stage, a.kind) == (stage, "forward")
    ]
    ended = [a.tick for a in schedule.actions if (a.stage, a.kind) == (stage, until)]
    return max(
        sum(b <= tick for b in begun) - sum(e < tick for e in ended)
        for tick in range(schedule.num_ticks)
    )


every_schedule = pytest.mark.parametrize("name", SCHEDULES)


@every_schedule
def test_every_piece_does_everything_once_with_every_microbatch(name: str) -> None:
    for schedule in schedules(name):
        num_pieces = schedule.num_stages * schedule.num_chunks
        times = Counter(
            (a.kind, a.piece(schedule.num_stages), a.microbatch)
            for a in schedule.actions
        )
        assert times == {
            (kind, piece, microbatch): 1
            for kind in kinds_of(name)
            for piece in range(num_pieces)
            for microbatch in range(schedule.num_microbatches)
        }
        assert {a.stage for a in schedule.actions} == set(range(schedule.num_stages))
        assert schedule.kinds == kinds_of(name)
        assert schedule.num_pieces == num_pieces


@every_schedule
def test_a_stage_does_one_thing_at_a_time_and_actions_are_in_order(name: str) -> None:
    for schedule in schedules(name):
        cells = [(a.tick, a.stage) for a in schedule.actions]
        assert cells == sorted(set(cells))
        assert cells[0] == (0, 0)
        assert schedule.num_ticks == 1 + max(tick for tick, _ in cells)


@every_schedule
def test_nothing_comes_before_what_it_needs(name: str) -> None:
    for schedule in schedules(name):
        at = ticks_of(schedule)
        last = schedule.num_stages * schedule.num_chunks - 1
        for (kind, piece, mb), tick in at.items():
            if kind == "forward" and piece > 0:
                assert at["forward", piece - 1, mb] < tick
            if kind in ("backward", "input_gradients"):
                assert at["forward", piece, mb] < tick
                assert piece == last or at[kind, piece + 1, mb] < tick
            if kind == "weight_gradients":
                assert at["input_gradients", piece, mb] < tick


@every_schedule
def test_a_piece_takes_microbatches_in_their_order(name: str) -> None:
    for schedule in schedules(name):
        at = ticks_of(schedule)
        for (kind, piece, mb), tick in at.items():
            assert mb == 0 or at[kind, piece, mb - 1] < tick


@every_schedule
def test_no_more_is_kept_than_theory_says(name: str) -> None:
    for schedule in schedules(name):
        p, m, v = shape_of(schedule)
        for s in range(p):
            kept = most_waiting(schedule, s, kinds_of(name)[-1])
            assert schedule.most_alive(s) == kept
            if name == "zero_bubble":
                # Also what waits for weight gradients is within 1F1B's first stage.
                assert kept <= min(p, m)
                kept = most_waiting(schedule, s, "input_gradients")
            theory = {
                "gpipe": m,
                "1f1b": min(p - s, m),
                "interleaved": min(2 * (p - s - 1) + (v - 1) * p + 1, m * v),
                "zero_bubble": min(p - s, m),
            }
            assert kept == theory[name], (p, m, v, s)


@every_schedule
def test_the_bubble_is_that_of_the_formula(name: str) -> None:
    for schedule in schedules(name):
        p, m, v = shape_of(schedule)
        if name == "zero_bubble" and m < p:
            continue
        formula = {
            "gpipe": Fraction(p - 1, m + p - 1),
            "1f1b": Fraction(p - 1, m + p - 1),
            "interleaved": Fraction(p - 1, v * m + p - 1),
            "zero_bubble": Fraction(p - 1, 3 * m + p - 1),
        }
        cells = schedule.num_ticks * p
        idle = Fraction(cells - len(schedule.actions), cells)
        assert idle == formula[name], (p, m, v)
        assert schedule.bubble == float(idle)


def test_zero_bubble_never_takes_longer_than_1f1b() -> None:
    for schedule in schedules("zero_bubble"):
        p, m = schedule.num_stages, schedule.num_microbatches
        # A whole backward takes two of its ticks.
        assert schedule.num_ticks <= 3 * (m + p - 1)
        # The last stage waits for the first forward, and the first stage for the last
        # input gradients, after which it has one weight gradient left.
        assert schedule.num_ticks == max(3 * m + p - 1, (p - 1) + 2 * m + (p - 1) + 1)


def test_one_microbatch_goes_through_one_stage_at_a_time() -> None:
    layerwise = make_schedule("gpipe", num_stages=3, num_microbatches=1)
    assert [(a.tick, a.stage, a.kind) for a in layerwise.actions] == [
        (0, 0, "forward"),
        (1, 1, "forward"),
        (2, 2, "forward"),
        (3, 2, "backward"),
        (4, 1, "backward"),
        (5, 0, "backward"),
    ]


def test_interleaved_has_two_chunks_unless_told_and_others_have_one() -> None:
    assert make_schedule("interleaved", 2, 4).num_chunks == 2
    assert make_schedule("interleaved", 2, 4, 3).num_chunks == 3
    assert make_schedule("1f1b", 2, 4).num_chunks == 1
    assert make_schedule("1f1b", 2, 4, 1) == make_schedule("1f1b", 2, 4)


def test_numbers_of_numpy_become_plain_ones() -> None:
    two = np.int64(2)
    schedule = make_schedule("interleaved", two, two, two)  # type: ignore[arg-type]
    assert repr(schedule) == repr(make_schedule("interleaved", 2, 2, 2))


def test_the_actions_of_a_stage_are_its_row() -> None:
    schedule = make_schedule("1f1b", num_stages=2, num_microbatches=2)
    assert schedule.of_stage(1) == (
        Action(1, 1, "forward", 0),
        Action(2, 1, "backward", 0),
        Action(3, 1, "forward", 1),
        Action(4, 1, "backward", 1),
    )


def test_a_timeline_names_chunks_where_there_are_several() -> None:
    assert make_schedule("interleaved", 2, 2).timeline().split("\n") == [
        "stage 0  F0:0 F1:0 F0:1 F1:1 .    B0:1 .    B1:1 B0:0 B1:0",
        "stage 1  .    F0:0 F1:0 F0:1 B0:1 F1:1 B1:1 B0:0 B1:0 .",
        "F forward, B backward, with the microbatch:chunk; . idle",
        "bubble: 20.0 %, 4 of 20 cells",
    ]


def test_the_columns_of_a_timeline_stand_below_each_other() -> None:
    schedule = make_schedule("zero_bubble", num_stages=11, num_microbatches=12)
    *rows, legend, summary = schedule.timeline().split("\n")
    starts = [row.index("F0") for row in rows]
    assert starts == [10 + 4 * stage for stage in range(11)]
    assert rows[10].startswith("stage 10  .   .   ")
    assert legend == (
        "F forward, I input gradients, W weight gradients, with the microbatch; . idle"
    )
    assert summary == "bubble: 21.7 %, 110 of 506 cells"


def refusal(*args: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        make_schedule(*args)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("GPIPE", "Did you mean 'gpipe'?"),
        ("1F1B", "Did you mean '1f1b'?"),
        ("zero-bubble", "Did you mean 'zero_bubble'?"),
        ("interleave", "Did you mean 'interleaved'?"),
        ("dualpipe", "Did you mean 'gpipe'?"),
        ("chimera", "Use '1f1b' if in doubt."),
        (None, "Use '1f1b' if in doubt."),
    ],
)
def test_an_unknown_schedule_is_refused_with_the_near_misses(
    name: Any, change: str
) -> None:
    assert refusal(name, 2, 4) == [
        f"{name!r} is not a schedule.",
        "The schedules are 'gpipe', '1f1b', 'interleaved', 'zero_bubble'.",
        change,
    ]


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("field", ["num_stages", "num_microbatches", "num_chunks"])
def test_counts_are_whole_numbers_from_one(field: str, value: Any) -> None:
    counts = {"num_stages": 2, "num_microbatches": 2, "num_chunks": 2, field: value}
    assert refusal("interleaved", *counts.values()) == [
        f"A schedule received {field}={value!r} (a {type(value).__name__}).",
        "Stages, microbatches and chunks are whole numbers from 1.",
        f"Use {field}=1 or more.",
    ]


@pytest.mark.parametrize(
    ("microbatches", "nearest"), [(6, "4 or 8"), (9, "8 or 12"), (3, "4")]
)
def test_interleaved_microbatches_are_a_multiple_of_the_stages(
    microbatches: int, nearest: str
) -> None:
    assert refusal("interleaved", 4, microbatches) == [
        f"The schedule 'interleaved' received num_microbatches={microbatches} "
        "for num_stages=4.",
        "Its chunks take turns with one microbatch per stage, so microbatches are a "
        "multiple of the stages.",
        f"Use {nearest} microbatches, or the schedule '1f1b', which takes any number.",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_only_interleaved_takes_chunks(name: str) -> None:
    assert refusal(name, 2, 4, 3) == [
        f"The schedule {name!r} received num_chunks=3.",
        "Only 'interleaved' has several pieces of the model on a stage.",
        "Leave num_chunks out, or use 'interleaved'.",
    ]


def test_one_stage_or_one_chunk_cannot_be_interleaved() -> None:
    assert refusal("interleaved", 1, 4) == [
        "The schedule 'interleaved' received num_stages=1.",
        "One stage has nobody to wait for, so nothing is interleaved.",
        "Use num_stages=2 or more, or the schedule '1f1b'.",
    ]
    assert refusal("interleaved", 2, 4, 1) == [
        "The schedule 'interleaved' received num_chunks=1.",
        "One chunk per stage has none to take turns with, so nothing is interleaved.",
        "Use num_chunks=2 or more, or the schedule '1f1b'.",
    ]


@every_schedule
def test_what_is_made_passes_the_check(name: str) -> None:
    for schedule in schedules(name):
        check_schedule(schedule)


def fault(schedule: Schedule) -> list[str]:
    with pytest.raises(PlanError) as caught:
        check_schedule(schedule)
    return str(caught.value).split("\n")


def with_actions(schedule: Schedule, *actions: Action) -> Schedule:
    return replace(schedule, actions=tuple(sorted(actions)))


def moved(
    schedule: Schedule, kind: Kind, piece: int, microbatch: int, tick: int
) -> Schedule:
    """The schedule with one action in another tick."""
    wanted = (kind, piece, microbatch)
    return with_actions(
        schedule,
        *(
            replace(a, tick=tick)
            if (a.kind, a.piece(schedule.num_stages), a.microbatch) == wanted
            else a
            for a in schedule.actions
        ),
    )


GPIPE = make_schedule("gpipe", num_stages=2, num_microbatches=2)
ZERO_BUBBLE = make_schedule("zero_bubble", num_stages=2, num_microbatches=2)
INTERLEAVED = make_schedule("interleaved", num_stages=2, num_microbatches=2)


def test_a_missing_action_is_found() -> None:
    assert fault(with_actions(GPIPE, *GPIPE.actions[1:])) == [
        "The schedule 'gpipe' has 0 actions for the forward of microbatch 0 on "
        "stage 0.",
        "Each piece of the model does each kind of action once per microbatch.",
        "Add one.",
    ]
    assert fault(replace(GPIPE, actions=()))[2] == "Add one."


def test_a_missing_half_of_a_backward_is_found() -> None:
    kept = [a for a in ZERO_BUBBLE.actions if a.kind != "weight_gradients"]
    assert fault(with_actions(ZERO_BUBBLE, *kept))[0] == (
        "The schedule 'zero_bubble' has 0 actions for the weight_gradients of "
        "microbatch 0 on stage 0."
    )


def test_an_action_that_stands_twice_is_found() -> None:
    again = replace(GPIPE.actions[-1], tick=GPIPE.num_ticks)
    assert fault(with_actions(GPIPE, *GPIPE.actions, again)) == [
        "The schedule 'gpipe' has 2 actions for the backward of microbatch 1 on "
        "stage 0.",
        "Each piece of the model does each kind of action once per microbatch.",
        "Take all but one of them out.",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"tick": -1},
        {"stage": 2},
        {"stage": -1},
        {"microbatch": 2},
        {"microbatch": -1},
        {"chunk": 1},
        {"kind": "update"},
    ],
)
def test_an_action_without_a_place_is_found(change: dict[str, Any]) -> None:
    first, *others = GPIPE.actions
    stray = replace(first, **change)
    assert fault(with_actions(GPIPE, stray, *others)) == [
        f"The schedule 'gpipe' has {stray}.",
        "It has num_stages=2, num_microbatches=2 and num_chunks=1, all counted from 0 "
        "as ticks are, and the kinds forward, backward.",
        "Take it out, or correct it.",
    ]


def test_a_stage_that_is_another_ones_next_chunk_is_found() -> None:
    # Stage 2 of chunk 0 would be the same piece as stage 0 of chunk 1.
    stray, *others = (a for a in INTERLEAVED.actions if a.piece(2) == 2)
    rest = [a for a in INTERLEAVED.actions if a.piece(2) != 2]
    stray = replace(stray, stage=2, chunk=0)
    lines = fault(with_actions(INTERLEAVED, stray, *others, *rest))
    assert lines[0] == f"The schedule 'interleaved' has {stray}."


def test_whole_and_split_backwards_do_not_mix() -> None:
    whole = Action(ZERO_BUBBLE.num_ticks, 0, "backward", 0)
    assert fault(with_actions(ZERO_BUBBLE, *ZERO_BUBBLE.actions, whole)) == [
        f"The schedule 'zero_bubble' has {whole}.",
        "It has num_stages=2, num_microbatches=2 and num_chunks=1, all counted from 0 "
        "as ticks are, and the kinds forward, input_gradients, weight_gradients.",
        "Take it out, or correct it.",
    ]


def test_two_actions_of_a_stage_in_one_tick_are_found() -> None:
    assert fault(moved(GPIPE, "forward", 0, 1, tick=0)) == [
        "The schedule 'gpipe' has 2 actions of stage 0 in tick 0.",
        "A stage does one thing at a time.",
        "Move all but one of them to other ticks.",
    ]


def test_actions_out_of_order_are_found() -> None:
    assert fault(replace(GPIPE, actions=GPIPE.actions[::-1])) == [
        "The schedule 'gpipe' has its actions in another order than that of time.",
        "Actions are listed by tick, and in a tick by stage.",
        "Use tuple(sorted(actions)).",
    ]


def test_a_bad_count_is_found() -> None:
    assert fault(replace(GPIPE, num_stages=0))[0] == (
        "A schedule received num_stages=0 (a int)."
    )


def delayed(schedule: Schedule) -> Schedule:
    """The schedule with nothing in its first tick."""
    later = (replace(a, tick=a.tick + 1) for a in schedule.actions)
    return with_actions(schedule, *later)


@pytest.mark.parametrize(
    ("damaged", "too_early", "tick", "needed", "at"),
    [
        pytest.param(
            moved(GPIPE, "forward", 1, 0, tick=0),
            *("forward of microbatch 0 on stage 1", 0),
            *("forward of microbatch 0 on stage 0", 0),
            id="forward of the piece before",
        ),
        pytest.param(
            moved(GPIPE, "backward", 0, 0, tick=3),
            *("backward of microbatch 0 on stage 0", 3),
            *("backward of microbatch 0 on stage 1", 3),
            id="backward of the piece after",
        ),
        pytest.param(
            moved(GPIPE, "backward", 1, 0, tick=0),
            *("backward of microbatch 0 on stage 1", 0),
            *("forward of microbatch 0 on stage 1", 1),
            id="own forward",
        ),
        pytest.param(
            moved(delayed(GPIPE), "forward", 0, 1, tick=0),
            *("forward of microbatch 1 on stage 0", 0),
            *("forward of microbatch 0 on stage 0", 1),
            id="order of forwards",
        ),
        pytest.param(
            moved(GPIPE, "backward", 0, 0, tick=6),
            *("backward of microbatch 1 on stage 0", 5),
            *("backward of microbatch 0 on stage 0", 6),
            id="order of backwards",
        ),
        pytest.param(
            moved(ZERO_BUBBLE, "input_gradients", 0, 0, tick=2),
            *("input_gradients of microbatch 0 on stage 0", 2),
            *("input_gradients of microbatch 0 on stage 1", 2),
            id="input gradients of the piece after",
        ),
        pytest.param(
            moved(ZERO_BUBBLE, "input_gradients", 1, 0, tick=0),
            *("input_gradients of microbatch 0 on stage 1", 0),
            *("forward of microbatch 0 on stage 1", 1),
            id="own forward of input gradients",
        ),
        pytest.param(
            moved(ZERO_BUBBLE, "weight_gradients", 1, 0, tick=0),
            *("weight_gradients of microbatch 0 on stage 1", 0),
            *("input_gradients of microbatch 0 on stage 1", 2),
            id="own input gradients",
        ),
        pytest.param(
            moved(ZERO_BUBBLE, "weight_gradients", 1, 0, tick=7),
            *("weight_gradients of microbatch 1 on stage 1", 6),
            *("weight_gradients of microbatch 0 on stage 1", 7),
            id="order of weight gradients",
        ),
        pytest.param(
            moved(delayed(INTERLEAVED), "forward", 2, 0, tick=0),
            *("forward of microbatch 0 on chunk 1 of stage 0", 0),
            *("forward of microbatch 0 on chunk 0 of stage 1", 2),
            id="forward of the chunk before",
        ),
        pytest.param(
            moved(INTERLEAVED, "backward", 2, 1, tick=10),
            *("backward of microbatch 1 on chunk 0 of stage 1", 8),
            *("backward of microbatch 1 on chunk 1 of stage 0", 10),
            id="backward of the chunk after",
        ),
    ],
)
def test_an_action_before_what_it_needs_is_found(
    damaged: Schedule, too_early: str, tick: int, needed: str, at: int
) -> None:
    assert fault(damaged) == [
        f"The schedule {damaged.name!r} has the {too_early} in tick {tick}.",
        f"It needs the {needed}, which is in tick {at}.",
        f"Move it to tick {at + 1} or later.",
    ]


def test_idle_ticks_at_the_start_are_possible_and_part_of_the_bubble() -> None:
    late = delayed(GPIPE)
    check_schedule(late)
    assert (late.num_ticks, late.bubble) == (7, 6 / 14)
