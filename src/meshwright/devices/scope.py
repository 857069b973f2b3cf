"""The device scope itself: which device is current, and who remembers which.

Arrays made in a scope stay *uncommitted* in JAX's sense: they live on the scope's
device, and an operation takes its inputs to the device of the scope it runs in. That
is TensorFlow's rule (a silent copy), and JAX offers it for free. Variables and layers
remember the scope they were made in; `keras_hooks` brings them back to it.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from meshwright.devices.runtime import jax_devices, name_of
from meshwright.errors import UnknownDeviceError

import jax

_current: ContextVar[str | None] = ContextVar("meshwright_device", default=None)
_HOME = "_meshwright_device"


STEP_MAKER = "_meshwright_step_maker"
"""The attribute of a model that makes its steps, set by a strategy."""

INTAKE_MAKER = "_meshwright_intake_maker"
"""The attribute of a model that makes what its data goes through, set by a strategy."""

Listener = Callable[[Any], None]
"""Called with a layer or operation that was made inside a scope."""
LayoutChooser = Callable[[Any], jax.sharding.Sharding | None]
"""Chooses the sharding of a variable that is being made inside a scope."""

_strategies: ContextVar[tuple[tuple[Listener, LayoutChooser], ...]] = ContextVar(
    "meshwright_strategies", default=()
)


@contextlib.contextmanager
def listening(listener: Listener, choose: LayoutChooser) -> Iterator[None]:
    """Lets a strategy see what is made inside of its scope."""
    token = _strategies.set((*_strategies.get(), (listener, choose)))
    try:
        yield
    finally:
        _strategies.reset(token)


_outputs: ContextVar[Callable[[Any], Any] | None] = ContextVar(
    "meshwright_outputs", default=None
)


@contextlib.contextmanager
def passing_outputs_through(function: Callable[[Any], Any]) -> Iterator[None]:
    """Passes tensors that layers put out through a function, while a step is traced."""
    token = _outputs.set(function)
    try:
        yield
    finally:
        _outputs.reset(token)


def output_function() -> Callable[[Any], Any] | None:
    """What outputs of layers are passed through here."""
    return _outputs.get()


ForwardPass = Callable[..., Any]
"""Called with a model's own stateless call and its arguments, in its place."""

_forward_passes: ContextVar[tuple[tuple[Any, ForwardPass], ...]] = ContextVar(
    "meshwright_forward_passes", default=()
)


@contextlib.contextmanager
def replacing_forward_pass(model: Any, forward: ForwardPass) -> Iterator[None]:
    """Runs a model's stateless calls through `forward`, while a step is traced."""
    token = _forward_passes.set((*_forward_passes.get(), (model, forward)))
    try:
        yield
    finally:
        _forward_passes.reset(token)


def run_forward_pass(
    call: Callable[..., Any], model: Any, *args: Any, **kw: Any
) -> Any:
    """A stateless call of a model, or what replaces it here, innermost first."""
    passes = _forward_passes.get()
    if not passes or passes[-1][0] is not model:
        return call(model, *args, **kw)
    token = _forward_passes.set(passes[:-1])
    try:
        return passes[-1][1](call, model, *args, **kw)
    finally:
        _forward_passes.reset(token)


_intake: ContextVar[Any] = ContextVar("meshwright_intake", default=None)


@contextlib.contextmanager
def taking_data_through(intake: Any) -> Iterator[None]:
    """Takes the batches of a run through an intake, or, with None, as Keras does."""
    token = _intake.set(intake)
    try:
        yield
    finally:
        _intake.reset(token)


def current_intake() -> Any:
    """What the batches of the innermost run go through; None if that is Keras' own."""
    return _intake.get()


Part = Callable[[Any, Any], Any]
"""A part of a step: a function of activations and of a weight."""

_parts: ContextVar[Callable[[Part, Any, Any], Any] | None] = ContextVar(
    "meshwright_parts", default=None
)


@contextlib.contextmanager
def computing_grouped_convolutions_by(
    function: Callable[[Part, Any, Any], Any],
) -> Iterator[None]:
    """Leaves it to a function to compute these, while a step is traced."""
    token = _parts.set(function)
    try:
        yield
    finally:
        _parts.reset(token)


