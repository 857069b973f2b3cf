"""An epoch of all members as one program: each step is one of every member's."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from meshwright.data.resident import ArraysInMemory
from meshwright.models.formulations import compiler_options, in_best_form
from meshwright.train.stretches import SMALL_STEP_FLOPS, put_whole
from meshwright.train.traced_step import TracedStep
from meshwright.trials.packed_constants import run_program
from meshwright.trials.packed_places import AXIS, Places
from meshwright.trials.packed_room import Room
from meshwright.trials.packed_steps import Key

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

_ALL, _SPLIT = PartitionSpec(), PartitionSpec(AXIS)
UNROLL_ON_GPU = 4
"""Steps in a round of the loop, where a round costs microseconds of its own."""

Constants = Mapping[Key, Mapping[int, Any]]


class PackedPrograms:
    """The programs of a packed training, over the places of its members.

    Arguments:
        steps: The steps that stand for those of all members.
        places: Where the members are.
    """

    def __init__(self, steps: Mapping[Key, TracedStep], places: Places) -> None:
        self._steps = steps
        self._places = places
        self._room = Room(places)
        self._kept: dict[Any, Any] = {}

    def train(self, data: ArraysInMemory, order: jax.Array) -> Any:
        """Trains all members for an epoch; returns what they log after it."""
        places = self._places
        is_shared = order.ndim == 1
        program = self._program(
            ("train", is_shared),
            partial(self._train, data.batch_size, data.rest),
            (_SPLIT, _SPLIT, _SPLIT, _ALL, _ALL if is_shared else _SPLIT),
        )
        logs, places.state = self._room.run(
            program,
            places.state,
            places.fresh_metrics,
            places.constants,
            self._put(data),
            order,
        )
        return logs

    def validate(self, data: ArraysInMemory) -> Any:
        """Evaluates all members; returns what they log after it."""
        places = self._places
        program = self._program(
            ("test", True),
            partial(self._test, data.batch_size, data.rest),
            (_SPLIT, _SPLIT, _SPLIT, _ALL),
        )
        weights, others, slots, metrics = places.state
        logs, others = self._room.run(
            program,
            others,
            (weights, places.fresh_metrics),
            places.constants,
            self._put(data),
        )
        places.state = weights, others, slots, metrics
        return logs

    def _put(self, data: ArraysInMemory) -> Any:
        whole = partial(put_whole, self._places.whole)
        return data.placed(self._places.mesh, whole)

    def _program(self, name: Any, run: Callable[..., Any], specs: Any) -> Any:
        if name in self._kept:
            return self._kept[name]
        mesh = self._places.mesh
        # Members know nothing of each other, and no device waits for another.
        mapped = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=specs,
            out_specs=(_SPLIT, _SPLIT),
            check_vma=False,
        )
        self._kept[name] = jax.jit(
            mapped, donate_argnums=0, compiler_options=compiler_options(mesh)
        )
        return self._kept[name]

    def _step(self, key: Key, constants: Constants, shares: bool) -> Any:
        """A step of every member: takes the state of all and a batch, or each its own.

        The constants that differ are inputs of the step of one member.
        """
        step = self._steps[key]
        structure = jax.tree.structure(step.logs)

        def one(state: Any, own: Mapping[int, Any], batch: Any) -> Any:
            values = run_program(step.program, jax.tree.leaves((state, batch)), own)
            logs = jax.tree.unflatten(structure, values[: structure.num_leaves])
            after = iter(values[structure.num_leaves :])
            return logs, tuple([next(after) for _ in group] for group in state)

        best = in_best_form(one, self._places.mesh, in_pairs=False)

        def every(state: Any, batch: Any) -> Any:
            is_one = shares
            if shares and self._repeats(state[0], batch):
                batch, is_one = _repeated(batch, len(jax.tree.leaves(state)[0])), False
            mapped = jax.vmap(best, in_axes=(0, 0, None if is_one else 0))
            return mapped(state, constants[key], batch)

        return every

    def _repeats(self, weights: Any, batch: Any) -> bool:
        """Whether each member gets the shared batch as if it were its own.

        The product of one batch and everybody's weights would be a single one, for
        which a GPU transposes all weights and back, in each step; with a batch each,
        it multiplies member by member. Should the compiler write the copies out, they
        take no more than the weights do. Images stay one: convolutions of many images
        by many kernels are slow.
        """
        leaves = jax.tree.leaves(batch)
        weight_size = sum(w[0].size for w in jax.tree.leaves(weights))
        is_small = sum(leaf.size for leaf in leaves) <= weight_size
        return not self._is_on_cpu and is_small and all(x.ndim <= 2 for x in leaves)

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self._places.mesh.devices.flat[0].platform == "cpu")

    def _train(
        self,
        size: int,
        rest: int,
        state: Any,
        fresh_metrics: Any,
        constants: Constants,
        data: Any,
        order: Any,
    ) -> Any:
        is_shared = order.ndim == 1
        number = order.shape[-1] // size
        rows = order[..., : number * size].reshape(*order.shape[:-1], number, size)
        rows = rows if is_shared else rows.swapaxes(0, 1)

        def take(rows: Any) -> Any:
            # Asking whether indices exist would double the time that it takes on a CPU.
            kept = {"mode": "promise_in_bounds"}
            return jax.tree.map(lambda array: array.at[rows].get(**kept), data)

        state = (*state[:-1], fresh_metrics)
        steps = []
        if number:
            steps.append((self._step(("train", size), constants, is_shared), rows))
        if rest:
            step = self._step(("train", rest), constants, is_shared)
            steps.append((step, order[jnp.newaxis, ..., number * size :]))
        unroll = self._unroll(("train", size if number else rest))
        return _run_all(steps, state, take, unroll)

    def _test(
        self,
        size: int,
        rest: int,
        others: Any,
        kept: Any,
        constants: Constants,
        data: Any,
    ) -> Any:
        weights, fresh_metrics = kept
        number = len(jax.tree.leaves(data)[0]) // size
        steps = []
        if number:
            whole = jax.tree.map(
                lambda a: a[: number * size].reshape(number, size, *a.shape[1:]), data
            )
            steps.append((self._step(("test", size), constants, True), whole))
        if rest:
            last = jax.tree.map(lambda a: a[jnp.newaxis, number * size :], data)
            steps.append((self._step(("test", rest), constants, True), last))
        unroll = self._unroll(("test", size if number else rest))
        state = weights, others, fresh_metrics
        logs, after = _run_all(steps, state, lambda batch: batch, unroll)
        return logs, after[1]

    def _unroll(self, key: Key) -> int:
        is_small = self._steps[key].flops <= SMALL_STEP_FLOPS
        return UNROLL_ON_GPU if is_small and not self._is_on_cpu else 1


def _repeated(batch: Any, members: int) -> Any:
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (members, *a.shape)), batch)


def _run_all(
    steps: Sequence[tuple[Any, Any]], state: Any, take: Any, unroll: int
) -> Any:
    """Runs steps, each on its stack of batches; returns the logs of the last one.

    That one is outside of the loop, so that no other computes its logs.
    """

    def run(step: Any, state: Any, batches: Any) -> Any:
        def body(state: Any, batch: Any) -> Any:
            return step(state, take(batch))[1], None

        return jax.lax.scan(body, state, batches, unroll=unroll)[0]

    *before, (step, batches) = steps
    for other, stack in before:
        state = run(other, state, stack)
    state = run(step, state, jax.tree.map(lambda a: a[:-1], batches))
    return step(state, take(jax.tree.map(lambda a: a[-1], batches)))
