"""The programs that a Keras training step becomes when workers train on their own."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

from meshwright.data.resident import Shapes
from meshwright.devices.containers import map_leaves
from meshwright.devices.step import variables_of
from meshwright.devices.strategy_hooks import replacing_forward_pass
from meshwright.errors import StrategyError
from meshwright.models.formulations import compiler_options, in_best_form
from meshwright.models.forward import in_blocks
from meshwright.parallel.local_sgd import Replica, Round, Shares, Workers
from meshwright.parallel.microbatch import Microbatches
from meshwright.parallel.plan import Plan
from meshwright.train.accumulation import accumulated_step
from meshwright.train.pure_step import pure
from meshwright.train.stretches import SMALL_STEP_FLOPS, run_steps
from meshwright.train.traced_step import TracedStep

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Leaves = tuple[tuple[tuple[int, ...], Any, bool], ...]
"""Of the arrays of a batch: shape, type, and whether there is a part for each worker.
"""

SEED = "seed_generator_state"
"""What Keras calls the state of its seeds."""


class LocalPrograms:
    """Makes functions under `jax.jit` of Keras' training step, each once.

    All of them take what the workers have, the metrics and the round first, and give
    them back; the mesh is entered by `jax.shard_map`, so a worker runs Keras' step as
    one device does. What its metrics add up goes from worker to worker once for each
    dispatch, the weights once for each round.

    Arguments:
        model: The model.
        step: Keras' step.
        plan: The plan.
        mesh: The devices.
        outer: The outer optimizer, built; None to average.
        sync_every: Steps of a round.

    Attributes:
        workers: What the workers do together.
        on_batch: `(size, leaves, structure)`: a step on a batch that is shared out.
        on_stack: `(size, leaves, structure, num_steps, of_each)`: steps on such batches
            along a first dim.
        on_arrays: `(size, shapes, num_steps, of_each)`: steps on arrays that are whole
            on every device, rows of indices, and the first row.
    """

    def __init__(
        self, model: Any, step: Any, plan: Plan, mesh: Mesh, outer: Any, sync_every: int
    ) -> None:
        others = model.non_trainable_variables
        self.are_seeds = [v.name == SEED for v in others]
        self.workers = Workers(mesh, outer, self.are_seeds)
        self._model, self._plan, self._mesh = model, plan, mesh
        self._function = pure(model, step.__name__, step.__wrapped__)
        self._sync_every = sync_every
        self._sums_metrics = _makes_logs_of_metrics(model)
        _refuse_metrics_that_do_not_add_up(model)
        self.on_batch = cache(self._on_batch)
        self.on_stack = cache(self._on_stack)
        self.on_arrays = cache(self._on_arrays)
        self.trace = cache(self._trace)

    def shares(self, size: int) -> Shares:
        """How a batch is shared out."""
        return Shares(size, self.workers.number)

    def state_shapes(self) -> Any:
        """The shapes and types of the model's state."""
        groups = variables_of(self._model, [()] * 4)
        return tuple([_shape_of(v) for v in group] for group in groups)

    def trace_on_arrays(self, size: int, arrays: Shapes) -> TracedStep:
        """The step of a worker on so many samples of arrays."""
        return self.trace(size, _shapes_of_samples(arrays, size))

    def _trace(self, size: int, batch: Shapes) -> TracedStep:
        """The step of a worker with so many samples.

        Arguments:
            size: The samples.
            batch: Shapes and types of the batch.
        """
        cut = Microbatches(size, self._plan.accumulate)
        step = in_best_form(partial(self._step, cut), self._mesh)
        traced = TracedStep.of(step, self.state_shapes(), batch.tree)
        if not traced.is_repeatable:
            raise StrategyError(
                f"A training step of {self._model.name!r} changes the shape or type of "
                "its state.",
                "The variables of a worker of LocalSGD stay as they are from step to "
                "step.",
                "Give metrics and variables the dtype that they are assigned.",
            )
        return traced

    def _step(self, cut: Microbatches, state: Any, batch: Any) -> Any:
        blocks = in_blocks(lambda weights: weights)
        has_blocks = self._plan.remat
        model = self._model
        with replacing_forward_pass(model, blocks) if has_blocks else nullcontext():
            if cut.wanted == 1:
                return self._function(state, batch)
            parts = cut.cut(batch)
            return accumulated_step(model, state, parts, lambda size: nullcontext())

    def _on_batch(self, size: int, leaves: Leaves, structure: Any) -> Any:
        return self._on_given(size, leaves, structure, 0, 1, of_each=False)

    def _on_stack(
        self, size: int, leaves: Leaves, structure: Any, num_steps: int, of_each: bool
    ) -> Any:
        return self._on_given(size, leaves, structure, 1, num_steps, of_each=of_each)

    def _on_given(
        self,
        size: int,
        leaves: Leaves,
        structure: Any,
        lead: int,
        num_steps: int,
        *,
        of_each: bool,
    ) -> Any:
        """Steps on batches from the host, which have `lead` dims of a stack."""
        shared = [is_shared for *_, is_shared in leaves]

        def of_share(number_of_samples: int) -> Shapes:
            shapes = [
                jax.ShapeDtypeStruct(
                    (number_of_samples, *shape[lead + 2 :]) if is_own else shape[lead:],
                    dtype,
                )
                for shape, dtype, is_own in leaves
            ]
            return Shapes.of(jax.tree.unflatten(structure, shapes))

        def pick(number: Any, batches: Any) -> Any:
            mine = [
                jnp.squeeze(leaf, lead) if is_own else leaf
                for leaf, is_own in zip(jax.tree.leaves(batches), shared, strict=True)
            ]
            chosen = [leaf[number] for leaf in mine] if lead else mine
            return jax.tree.unflatten(structure, chosen)

        stacks = (None,) * lead
        own = PartitionSpec(*stacks, self.workers.axes)
        specs = [own if is_own else PartitionSpec() for is_own in shared]
        specs = jax.tree.unflatten(structure, specs)
        return self._program(size, of_share, pick, (specs,), num_steps, of_each)

    def _on_arrays(
        self, size: int, arrays: Shapes, num_steps: int, of_each: bool
    ) -> Any:
        rows = self.shares(size).rows

        def of_share(number_of_samples: int) -> Shapes:
            return _shapes_of_samples(arrays, number_of_samples)

        def pick(number: Any, arrays: Any, batches: Any, first: Any) -> Any:
            mine = jnp.asarray(rows)[self.workers.index]
            indices = batches[first + number][mine]
            kept = {"mode": "promise_in_bounds"}
            return map_leaves(lambda array: array.at[indices].get(**kept), arrays)

        whole = PartitionSpec()
        specs = (whole, whole, whole)
        return self._program(size, of_share, pick, specs, num_steps, of_each)

    def _program(
        self,
        size: int,
        of_share: Callable[[int], Shapes],
        pick: Callable[..., Any],
        data_specs: tuple[Any, ...],
        num_steps: int,
        of_each: bool,
    ) -> Any:
        shares = self.shares(size)
        larger = self.trace(shares.larger, of_share(shares.larger))
        is_even = shares.larger == shares.smaller
        smaller = None
        if shares.smaller and not is_even:
            smaller = self.trace(shares.smaller, of_share(shares.smaller))
        unrolls = larger.flops <= SMALL_STEP_FLOPS

        def train(replica: Replica, base: Any, round: Round, *data: Any) -> Any:
            def one(carry: Any, number: Any) -> Any:
                replica, sums, round = carry
                batch = pick(number, *data)
                replica, sums, own = self._train_on_share(
                    shares, larger, smaller, replica, sums, batch
                )
                round = self._count(shares, round)
                wanted = round.steps == self._sync_every
                replica, round = self.workers.agree_if(wanted, replica, round)
                return (replica, sums, round), (sums, own)

            sums = [jnp.zeros_like(value) for value in base]
            logs = self._logs_shapes(larger, sums)
            carry = (replica, sums, round)
            last, (replica, _, round) = run_steps(
                one, carry, num_steps, logs, unrolls=unrolls, of_each=of_each
            )
            logs, metrics = self._logs(last, base, of_each)
            return logs, replica, metrics, round

        return self._compiled(train, data_specs)

    def _train_on_share(
        self,
        shares: Shares,
        larger: TracedStep,
        smaller: TracedStep | None,
        replica: Replica,
        sums: Any,
        batch: Any,
    ) -> Any:
        """The step of this worker: its replica, its metrics, and its logs times n."""

        def run(step: TracedStep, size: int, replica: Replica, batch: Any) -> Any:
            logs, (*lists, metrics) = step((*replica, sums), batch)
            return tuple(lists), list(metrics), self._own_logs(logs, size / shares.size)

        def on_smaller(replica: Replica, batch: Any) -> Any:
            if smaller is None:
                none = self._own_logs(larger.logs, 0.0)
                return replica, list(sums), none
            return run(smaller, shares.smaller, replica, self._shortened(batch, shares))

        on_larger = partial(run, larger, shares.larger)
        if shares.larger == shares.smaller:
            return on_larger(replica, batch)
        has_more = self.workers.index < shares.num_larger
        return jax.lax.cond(has_more, on_larger, on_smaller, replica, batch)

    def _shortened(self, batch: Any, shares: Shares) -> Any:
        """A smaller share without what filled it up."""

        def shorten(leaf: Any) -> Any:
            has_samples = leaf.ndim and leaf.shape[0] == shares.larger
            return leaf[: shares.smaller] if has_samples else leaf

        return jax.tree.map(shorten, batch)

    def _count(self, shares: Shares, round: Round) -> Round:
        mine = jnp.asarray(shares.sizes, jnp.float32)[self.workers.index]
        return round._replace(steps=round.steps + 1, samples=round.samples + mine)

    def _own_logs(self, logs: Any, share: float) -> Any:
        """What a step returned, counted by its samples, if metrics do not tell it."""
        if self._sums_metrics:
            return {}
        return {
            name: share * jnp.asarray(value, jnp.float32)
            if share
            else jnp.zeros(jnp.shape(value), jnp.float32)
            for name, value in logs.items()
        }

    def _logs_shapes(self, step: TracedStep, sums: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in sums]
        own = {} if self._sums_metrics else step.logs
        numbers = {
            name: jax.ShapeDtypeStruct(jnp.shape(value), jnp.float32)
            for name, value in own.items()
        }
        return shapes, numbers

    def _logs(self, found: Any, base: Any, of_each: bool) -> Any:
        """What the steps of all workers return, and their metrics."""
        found = jax.lax.psum(found, self.workers.axes)

        def logs_of(summed: Any) -> Any:
            sums, own = summed
            metrics = [b + s for b, s in zip(base, sums, strict=True)]
            return (self._results(metrics) if self._sums_metrics else own), metrics

        if not of_each:
            return logs_of(found)
        last, each = found
        logs, metrics = logs_of(last)
        every = jax.lax.map(lambda summed: logs_of(summed)[0], each)
        return (logs, every), metrics

    def _results(self, metrics: list[Any]) -> Any:
        import keras

        pairs = list(zip(self._model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            return self._model.get_metrics_result()

    def _compiled(self, train: Callable[..., Any], data_specs: tuple[Any, ...]) -> Any:
        own, whole = PartitionSpec(self.workers.axes), PartitionSpec()
        rounds = Round(whole, own, whole, whole)
        mapped = jax.shard_map(
            _on_own_parts(train),
            mesh=self._mesh,
            in_specs=(own, whole, rounds, *data_specs),
            out_specs=(whole, own, whole, rounds),
            check_vma=False,
        )

        def run(state: Any, round: Round, *data: Any) -> Any:
            # The compiler knows arguments by these names, see `StepMemory.of`.
            *replica, metrics = state
            logs, replica, metrics, round = mapped(
                tuple(replica), metrics, round, *data
            )
            return logs, ((*replica, metrics), round)

        options = compiler_options(self._mesh)
        return jax.jit(run, donate_argnums=(0, 1), compiler_options=options)


def _on_own_parts(train: Callable[..., Any]) -> Callable[..., Any]:
    """Inside of `jax.shard_map`: without the dim of workers, which is 1 there."""

    def run(replica: Any, metrics: Any, round: Round, *data: Any) -> Any:
        mine = round._replace(samples=round.samples[0])
        logs, replica, metrics, after = train(_first(replica), metrics, mine, *data)
        round = after._replace(samples=after.samples[jnp.newaxis])
        return logs, _as_one_of_many(replica), metrics, round

    return run


def _first(values: Any) -> Any:
    return jax.tree.map(lambda value: value[0], values)


def _as_one_of_many(values: Any) -> Any:
    return jax.tree.map(lambda value: value[jnp.newaxis], values)


def spread_program(workers: Workers) -> Any:
    """Gives each worker values of a model: `(values, are_seeds)`, lists."""

    def spread(values: Any, are_seeds: tuple[bool, ...]) -> Any:
        return [workers.spread(v, s) for v, s in zip(values, are_seeds, strict=True)]

    return jax.jit(spread, static_argnums=1)


def merge_program(workers: Workers, mesh: Mesh) -> Any:
    """Makes one model of the workers, as if they agreed now: `(replica, round)`.

    It returns what they would have in common, and the state of the outer optimizer.
    """
    own, whole = PartitionSpec(workers.axes), PartitionSpec()

    def merge(replica: Replica, round: Round) -> Any:
        mine = round._replace(samples=round.samples[0])
        agreed, begun = workers.agree_if(mine.steps > 0, _first(replica), mine)
        return workers.merge(agreed), begun.slots

    mapped = jax.shard_map(
        merge,
        mesh=mesh,
        in_specs=(own, Round(whole, own, whole, whole)),
        out_specs=whole,
        check_vma=False,
    )
    return jax.jit(mapped, compiler_options=compiler_options(mesh))


def _makes_logs_of_metrics(model: Any) -> bool:
    """Whether what a step returns is what its metrics tell."""
    import keras

    names = ("train_step", "compute_metrics")
    return all(getattr(type(model), n) is getattr(keras.Model, n) for n in names)


def _refuse_metrics_that_do_not_add_up(model: Any) -> None:
    for variable in model.metrics_variables:
        if variable.aggregation != "sum":
            raise StrategyError(
                f"{variable.path}, a variable of a metric of {model.name!r}, has "
                f"aggregation={variable.aggregation!r}.",
                "The metrics of workers are added up, as those of Keras can be.",
                "Write the metric with sums (aggregation='sum'), or train without it "
                "and evaluate afterwards.",
            )


def _shapes_of_samples(arrays: Shapes, number: int) -> Shapes:
    leaves = tuple(((number, *shape[1:]), dtype) for shape, dtype in arrays.leaves)
    return Shapes(arrays.structure, leaves)


def _shape_of(variable: Any) -> jax.ShapeDtypeStruct:
    # Keras takes the values away while `fit` runs.
    held = variable if variable._value is None else variable._value
    return jax.ShapeDtypeStruct(tuple(held.shape), held.dtype)
