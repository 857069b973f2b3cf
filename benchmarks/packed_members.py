"""The tiny network as a packed training, for who measures it."""

from typing import Any

from meshwright.data.checks import Parts
from meshwright.strategies.strategy import choose_devices
from meshwright.trials.packed import PackedTraining
from meshwright.trials.packed_data import take_data

from jobs import JOBS, keras_model


def make_training(x: Any, y: Any, members: int, *, shares: bool) -> PackedTraining:
    """Members of other learning rates and seeds, made and traced, not yet compiled.

    Arguments:
        x: Inputs.
        y: Targets.
        members: How many.
        shares: Whether all go through the data in the same order.
    """
    job = JOBS["mlp"]

    def make_model(number: int) -> Any:
        model = keras_model(job)
        prepare(model, number, members, shares=shares)
        return model

    data = take_data(Parts(x, y), job.batch_size, True, None, 0.0)
    return PackedTraining(make_model, range(members), data, choose_devices(None))


def prepare(model: Any, number: int, members: int, *, shares: bool) -> None:
    """Gives a model what makes it the member of a number."""
    import keras

    model.optimizer.learning_rate = 1e-3 / (1 + number / members)
    keras.utils.set_random_seed(0 if shares else number)
