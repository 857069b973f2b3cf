"""Schedules of a pipeline: which stage does what for which microbatch, and when.

A schedule is a table of actions and nothing else. It is built here, checked here and
drawn here; what runs it reads the table.

The model is cut into pieces, numbered from its inputs to its outputs. A *stage* is a
device; it has one piece, or several *chunks*: with p stages, chunk c of stage s is
piece c * p + s, so every stage hands on to the next and the last to the first. Each
action takes one tick, and what one tick produces can be used in the next:

| kind               | needs, in an earlier tick                                       |
|--------------------|-----------------------------------------------------------------|
| `forward`          | the forward of the piece before                                 |
| `backward`         | its own forward, and the backward of the piece after            |
| `input_gradients`  | its own forward, and the input gradients of the piece after     |
| `weight_gradients` | its own input gradients                                         |

Each kind also needs itself, on the same piece, for the microbatch before: a piece takes
microbatches in their order, which running statistics rely on.

With m microbatches, v chunks and p stages, on stage s from 0:

| schedule      | order of a stage               | ticks                          |
|---------------|--------------------------------|--------------------------------|
| `gpipe`       | all forwards, all backwards    | 2(m + p - 1)                   |
| `1f1b`        | backwards as soon as there are | 2(m + p - 1)                   |
| `interleaved` | the same, chunks in turn       | 2(vm + p - 1)                  |
| `zero_bubble` | the same, weights put off      | max(3m + p - 1, 2m + 2p - 1)   |

| schedule      | forwards whose results are kept at the same time, at most       |
|---------------|-----------------------------------------------------------------|
| `gpipe`       | m                                                               |
| `1f1b`        | min(p - s, m)                                                   |
| `interleaved` | min(2(p - s - 1) + (v - 1)p + 1, vm)                            |
| `zero_bubble` | min(p, m), of which min(p - s, m) wait for input gradients      |

`gpipe` with one microbatch is layer-wise placement: one stage works at a time.
`zero_bubble` is ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024). Two
of its ticks make one backward, so the same batch takes `1f1b` 3(m + p - 1) of them.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from typing import Any, Literal, NamedTuple

from meshwright.devices.sizes import is_count
from meshwright.errors import PlanError

Kind = Literal["forward", "backward", "input_gradients", "weight_gradients"]
"""What a stage can do; `backward` is the last two at once."""

_LETTERS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "input_gradients": "I",
    "weight_gradients": "W",
}
_WHOLE: tuple[Kind, ...] = ("forward", "backward")
_SPLIT: tuple[Kind, ...] = ("forward", "input_gradients", "weight_gradients")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """What one stage does in one tick.

    >>> Action(tick=7, stage=1, kind="forward", microbatch=2, chunk=1).piece(4)
    5
    """

    tick: int
    stage: int
    """The device, from 0."""
    kind: Kind
    microbatch: int
    chunk: int = 0
    """Which of the pieces that the stage has."""

    def piece(self, num_stages: int) -> int:
        """Its piece of the model, counted from the inputs."""
        return self.chunk * num_stages + self.stage


@dataclass(frozen=True, slots=True)
class Schedule:
    """A table of actions, by tick and then by stage.

    >>> schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3)
    >>> schedule.num_ticks, schedule.bubble, schedule.most_alive(0)
    (8, 0.25, 2)
    >>> schedule.of_stage(1)[0]
    Action(tick=1, stage=1, kind='forward', microbatch=0, chunk=0)
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    actions: tuple[Action, ...]

    @property
    def num_ticks(self) -> int:
        """Ticks from the first, which is 0, to the end."""
        return self.actions[-1].tick + 1

    @property
    def num_pieces(self) -> int:
        """Pieces that the model is cut into."""
        return self.num_stages * self.num_chunks

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What each piece does with each microbatch, in this order."""
        is_split = any(action.kind in _SPLIT[1:] for action in self.actions)
        return _SPLIT if is_split else _WHOLE

    @property
    def num_idle(self) -> int:
        """Ticks in which stages have nothing to do, over all stages."""
        return self.num_ticks * self.num_stages - len(self.actions)

    @property
    def bubble(self) -> float:
        """The idle share of all ticks of all stages."""
        return self.num_idle / (self.num_ticks * self.num_stages)

    def of_stage(self, stage: int) -> tuple[Action, ...]:
        """What one stage does, in its order."""
        return tuple(action for action in self.actions if action.stage == stage)

    def most_alive(self, stage: int) -> int:
        """The most forwards of a stage whose results are kept at the same time.

        They are kept from the tick of the forward to the end of the tick of the
        backward; where that is split, to the end of the weight gradients.
        """
        last = self.kinds[-1]
        alive = most = 0
        for action in self.of_stage(stage):
            alive += action.kind == "forward"
            most = max(most, alive)
            alive -= action.kind == last
        return most

    def timeline(self) -> str:
        """A drawing: a row for each stage, a cell for each tick.

        >>> print(make_schedule("1f1b", num_stages=2, num_microbatches=3).timeline())
        stage 0  F0 F1 .  B0 F2 B1 .  B2
        stage 1  .  F0 B0 F1 B1 F2 B2 .
        F forward, B backward, with the microbatch; . idle
        bubble: 25.0 %, 4 of 16 cells
        """
        texts = {(a.stage, a.tick): self._cell(a) for a in self.actions}
        width = max(len(text) for text in texts.values())
        label = len(f"stage {self.num_stages - 1}")
        rows = []
        for stage in range(self.num_stages):
            cells = (texts.get((stage, t), ".") for t in range(self.num_ticks))
            drawn = " ".join(cell.ljust(width) for cell in cells)
            rows.append(f"{f'stage {stage}':{label}}  {drawn}".rstrip())
        return "\n".join([*rows, self._legend(), self._summary()])

    def _cell(self, action: Action) -> str:
        chunk = f":{action.chunk}" if self.num_chunks > 1 else ""
        return f"{_LETTERS[action.kind]}{action.microbatch}{chunk}"

    def _legend(self) -> str:
        words = [f"{_LETTERS[kind]} {kind.replace('_', ' ')}" for kind in self.kinds]
        numbers = "microbatch:chunk" if self.num_chunks > 1 else "microbatch"
        return f"{', '.join(words)}, with the {numbers}; . idle"

    def _summary(self) -> str:
        cells = self.num_ticks * self.num_stages
        return f"bubble: {100 * self.bubble:.1f} %, {self.num_idle} of {cells} cells"


class _Job(NamedTuple):
    """An action that has no tick yet."""

    kind: Kind
    piece: int
    microbatch: int

    def needs(self, num_pieces: int) -> Iterator["_Job"]:
        """The jobs that must be done in earlier ticks."""
        if self.microbatch > 0:
            yield self._replace(microbatch=self.microbatch - 1)
        if self.kind == "forward":
            if self.piece > 0:
                yield self._replace(piece=self.piece - 1)
        elif self.kind == "weight_gradients":
            yield self._replace(kind="input_gradients")
        else:
            yield self._replace(kind="forward")
            if self.piece < num_pieces - 1:
                yield self._replace(piece=self.piece + 1)


class _Shape(NamedTuple):
    """How many there are of everything."""

    stages: int
    microbatches: int
    chunks: int

    def pieces_of(self, stage: int) -> range:
        return range(stage, self.stages * self.chunks, self.stages)


def _gpipe(shape: _Shape, stage: int) -> list[_Job]:
    forwards = _in_turn("forward", shape, stage)
    return [*forwards, *_in_turn("backward", shape, stage)]


def _1f1b(shape: _Shape, stage: int) -> list[_Job]:
    forwards = _in_turn("forward", shape, stage)
    backwards = _in_turn("backward", shape, stage)
    return _alternate(forwards, backwards, shape.stages - stage - 1)


def _interleaved(shape: _Shape, stage: int) -> list[_Job]:
    forwards = _in_turn("forward", shape, stage)
    backwards = _in_turn("backward", shape, stage)
    # The last chunk begins after so many others. Its first microbatch is on its way to
    # the last stage and back while this stage, rather than wait, goes on with forwards.
    before = (shape.chunks - 1) * shape.stages
    there_and_back = 2 * (shape.stages - stage - 1)
    return _alternate(forwards, backwards, before + there_and_back)


def _zero_bubble(shape: _Shape, stage: int) -> list[_Job]:
    forwards = _in_turn("forward", shape, stage)
    inputs = _in_turn("input_gradients", shape, stage)
    weights = _in_turn("weight_gradients", shape, stage)
    # Nobody waits for weight gradients, so they fill what would be idle at the end. A
    # stage may put off as many as it keeps fewer forwards than the first stage.
    put_off = min(stage, shape.microbatches)
    order: list[_Job] = []
    for job in _alternate(forwards, inputs, shape.stages - stage - 1):
        order.append(job)
        if job.kind == "input_gradients" and job.microbatch >= put_off:
            order.append(weights[job.microbatch - put_off])
    return order + weights[shape.microbatches - put_off :]


def _in_turn(kind: Kind, shape: _Shape, stage: int) -> list[_Job]:
    """All jobs of a kind: chunks take turns, each with a microbatch per stage."""
    pieces = shape.pieces_of(stage)
    group = shape.stages if shape.chunks > 1 else shape.microbatches
    return [
        _Job(kind, piece, microbatch)
        for first in range(0, shape.microbatches, group)
        for piece in (pieces if kind == "forward" else reversed(pieces))
        for microbatch in range(first, first + group)
    ]


def _alternate(forwards: list[_Job], backwards: list[_Job], ahead: int) -> list[_Job]:
    """Some forwards ahead, then one and one, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    left = backwards[len(forwards) - ahead :]
    return [*forwards[:ahead], *chain.from_iterable(pairs), *left]


