"""A Keras training step whose gradients are applied as they arrive."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from meshwright.cluster.channel import telling_of_compiling
from meshwright.data.resident import Shapes
from meshwright.devices.containers import map_leaves
from meshwright.devices.memory import explaining_exhaustion
from meshwright.devices.settings import current_settings
from meshwright.devices.step import (
    StepCheck,
    StepState,
    batch_size,
    give_values,
    variables_of,
)
from meshwright.errors import StrategyError
from meshwright.models.work import count_flops, guess_seconds
from meshwright.parallel.batch import PlacedBatch, PlacedStack
from meshwright.parallel.mesh import replicated
from meshwright.parallel.microbatch import cut_up
from meshwright.parallel.staleness import Staleness
from meshwright.train.async_programs import AsyncPrograms
from meshwright.train.async_server import Rules, UpdateServer
from meshwright.train.async_worker import Task, Worker
from meshwright.train.listeners import Logs

import jax
import numpy as np
from jax.sharding import Mesh


class AsyncStep:
    """Trains on batches by workers that do not wait for each other.

    Each batch is cut into as many as there are workers, and each of these is an update
    of its own. Workers meet at the end of a dispatch, where callbacks are called, so
    the state that these see is whole.

    Arguments:
        model: The model.
        step: Keras' training step.
        server: The device of the server.
        workers: The workers.
        remat: Whether activations are computed again for the gradients.
        rules: Says by which rules a dispatch is served.
        staleness: Counts the updates by their staleness.
    """

    measures_kernels = False

    def __init__(
        self,
        model: Any,
        step: Any,
        server: Mesh,
        workers: Sequence[Worker],
        *,
        remat: bool,
        rules: Callable[[], Rules],
        staleness: Staleness,
    ) -> None:
        _refuse_what_cannot_be_taken_apart(model, step)
        self._model = model
        self._workers = workers
        self._check = StepCheck(model, step.__name__)
        self._what = f"{step.__name__} of {model.name!r}"
        self._state = StepState(model)
        self.giving_back = self._state.giving_back
        self._make_programs = partial(AsyncPrograms, model, remat, server, workers)
        self._make_server = partial(
            UpdateServer,
            workers=workers,
            place=replicated(server),
            rules=rules,
            staleness=staleness,
        )
        self._start_anew()

    def _start_anew(self) -> None:
        """Forgets what is known by the places of variables in their lists."""
        self._places = self._places_of_variables()
        self._programs = self._make_programs()
        self._server = self._make_server(self._programs)
        self._seen: set[Shapes] = set()

    def _places_of_variables(self) -> list[list[int]]:
        groups = variables_of(self._model, ((), ()))
        return [[id(variable) for variable in group] for group in groups]

    def put(self, data: Any) -> PlacedBatch:
        """A batch of the host, kept until workers take their parts of it."""
        return PlacedBatch(batch_size(data), map_leaves(_keep, data))

    def put_stack(self, stack: Any, size: int) -> PlacedStack:
        """Batches of that size, stacked along a first dim, likewise."""
        kept = map_leaves(_keep, stack)
        return PlacedStack(size, len(jax.tree.leaves(kept)[0]), kept)

    def __call__(self, state: Any, data: Any) -> Any:
        """Trains on one batch of any size; returns what Keras' step does."""
        batch = data if isinstance(data, PlacedBatch) else self.put(data)
        logs, state = self._train(state, [batch])
        return logs[-1], state

    def run_placed(
        self, state: Any, batches: PlacedStack | PlacedBatch, of_each: bool
    ) -> Any:
        """Trains on several batches; returns the logs after them and the state.

        Arguments:
            state: The state before them.
            batches: The batches.
            of_each: Whether the logs after each of them are wanted, as `Logs`.
        """
        if isinstance(batches, PlacedBatch):
            return self(state, batches)
        several = [
            PlacedBatch(batches.size, map_leaves(partial(_entry, i), batches.arrays))
            for i in range(batches.number)
        ]
        logs, state = self._train(state, several)
        if not of_each:
            return logs[-1], state
        each = {name: [log[name] for log in logs] for name in logs[-1]}
        return Logs(logs[-1], each, len(logs)), state

    def guess_seconds(self, batch: Any, cores: int | None) -> float:
        """A guess of what all workers together take for a batch."""
        tasks = self._tasks([self.put(batch)])
        program = self._programs.trace(tasks[0].key.shapes)
        # Cores are shared, accelerators are not.
        flops = count_flops(program) * (len(tasks) if cores else 1)
        return guess_seconds(flops, len(program.jaxpr.eqns), cores)

    def _train(self, state: Any, batches: Sequence[PlacedBatch]) -> Any:
        if self._places_of_variables() != self._places:
            self._start_anew()  # layers have been frozen, or are trained again
        tasks = self._tasks(batches)
        parts = [self._num_parts(batch.size) for batch in batches]
        self._look(tasks, state)
        is_new = any(task.key.shapes not in self._seen for task in tasks)
        self._seen |= {task.key.shapes for task in tasks}
        with (
            telling_of_compiling(is_new),
            explaining_exhaustion(self._what, tasks[0].size, 1),
        ):
            logs = self._serve(state, tasks)
        # After as many updates as belong to each batch, whosever these were.
        known = [logs[end - 1] for end in accumulate(parts)]
        # The server keeps nothing between dispatches: it would be twice the memory.
        newest, self._server.state = self._server.state, None
        return known, self._state.keep(newest)

    def _serve(self, state: Any, tasks: list[Task]) -> list[Any]:
        try:
            return self._server.run(state, tasks)
        except BaseException:
            # Also after Ctrl-C: what was applied is not lost.
            if self._server.state is not None:
                newest, self._server.state = self._server.state, None
                give_values(self._model, self._state.keep(newest))
            raise

    def _num_parts(self, size: int) -> int:
        return max(1, min(len(self._workers), size))

    def _tasks(self, batches: Sequence[PlacedBatch]) -> list[Task]:
        parts = [
            part
            for batch in batches
            for part in cut_up(batch.arrays, batch.size, len(self._workers))
        ]
        return [
            Task(number, part, batch_size(part), self._programs.key(Shapes.of(part)))
            for number, part in enumerate(parts)
        ]

    def _look(self, tasks: Sequence[Task], state: Any) -> None:
        """Refuses a step over the memory limit."""
        if current_settings().memory_limit is None:
            return
        weights, others, _, metrics = state
        program = self._programs.gradients(True)
        for task in tasks:
            lists = (weights, others, metrics)
            self._check.look(program, (lists, task.batch), task.size)


def _refuse_what_cannot_be_taken_apart(model: Any, step: Any) -> None:
    import keras

    if not hasattr(step, "lower"):
        raise StrategyError(
            f"{model.name!r} was compiled with run_eagerly=True or jit_compile=False.",
            "Workers run compiled programs.",
            "Compile the model without these, or train it without a strategy.",
        )
    if type(model).train_step is not keras.Model.train_step:
        raise StrategyError(
            f"{model.name!r}, whose class {type(model).__name__} has a train_step of "
            "its own, was to be trained asynchronously.",
            "Workers compute gradients and the server applies them, so a step that "
            "does both would not be called.",
            "Override compute_loss instead of train_step, or use Mirrored.",
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise StrategyError(
            f"{model.name!r} was to be trained asynchronously with a "
            "LossScaleOptimizer, as float16 needs it.",
            "Its scale changes from update to update, and gradients of an older scale "
            "would be too large or too small.",
            "Use precision='bfloat16', which needs no scale.",
        )


def _keep(array: Any) -> Any:
    """A copy on the host, as devices will have it: a source may use its array again."""
    host = np.array(array)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)


def _entry(number: int, array: Any) -> Any:
    return array[number]
