"""Times small programs on this machine, compiled as training steps are."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any, NamedTuple

from meshwright.models.formulations import compiler_options, in_best_form

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BLINK = 0.01
"""Seconds for which a program is repeated, to be timed."""

REPEATS, ROUNDS = 2, 4
"""Each program is timed so often at a time, and comes up so many times."""

_MOST_TURNS = 4096

Shape = tuple[tuple[int, ...], str]
"""A shape and a type."""


class Trial(NamedTuple):
    """A function whose time is wanted."""

    function: Callable[..., Any]
    shapes: Sequence[Shape]
    """Of its arguments; the first has floats."""
    copies: int = 1
    """How often it stands in a turn of the loop that repeats it."""


class Turns:
    """Times a turn of a loop: what many of them take beyond a few.

    Whatever else goes on there, it only ever takes longer; so the least counts.

    Arguments:
        run: Runs so many turns, and says how long they took.
        few: Some turns.
        many: More turns.
    """

    def __init__(self, run: Callable[[int], float], few: int, many: int) -> None:
        self._run = run
        self._numbers = few, many
        self._least = [inf, inf]

    def repeat(self, times: int) -> "Turns":
        """Runs both so many times."""
        for _ in range(times):
            self.once()
        return self

    def once(self) -> float:
        """Runs both, and returns the seconds of a turn as they were this time."""
        few, many = self._numbers
        short, long = self._run(few), self._run(many)
        self._least = [*map(min, self._least, (short, long))]
        return (long - short) / (many - few)

    @property
    def per_turn(self) -> float:
        """Seconds of a turn."""
        (few, many), (short, long) = self._numbers, self._least
        return (long - short) / (many - few)


class Stopwatch:
    """Times functions on the devices of a mesh.

    A function is run in a loop on the devices, in which each turn waits for the last,
    so that what the host needs to dispatch it does not count. On GPUs a turn is long
    for itself, so short functions stand in it several times.

    Arguments:
        mesh: The devices.

    Attributes:
        waiting: Seconds of the smallest kernel that waits for another one.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._options = compiler_options(mesh)
        smallest = [Trial(_first, [((8,), "float32")], copies) for copies in (1, 17)]
        self._turn = self.waiting = 0.0
        one, many = self._spans(smallest)
        self.waiting = max((many - one) / 16, 0.0)
        self._turn = max(one - self.waiting, 0.0)

    def seconds(self, trials: Sequence[Trial]) -> Iterator[float]:
        """Seconds of each of some functions; all are compiled first, in threads."""
        for trial, span in zip(trials, self._spans(trials), strict=False):
            each = (span - self._turn) / trial.copies - self.waiting
            yield float(max(each, 1e-9))

    def _spans(self, trials: Iterable[Trial]) -> Iterator[float]:
        """Seconds of a turn of each.

        One goes through them several times: what disturbs a machine for a second would
        spoil all timings of one program, but not those of the next time.
        """
        trials = list(trials)
        with ThreadPoolExecutor(16) as pool:
            programs = list(pool.map(self._compiled, trials))
        runs = [self._ready(p, t) for p, t in zip(programs, trials, strict=True)]
        for _ in range(ROUNDS):
            for run in runs:
                run.repeat(REPEATS)
        yield from (run.per_turn for run in runs)

    def _ready(self, program: Any, trial: Trial) -> "Turns":
        args = [
            jax.device_put(jnp.full(shape, 0.01, dtype), self._whole)
            for shape, dtype in trial.shapes
        ]
        _run(program, 1, args)
        once = _run(program, 1, args)
        many = max(4, min(_MOST_TURNS, int(BLINK / max(once, 1e-9))))
        return Turns(lambda number: _run(program, number, args), many // 4, many)

    def _compiled(self, trial: Trial) -> Any:
        best = in_best_form(trial.function, self._mesh)

        def turn(_: Any, carried: Any) -> Any:
            args, _ = carried
            outputs = []
            for _ in range(trial.copies):
                outputs.append(jax.lax.optimization_barrier(best(*args)))
                args = (_after(args[0], outputs[-1]), *args[1:])
            # They are carried on, or the compiler would make a single number of each.
            return args, outputs

        def run(number: Any, *args: Any) -> Any:
            _, shapes = jax.eval_shape(turn, 0, (args, None))
            made = jax.tree.map(jnp.zeros_like, shapes)
            return jax.lax.fori_loop(0, number, turn, (args, made))

        shapes = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)
            for shape, dtype in trial.shapes
        ]
        number = jax.ShapeDtypeStruct((), "int32", sharding=self._whole)
        compiled = jax.jit(run, compiler_options=self._options)
        return compiled.lower(number, *shapes).compile()


def _first(array: Any) -> Any:
    return array[:1]


def _after(array: Any, made: Any) -> Any:
    """The same array, once something is made."""
    first = jnp.ravel(jax.tree.leaves(made)[0])[0]
    return array.at[(0,) * array.ndim].add((first * 0).astype(array.dtype))


def _run(program: Any, number: int, args: Sequence[Any]) -> float:
    turns = jax.device_put(jnp.int32(number), args[0].sharding)
    start = time.perf_counter()
    jax.block_until_ready(program(turns, *args))
    return time.perf_counter() - start
