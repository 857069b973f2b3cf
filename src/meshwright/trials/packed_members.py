"""The members of a packed training: each model is made, built, traced and let go."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshwright.cluster.randomness import random_state, set_random_state
from meshwright.data.resident import ArraysInMemory
from meshwright.devices.step import variables_of
from meshwright.errors import MeshwrightError, PackedTrialsError
from meshwright.strategies.attach import attached
from meshwright.train.mesh_programs import TEST_STATES, TRAIN_STATES
from meshwright.train.pure_step import Step, pure
from meshwright.train.traced_step import TracedStep
from meshwright.trials.packed_constants import (
    Reading,
    differing,
    first_difference,
    read_program,
)
from meshwright.trials.packed_data import PackedData, RandomState, batch_shapes

import jax
import numpy as np

MakeModel = Callable[[Any], Any]
Key = tuple[str, int]
"""A step of Keras' and the size of its batches."""


@dataclass(kw_only=True)
class Member:
    """What is left of a model after it was made.

    Attributes:
        state: The values of its variables, in the four lists of Keras' training step.
        random_state: What its `fit` draws the order of its first epoch from.
        readings: Its steps, as rows and constants.
    """

    state: list[list[Any]]
    random_state: RandomState
    readings: dict[Key, Reading]


@dataclass(kw_only=True)
class Members:
    """All members; the model and the steps of the first stand for all.

    Attributes:
        model: The first model.
        steps: Its steps.
        constants: For each step, the constants that differ, by number: one value for
            each member.
        state: The values of variables, stacked over the members.
        random_states: What each `fit` draws the order of its first epoch from.
    """

    model: Any
    steps: dict[Key, TracedStep]
    constants: dict[Key, dict[int, Any]]
    state: list[list[Any]]
    random_states: list[RandomState]

    @property
    def weight_places(self) -> list[tuple[int, int]]:
        """Where the model's weights are in the state, as `get_weights` has them."""
        groups = variables_of(self.model, [()] * TEST_STATES)[:2]
        places = {
            id(variable): (number, place)
            for number, group in enumerate(groups)
            for place, variable in enumerate(group)
        }
        return [places[id(variable)] for variable in self.model.weights]


def make_members(
    make_model: MakeModel, configs: Sequence[Any], data: PackedData
) -> Members:
    """Makes the models one by one and sees that their steps are one program.

    Each is made in the random state in which the first is, as if it were alone.
    """
    before = random_state()
    first: Any = None
    steps: dict[Key, TracedStep] = {}
    members: list[Member] = []
    for number, config in enumerate(configs):
        set_random_state(before)
        with _told_of(number):
            model = _make(make_model, config, number)
            if first is None:
                data.check(model)
            _build(model, data.train)
        drawn = np.random.get_state(legacy=True)
        if first is not None:
            _compare_models(first, model, configs, number)
        traced = _trace(model, data)
        readings = {key: read_program(step.program) for key, step in traced.items()}
        if first is None:
            first, steps = model, traced
            _refuse_growing_states(first, steps)
        else:
            found = steps, members[0].readings, traced, readings
            _compare_steps(*found, configs, number)
        state = _values(model)
        members.append(Member(state=state, random_state=drawn, readings=readings))
    return Members(
        model=first,
        steps=steps,
        constants={
            key: {
                constant: np.stack([np.asarray(value) for value in values])
                for constant, values in differing(
                    [member.readings[key] for member in members]
                ).items()
            }
            for key in steps
        },
        state=_stacked([member.state for member in members]),
        random_states=[member.random_state for member in members],
    )


def _stacked(states: Sequence[list[list[Any]]]) -> list[list[Any]]:
    first = states[0]
    return [
        [np.stack([s[group][place] for s in states]) for place in range(len(values))]
        for group, values in enumerate(first)
    ]


@contextmanager
def _told_of(number: int) -> Iterator[None]:
    """Adds the number of a config to errors that are not ours."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, MeshwrightError):
            error.add_note(f"It came of the model of configs[{number}].")
        raise


def _make(make_model: MakeModel, config: Any, number: int) -> Any:
    import keras

    model = make_model(config)
    if not isinstance(model, keras.Model) or not model.compiled:
        what = type(model).__name__ if not isinstance(model, keras.Model) else None
        raise PackedTrialsError(
            f"make_model(configs[{number}]) returned "
            + (
                f"an object of type {what}." if what else f"{model.name!r}, uncompiled."
            ),
            "Every member is a compiled Keras model.",
            "Call model.compile(...) in make_model and return the model.",
        )
    _refuse_what_is_not_packed(model, number)
    return model


def _refuse_what_is_not_packed(model: Any, number: int) -> None:
    if attached(model) is not None:
        received = f"{model.name!r} with the strategy {attached(model)!r}"
        change = "Leave out the strategy: packed_trials spreads members over devices."
    elif model.run_eagerly or not model.jit_compile:
        received = f"{model.name!r}, compiled with run_eagerly or without jit_compile"
        change = "Compile it without these."
    elif _averages(model.optimizer):
        received = f"{model.name!r}, whose optimizer has use_ema=True"
        change = "Leave use_ema out, or train this model by itself."
    else:
        return
    raise PackedTrialsError(
        f"make_model(configs[{number}]) returned {received}.",
        "Members are trained by Keras' own step as one compiled program, and end with "
        "the weights that it leaves.",
        change,
    )


def _averages(optimizer: Any) -> bool:
    """Whether an optimizer, or one inside of it, puts averages in place of weights."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return getattr(optimizer, "use_ema", False) or (
        inner is not None and _averages(inner)
    )


