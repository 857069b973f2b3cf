"""The steps of a member's model as traced programs, and what must be the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.data.resident import ArraysInMemory
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.step import variables_of
from meshwright.devices.strategy_hooks import TraceHooks, tracing
from meshwright.errors import PackedTrialsError
from meshwright.train.mesh_programs import TEST_STATES, TRAIN_STATES
from meshwright.train.pure_step import Step, pure
from meshwright.train.traced_step import TracedStep
from meshwright.trials.packed_constants import (
    Reading,
    first_difference,
    read_program,
)
from meshwright.trials.packed_data import PackedData, batch_shapes

import jax

Key = tuple[str, int]
"""A step of Keras' and the size of its batches."""

_VARIABLES = "trainable variable", "other variable", "variable of the optimizer"


@dataclass(frozen=True)
class TracedModel:
    """A model and its steps, as operations and as rows and constants."""

    model: Any
    steps: dict[Key, TracedStep]
    readings: dict[Key, Reading]

    @classmethod
    def of(cls, model: Any, data: PackedData) -> "TracedModel":
        """Traces the steps of a model for all sizes of batches that there are."""
        train = pure(model, "train_step", model.train_step)
        steps = _trace_sizes(model, "train", train, data.train, TRAIN_STATES)
        if data.validation is not None:
            test = pure(model, "test_step", model.test_step)
            steps |= _trace_sizes(model, "test", test, data.validation, TEST_STATES)
        readings = {key: read_program(step.program) for key, step in steps.items()}
        return cls(model, steps, readings)

    def refuse_other(
        self, other: "TracedModel", configs: Sequence[Any], number: int
    ) -> None:
        """Refuses a model that differs from this, the first one, in more than values.

        Arguments:
            other: The model.
            configs: All configs.
            number: That of the other model.
        """
        found = _first_difference(self, other)
        if found is not None:
            mine, its = found
            raise PackedTrialsError(
                f"configs[0] = {configs[0]!r} and configs[{number}] = "
                f"{configs[number]!r} differ in more than values. The first "
                f"difference: {mine} in the one, {its} in the other.",
                "Packed members are one program with other numbers: layers, shapes, "
                "kinds of optimizer, loss and metrics are the same. A value of 0 or "
                "None that switches something off, such as a dropout rate of 0, makes "
                "another program.",
                "Call packed_trials once for each group of configs that are alike.",
            )


def _first_difference(one: TracedModel, other: TracedModel) -> tuple[str, str] | None:
    names = [type(traced.model.optimizer).__name__ for traced in (one, other)]
    return (
        _difference_in_variables(one.model, other.model, _VARIABLES[:2])
        or ((f"the optimizer {names[0]}", names[1]) if names[0] != names[1] else None)
        or _difference_in_variables(one.model, other.model, _VARIABLES)
        or _difference_in_steps(one, other)
    )


def _difference_in_variables(
    one: Any, other: Any, kinds: Sequence[str]
) -> tuple[str, str] | None:
    mine, its = (variables_of(model, [()] * TRAIN_STATES) for model in (one, other))
    for kind, ours, theirs in zip(kinds, mine, its, strict=False):
        for first, second in zip(ours, theirs, strict=False):
            if _type(first) != _type(second):
                had, has = (f"{v.path} {_type(v)}" for v in (first, second))
                return f"the {kind} {had}", has
        if len(ours) != len(theirs):
            return f"{len(ours)} times a {kind}", str(len(theirs))
    return None


def _type(variable: Any) -> str:
    return f"{variable.dtype}[{','.join(map(str, variable.shape))}]"


def _difference_in_steps(
    one: TracedModel, other: TracedModel
) -> tuple[str, str] | None:
    for key, step in one.steps.items():
        names, its = (sorted(s.logs) for s in (step, other.steps[key]))
        if names != its:
            return f"the logs {', '.join(names)}", ", ".join(its)
        found = first_difference(one.readings[key], other.readings[key])
        if found is not None:
            where = f"the operation {found[0]} in the {key[0]}ing step"
            return where, str(found[1])
    return None


def _trace_sizes(
    model: Any, name: str, step: Step, data: ArraysInMemory, num_lists: int
) -> dict[Key, TracedStep]:
    state = tuple(
        [jax.ShapeDtypeStruct(tuple(v.shape), v.value.dtype) for v in group]
        for group in variables_of(model, [()] * num_lists)
    )
    sizes = {
        data.batch_size if data.num_whole_batches else 0,
        data.rest,
    } - {0}
    run = _with_results(model, step)
    install_keras_hooks()
    with tracing(_TOGETHER):
        steps = {
            (name, size): TracedStep.of(run, state, batch_shapes(data, size))
            for size in sorted(sizes, reverse=True)
        }
    if not all(step.is_repeatable for step in steps.values()):
        raise PackedTrialsError(
            f"The {name}_step of {model.name!r} returns a state of other shapes or "
            "types than it takes.",
            "An epoch is a loop of steps, so a step's state goes into the next.",
            f"Let {name}_step return the variables' values as they came, in the "
            "same types.",
        )
    return steps


_TOGETHER = TraceHooks(
    keep_output=lambda output: output,
    keep_cast=lambda variable, value: value,
    convolve_groups=lambda convolve, inputs, kernel: convolve(inputs, kernel),
    num_devices=2,
)
"""Libraries' kernels for recurrent layers take one model, as they take one device."""


def _with_results(model: Any, step: Step) -> Step:
    """A step whose logs are what Keras shows after it: results of metrics, mostly."""

    def run(state: Any, batch: Any) -> Any:
        import keras

        logs, after = step(state, batch)
        values = zip(model.metrics_variables, after[-1], strict=True)
        with keras.StatelessScope(state_mapping=list(values)):
            results = model.get_metrics_result()
        return (results if set(results) == set(logs) else logs), after

    return run
