"""What is checked and logged about a model's step before it runs."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from meshwright.devices.memory import (
    StepMemory,
    is_out_of_memory,
    refuse_batch,
    refuse_over_limit,
)
from meshwright.devices.placement_log import log_number, log_step
from meshwright.devices.scope import (
    current_device,
    default_device,
    enter,
    homes_of,
)
from meshwright.devices.settings import current_settings

import jax
import numpy as np

STATE_KINDS = {
    4: ("parameters", "model state", "optimizer state", "metrics"),
    3: ("parameters", "model state", "metrics"),
    2: ("parameters", "model state"),
}
"""What the lists in a Keras step's state are called, by the number of lists."""

# The variables behind the lists in a Keras step's state, by the number of lists.
_TRAIN = ("trainable_variables", "non_trainable_variables", "optimizer", "metrics")
_STATES = {4: _TRAIN, 3: (*_TRAIN[:2], "metrics"), 2: _TRAIN[:2]}


class StepState:
    """Returns a model's values to it when something stops its training.

    Keras takes the values away from the variables for as long as `fit` runs, and puts
    back what it saw last, which steps since then may have consumed, or nothing if the
    first step fails.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._state: Any = None

    def keep(self, state: Any) -> Any:
        """Remembers the newest state."""
        self._state = state
        return state

    @contextmanager
    def giving_back(self, state: Any) -> Iterator[None]:
        """Gives the newest state back if the block fails before it is consumed."""
        self._state = state
        try:
            yield
        except StopIteration:
            raise  # the data is at its end, and Keras knows what to do
        except Exception:
            if not any(value.is_deleted() for value in jax.tree.leaves(self._state)):
                give_values(self._model, shown(self._model, self._state))
            raise
        finally:
            self._state = None


def give_values(model: Any, state: Any) -> None:
    """Gives the variables of a model the values of a state that a step has put out."""
    for group, values in zip(variables_of(model, state), state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable._value = value
    model._jax_state_synced = True


def shown(model: Any, state: Any) -> Any:
    """A state that a step has put out as values of the model's variables.

    Most steps put out just these; some keep more, and show a model if it is wanted.
    """
    step: Any = getattr(getattr(model, "train_function", None), "guarded", None)
    return step.show(state) if hasattr(step, "show") else state


def end_training(model: Any) -> None:
    """Called at the end of each `fit`, when the variables have their values again."""
    step: Any = getattr(model.train_function, "guarded", None)
    if hasattr(step, "end_round"):
        step.end_round()


def newest_values(model: Any) -> list[list[Any]]:
    """The values of a model's variables, also while `fit` has taken them away.

    They are in the order of `variables_of`, in all four lists.
    """
    state = getattr(model, "_jax_state", None)
    if state and not model._jax_state_synced:
        return [list(values) for values in shown(model, list(state.values()))]
    lists: list[Any] = [()] * len(_TRAIN)
    return [[v._value for v in group] for group in variables_of(model, lists)]


class StepCheck:
    """Looks at a compiled step before it runs: its memory, and where it runs."""

    def __init__(self, model: Any, name: str) -> None:
        self._model = model
        self._name = name
        self._seen: set[Any] = set()
        self._newest: tuple[Any, Any] | None = None

    def remember(self, step: Any, args: tuple[Any, ...]) -> None:
        """Keeps what `memory` looks at: a function under `jax.jit`, and arguments."""
        self._newest = step, jax.tree.map(_shape_of, args)

    def memory(self) -> StepMemory | None:
        """What the newest step takes on each device; None before the first.

        It has run, so JAX has its program and does not compile it again.
        """
        if self._newest is None:
            return None
        step, args = self._newest
        labels = labels_of(variables_of(self._model, args[0]), _first_parameter(step))
        return StepMemory.of(step.lower(*args).compile(), labels)

    def look(
        self, step: Any, args: tuple[Any, ...], size: int, device: str | None = None
    ) -> None:
        """Refuses a step over the limit, and logs it; once for each new shape.

        Arguments:
            step: A function under `jax.jit`.
            args: Its arguments; the first is the state, lists of the values of the
                model's variables.
            size: The number of samples in the batch.
            device: The device that the step runs on, if it is not where the state is.
        """
        limit, logging = current_settings().memory_limit, log_number()
        if limit is None and not logging:
            return
        state, *data = args
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(data))
        if (size, shapes, limit, logging) in self._seen:
            return
        variables = variables_of(self._model, state)
        if limit is not None:
            name = f"{self._name} of {self._model.name!r}"
            lowered = step.lower(*args)
            labels = labels_of(variables, _first_parameter(step))
            refuse_over_limit(lowered, labels, limit, name, size)
        if logging:
            log_step(self._model, self._name, variables, state, device)
        self._seen.add((size, shapes, limit, logging))


def _first_parameter(step: Any) -> str:
    return next(iter(inspect.signature(step).parameters))


def _shape_of(value: Any) -> Any:
    """What a value is to a compiler, without keeping it."""
    if not isinstance(value, jax.Array):
        return value
    return jax.ShapeDtypeStruct(
        value.shape, value.dtype, sharding=value.sharding, weak_type=value.weak_type
    )


class GuardedStep:
    """A Keras step that runs where its model was put, if its memory limit allows.

    A model on one device runs its step there. If a model on several devices is not to
    be compiled, each of its layers works at home.
    """

    def __init__(self, model: Any, step: Callable[[Any, Any], Any]) -> None:
        self._step = step
        self._is_compiled = hasattr(step, "lower")
        self._homes = sorted({name for _, name in homes_of(model)})
        self._check = StepCheck(model, step.__name__)
        self._state = StepState(model)
        self.giving_back = self._state.giving_back

    def __call__(self, state: Any, data: Any) -> Any:
        """Runs one step; the first with new shapes is checked and logged before."""
        with self._scope():
            if self._is_compiled:
                size = batch_size(data)
                device = current_device() or default_device()
                self._check.look(self._step, (state, data), size, device)
            logs, state = self._step(state, data)
            return logs, self._state.keep(state)

    def _scope(self) -> AbstractContextManager[None]:
        return enter(self._homes[0]) if len(self._homes) == 1 else nullcontext()


@contextmanager
def refusal_of_batches_over_limit(data: Any) -> Iterator[None]:
    """Explains an allocator that has no room for a batch under a memory limit.

    Keras moves batches to a GPU before their step is compiled, so a very large one
    fails there already, with an error of the allocator that names neither.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        limit = current_settings().memory_limit
        if limit is None or not is_out_of_memory(error):
            raise
        refuse_batch(data, limit, error)


def variables_of(model: Any, state: Any) -> list[list[Any]]:
    """The model's variables, in the order of the lists in `state`."""
    optimizer = getattr(model, "optimizer", None)
    found = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer": optimizer.variables if optimizer else [],
        "metrics": model.metrics_variables,
    }
    return [found[name] for name in _STATES[len(state)]]


def labels_of(variables: list[list[Any]], argument: str) -> dict[str, tuple[str, str]]:
    """The kind and path of each variable under the name that the compiler gives it."""
    kinds = STATE_KINDS[len(variables)]
    return {
        f"{argument}[{i}][{j}]": (kind, variable.path)
        for i, (kind, group) in enumerate(zip(kinds, variables, strict=True))
        for j, variable in enumerate(group)
    }


def batch_size(data: Any) -> int:
    """The number of samples of a batch, which is a tree of arrays and numbers."""
    return next(len(leaf) for leaf in jax.tree.leaves(data) if np.ndim(leaf))