def _build(model: Any, data: ArraysInMemory) -> None:
    """Lets Keras make everything that `fit` would, random draws included."""
    import keras

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data.arrays)
    model.fit(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=data.batch_size,
        shuffle=data.shuffle,
        epochs=0,
        verbose=0,
    )
    model.reset_metrics()


def _values(model: Any) -> list[list[Any]]:
    groups = variables_of(model, [()] * TRAIN_STATES)
    return [[np.asarray(variable.value) for variable in group] for group in groups]


def _refuse_growing_states(model: Any, steps: Mapping[Key, TracedStep]) -> None:
    for (name, _), step in steps.items():
        if not step.is_repeatable:
            raise PackedTrialsError(
                f"The {name}_step of {model.name!r} returns a state of other shapes or "
                "types than it takes.",
                "An epoch is a loop of steps, so a step's state goes into the next.",
                f"Let {name}_step return the variables' values as they came, in the "
                "same types.",
            )


def _trace(model: Any, data: PackedData) -> dict[Key, TracedStep]:
    """The steps of a model for all sizes of batches that there are."""
    train = pure(model, "train_step", model.train_step)
    traced = _trace_sizes(model, "train", train, data.train, TRAIN_STATES)
    if data.validation is not None:
        test = pure(model, "test_step", model.test_step)
        traced |= _trace_sizes(model, "test", test, data.validation, TEST_STATES)
    return traced


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
    return {
        (name, size): TracedStep.of(run, state, batch_shapes(data, size))
        for size in sorted(sizes, reverse=True)
    }


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


def _compare_models(
    first: Any, model: Any, configs: Sequence[Any], number: int
) -> None:
    """Refuses a model whose variables are not those of the first."""
    kinds = "trainable variable", "other variable"
    mine, its = (variables_of(m, [()] * TEST_STATES)[:2] for m in (first, model))
    for kind, ours, theirs in zip(kinds, mine, its, strict=True):
        for one, other in zip(ours, theirs, strict=False):
            if _type(one) != _type(other):
                had, has = (f"{v.path} {_type(v)}" for v in (one, other))
                _refuse(configs, number, f"{kind} {had}", has)
        if len(ours) != len(theirs):
            _refuse(configs, number, _count(len(ours), kind), str(len(theirs)))
    names = [type(m.optimizer).__name__ for m in (first, model)]
    if names[0] != names[1]:
        _refuse(configs, number, f"the optimizer {names[0]}", names[1])


def _type(variable: Any) -> str:
    return f"{variable.dtype}[{','.join(map(str, variable.shape))}]"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _compare_steps(
    steps: Mapping[Key, TracedStep],
    readings: Mapping[Key, Reading],
    its_steps: Mapping[Key, TracedStep],
    its_readings: Mapping[Key, Reading],
    configs: Sequence[Any],
    number: int,
) -> None:
    for key, step in steps.items():
        names, its = (sorted(s.logs) for s in (step, its_steps[key]))
        if names != its:
            _refuse(configs, number, f"the logs {', '.join(names)}", ", ".join(its))
        found = first_difference(readings[key], its_readings[key])
        if found is not None:
            where = f"the operation {found[0]} in the {key[0]}ing step"
            _refuse(configs, number, where, str(found[1]))


def _refuse(configs: Sequence[Any], number: int, mine: str, its: str) -> None:
    raise PackedTrialsError(
        f"configs[0] = {configs[0]!r} and configs[{number}] = {configs[number]!r} "
        f"differ in more than values. The first difference: {mine} in the one, {its} "
        "in the other.",
        "Packed members are one program with other numbers: layers, shapes, kinds of "
        "optimizer, loss and metrics are the same. A value of 0 or None that switches "
        "something off, such as a dropout rate of 0, makes another program.",
        "Call packed_trials once for each group of configs that are alike.",
    )
