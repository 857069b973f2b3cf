"""Which steps can become one program over a mesh: those without side effects.

Keras' own steps are. One that a user wrote may take other arguments, assign to
variables or return something else; a compiled program would lose or garble that, so it
is refused.
"""

import inspect
from collections.abc import Callable
from typing import Any

from meshwright.devices.step import variables_of
from meshwright.errors import StrategyError

Step = Callable[[Any, Any], Any]
"""Takes the state and a batch; returns logs or outputs, and the new state."""

_TEMPLATE = (
    "Write it as Keras does for JAX: def {name}(self, state, data), returning logs and "
    "state; the model's stateless_call and the optimizer's stateless_apply help."
)


def pure(model: Any, name: str, step: Step) -> Step:
    """The same step, which refuses to be traced if it has side effects."""
    change = _TEMPLATE.format(name=name)
    _refuse_other_arguments(model, name, change)

    def checked(state: Any, batch: Any) -> Any:
        import keras

        groups = zip(variables_of(model, state), state, strict=True)
        before = [pair for group in groups for pair in zip(*group, strict=True)]
        with keras.StatelessScope(state_mapping=before) as scope:
            returned = step(state, batch)
        assigned = [
            v.path for v, old in before if scope.get_current_value(v) is not old
        ]
        if assigned:
            raise StrategyError(
                f"{name} of {model.name!r} assigned to {', '.join(assigned)}.",
                "A step over a mesh is one compiled program, in which values go in and "
                "out and nothing is assigned.",
                change,
            )
        _refuse_other_results(model, name, returned, len(state), change)
        return returned

    return checked


def _refuse_other_arguments(model: Any, name: str, change: str) -> None:
    signature = inspect.signature(getattr(model, name))
    try:
        signature.bind("state", "data")
    except TypeError as error:
        raise StrategyError(
            f"{name} of {model.name!r} takes {signature}.",
            "A step over a mesh is one compiled program, which takes all state as an "
            "argument.",
            change,
        ) from error


def _refuse_other_results(
    model: Any, name: str, returned: Any, num_lists: int, change: str
) -> None:
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or len(returned[1]) != num_lists:
        what = f"a state of {len(returned[1])} parts" if is_pair else "no pair"
        raise StrategyError(
            f"{name} of {model.name!r} returned {what}.",
            f"It returns logs and the new state, in the {num_lists} parts in which it "
            "received it.",
            change,
        )
