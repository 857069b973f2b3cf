"""The callback by which a run hears of epochs; imports Keras."""

from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from meshwright.train.run_course import RunCourse


class RunCallback(keras.callbacks.Callback):
    """Tells a run of the epochs of a fit, as the last of its callbacks.

    Arguments:
        course: The fit, as the run sees it.
    """

    def __init__(self, course: "RunCourse") -> None:
        super().__init__()
        self._course = course

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """The callbacks of the user have begun an epoch."""
        self._course.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """They have ended it."""
        self._course.end_epoch(epoch, logs or {})
