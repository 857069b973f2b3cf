"""What the layers of a model hold and compute, from shapes alone."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.sizes import format_bytes
from meshwright.devices.strategy_hooks import tracing_with
from meshwright.errors import ProfileError
from meshwright.models.library import library_of
from meshwright.models.parts import bytes_of
from meshwright.models.stages import scopes_of
from meshwright.models.work import flops_of

import jax
import numpy as np
from jax.extend.core import Jaxpr, Var

OUTSIDE = "(outside of layers)"
"""Where operations and variables are counted that belong to no layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer, on one batch."""

    name: str
    """Its path in the model, `encoder/dense`."""
    parameters: int
    """The numbers that it trains, or keeps."""
    parameter_bytes: int
    flops: int
    """Floating point operations of the forward pass."""
    activation_bytes: int
    """What its operations make; a backward pass keeps this much at the most."""
    output_bytes: int
    """What others read of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A model, or another function, on one batch."""

    name: str
    batch_size: int
    layers: tuple[LayerProfile, ...]

    @property
    def parameters(self) -> int:
        """The numbers that all layers train or keep."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Their bytes."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def flops(self) -> int:
        """Floating point operations of the forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """What all operations of the forward pass make."""
        return sum(layer.activation_bytes for layer in self.layers)

    def __str__(self) -> str:
        rows = [
            (
                layer.name,
                f"{layer.parameters:,}",
                f"{layer.flops / 1e6:,.1f}",
                format_bytes(layer.activation_bytes),
                format_bytes(layer.output_bytes),
            )
            for layer in self.layers
        ]
        head = ("layer", "parameters", "MFLOP", "activations", "output")
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, *rows)
        ]
        total = (
            f"{self.name}, batch of {self.batch_size}: {self.parameters:,} parameters "
            f"({format_bytes(self.parameter_bytes)}), {self.flops / 1e9:,.2f} GFLOP "
            f"forward, {format_bytes(self.activation_bytes)} of activations"
        )
        return "\n".join([*lines, total])


def build_abstractly(make_model: Callable[[], Any]) -> Any:
    """Builds a model whose variables have shapes and no values.

    It can be profiled and planned for, whatever its size; it cannot be called.

    Arguments:
        make_model: Returns a built Keras model; it is traced, so it must not look at
            values, load weights or train.

    >>> import keras
    >>> def make_model():
    ...     layers = [keras.Input((10**6,)), keras.layers.Dense(10**6, name="huge")]
    ...     return keras.Sequential(layers, name="net")
    >>> profile_model(build_abstractly(make_model), batch_size=1).parameters
    1000001000000
    """
    found = []

    def make() -> None:
        model = make_model()
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            # Without values it cannot be asked for its settings any more.
            optimizer.build(model.trainable_variables)
        found.append((model, optimizer))

    jax.eval_shape(make)
    ((model, optimizer),) = found
    variables = [*model.variables, *model.metrics_variables]
    for variable in (*variables, *(optimizer.variables if optimizer else ())):
        value = variable._value
        if isinstance(value, jax.core.Tracer):
            variable._value = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return model


def profile_model(model: Any, batch_size: int, data: Any = None) -> Profile:
    """Profiles a built Keras model; nothing is computed, and nothing allocated.

    Arguments:
        model: The model.
        batch_size: Samples in a batch.
        data: A batch of inputs, or its shapes, for models that do not know their own.

    Raises:
        ProfileError: The model is not built, or does not know its inputs.

    >>> import keras
    >>> layers = [keras.Input((4,)), keras.layers.Dense(3, name="scores")]
    >>> print(profile_model(keras.Sequential(layers, name="net"), batch_size=2))
    layer   parameters  MFLOP  activations  output
    scores          15    0.0         60 B    24 B
    net, batch of 2: 15 parameters (60 B), 0.00 GFLOP forward, 60 B of activations
    """
    refuse_unbuilt(model)
    inputs = own_inputs(model, batch_size) if data is None else _shapes(data)
    weights = [shape_of(v) for v in model.trainable_variables]
    others = [shape_of(v) for v in model.non_trainable_variables]

    options = {"training": True} if model._call_has_training_arg else {}

    def forward(weights: Any, others: Any, inputs: Any) -> Any:
        return model.stateless_call(weights, others, inputs, **options)[0]

    install_keras_hooks()
    with tracing_with(library_of()):
        program = jax.make_jaxpr(forward)(weights, others, inputs)
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    held: dict[str, list[Any]] = {}
    for variable in model.variables:
        *path, _ = variable.path.split("/")
        held.setdefault(_path(path, names), []).append(shape_of(variable))
    return _profile(model.name, batch_size, _Sums(program.jaxpr, names), held)


def profile_function(function: Callable[..., Any], *args: Any) -> Profile:
    """Profiles a function of arrays, or of their shapes; `jax.named_scope` are layers.

    The first dim of its first array is the batch.

    >>> import jax.numpy as jnp
    >>> profile_function(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 4))).flops
    48
    """
    shapes = _shapes(args)
    program = jax.make_jaxpr(function)(*shapes)
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(shapes) if leaf.shape]
    name = getattr(function, "__name__", "function")
    return _profile(name, sizes[0] if sizes else 1, _Sums(program.jaxpr), {})


class _Sums:
    """What the operations of a program do, by layer.

    Arguments:
        jaxpr: The program.
        names: Names of layers, among those of scopes; None if all scopes are.
    """

    def __init__(self, jaxpr: Jaxpr, names: Collection[str] | None = None) -> None:
        self.flops: Counter[str] = Counter()
        self.made: Counter[str] = Counter()
        self.put_out: Counter[str] = Counter()
        makers: dict[Any, str] = {}
        leaving = {v for v in jaxpr.outvars if isinstance(v, Var)}
        for operation in jaxpr.eqns:
            layer = _path(scopes_of(operation), names)
            self.flops[layer] += flops_of(operation)
            self.made[layer] += sum(map(bytes_of, operation.outvars))
            makers |= dict.fromkeys(operation.outvars, layer)
            inputs = [v for v in operation.invars if isinstance(v, Var)]
            leaving |= {v for v in inputs if makers.get(v, layer) != layer}
        for v in leaving & makers.keys():
            self.put_out[makers[v]] += bytes_of(v)


def _profile(
    name: str, batch_size: int, sums: _Sums, held: dict[str, list[Any]]
) -> Profile:
    layers = [
        LayerProfile(
            name=path,
            parameters=sum(_size(each) for each in held.get(path, [])),
            parameter_bytes=sum(_bytes(each) for each in held.get(path, [])),
            flops=sums.flops[path],
            activation_bytes=sums.made[path],
            output_bytes=sums.put_out[path],
        )
        for path in dict.fromkeys([*sums.flops, *held])
    ]
    return Profile(name=name, batch_size=batch_size, layers=tuple(layers))


def _path(parts: list[str], names: Collection[str] | None) -> str:
    chosen = [part for part in parts if part and (names is None or part in names)]
    return "/".join(chosen) or OUTSIDE


def refuse_unbuilt(model: Any) -> None:
    """Raises `ProfileError` for a model whose weights are not made yet."""
    if not model.built:
        raise ProfileError(
            f"{model.name!r} was to be profiled, and is not built.",
            "The shapes of weights are known when a model is built.",
            "Give it a keras.Input, call it on a batch, or call build(input_shape).",
        )


def own_inputs(model: Any, batch_size: int) -> Any:
    """The shapes of a batch of inputs, as a model was built for.

    Raises:
        ProfileError: It does not say what they are.
    """
    functional = getattr(model, "_functional", model)
    inputs = getattr(functional, "_inputs_struct", None)
    if inputs is None:
        raise ProfileError(
            f"{model.name!r}, a {type(model).__name__}, does not say what its inputs "
            "are.",
            "Functional and Sequential models know their inputs, others are shown "
            "some.",
            "Pass a batch of inputs, or its shapes, as data.",
        )
    for each in jax.tree.leaves(inputs):
        if None in each.shape[1:]:
            raise ProfileError(
                f"{model.name!r} takes inputs of shape {each.shape}.",
                "How much there is to do depends on every dim.",
                "Pass a batch of inputs, or its shapes, as data.",
            )
    return jax.tree.map(
        lambda each: jax.ShapeDtypeStruct((batch_size, *each.shape[1:]), each.dtype),
        inputs,
    )


def _shapes(data: Any) -> Any:
    return jax.tree.map(shape_of, data)


def shape_of(value: Any) -> jax.ShapeDtypeStruct:
    """The shape and type that a variable or an array has on a device."""
    held = getattr(value, "_value", value)
    dtype = getattr(held, "dtype", None) or np.asarray(held).dtype
    return jax.ShapeDtypeStruct(np.shape(held), jax.dtypes.canonicalize_dtype(dtype))


def _size(shape: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(shape.shape, dtype=object))


def _bytes(shape: jax.ShapeDtypeStruct) -> int:
    return _size(shape) * int(shape.dtype.itemsize)
