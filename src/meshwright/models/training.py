"""The training step of a model as a traced program, from shapes alone.

It is traced for a number of samples that no other dim has, so that what grows with the
batch can be told from what does not, and one trace serves batches of all sizes.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.devices.containers import map_leaves
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.step import batch_size
from meshwright.devices.strategy_hooks import replacing_forward_pass, tracing_with
from meshwright.errors import ProfileError
from meshwright.models.forward import in_blocks
from meshwright.models.library import library_of
from meshwright.models.precision import keeping_precision, set_precision
from meshwright.models.profile import own_inputs, refuse_unbuilt, shape_of
from meshwright.models.stages import Input, Role, StagedProgram

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

SAMPLES = 10007
"""Samples in the batch of a trace: a prime that is no size of anything else."""

StateKind = Literal["weight", "state", "slot", "metric", "data"]
"""Of what a step takes: trained, kept, the optimizer's, a metric's, the batch."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One array that a training step takes."""

    kind: StateKind
    path: str
    """That of the variable; empty for data."""
    variable: Any = None


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """A training step on a batch of `SAMPLES`: forward, backward and update."""

    name: str
    program: ClosedJaxpr
    inputs: tuple[StepInput, ...]
    wanted: frozenset[str] = frozenset()
    """Layers that a library would compute, or does, where there is one."""


def trace_training(
    model: Any,
    data: Any = None,
    *,
    precision: str | None = None,
    remat: bool = False,
    library: Collection[str] = (),
) -> TrainingStep:
    """Traces the training step of a compiled model; nothing is allocated or changed.

    Arguments:
        model: A built and compiled model, with or without values.
        data: A batch as `(x, y)`, or its shapes, of any size; inferred from the model
            and its loss if left out.
        precision: What layers compute in; as the model has it if left out.
        remat: Whether blocks are computed again for the gradients.
        library: Layers that a library computes, of `"lstm"` and `"attention"`; all
            others consist of operations, whatever is here.

    Raises:
        ProfileError: The model is not built or not compiled, or its data is not known.
    """
    with ready_to_train(model, data, SAMPLES, precision, metrics=False) as batch:
        groups = _state(model)
        shapes = tuple([shape_of(v) for v in group] for group, _ in groups)
        again = replacing_forward_pass(model, in_blocks(lambda weights: weights))
        calls = library_of(library)
        with tracing_with(calls), again if remat else nullcontext():
            program = jax.make_jaxpr(model.train_step)(shapes, batch)
    inputs = [
        StepInput(kind, variable.path, variable)
        for group, kind in groups
        for variable in group
    ]
    inputs += [StepInput("data", "")] * (len(program.in_avals) - len(inputs))
    return TrainingStep(model.name, program, tuple(inputs), frozenset(calls.wanted))


def trace_loss(
    model: Any, data: Any = None, *, precision: str | None = None
) -> StagedProgram:
    """Traces the forward pass of a training step with its loss, to be cut into pieces.

    Arguments are those of `trace_training`.
    """
    import keras

    def run(state: Any, batch: Any) -> Any:
        weights, others, slots, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        loss, aux = model.compute_loss_and_updates(
            weights,
            others,
            metrics,
            x,
            y,
            sample_weight,
            training=True,
            optimizer_variables=slots,
        )
        return loss, aux[2], aux[3]

    with ready_to_train(model, data, SAMPLES, precision, metrics=False) as batch:
        groups = _state(model)
        shapes = tuple([shape_of(v) for v in group] for group, _ in groups)
        with tracing_with(library_of()):
            program, outputs = jax.make_jaxpr(run, return_shape=True)(shapes, batch)
    inputs = [
        Input(ROLES[kind], number)
        for group, kind in groups
        for number in range(len(group))
    ]
    places = {each: number for number, each in enumerate(inputs)}
    inputs += [Input("data", i) for i in range(len(jax.tree.leaves(batch)))]
    _, others, metrics = outputs
    updates: list[int | None] = [None]
    updates += [places[Input("state", i)] for i in range(len(others))]
    updates += [places[Input("metric", i)] for i in range(len(metrics))]
    return StagedProgram(program, tuple(inputs), tuple(updates), (0,))


ROLES: dict[StateKind, Role] = {
    "weight": "weight",
    "state": "state",
    "slot": "shared",
    "metric": "metric",
}
"""What the inputs of a training step are called if it is cut into pieces."""


def _state(model: Any) -> list[tuple[list[Any], StateKind]]:
    return [
        (list(model.trainable_variables), "weight"),
        (list(model.non_trainable_variables), "state"),
        (list(model.optimizer.variables), "slot"),
        (list(model.metrics_variables), "metric"),
    ]


@contextmanager
def ready_to_train(
    model: Any,
    data: Any = None,
    num_samples: int | None = None,
    precision: str | None = None,
    *,
    metrics: bool = True,
) -> Iterator[Any]:
    """Lets the training step of a compiled model be traced, and then undoes it all.

    What makes variables in its first step is stood in for by copies that have made
    them. Nothing is allocated but counters.

    Arguments:
        model: A built and compiled model, with or without values.
        data: A batch as `(x, y)` or `(x, y, sample_weight)`, or its shapes; inferred
            from the model and its loss if left out.
        num_samples: Samples in the batch; as `data` has them if left out.
        precision: What layers compute in; as the model has it if left out.
        metrics: Whether the metrics that it was compiled with take part.

    Yields:
        The shapes of the batch.

    Raises:
        ProfileError: The model is not built or not compiled, or its data is not known.
    """
    refuse_unbuilt(model)
    _refuse_uncompiled(model)
    install_keras_hooks()
    with keeping_precision(model):
        set_precision(model, precision)
        batch = batch_shapes(model, data, num_samples)
        with _standing_in(model, batch, metrics):
            yield batch


