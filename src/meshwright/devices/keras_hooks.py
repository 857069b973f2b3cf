"""Every place where Meshwright reaches into Keras, in one file.

Keras on JAX forgets devices: variables drift to device 0 when they are assigned or
trained, and layers compute wherever their caller does. A few methods are extended so
that things stay where `meshwright.device` put them; models that were never placed, and
steps without a memory limit or a placement log, run the original code.

| method | what is added |
|---|---|
| `Variable.__init__` | remembers the scope it was made in |
| `Variable._initialize_layout` | is laid out as the strategy of its scope wants |
| `Variable._deferred_initialize` | makes the first value on the variable's device |
| `Variable._direct_assign` | takes new values to the variable's device |
| `Variable.__array__` | is whole, also if it is split among processes |
| `Variable._maybe_autocast` | keeps what is cast for a layer where the weight is |
| `Operation.__init__` | remembers the scope the layer or operation was made in |
| `Operation.__call__`, `Layer.__call__` | computes on that device, or split by sample |
| `Layer.stateless_call` | a model's forward pass in blocks or microbatches |
| `Optimizer.add_variable_from_reference` | slots live with their variable |
| `Layer.add_weight`, `Layer._open_name_scope` | builds on that device |
| `JAXTrainer.make_*_function`, `JAXTrainer._make_function` | steps of placed models |
| `JAXTrainer._get_jax_state` | values are read as they are |
| `JAXTrainer.jax_state_sync` | values that are where they belong are only taken back |
| `nn.conv`, `nn.depthwise_conv` | groups, which XLA cannot split |
| `trainer._distribute_data` | batches that a limited GPU cannot take |
| `JAXTrainer.fit`, `evaluate`, `predict` | data of distributed models is checked |
| `ArrayDataAdapter._get_iterator` | shuffles of trainings side by side |
| `JAXEpochIterator._get_iterator` | their batches go to the mesh from the host |
| `JAXEpochIterator._enumerate_iterator` | or stay there, for many steps at once |
| `CallbackList.on_*_batch_*` | callbacks are called between those, if they want it |
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import GeneratorType
from typing import Any, NamedTuple

from meshwright.devices.apart import own_chance
from meshwright.devices.containers import map_leaves, named_leaves
from meshwright.devices.placement_log import told_by_layer
from meshwright.devices.runtime import belongs_to_some, jax_devices, to_host
from meshwright.devices.scope import (
    enter,
    home_of,
    homes_of,
    mark_home,
    remember_home,
)
from meshwright.devices.step import (
    GuardedStep,
    end_training,
    give_values,
    refusal_of_batches_over_limit,
    shown,
)
from meshwright.devices.strategy_hooks import (
    INTAKE_MAKER,
    PLACED_MARK,
    STAGE_MARK,
    STEP_MAKER,
    LaidAside,
    current_intake,
    current_library,
    make_placed_step,
    reading_as_they_are,
    reads_as_they_are,
    run_forward_pass,
    scope_hooks,
    taking_data_through,
    trace_hooks,
)

import jax
import jax.numpy as jnp
import numpy as np

GLOBAL_BATCHES = "global_batches"
"""The attribute of a data set with its batches, before strategies split them."""

_NEWEST_STEP = "_meshwright_newest_step"
"""The attribute of a model with the step that was made for it last."""


@functools.cache
def install_keras_hooks() -> None:
    """Extends Keras once; a second call does nothing.

    Importing Keras takes a second, so this waits until somebody needs it.
    """
    from keras.src.backend.jax import nn, trainer
    from keras.src.backend.jax.core import Variable
    from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer
    from keras.src.callbacks.callback_list import CallbackList
    from keras.src.layers.layer import Layer
    from keras.src.ops.operation import Operation
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    _extend(Variable, "__init__", _remembering_init)
    _extend(Variable, "_initialize_layout", _lay_out_in_scope)
    _extend(Variable, "_deferred_initialize", _call_at_home)
    _extend(Variable, "_direct_assign", _assign_at_home)
    _extend(Variable, "__array__", _whole_array)
    _extend(Variable, "_maybe_autocast", _cast_in_place)
    _extend(Operation, "__init__", _remembering_init)
    _extend(Operation, "__call__", _call_at_home)
    _extend(Layer, "__call__", _call_layer)
    _extend(Layer, "stateless_call", run_forward_pass)
    _extend(BaseOptimizer, "add_variable_from_reference", _add_slot_at_home)
    _extend(Layer, "add_weight", _call_at_home)
    _extend(Layer, "_open_name_scope", _name_scope_at_home)
    _extend(JAXTrainer, "make_train_function", _make_step)
    _extend(JAXTrainer, "make_test_function", _make_step)
    _extend(JAXTrainer, "make_predict_function", _make_step)
    _extend(JAXTrainer, "_make_function", _make_guarded_function)
    _extend(JAXTrainer, "_get_jax_state", _read_state)
    _extend(JAXTrainer, "jax_state_sync", _take_state_back)
    _extend(nn, "conv", _convolve)
    _extend(nn, "depthwise_conv", _convolve_groups)
    # A function of Keras' hides the module of its name.
    recurrence = importlib.import_module("keras.src.backend.jax.rnn")
    _extend(recurrence, "cudnn_ok", _may_use_library)
    _extend(recurrence, "_is_gpu_available", _has_library)
    _extend(nn, "dot_product_attention", _attend)
    _extend(importlib.import_module("jax.experimental.rnn"), "lstm", _lstm)
    _extend(trainer, "_distribute_data", _transfer_within_limit)
    for verb in ("fit", "evaluate", "predict"):
        _extend(JAXTrainer, verb, _run_on_checked_data)
    _extend(ArrayDataAdapter, "_get_iterator", _draw_by_own_chance)
    _extend(JAXEpochIterator, "_get_iterator", _iterate_through_intake)
    _extend(JAXEpochIterator, "_enumerate_iterator", _enumerate_stretches)
    for kind in ("train", "test"):
        _extend(CallbackList, f"on_{kind}_batch_begin", _before_batch)
        _extend(CallbackList, f"on_{kind}_batch_end", _after_batch)


def _extend(owner: Any, name: str, extension: Callable[..., Any]) -> None:
    """Replaces a method or function by `extension(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(original, *args, **kwargs)

    # Keras reads the arguments of `__init__` to write configurations.
    extended.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, extended)


def _remembering_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # Before the original runs: a variable assigns its first value in there.
    remember_home(self)
    original(self, *args, **kwargs)
    for hooks in scope_hooks():
        hooks.notice(self)


def _lay_out_in_scope(original: Any, self: Any) -> None:
    original(self)
    for hooks in reversed(scope_hooks()):
        if self._layout is None:
            self._layout = hooks.choose_layout(self)


def _assign_at_home(original: Any, self: Any, value: Any) -> None:
    home = home_of(self)
    if home is not None:
        value = _bring(value, jax_devices()[home])
    elif self._layout is None and _is_concrete(getattr(self, "_value", None)):
        # The old value may have been donated to a step; its place is still known.
        (device, *others) = self._value.sharding.device_set
        if not others and _is_concrete(value) and value.devices() != {device}:
            value = _bring(value, device)
    original(self, value)


def _whole_array(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    value = self._value
    is_array = isinstance(value, jax.Array)
    if is_array and (not value.is_fully_addressable or belongs_to_some(value.sharding)):
        return to_host(value)
    return original(self, *args, **kwargs)


def _cast_in_place(original: Any, self: Any, value: Any) -> Any:
    if not reads_as_they_are() and _is_concrete(value) and value.committed:
        value = _for_eager_work(self, value)
    cast = original(self, value)
    hooks = trace_hooks()
    return cast if cast is value or hooks is None else hooks.keep_cast(self, cast)


def _for_eager_work(variable: Any, value: Any) -> Any:
    """The value of a variable that steps in pieces may have fixed to a device."""
    layout = getattr(variable, STAGE_MARK, None)
    is_on_a_stage = layout is not None and layout is variable._layout
    if is_on_a_stage and value.is_fully_addressable:
        # Weights of one layer may lie on several stages: eager work needs them here.
        return jax.device_put(value, jax.local_devices()[0])
    if getattr(variable, PLACED_MARK, False) and variable._layout is None:
        (device,) = value.devices()
        # Keras may be tracing, and the variable must not get a tracer for a value.
        with jax.ensure_compile_time_eval():
            variable._value = value = _bring(value, device)
    return value


def _call_at_home(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    home = home_of(self)
    if home is None:
        return original(self, *args, **kwargs)
    with enter(home), mark_home(home):
        target = jax_devices()[home]
        args = _bring_committed(args, target)
        kwargs = _bring_committed(kwargs, target)
        return original(self, *args, **kwargs)


def _call_layer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    output = _call_at_home(original, self, *args, **kwargs)
    hooks = trace_hooks()
    if hooks is None:
        return output
    return map_leaves(lambda t: with_mask(hooks.keep_output(t), mask_of(t)), output)


@contextmanager
def _name_scope_at_home(original: Any, self: Any) -> Iterator[Any]:
    home = home_of(self)
    with original(self) as scope, nullcontext() if home is None else enter(home):
        yield scope


def _add_slot_at_home(
    original: Any, self: Any, reference_variable: Any, *args: Any, **kwargs: Any
) -> Any:
    home = home_of(reference_variable)
    with nullcontext() if home is None else enter(home):
        return original(self, reference_variable, *args, **kwargs)


def _make_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # Functions from before the hooks were installed know nothing of them.
    for name in ("train_function", "test_function", "predict_function"):
        if not hasattr(getattr(self, name), "guarded"):
            setattr(self, name, None)
    original(self, *args, **kwargs)
    made = self.predict_function
    if made is not None and not hasattr(made, "guarded"):
        # Keras has wrapped what predicts once more, just now.
        made.guarded = getattr(self, _NEWEST_STEP)


def _make_guarded_function(
    original: Any, self: Any, step_function: Any, *args: Any, **kwargs: Any
) -> Any:
    guarded = _step_maker(self, step_function)(self, step_function)
    run = original(self, guarded, *args, **kwargs)
    # Keras' own step is one operation, or those of its layers; others have programs.
    telling = nullcontext if isinstance(guarded, GuardedStep) else told_by_layer

    def run_or_give_back(state: Any, iterator: Any) -> Any:
        with telling(), guarded.giving_back(state):
            intake = current_intake()
            if isinstance(iterator, LaidAside):
                return iterator.logs, state
            if hasattr(iterator, "take_stretch"):
                outcome = intake.run_stretch(guarded, state, iterator)
            else:
                if hasattr(iterator, "ahead"):
                    iterator = iterator.ahead(guarded.put)
                outcome = run(state, iterator)
            if intake is not None:
                intake.see(outcome[0])
            return outcome

    run_or_give_back.guarded = guarded  # type: ignore[attr-defined]
    object.__setattr__(self, _NEWEST_STEP, guarded)
    return run_or_give_back


def _step_maker(model: Any, step: Any) -> Any:
    by_strategy = getattr(model, STEP_MAKER, None)
    if by_strategy is not None:
        return by_strategy
    needs_pieces = hasattr(step, "lower") or step.__name__ == "train_step"
    return make_placed_step if needs_pieces and _is_split(model) else GuardedStep


def _is_split(model: Any) -> bool:
    return len({name for _, name in homes_of(model)}) > 1


def _runs_elsewhere(model: Any) -> bool:
    """Whether steps of a model put its values where they belong."""
    if getattr(model, STEP_MAKER, None) is not None:
        return True
    functions = (model.train_function, model.test_function, model.predict_function)
    steps = [getattr(each, "guarded", None) for each in functions]
    return any(step and not isinstance(step, GuardedStep) for step in steps)


def _read_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with reading_as_they_are():
        return original(self, *args, **kwargs)


def _take_state_back(original: Any, self: Any) -> None:
    state = getattr(self, "_jax_state", None)
    if not _runs_elsewhere(self) or not state or self._jax_state_synced:
        original(self)
        return
    values = tuple(values for values in state.values() if values is not None)
    give_values(self, shown(self, values))


def _run_on_checked_data(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    make_intake = getattr(self, INTAKE_MAKER, None)
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    for name in ("x", "validation_data"):
        if hasattr(bound.arguments.get(name), GLOBAL_BATCHES):
            bound.arguments[name] = _adapt_batches(bound.arguments[name])
    if make_intake is None:
        # This may be a callback inside the run of a model that has one.
        with taking_data_through(None):
            return original(*bound.args, **bound.kwargs)
    made = make_intake(self, original.__name__, bound.arguments)
    with made as intake, taking_data_through(intake):
        intake.take(bound.arguments)
        intake.course.begin(bound.arguments)
        result = original(*bound.args, **bound.kwargs)
        if original.__name__ == "fit":
            end_training(self)
        intake.course.end()
        return result


def _adapt_batches(data: Any) -> Any:
    """A data adapter over what a data set of the façade `tf` has to give."""
    batches = getattr(data, GLOBAL_BATCHES)
    try:
        length = len(batches)
    except TypeError:
        length = None

    def as_tuples() -> Iterator[Any]:
        return (b if isinstance(b, tuple) else (b,) for b in batches)

    return make_data_adapter(as_tuples, length)


def _iterate_through_intake(original: Any, self: Any) -> Any:
    intake = current_intake()
    if intake is None:
        return original(self)
    if intake.keeps(self.data_adapter):
        return intake.resident(self.data_adapter)
    # Keras would bring batches to the first GPU, from where they had to come back.
    batches, limit = self.data_adapter.get_jax_iterator(), _steps_of_epoch(self)
    has_tail = limit == self._num_batches and _has_tail(self.data_adapter)
    return intake.stream(batches, limit, has_tail)


def _draw_by_own_chance(original: Any, self: Any, *args: Any) -> Iterator[Any]:
    chance, batches = own_chance(), original(self, *args)
    if chance is None or not self._shuffle:
        return batches
    return chance.draw_all(batches)


def _has_tail(adapter: Any) -> bool:
    """Whether an adapter says that its last batch is smaller; some cannot say."""
    try:
        return bool(adapter.has_partial_batch)
    except NotImplementedError:
        return False


def _steps_of_epoch(epoch_iterator: Any) -> int | None:
    """How many batches an epoch takes at the most, as Keras counts, if it knows.

    Keras executes several steps also where fewer of them are wanted.
    """
    available = epoch_iterator._num_batches
    wanted = epoch_iterator.steps_per_epoch or available
    if not wanted:
        return None
    several = epoch_iterator.steps_per_execution
    executed: int = -(-wanted // several) * several
    return min(executed, available) if available and wanted <= available else executed


def _enumerate_stretches(original: Any, self: Any) -> Iterator[Any]:
    """Steps as Keras counts them, but as many at a time as the stream settles on."""
    intake = current_intake()
    if intake is None:
        yield from original(self)
        return
    course = intake.course
    start = intake.enter_epoch(_steps_of_epoch(self), self._num_batches)
    self._num_batches = start.num_batches
    num_steps = _steps_of_epoch(self)
    course.begin_data(self.data_adapter)
    if self._current_iterator is None or self.steps_per_epoch is None or start.step:
        _start_anew(self)
    if self._steps_seen == 0:
        course.begin_pass()
    if start.taken:
        self._current_iterator.skip(start.step, start.taken)
        self._steps_seen = start.taken
        course.pass_over(self._current_iterator.draws_at_once)
    if start.step:
        course.hears_nothing = True
        yield start.step - 1, start.step - 1, LaidAside(start.logs)
        course.hears_nothing = False
    try:
        yield from _enumerate_from(self, start.step, num_steps, intake)
    finally:
        course.leave_epoch()
    course.end_data(self.data_adapter)


def _enumerate_from(
    self: Any, begin: int, num_steps: int | None, intake: Any
) -> Iterator[Any]:
    settles = intake.stretches(self.data_adapter)
    while num_steps is None or begin < num_steps:
        if self._num_batches and self._steps_seen >= self._num_batches:
            if self.steps_per_epoch:
                self._interrupted_warning()
            break
        length = self.steps_per_execution
        if settles:
            num_left = None if num_steps is None else num_steps - begin
            length = self._current_iterator.settle_stretch(num_left, num_steps)
        self._steps_seen += length
        intake.before_steps(begin, length)
        yield begin, begin + length - 1, self._current_iterator
        begin += length
        intake.course.after_steps(begin, self._steps_seen)
    if self._num_batches and self._steps_seen >= self._num_batches:
        _start_anew(self)


def _start_anew(epoch_iterator: Any) -> None:
    epoch_iterator._current_iterator = epoch_iterator._get_iterator()
    epoch_iterator._steps_seen = 0


class AdaptedArrays(NamedTuple):
    """What a data adapter of Keras' takes batches from."""

    arrays: Any
    num_samples: int
    batch_size: int
    shuffle: bool | str


def adapt_arrays(
    parts: tuple[Any, Any, Any], batch_size: int | None, num_steps: int | None
) -> AdaptedArrays | None:
    """What Keras' data adapter of such arguments takes batches from."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return arrays_behind(ArrayDataAdapter(*parts, batch_size, num_steps))


def arrays_behind(adapter: Any) -> AdaptedArrays | None:
    """The NumPy arrays that a data adapter of Keras' takes batches from, if it does.

    Floats are in Keras' precision, as they are in its batches.
    """
    from keras.src.trainers.data_adapters import array_slicing
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    if type(adapter) is not ArrayDataAdapter:
        return None
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
    kinds = {type(part) for _, part in named_leaves("", inputs)}
    if kinds != {array_slicing.NumpySliceable}:
        return None
    arrays = map_leaves(lambda part: part.array, inputs)
    samples, size = adapter._num_samples, adapter.batch_size
    return AdaptedArrays(arrays, samples, size, adapter._shuffle)


def _before_batch(original: Any, self: Any, batch: int, logs: Any = None) -> None:
    intake = current_intake()
    if intake is None:
        original(self, batch, logs)
    elif not intake.course.hears_nothing:
        intake.pace.listeners.before_batch(original, self, batch)


def _after_batch(original: Any, self: Any, batch: int, logs: Any = None) -> None:
    intake = current_intake()
    if intake is None:
        original(self, batch, logs)
    elif not intake.course.hears_nothing:
        intake.pace.listeners.after_batch(original, self, batch, logs)


def is_known_to_keras(x: Any) -> bool:
    """Whether Keras has an adapter for data of this type."""
    from keras.src.trainers import data_adapters
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset

    return (
        isinstance(x, DataAdapter | PyDataset | GeneratorType)
        or data_adapters.is_tf_dataset(x)
        or data_adapters.is_torch_dataloader(x)
        or data_adapters.is_grain_dataset(x)
        or data_adapters.array_data_adapter.can_convert_arrays(x)
    )


def make_data_adapter(
    make_iterator: Callable[[], Iterator[Any]], length: int | None
) -> Any:
    """A data adapter of Keras' over batches that are iterated anew in every epoch.

    Arguments:
        make_iterator: Makes an iterator over the batches of one epoch, as tuples.
        length: Their number, if it is known.
    """
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    from keras.src.trainers.data_adapters.data_adapter_utils import get_jax_iterator

    class IterableAdapter(DataAdapter):
        num_batches = length
        batch_size = None

        def get_jax_iterator(self) -> Any:
            return get_jax_iterator(make_iterator())

    return IterableAdapter()


def _transfer_within_limit(original: Any, data: Any, *args: Any) -> Any:
    with refusal_of_batches_over_limit(data):
        return original(data, *args)


def _convolve(
    original: Any,
    inputs: Any,
    kernel: Any,
    strides: Any = 1,
    padding: Any = "valid",
    data_format: Any = None,
    dilation_rate: Any = 1,
) -> Any:
    import keras

    data_format = data_format or keras.config.image_data_format()
    features = inputs.shape[-1 if data_format == "channels_last" else 1]
    options = (strides, padding, data_format, dilation_rate)
    if features == kernel.shape[-2]:
        return original(inputs, kernel, *options)
    return _convolve_groups(original, inputs, kernel, *options)


def _convolve_groups(original: Any, inputs: Any, kernel: Any, *options: Any) -> Any:
    import keras

    def part(inputs: Any, kernel: Any) -> Any:
        return original(inputs, kernel, *options)

    inputs, kernel = map(keras.ops.convert_to_tensor, (inputs, kernel))
    hooks = trace_hooks()
    if hooks is None:
        return part(inputs, kernel)
    return hooks.convolve_groups(part, inputs, kernel)


def _may_use_library(original: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a library may compute a recurrent layer as a whole.

    XLA cannot divide such a call, so every device would compute all of the batch.
    """
    hooks = trace_hooks()
    is_divided = hooks is not None and hooks.num_devices > 1
    return not is_divided and bool(original(*args, **kwargs))


def _has_library(original: Any) -> bool:
    library = current_library()
    if library is None:
        return bool(original())
    library.wanted.add("lstm")  # Keras asks after all else
    return library.lstm is not None


def _lstm(original: Any, *args: Any, **kwargs: Any) -> Any:
    library = current_library()
    call = library.lstm if library is not None else None
    return (call or original)(*args, **kwargs)


def _attend(
    original: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    **options: Any,
) -> Any:
    library = current_library()
    if library is not None:
        may = options.get("flash_attention") is not False
        if may and _suits_library(query, value):
            library.wanted.add("attention")
            if library.attention is not None:
                return library.attention(query, key, value, bias, mask)
        options["flash_attention"] = False
    return original(query, key, value, bias, mask, **options)


def _suits_library(query: Any, value: Any) -> bool:
    """Whether cuDNN has a kernel for attention, on GPUs like an H200."""
    is_half = str(query.dtype) in ("bfloat16", "float16")
    size = query.shape[-1]
    return is_half and size == value.shape[-1] and size % 8 == 0 and size <= 256


def _bring_committed(value: Any, target: jax.Device) -> Any:
    """Brings arrays that are committed to other devices; the rest follows by itself."""

    def bring(leaf: Any) -> Any:
        is_committed = _is_concrete(leaf) and leaf.committed
        return _bring(leaf, target) if is_committed else leaf

    return map_leaves(bring, value)


def _is_concrete(value: Any) -> bool:
    # Tracers have no place, and keys of random numbers no host form.
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    )


def _bring(value: Any, target: jax.Device) -> Any:
    """The value as an uncommitted array on `target`, with its mask."""
    if not _is_concrete(value):
        return value
    if value.devices() == {target} and not value.committed:
        return value
    with jax.default_device(target):
        # A committed array can only be freed of its device by way of the host.
        brought = _compiled_copy(np.asarray(value) if value.committed else value)
    return with_mask(brought, _bring(mask_of(value), target))


def mask_of(tensor: Any) -> Any:
    """The mask that Keras keeps for a tensor, or None."""
    from keras.src.backend import get_keras_mask

    return get_keras_mask(tensor)


def with_mask(tensor: Any, mask: Any) -> Any:
    """A tensor for which Keras keeps a mask, if it is one."""
    from keras.src.backend import set_keras_mask

    if mask is not None:
        set_keras_mask(tensor, mask)
    return tensor


def _copy(value: Any) -> Any:
    return value


_compiled_copy = jax.jit(_copy)


def current_stateless_scope() -> Any:
    """The scope that keeps the values of Keras' variables apart, if one is open."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()