_ORDERS: dict[str, Callable[[_Shape, int], list[_Job]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}

SCHEDULES = tuple(_ORDERS)
"""The names of all schedules."""

DEFAULT_SCHEDULE = "1f1b"


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
) -> Schedule:
    """Builds a schedule by name.

    Arguments:
        name: `'gpipe'`, `'1f1b'`, `'interleaved'` or `'zero_bubble'`.
        num_stages: Devices in a row.
        num_microbatches: Parts of a batch; for `interleaved` a multiple of the stages.
        num_chunks: Pieces of the model per stage; None is 2 for `interleaved`, else 1.

    Raises:
        PlanError: An unknown name, or numbers that the schedule cannot have.

    >>> print(make_schedule("zero_bubble", 2, 3).timeline())
    stage 0  F0 F1 .  I0 W0 F2 I1 W1 I2 W2
    stage 1  .  F0 I0 F1 I1 W0 F2 I2 W1 W2
    F forward, I input gradients, W weight gradients, with the microbatch; . idle
    bubble: 10.0 %, 2 of 20 cells
    """
    _check_name(name)
    if num_chunks is None:
        num_chunks = 2 if name == "interleaved" else 1
    shape = _checked_shape(num_stages, num_microbatches, num_chunks)
    if name == "interleaved":
        _check_interleaved(shape)
    elif shape.chunks > 1:
        raise PlanError(
            f"The schedule {name!r} received num_chunks={num_chunks}.",
            "Only 'interleaved' has several pieces of the model on a stage.",
            "Leave num_chunks out, or use 'interleaved'.",
        )
    return _made(name, shape)


