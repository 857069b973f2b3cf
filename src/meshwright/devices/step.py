"""What is checked and logged about a model's step before it runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from meshwright.devices.memory import (
    is_out_of_memory,
    refuse_batch,
    refuse_over_limit,
)
from meshwright.devices.placement_log import is_logging, log_step
from meshwright.devices.scope import enter, homes_of
from meshwright.devices.settings import current_settings
from meshwright.errors import MemoryLimitError, PlacementError

import jax

# The variables behind the lists in a Keras step's state, by the number of lists.
_TRAIN = ("trainable_variables", "non_trainable_variables", "optimizer", "metrics")
_STATES = {4: _TRAIN, 3: (*_TRAIN[:2], "metrics"), 2: _TRAIN[:2]}


def refuse_to_train_split_model(model: Any) -> None:
    """Raises if the layers of a model were put on more than one device."""
    homes = homes_of(model)
    if len(set(homes.values())) > 1:
        layers = ", ".join(f"{path} on {name}" for path, name in homes.items())
        raise PlacementError(
            f"fit was called on {model.name!r}, whose layers live on several devices: "
            f"{layers}.",
            "One compiled training step runs on one set of devices, and moving the "
            "weights would break the placement.",
            "Build the whole model under one meshwright.device; call, predict and "
            "evaluate work with the layers where they are.",
        )


class GuardedStep:
    """A Keras step that runs where its model was put, if its memory limit allows.

    A model on one device runs its compiled step there. A model on several devices runs
    its step uncompiled, so that each layer works at home.
    """

    def __init__(self, model: Any, step: Callable[[Any, Any], Any]) -> None:
        self._model = model
        self._step = step
        self._is_compiled = hasattr(step, "lower")
        self._homes = sorted(set(homes_of(model).values()))
        if self._is_compiled and len(self._homes) > 1:
            self._step = step.__wrapped__  # type: ignore[attr-defined]
            self._is_compiled = False
        self._checked: set[Any] = set()
        self._state: Any = None

    def __call__(self, state: Any, data: Any) -> Any:
        """Runs one step; the first with new shapes is checked and logged before."""
        with self._scope():
            if self._is_compiled:
                self._look_before_running(state, data)
            logs, self._state = self._step(state, data)
            return logs, self._state

    @contextmanager
    def giving_back(self, state: Any) -> Iterator[None]:
        """Returns the model's values to it when a memory limit stops its training.

        Keras takes the values away from the variables for as long as `fit` runs.
        """
        self._state = state
        try:
            yield
        except MemoryLimitError:
            self._give_back()
            raise
        finally:
            self._state = None

    def _give_back(self) -> None:
        variables = _variables_of(self._model, self._state)
        for group, values in zip(variables, self._state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable._value = value
        # Otherwise Keras would put back what it saw last, which the steps since then
        # have consumed.
        self._model._jax_state_synced = True

    def _scope(self) -> AbstractContextManager[None]:
        return enter(self._homes[0]) if len(self._homes) == 1 else nullcontext()

    def _look_before_running(self, state: Any, data: Any) -> None:
        limit, logging = current_settings().memory_limit, is_logging()
        if limit is None and not logging:
            return
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(data))
        if (shapes, limit, logging) in self._checked:
            return
        variables = _variables_of(self._model, state)
        if limit is not None:
            self._refuse_over_limit(state, data, variables, limit)
        if logging:
            log_step(self._model, self._step.__name__, variables, state)
        self._checked.add((shapes, limit, logging))

    def _refuse_over_limit(
        self, state: Any, data: Any, variables: list[list[Any]], limit: int
    ) -> None:
        refuse_over_limit(
            self._step.lower(state, data),  # type: ignore[attr-defined]
            _labels(variables),
            limit,
            f"{self._step.__name__} of {self._model.name!r}",
            _batch_size(data),
        )


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


def _variables_of(model: Any, state: Any) -> list[list[Any]]:
    """The model's variables, in the order of the lists in `state`."""
    found = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer": model.optimizer.variables if model.optimizer else [],
        "metrics": model.metrics_variables,
    }
    return [found[name] for name in _STATES[len(state)]]


def _labels(variables: list[list[Any]]) -> dict[str, tuple[str, str]]:
    """The kind and path of each variable under the name that the compiler gives it."""
    kinds = {
        4: ("parameters", "model state", "optimizer state", "metrics"),
        3: ("parameters", "model state", "metrics"),
        2: ("parameters", "model state"),
    }[len(variables)]
    return {
        f"state[{i}][{j}]": (kind, variable.path)
        for i, (kind, group) in enumerate(zip(kinds, variables, strict=True))
        for j, variable in enumerate(group)
    }


def _batch_size(data: Any) -> int:
    return int(jax.tree.leaves(data)[0].shape[0])
