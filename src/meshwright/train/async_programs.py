"""The programs that a training step becomes when its update happens elsewhere."""

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import count
from typing import Any, NamedTuple

from meshwright.data.resident import Shapes
from meshwright.devices.step import variables_of
from meshwright.devices.strategy_hooks import replacing_forward_pass
from meshwright.models.formulations import compiler_options, in_best_form
from meshwright.models.forward import in_blocks
from meshwright.parallel.mesh import replicated
from meshwright.train.async_worker import (
    Computed,
    ProgramKey,
    Worker,
    placed_shapes,
)
from meshwright.train.pure_step import pure

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh

_numbers = count()


class ServerPrograms(NamedTuple):
    """What the server runs for batches of the same shapes."""

    draw: Any
    """Takes `(weights, others, metrics)` and a batch; returns what `Task.drawn` of the
    next batch is. None if the model draws nothing."""
    apply: Any
    """Takes `(slots, weights, others, metrics, computed, pulled_others, pulled_metrics,
    is_fresh, batch)`; returns logs and the new state, in the order of Keras'."""


class AsyncPrograms:
    """Takes Keras' training step apart: gradients for workers, updates for the server.

    Arguments:
        model: The model.
        remat: Whether activations are computed again for the gradients.
        server: The device of the server.
        workers: The workers; they are given what they run.
    """

    def __init__(
        self, model: Any, remat: bool, server: Mesh, workers: Sequence[Worker]
    ) -> None:
        self._model = model
        self._remat = remat
        self._server = server
        self._workers = workers
        self._gradients = pure(model, "train_step", self._gradients_of)
        self.for_server = cache(self._for_server)
        self.gradients = cache(self._jitted_gradients)
        self._keeps_outputs = cache(self._find_whether_to_keep_outputs)
        self._number = next(_numbers)
        for worker in workers:
            weakref.finalize(self, worker.forget, self._number)
        self._prepared: set[Shapes] = set()

    @property
    def drawn(self) -> list[int]:
        """Which of the other variables are seeds and counters, and no statistics."""
        others = self._model.non_trainable_variables
        return [i for i, v in enumerate(others) if "float" not in str(v.dtype)]

    def prepare(self, shapes: Shapes) -> None:
        """Makes all programs for batches of some shapes."""
        if shapes in self._prepared:
            return
        self.for_server(shapes)
        program = self.gradients(self._keeps_outputs(shapes))
        weights, others, _, metrics = self.state_shapes()
        state = (weights, others, metrics)
        key = self.key(shapes)
        rests = [worker.prepare(key, program, state) for worker in self._workers]
        with ThreadPoolExecutor() as threads:
            for done in [threads.submit(rest) for rest in rests]:
                done.result()
        self._prepared.add(shapes)

    def key(self, shapes: Shapes) -> ProgramKey:
        """By which workers know what to run on batches of some shapes."""
        return ProgramKey(self._number, shapes)

    def state_shapes(self) -> Any:
        """Shapes and types of the lists of Keras' state."""
        groups = variables_of(self._model, [()] * 4)
        return tuple([_shape_of(v) for v in group] for group in groups)

    def trace(self, shapes: Shapes) -> Any:
        """A worker's step on a batch of some shapes, as operations."""
        weights, others, _, metrics = self.state_shapes()
        program = self.gradients(self._keeps_outputs(shapes))
        return program.trace((weights, others, metrics), shapes.tree).jaxpr

    def _jitted_gradients(self, keeps_outputs: bool) -> Any:
        def run(state: Any, batch: Any) -> Computed:
            computed, (gradients, others, metrics) = self._gradients(state, batch)
            loss, outputs = computed
            finite = jnp.isfinite(loss)
            for gradient in gradients:
                finite &= jnp.isfinite(gradient).all()
            outputs = outputs if keeps_outputs else None
            return Computed(gradients, others, metrics, loss, outputs, finite)

        best = in_best_form(run, self._server, is_moved=False)
        return jax.jit(best, compiler_options=compiler_options(self._server))

    def _gradients_of(self, state: Any, batch: Any) -> Any:
        """Loss and outputs, and lists like the state with gradients for weights."""
        import keras

        weights, others, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        find = jax.value_and_grad(self._model.compute_loss_and_updates, has_aux=True)
        with self._in_blocks():
            (_, aux), gradients = find(
                *(weights, others, metrics, x, y, sample_weight),
                training=True,
                # The loss is not scaled by them: optimizers that do are refused.
                optimizer_variables=self._zeros_of_slots(),
            )
        loss, outputs, others, metrics = aux
        return (loss, outputs), (gradients, others, metrics)

    def _zeros_of_slots(self) -> list[Any]:
        return [jnp.zeros(each.shape, each.dtype) for each in self.state_shapes()[2]]

    def _in_blocks(self) -> AbstractContextManager[None]:
        if not self._remat:
            return nullcontext()
        return replacing_forward_pass(self._model, in_blocks(lambda lists: lists))

    def _for_server(self, shapes: Shapes) -> ServerPrograms:
        whole = replicated(self._server)
        state = placed_shapes(self.state_shapes(), whole)
        weights, others, slots, metrics = state
        computed = placed_shapes(self._computed_shapes(shapes), whole)
        if not self._keeps_outputs(shapes):
            computed = computed._replace(outputs=None)
        fresh = jax.ShapeDtypeStruct((), bool)
        batch = shapes.tree
        options = {"compiler_options": compiler_options(self._server)}
        apply = jax.jit(self._apply, donate_argnums=0, **options).lower(
            slots, weights, others, metrics, computed, others, metrics, fresh, batch
        )
        draw = None
        if self.drawn:
            lists = (weights, others, metrics)
            draw = jax.jit(self._draw, **options).lower(lists, batch).compile()
        return ServerPrograms(draw, apply.compile())

    def _draw(self, state: Any, batch: Any) -> list[Any]:
        """Seeds and counters as they are after a batch; the rest is not computed."""
        _, (_, others, _) = self._gradients(state, batch)
        return [others[i] for i in self.drawn]

    def _apply(
        self,
        slots: Any,
        weights: Any,
        others: Any,
        metrics: Any,
        computed: Computed,
        pulled_others: Any,
        pulled_metrics: Any,
        is_fresh: Any,
        batch: Any,
    ) -> Any:
        import keras

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        weights, slots = self._model.optimizer.stateless_apply(
            slots, computed.gradients, weights
        )
        drawn = set(self.drawn)
        merged = _merged(others, pulled_others, computed.others, is_fresh)
        others = [
            old if i in drawn else new for i, (old, new) in _pairs(others, merged)
        ]
        metrics = _merged(metrics, pulled_metrics, computed.metrics, is_fresh)
        logs, metrics = self._model._update_metrics_variables(
            metrics, computed.loss, x, y, computed.outputs, sample_weight
        )
        return logs, (weights, others, slots, metrics)

    def _computed_shapes(self, shapes: Shapes) -> Computed:
        weights, others, _, metrics = self.state_shapes()
        run = self.gradients(True)
        found: Computed = jax.eval_shape(run, (weights, others, metrics), shapes.tree)
        return found

    def _find_whether_to_keep_outputs(self, shapes: Shapes) -> bool:
        """Whether metrics want the outputs of the model; they may be large."""
        weights, others, slots, metrics = self.state_shapes()
        computed = self._computed_shapes(shapes)
        lists = (slots, weights, others, metrics)
        rest = (computed, others, metrics, jax.ShapeDtypeStruct((), bool), shapes.tree)
        jaxpr = jax.make_jaxpr(self._apply)(*lists, *rest).jaxpr
        used = {v for op in jaxpr.eqns for v in op.invars if isinstance(v, Var)}
        before = len(jax.tree.leaves((lists, computed._replace(outputs=None)))) - 1
        number = len(jax.tree.leaves(computed.outputs))
        return bool(used & set(jaxpr.invars[before : before + number]))


def _merged(now: Any, pulled: Any, computed: Any, is_fresh: Any) -> list[Any]:
    """What a worker changed, put into what others have changed since it pulled."""

    def merge(now: Any, pulled: Any, computed: Any) -> Any:
        if now.dtype == bool:
            changed = jnp.where(computed == pulled, now, computed)
        else:
            changed = jnp.where(computed == pulled, now, now + (computed - pulled))
        return jnp.where(is_fresh, computed, changed).astype(now.dtype)

    triples = zip(now, pulled, computed, strict=True)
    return [merge(*each) for each in triples]


def _pairs(first: Any, second: Any) -> Any:
    return enumerate(zip(first, second, strict=True))


def _shape_of(variable: Any) -> jax.ShapeDtypeStruct:
    # Keras takes the values away while `fit` runs.
    held = variable if variable._value is None else variable._value
    return jax.ShapeDtypeStruct(tuple(held.shape), held.dtype)
