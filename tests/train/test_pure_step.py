"""Steps that users write: pure ones run on a mesh, others are refused in words."""

from typing import Any

import meshwright as mw
from meshwright.errors import StrategyError

import keras
import numpy as np
import pytest

X = np.random.default_rng(0).normal(size=(10, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(10, 4)).astype(np.float32)
CHANGE = (
    "Write it as Keras does for JAX: def train_step(self, state, data), returning logs "
    "and state; the model's stateless_call and the optimizer's stateless_apply help."
)


class Counting(keras.Model):
    """Has a weight of its own that a step could assign to."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.dense = keras.layers.Dense(4)
        self.seen = self.add_weight(initializer="zeros", trainable=False, name="seen")

    def call(self, x: Any) -> Any:
        return self.dense(x)


class ForTensorFlow(Counting):
    def train_step(self, data: Any) -> Any:
        return {"loss": 0.0}


class Assigning(Counting):
    def train_step(self, state: Any, data: Any) -> Any:
        self.seen.assign_add(1.0)
        return super().train_step(state, data)


class Overwriting(Counting):
    def train_step(self, state: Any, data: Any) -> Any:
        self.seen.assign(3.0)
        return super().train_step(state, data)


class Shortened(Counting):
    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return logs, state[:3]


class OnlyLogs(Counting):
    def train_step(self, state: Any, data: Any) -> Any:
        return {"loss": 0.0}


ASSIGNED = (
    "train_step of 'net' assigned to net/seen.",
    "A step over a mesh is one compiled program, in which values go in and out and "
    "nothing is assigned.",
)
PARTS = "It returns logs and the new state, in the 4 parts in which it received it."


@pytest.mark.parametrize(
    ("kind", "received", "rule"),
    [
        (
            ForTensorFlow,
            "train_step of 'net' takes (data: Any) -> Any.",
            "A step over a mesh is one compiled program, which takes all state as an "
            "argument.",
        ),
        (Assigning, *ASSIGNED),
        (Overwriting, *ASSIGNED),
        (Shortened, "train_step of 'net' returned a state of 3 parts.", PARTS),
        (OnlyLogs, "train_step of 'net' returned no pair.", PARTS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_steps_with_side_effects_are_refused_and_the_weights_stay(
    kind: type[keras.Model], received: str, rule: str
) -> None:
    model = kind()
    model(X)
    before = model.get_weights()
    model.compile(optimizer="sgd", loss="mse")
    mw.distribute(model, mw.FSDP(4))
    with pytest.raises(StrategyError) as caught:
        model.fit(X, Y, batch_size=8, verbose=0)
    assert str(caught.value).split("\n") == [received, rule, CHANGE]
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


class Peeking(Counting):
    """Reads a variable in its step, and passes a new value on."""

    def train_step(self, state: Any, data: Any) -> Any:
        count = self.seen.value + 1.0
        logs, (weights, _, slots, metrics) = super().train_step(state, data)
        return {**logs, "count": count}, (weights, [count], slots, metrics)


def test_a_step_may_read_variables() -> None:
    model = mw.distribute(Peeking(), mw.Mirrored(["CPU:0"]))
    model.compile(optimizer="sgd", loss="mse")
    model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
    assert float(model.seen.value) == 4