@contextmanager
def _standing_in(model: Any, batch: Any, metrics: bool) -> Iterator[None]:
    changes: dict[str, Any] = {} if metrics else {"_compile_metrics": None}
    if not model.optimizer.built:
        changes["optimizer"] = _optimizer_like(model)
    loss = model._compile_loss
    if loss is not None and not loss.built:
        changes["_compile_loss"] = like = type(loss)(
            loss._user_loss, loss._user_loss_weights, output_names=loss.output_names
        )
        _use(like, [], model, batch)
    measured = model._compile_metrics
    if metrics and measured is not None and not measured.built:
        changes["_compile_metrics"] = _metrics_like(measured, model, batch)
    before = {name: getattr(model, name) for name in changes}
    try:
        for name, value in changes.items():
            object.__setattr__(model, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(model, name, value)


def _optimizer_like(model: Any) -> Any:
    """The same optimizer, built; its slots have shapes only."""
    import keras

    # Schedules and optimizers of the user's own may not be registered.
    found, own = model.optimizer, {}
    while found is not None:
        for part in (found, getattr(found, "_learning_rate", None)):
            own[type(part).__name__] = type(part)
        found = getattr(found, "inner_optimizer", None)
    with keras.saving.custom_object_scope(own):
        kind, config = type(model.optimizer), model.optimizer.get_config()
        optimizer = kind.from_config(config)
    jax.eval_shape(lambda: optimizer.build(model.trainable_variables))
    return optimizer


def _metrics_like(measured: Any, model: Any, batch: Any) -> Any:
    """The same metrics, built.

    Those that have their variables already are themselves, for a step changes them
    nowhere but in its state.
    """
    import keras

    kept = []

    def like(metric: Any) -> Any:
        if not isinstance(metric, keras.Metric):
            return metric
        if not metric.variables:
            return type(metric).from_config(metric.get_config())
        kept.extend(metric.variables)
        return metric

    given = measured._user_metrics, measured._user_weighted_metrics
    copies = [map_leaves(like, each) for each in given]
    built = type(measured)(*copies, output_names=measured.output_names)
    _use(built.update_state, kept, model, batch)
    return built


def _use(function: Any, variables: list[Any], model: Any, batch: Any) -> None:
    """Calls a loss or metrics on shapes, so that they make what they need."""
    import keras

    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)

    def use(targets: Any, outputs: Any, weights: Any) -> None:
        state = [(v, jnp.zeros(v.shape, v.dtype)) for v in variables]
        with keras.StatelessScope(state_mapping=state):
            function(targets, outputs, weights)

    jax.eval_shape(use, targets, _outputs(model, inputs), weights)


def batch_shapes(model: Any, data: Any = None, num_samples: int | None = None) -> Any:
    """The shapes and types of a training batch.

    Arguments:
        model: A built and compiled model.
        data: A batch, or its shapes; inferred from the model and its loss if left out.
        num_samples: Samples in the batch; as `data` has them if left out.

    Raises:
        ProfileError: The model does not know its inputs.

    >>> import keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> model.compile(loss="sparse_categorical_crossentropy")
    >>> inputs, targets = batch_shapes(model, num_samples=2)
    >>> inputs.shape, targets.shape, targets.dtype
    ((2, 4), (2,), dtype('int32'))
    """
    if data is None:
        assert num_samples is not None, "nothing else says how many there are"
        inputs = own_inputs(model, num_samples)
        return inputs, _targets(model, inputs)
    shapes = map_leaves(shape_of, data)
    size = batch_size(shapes)

    def resized(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if shape.shape[:1] != (size,) or num_samples is None:
            return shape
        return jax.ShapeDtypeStruct((num_samples, *shape.shape[1:]), shape.dtype)

    return map_leaves(resized, shapes)


def _targets(model: Any, inputs: Any) -> Any:
    """Targets as the losses want them: as the outputs are, or the numbers of classes.

    Keras' outputs may be dicts, which JAX would sort.
    """
    from keras import tree

    outputs = _outputs(model, inputs)
    flat = tree.flatten(outputs)
    losses = _losses(model, outputs, len(flat))
    targets = [_target(o, loss) for o, loss in zip(flat, losses, strict=True)]
    return tree.pack_sequence_as(outputs, targets)


def _outputs(model: Any, inputs: Any) -> Any:
    def forward(weights: Any, others: Any, inputs: Any) -> Any:
        return model.stateless_call(weights, others, inputs)[0]

    weights = [shape_of(v) for v in model.trainable_variables]
    others = [shape_of(v) for v in model.non_trainable_variables]
    with tracing_with(library_of()):
        return jax.eval_shape(forward, weights, others, inputs)


def _losses(model: Any, outputs: Any, number: int) -> list[Any]:
    given = getattr(model._compile_loss, "_user_loss", None)
    if isinstance(given, dict):
        keys = outputs if isinstance(outputs, dict) else model.output_names
        return [given.get(key) for key in keys]
    if isinstance(given, list | tuple):
        return list(given)
    return [given] * number


def _target(output: Any, loss: Any) -> jax.ShapeDtypeStruct:
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
    if "sparse" in f"{name} {type(loss).__name__}".lower():
        return jax.ShapeDtypeStruct(output.shape[:-1], "int32")
    return jax.ShapeDtypeStruct(output.shape, "float32")


def _refuse_uncompiled(model: Any) -> None:
    if not model.compiled or model.optimizer is None:
        raise ProfileError(
            f"{model.name!r} was to be planned for, and is not compiled.",
            "What a training step does depends on the loss and the optimizer.",
            "Call compile(optimizer=..., loss=...) first.",
        )
