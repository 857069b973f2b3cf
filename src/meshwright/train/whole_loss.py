"""The loss of a whole batch, from the outputs of its microbatches.

Some losses are no mean over samples (masks, sums, losses of the user's own). Their
gradients can only start when the outputs of all microbatches are there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from meshwright.devices.strategy_hooks import replacing_forward_pass
from meshwright.models.formulations import compiler_options
from meshwright.models.forward import rebuild
from meshwright.models.stages import Input
from meshwright.parallel.batch import BatchSplit
from meshwright.parallel.mesh import replicated
from meshwright.train.staged_steps import TRAIN

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh


class Microbatch(NamedTuple):
    """What is known of a microbatch when its forward pass is done."""

    flat: list[Any]
    losses: list[Any]
    masks: list[Any]
    data: Any


class LossGradients(NamedTuple):
    """What the loss of a batch gives."""

    weights: list[Any]
    """Gradients of the weights that the loss itself reads."""
    outputs: list[tuple[list[Any], list[Any]]]
    """For each microbatch those of its outputs, and of the losses of its layers."""
    logs: Any
    metrics: list[Any]


class WholeLoss:
    """Computes it on the devices of the last stage.

    Arguments:
        model: The model.
        template: How its outputs are put together.
        state: Shapes and types of the lists of its state.
        microbatches: Those of the microbatches.
        mesh: The devices.

    Attributes:
        reads: The weights and other variables that the loss itself reads.
        shapes: The shapes of what it gives.
    """

    def __init__(
        self,
        model: Any,
        template: Any,
        state: Any,
        microbatches: Sequence[Microbatch],
        mesh: Mesh,
    ) -> None:
        self._model = model
        self._template = template
        self._sizes = [_size(each.data) for each in microbatches]
        self._mesh = mesh
        self._state = state
        self.reads = self._find_reads(microbatches)
        self.shapes = LossGradients(
            *jax.eval_shape(self._run, *self._arguments(microbatches))
        )
        self._program = jax.jit(
            self._run,
            out_shardings=self._places(microbatches),
            compiler_options=compiler_options(mesh),
        )

    def __call__(
        self, read: list[Any], metrics: list[Any], microbatches: Sequence[Microbatch]
    ) -> LossGradients:
        """Computes it; `read` is what `reads` says."""
        weights = [v for v, each in zip(read, self.reads, strict=True) if _trains(each)]
        rest = [
            v for v, each in zip(read, self.reads, strict=True) if not _trains(each)
        ]
        found = self._program(weights, rest, metrics, list(microbatches))
        return LossGradients(*found)

    def _arguments(self, microbatches: Sequence[Microbatch]) -> Any:
        lists = dict(zip(TRAIN, self._state, strict=True))
        read = [lists[each.role][each.index] for each in self.reads if _trains(each)]
        rest = [
            lists[each.role][each.index] for each in self.reads if not _trains(each)
        ]
        return read, rest, self._state[3], list(microbatches)

    def _find_reads(self, microbatches: Sequence[Microbatch]) -> list[Input]:
        jaxpr = jax.make_jaxpr(self._loss)(*self._state, list(microbatches)).jaxpr
        used = {v for op in jaxpr.eqns for v in op.invars if isinstance(v, Var)}
        inputs = [
            Input(role, i)
            for role, values in zip(TRAIN, self._state, strict=True)
            for i in range(len(values))
        ]
        pairs = zip(inputs, jaxpr.invars, strict=False)
        return [each for each, v in pairs if v in used and each.role != "metric"]

    def _places(self, microbatches: Sequence[Microbatch]) -> Any:
        whole = replicated(self._mesh)
        outputs = [
            ([BatchSplit(size, self._mesh).placement()] * len(each.flat), None)
            for size, each in zip(self._sizes, microbatches, strict=True)
        ]
        return None, outputs, whole, whole

    def _run(self, weights: Any, rest: Any, metrics: Any, microbatches: Any) -> Any:
        def loss_of(weights: Any, outputs: Any) -> Any:
            pairs = zip(microbatches, outputs, strict=True)
            given = [each._replace(flat=f, losses=s) for each, (f, s) in pairs]
            known, others, slots = self._lists(weights, rest)
            return self._loss(known, others, slots, metrics, given)

        outputs = [(each.flat, each.losses) for each in microbatches]
        gradients_of = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (_, (logs, metrics)), found = gradients_of(weights, outputs)
        return *found, logs, metrics

    def _lists(self, weights: Any, rest: Any) -> list[list[Any]]:
        """The lists of the state, with zeros for what nobody reads."""
        trained, others = iter(weights), iter(rest)
        lists = [
            [jnp.zeros(leaf.shape, leaf.dtype) for leaf in values]
            for values in self._state[:3]
        ]
        for each in self.reads:
            value = next(trained) if _trains(each) else next(others)
            lists[TRAIN.index(each.role)][each.index] = value
        return lists

    def _loss(
        self, weights: Any, others: Any, slots: Any, metrics: Any, microbatches: Any
    ) -> Any:
        import keras

        flat = _joined([each.flat for each in microbatches])
        masks = _joined([each.masks for each in microbatches])
        outputs = rebuild(self._template, flat, masks)
        total = sum(self._sizes)
        shares = [size / total for size in self._sizes]
        losses = [
            sum(share * loss for share, loss in zip(shares, every, strict=True))
            for every in zip(*(each.losses for each in microbatches), strict=True)
        ]
        data = _joined([each.data for each in microbatches], self._sizes)
        given = keras.utils.unpack_x_y_sample_weight(data)

        def computed(*_: Any, **__: Any) -> Any:
            return outputs, others, losses

        with replacing_forward_pass(self._model, computed):
            loss, aux = self._model.compute_loss_and_updates(
                weights,
                others,
                metrics,
                *given,
                training=True,
                optimizer_variables=slots,
            )
        unscaled, _, _, metrics = aux
        x, y, sample_weight = given
        update: Callable[..., Any] = self._model._update_metrics_variables
        # Keras' own step has lost the masks when it comes to the metrics.
        unmasked = rebuild(self._template, [jnp.copy(tensor) for tensor in flat])
        logs, metrics = update(metrics, unscaled, x, y, unmasked, sample_weight)
        return loss, (logs, metrics)


def _trains(given: Input) -> bool:
    return given.role == "weight"


def _joined(parts: Sequence[Any], sizes: Sequence[int] | None = None) -> Any:
    """Values of microbatches as those of the batch; what has no samples is the same."""

    def join(*leaves: Any) -> Any:
        has_samples = sizes is None or (leaves[0].ndim and len(leaves[0]) == sizes[0])
        return jnp.concatenate(leaves) if has_samples else leaves[0]

    return jax.tree.map(join, *parts)


def _size(data: Any) -> int:
    return int(next(leaf.shape[0] for leaf in jax.tree.leaves(data) if leaf.ndim))