@lru_cache(maxsize=1024)
def _made(name: str, shape: _Shape) -> Schedule:
    orders = [_ORDERS[name](shape, stage) for stage in range(shape.stages)]
    actions = _as_early_as_possible(orders, shape.stages * shape.chunks)
    return Schedule(name, *shape, actions)


def _check_name(name: Any) -> None:
    if name in SCHEDULES:
        return
    near = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=2, cutoff=0.5)
    raise PlanError(
        f"{name!r} is not a schedule.",
        f"The schedules are {', '.join(map(repr, SCHEDULES))}.",
        f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else "Use '1f1b' if in doubt.",
    )


def _checked_shape(stages: Any, microbatches: Any, chunks: Any) -> _Shape:
    for field, value in (
        ("num_stages", stages),
        ("num_microbatches", microbatches),
        ("num_chunks", chunks),
    ):
        if not is_count(value) or value < 1:
            raise PlanError(
                f"A schedule received {field}={value!r} (a {type(value).__name__}).",
                "Stages, microbatches and chunks are whole numbers from 1.",
                f"Use {field}=1 or more.",
            )
    return _Shape(int(stages), int(microbatches), int(chunks))


def _check_interleaved(shape: _Shape) -> None:
    for field, value, rule in (
        ("num_stages", shape.stages, "One stage has nobody to wait for"),
        ("num_chunks", shape.chunks, "One chunk per stage has none to take turns with"),
    ):
        if value < 2:
            raise PlanError(
                f"The schedule 'interleaved' received {field}={value}.",
                f"{rule}, so nothing is interleaved.",
                f"Use {field}=2 or more, or the schedule '1f1b'.",
            )
    below = shape.microbatches // shape.stages * shape.stages
    if below < shape.microbatches:
        above = below + shape.stages
        nearest = f"{below} or {above}" if below else f"{above}"
        raise PlanError(
            f"The schedule 'interleaved' received "
            f"num_microbatches={shape.microbatches} for num_stages={shape.stages}.",
            "Its chunks take turns with one microbatch per stage, so microbatches are "
            "a multiple of the stages.",
            f"Use {nearest} microbatches, or the schedule '1f1b', which takes any "
            "number.",
        )


