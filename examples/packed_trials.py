"""Two dozen trainings as one program: rates, smoothing and seeds, compared on MNIST.

Each ends as its own `fit` would; one of them is trained by itself to show it. Takes
about 10 seconds on a two-core machine; the best of all gets more than 85 % of the 500
test images right.
"""

import itertools

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras
import numpy as np

mw.configure(visible=[], virtual=2)  # two devices made of the CPU
digits = load_digits()
x, y = digits.x_train, keras.utils.to_categorical(digits.y_train, 10)
held_out = digits.x_test, keras.utils.to_categorical(digits.y_test, 10)
FIT = {"epochs": 4, "batch_size": 32, "validation_data": held_out}
NAMES = ("rate", "momentum", "smoothing", "seed")
VALUES = (0.001, 0.05, 0.2), (0.5, 0.9), (0.05, 0.1), (1, 2)
every = itertools.product(*VALUES)
configs = [dict(zip(NAMES, values, strict=True)) for values in every]


def make_model(config):
    """A small classifier with the values of a config."""
    keras.utils.set_random_seed(config["seed"])
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *layers])
    model.compile(
        keras.optimizers.SGD(config["rate"], momentum=config["momentum"]),
        keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config["smoothing"]
        ),
        metrics=["accuracy"],
    )
    return model


patience = keras.callbacks.EarlyStopping("val_accuracy", patience=1, mode="max")
trials = mw.packed_trials(make_model, configs, x, y, **FIT, callbacks=[patience])

print("validation accuracy, best of its epochs")
ranked = sorted(trials, key=lambda trial: -max(trial.history["val_accuracy"]))
for trial in [*ranked[:3], *ranked[-2:]]:
    accuracies = trial.history["val_accuracy"]
    print(f"{max(accuracies):.3f} in {len(accuracies)} epochs  {trial.config}")
assert max(ranked[0].history["val_accuracy"]) > 0.85

twin = make_model(ranked[0].config)
alone = twin.fit(x, y, **FIT, callbacks=[patience], verbose=0).history
difference = np.abs(np.subtract(alone["loss"], ranked[0].history["loss"])).max()
assert difference < 1e-4, difference
print(f"largest difference of a loss to the same model alone: {difference:.1e}")
