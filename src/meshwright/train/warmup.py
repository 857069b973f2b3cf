"""A learning rate that rises before it follows its schedule.

This file imports Keras, whose schedules are classes; `meshwright` imports it when
somebody asks for `Warmup`.
"""

from typing import Any

from meshwright.errors import LearningRateError
from meshwright.train.learning_rate import is_count, is_rate

import keras
from keras.optimizers.schedules import LearningRateSchedule


@keras.saving.register_keras_serializable(package="meshwright")
class Warmup(LearningRateSchedule):
    """Rises linearly to a learning rate or to the start of a schedule, then follows it.

    The first update has the rate `start`, the one after `steps` updates is the first
    with the full rate. A schedule counts from there: its first value is the end of the
    ramp, and nothing of it is lost.

    Arguments:
        learning_rate: A number, or one of Keras' schedules.
        steps: Length of the ramp in updates.
        start: The rate of the first update.

    >>> import meshwright as mw
    >>> rate = mw.Warmup(0.8, steps=4)
    >>> [round(float(rate(step)), 2) for step in range(6)]
    [0.0, 0.2, 0.4, 0.6, 0.8, 0.8]
    """

    def __init__(
        self, learning_rate: float | Any, steps: int, start: float = 0.0
    ) -> None:
        super().__init__()
        is_schedule = isinstance(learning_rate, LearningRateSchedule)
        if not is_schedule and not (is_rate(learning_rate) and learning_rate > 0):
            self._refuse(
                "learning_rate",
                learning_rate,
                "A learning rate is a finite number above 0, or one of Keras' "
                "schedules.",
                "Use, for example, learning_rate=0.1.",
            )
        if not is_count(steps):
            self._refuse(
                "steps",
                steps,
                "The ramp is a whole number of updates from 1.",
                "Use, for example, steps=500, or the learning rate without a Warmup.",
            )
        if not is_rate(start):
            self._refuse(
                "start",
                start,
                "A warm-up starts from a finite number from 0.",
                "Use, for example, start=0.0.",
            )
        self.learning_rate = learning_rate if is_schedule else float(learning_rate)
        self.steps = int(steps)
        self.start = float(start)

    def _refuse(self, name: str, value: Any, rule: str, change: str) -> None:
        kind = type(value).__name__
        received = f"Warmup received {name}={value!r} (a {kind})."
        raise LearningRateError(received, rule, change)

    def __call__(self, step: Any) -> Any:
        """The rate of an update; updates count from 0."""
        ops = keras.ops
        step = ops.convert_to_tensor(step)
        after = self._rate_after_ramp(ops.maximum(step - self.steps, 0))
        passed = ops.cast(step, after.dtype) / self.steps
        ramp = self.start + (after - self.start) * passed
        return ops.where(step < self.steps, ramp, after)

    def _rate_after_ramp(self, step: Any) -> Any:
        rate = self.learning_rate
        rate = rate(step) if isinstance(rate, LearningRateSchedule) else rate
        return keras.ops.convert_to_tensor(rate, dtype=keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes an equal one of."""
        rate = self.learning_rate
        if isinstance(rate, LearningRateSchedule):
            rate = keras.optimizers.schedules.serialize(rate)
        return {"learning_rate": rate, "steps": self.steps, "start": self.start}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Warmup":
        """Makes one from what `get_config` returned."""
        rate = config["learning_rate"]
        if isinstance(rate, dict):
            rate = keras.optimizers.schedules.deserialize(rate)
        return cls(**{**config, "learning_rate": rate})