def compute_grouped_convolution(part: Part, inputs: Any, kernel: Any) -> Any:
    """Computes a grouped convolution the way that was chosen here."""
    function = _parts.get()
    return part(inputs, kernel) if function is None else function(part, inputs, kernel)


_casts: ContextVar[Callable[[Any, Any], Any] | None] = ContextVar(
    "meshwright_casts", default=None
)


@contextlib.contextmanager
def passing_casts_through(function: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Passes variables that were cast for a layer, and their values, through it."""
    token = _casts.set(function)
    try:
        yield
    finally:
        _casts.reset(token)


def pass_cast(variable: Any, value: Any) -> Any:
    """What the value of a variable becomes here, after it was cast for a layer."""
    function = _casts.get()
    return value if function is None else function(variable, value)


def creation_listeners() -> tuple[Listener, ...]:
    """The listeners of the scopes that are open here."""
    return tuple(listener for listener, _ in _strategies.get())


def layout_choosers() -> tuple[LayoutChooser, ...]:
    """The choosers of the scopes that are open here, innermost first."""
    return tuple(choose for _, choose in reversed(_strategies.get()))


@contextlib.contextmanager
def enter(name: str | None) -> Iterator[None]:
    """Enters the scope of a device that is known to exist; None is automatic."""
    target = None if name is None else _existing(name)
    token = _current.set(name)
    try:
        with jax.default_device(target):
            yield
    finally:
        _current.reset(token)


def _existing(name: str) -> jax.Device:
    available = jax_devices()
    if name not in available:
        raise UnknownDeviceError(
            f"{name} unknown device: something was made for it, and it is gone.",
            "What was made in a scope lives on that device for good.",
            f"Configure the devices first; now there are {', '.join(available)}.",
        )
    return available[name]


def current_device() -> str | None:
    """The name of the innermost scope's device, or None for automatic placement."""
    return _current.get()


def remember_home(thing: Any) -> None:
    """Makes the current scope the home of a variable, layer or operation."""
    # Past Keras' own __setattr__, which expects a fully made layer.
    object.__setattr__(thing, _HOME, current_device())


def home_of(thing: Any) -> str | None:
    """The name of the device that a variable, layer or operation was made for."""
    return getattr(thing, _HOME, None)


def homes_of(model: Any) -> list[tuple[str, str]]:
    """Which layer or operation of a model lives on which device, as (path, name).

    Variables decide where there are any: one that nobody placed lives on the default
    device. What has no variables counts only if it was placed, else it follows.
    """
    homes = []
    for layer in model._flatten_layers():
        path = layer.path or layer.name
        own = own_variables(layer)
        homes += [(path, home_of(v) or default_device()) for v in own]
        is_leaf = not layer._flatten_layers(include_self=False)
        if not own and is_leaf and not is_input(layer) and home_of(layer):
            homes.append((path, str(home_of(layer))))
        homes += [
            (operation.name, str(home_of(operation)))
            for operation in getattr(layer, "operations", ())
            if not hasattr(operation, "_flatten_layers") and home_of(operation)
        ]
    return list(dict.fromkeys(homes)) if any_placed(model) else []


def any_placed(model: Any) -> bool:
    """Whether anything of a model was made inside of a scope."""
    layers = model._flatten_layers()
    operations = [o for layer in layers for o in getattr(layer, "operations", ())]
    things = [*layers, *operations, *model.variables]
    return any(home_of(thing) for thing in things if not is_input(thing))


def own_variables(layer: Any) -> list[Any]:
    """The variables of a layer that belong to none of the layers inside it."""
    inner = layer._flatten_layers(include_self=False)
    theirs = {id(variable) for other in inner for variable in other.variables}
    return [variable for variable in layer.variables if id(variable) not in theirs]


def is_input(layer: Any) -> bool:
    """Whether a layer only stands for an input."""
    return bool(type(layer).__name__ == "InputLayer")


def default_device() -> str:
    """The name of the device that work goes to here, unless it was placed."""
    configured = jax.config.jax_default_device
    if isinstance(configured, str):
        configured = jax.devices(configured)[0]
    return name_of(configured or jax.devices()[0])