def _as_early_as_possible(
    orders: list[list[_Job]], num_pieces: int
) -> tuple[Action, ...]:
    """Puts jobs on ticks; each stage keeps its order and waits for what it needs."""
    num_stages = len(orders)
    waiting = [iter(order) for order in orders]
    heads = [next(jobs, None) for jobs in waiting]
    done: set[_Job] = set()
    actions: list[Action] = []
    tick = 0
    while any(heads):
        ready = [
            (stage, job)
            for stage, job in enumerate(heads)
            if job is not None and done.issuperset(job.needs(num_pieces))
        ]
        assert ready, "the orders of the stages wait for each other"
        for stage, job in ready:
            chunk = job.piece // num_stages
            actions.append(Action(tick, stage, job.kind, job.microbatch, chunk))
            heads[stage] = next(waiting[stage], None)
        done.update(job for _, job in ready)
        tick += 1
    return tuple(actions)


def check_schedule(schedule: Schedule) -> None:
    """Refuses a table that cannot be run, whoever made it.

    Raises:
        PlanError: An action is missing, stands twice or has no place in the schedule,
            a stage does two things at once, or something comes before what it needs.

    >>> check_schedule(make_schedule("gpipe", num_stages=3, num_microbatches=4))
    """
    _checked_shape(schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
    _check_complete(schedule)
    _check_one_at_a_time(schedule)
    _check_needs(schedule)


def _check_complete(schedule: Schedule) -> None:
    times = dict.fromkeys(_actions_without_ticks(schedule), 0)
    for action in schedule.actions:
        kept = replace(action, tick=0)
        if kept not in times or action.tick < 0:
            raise PlanError(
                f"The schedule {schedule.name!r} has {action}.",
                _extent(schedule),
                "Take it out, or correct it.",
            )
        times[kept] += 1
    for action, number in times.items():
        if number != 1:
            raise PlanError(
                f"The schedule {schedule.name!r} has {number} actions for the "
                f"{_words(_job(action, schedule), schedule)}.",
                "Each piece of the model does each kind of action once per microbatch.",
                "Take all but one of them out." if number else "Add one.",
            )


def _actions_without_ticks(schedule: Schedule) -> Iterator[Action]:
    for kind, stage, microbatch, chunk in product(
        schedule.kinds,
        range(schedule.num_stages),
        range(schedule.num_microbatches),
        range(schedule.num_chunks),
    ):
        yield Action(0, stage, kind, microbatch, chunk)


def _extent(schedule: Schedule) -> str:
    return (
        f"It has num_stages={schedule.num_stages}, "
        f"num_microbatches={schedule.num_microbatches} and "
        f"num_chunks={schedule.num_chunks}, all counted from 0 as ticks are, and the "
        f"kinds {', '.join(schedule.kinds)}."
    )


def _check_one_at_a_time(schedule: Schedule) -> None:
    cells = [(action.tick, action.stage) for action in schedule.actions]
    for (tick, stage), times in Counter(cells).items():
        if times > 1:
            raise PlanError(
                f"The schedule {schedule.name!r} has {times} actions of stage {stage} "
                f"in tick {tick}.",
                "A stage does one thing at a time.",
                "Move all but one of them to other ticks.",
            )
    if cells != sorted(cells):
        raise PlanError(
            f"The schedule {schedule.name!r} has its actions in another order than "
            "that of time.",
            "Actions are listed by tick, and in a tick by stage.",
            "Use tuple(sorted(actions)).",
        )


def _check_needs(schedule: Schedule) -> None:
    ticks = {_job(action, schedule): action.tick for action in schedule.actions}
    for job, tick in ticks.items():
        for needed in job.needs(schedule.num_pieces):
            if ticks[needed] >= tick:
                raise PlanError(
                    f"The schedule {schedule.name!r} has the {_words(job, schedule)} "
                    f"in tick {tick}.",
                    f"It needs the {_words(needed, schedule)}, which is in tick "
                    f"{ticks[needed]}.",
                    f"Move it to tick {ticks[needed] + 1} or later.",
                )


def _job(action: Action, schedule: Schedule) -> _Job:
    piece = action.piece(schedule.num_stages)
    return _Job(action.kind, piece, action.microbatch)


def _words(job: _Job, schedule: Schedule) -> str:
    chunk, stage = divmod(job.piece, schedule.num_stages)
    place = f"chunk {chunk} of stage {stage}"
    if schedule.num_chunks == 1:
        place = f"stage {stage}"
    return f"{job.kind} of microbatch {job.microbatch} on {place}"
