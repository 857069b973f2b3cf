"""The members of a packed training: each model is made, built, traced and let go."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshwright.cluster.randomness import random_state, set_random_state
from meshwright.data.resident import ArraysInMemory
from meshwright.devices.step import variables_of
from meshwright.errors import MeshwrightError, PackedTrialsError
from meshwright.strategies.attach import attached
from meshwright.train.mesh_programs import TEST_STATES, TRAIN_STATES
from meshwright.train.traced_step import TracedStep
from meshwright.trials.packed_constants import differing
from meshwright.trials.packed_data import PackedData, RandomState
from meshwright.trials.packed_steps import Key, TracedModel

import numpy as np

MakeModel = Callable[[Any], Any]


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
    first: TracedModel | None = None
    states, constants, drawn = [], [], []
    for number, config in enumerate(configs):
        set_random_state(before)
        with _told_of(number):
            model = _make(make_model, config, number)
            if first is None:
                data.check(model)
            _build(model, data.train)
        drawn.append(np.random.get_state(legacy=True))
        traced = TracedModel.of(model, data)
        first = first or traced
        first.refuse_other(traced, configs, number)
        states.append(_values(model))
        readings = traced.readings.items()
        constants.append({key: reading.constants for key, reading in readings})
    assert first is not None, "there is a config"
    return Members(
        model=first.model,
        steps=first.steps,
        constants={
            key: {number: np.stack(values) for number, values in found.items()}
            for key in first.steps
            for found in [differing([each[key] for each in constants])]
        },
        state=_stacked(states),
        random_states=drawn,
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
