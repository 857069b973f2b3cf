"""What a model wants of its data, as far as that can be known without running it.

Only what stock Keras does with the data is known. A model with a step, loss or call of
its own may do anything with it, so nothing is demanded there.
"""

from dataclasses import dataclass
from typing import Any

from meshwright.devices.containers import map_leaves, named_leaves

import jax

Shape = tuple[int | None, ...]

_STEPS = {"fit": "train_step", "evaluate": "test_step", "predict": "predict_step"}


@dataclass(frozen=True, slots=True)
class InputDemand:
    """One input of a model."""

    name: str
    shape: Shape

    def is_met_by(self, shape: tuple[int, ...]) -> bool:
        """Whether a shape is the one that the input declares; samples do not count.

        >>> InputDemand("image", (None, 28, 28)).is_met_by((5, 28, 28))
        True
        """
        return len(shape) == len(self.shape) and all(
            wanted in (None, dim)
            for wanted, dim in zip(self.shape[1:], shape[1:], strict=True)
        )


@dataclass(frozen=True, slots=True)
class LabelDemand:
    """The labels of one output with a sparse categorical loss."""

    position: int
    num_outputs: int
    name: str | None
    """The output's name, if labels can come by name."""
    num_classes: int | None
    """None if it is not known; then labels are only known to start at 0."""
    ignored: int | None
    """A label that does not count."""

    def find(self, targets: Any) -> Any:
        """The labels among targets or weights; None if they are not to be found."""
        if isinstance(targets, dict):
            return targets.get(self.name)
        if isinstance(targets, list | tuple):
            fits = len(targets) == self.num_outputs
            return targets[self.position] if fits else None
        return targets if self.num_outputs == 1 else None


@dataclass(frozen=True, slots=True)
class Demands:
    """Everything that a model wants of its data."""

    inputs: tuple[InputDemand, ...] = ()
    """Empty if nothing is known."""
    has_named_inputs: bool = False
    """Whether the inputs may also come as a dict."""
    labels: tuple[LabelDemand, ...] = ()
    outputs_match_targets: bool = False
    """Whether outputs and targets have the same number of samples."""


def demands_of(model: Any, verb: str) -> Demands:
    """What a model wants of its data in `fit`, `evaluate` or `predict`."""
    if not model.built or not _is_keras_own(model, _STEPS[verb]):
        return Demands()
    inputs, are_named = _inputs_of(model)
    if verb == "predict" or not _has_losses_of_keras(model):
        return Demands(inputs, are_named)
    return Demands(inputs, are_named, _labels_of(model), outputs_match_targets=True)


def output_shapes(model: Any, x: Any) -> list[tuple[int, ...]]:
    """The shapes of a model's outputs for inputs like `x`; raises if Keras does."""

    def shaped(array: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        return jax.ShapeDtypeStruct(tuple(array.shape), dtype)

    groups = model.trainable_variables, model.non_trainable_variables
    # Values are not needed, and Keras takes them away while `fit` runs.
    weights = [
        [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in group]
        for group in groups
    ]
    outputs = jax.eval_shape(
        lambda weights, x: model.stateless_call(*weights, x)[0],
        weights,
        map_leaves(shaped, x),
    )
    return [tuple(output.shape) for output in jax.tree.leaves(outputs)]


def _is_keras_own(model: Any, method: str) -> bool:
    import keras

    return getattr(type(model), method) is getattr(keras.Model, method)


def _comes_from_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).split(".")[0] == "keras"


def _inputs_of(model: Any) -> tuple[tuple[InputDemand, ...], bool]:
    tensors = getattr(model, "inputs", None)
    if not tensors or not _comes_from_keras(type(model).call):
        return (), False
    # A Functional model keeps the containers in which its inputs came.
    containers = model.input if hasattr(model, "output_names") else tensors
    if isinstance(containers, dict):
        are_named = all(hasattr(item, "shape") for item in containers.values())
        names = sorted(containers) if are_named else [t.name for t in tensors]
    else:
        items = containers if isinstance(containers, list | tuple) else [containers]
        are_named = all(hasattr(item, "shape") for item in items)
        names = [tensor.name for tensor in tensors]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    found = [InputDemand(n, s) for n, s in zip(names, shapes, strict=True)]
    return tuple(found), are_named


def _has_losses_of_keras(model: Any) -> bool:
    losses = [loss for _, loss in named_leaves("loss", getattr(model, "loss", None))]
    return _is_keras_own(model, "compute_loss") and all(
        isinstance(loss, str)
        or _comes_from_keras(loss if hasattr(loss, "__name__") else type(loss))
        for loss in losses
    )


def _labels_of(model: Any) -> tuple[LabelDemand, ...]:
    outputs = _outputs_of(model)
    found = []
    for position, (name, shape) in enumerate(outputs):
        loss = _loss_of(model.loss, position, name, len(outputs))
        is_sparse, ignored = _read_loss(loss)
        if is_sparse:
            num_classes = shape[-1] if shape else None
            found.append(
                LabelDemand(position, len(outputs), name, num_classes, ignored)
            )
    return tuple(found)


def _outputs_of(model: Any) -> list[tuple[str | None, Shape]]:
    """Names and shapes of the outputs; one of unknown shape without a graph."""
    tensors = getattr(model, "outputs", None)
    if not tensors or not _comes_from_keras(type(model).call):
        return [(None, ())]
    if not hasattr(model, "output_names"):
        return [(None, tuple(tensor.shape)) for tensor in tensors]
    containers = model.output
    if isinstance(containers, dict):
        items = containers.items()
        return [(key, tuple(getattr(item, "shape", ()))) for key, item in items]
    names = model.output_names
    return [(n, tuple(t.shape)) for n, t in zip(names, tensors, strict=True)]


def _loss_of(losses: Any, position: int, name: str | None, num_outputs: int) -> Any:
    if isinstance(losses, dict):
        return losses.get(name)
    if isinstance(losses, list | tuple):
        return losses[position] if len(losses) == num_outputs else None
    return losses


def _read_loss(loss: Any) -> tuple[bool, int | None]:
    """Whether a loss takes the numbers of classes, and which number it ignores."""
    import keras

    if isinstance(loss, str) and loss.lower() not in ("crossentropy", "ce"):
        loss = keras.losses.get(loss)
    if loss is keras.losses.sparse_categorical_crossentropy:
        return True, None
    if type(loss) is keras.losses.SparseCategoricalCrossentropy:
        return True, loss.ignore_class
    return False, None
