"""What is seen of members while they are trained side by side."""

import math
import sys
from typing import Any


def make_progress(title: str, epochs: int, is_shown: bool) -> Any:
    """A callback that ends a training whose loss is no number, and prints its epochs.

    A bar of each member would be one over the other, so each prints a line an epoch.

    Arguments:
        title: What the member is called.
        epochs: How many there are.
        is_shown: Whether anything is printed.
    """
    import keras

    class Progress(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs = logs or {}
            if not math.isfinite(logs.get("loss", 0.0)):
                self.model.stop_training = True
            if is_shown:
                sys.stdout.write(f"{title}: epoch {epoch + 1}/{epochs}{_show(logs)}\n")
                sys.stdout.flush()

    return Progress()


def _show(logs: Any) -> str:
    return "".join(f" - {name}: {float(value):.4g}" for name, value in logs.items())
