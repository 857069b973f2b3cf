"""A search for the parameters of a small network, a trial on each core or GPU.

    python examples/tune.py 30

makes a study of 30 trials; without a number it has two, which takes 15 seconds on two
cores. The same call with a larger number goes on with it, and
`runs/tune-objective/report.html` shows what came of it.
"""

import sys
from typing import Any

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras


def objective(trial: Any) -> float:
    """The share of the test images that a network gets wrong."""
    digits = load_digits()
    width = trial.suggest_int("width", 8, 128, log=True)
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    errors = 1.0
    for epoch in range(2):
        model.fit(digits.x_train, digits.y_train, batch_size=64, verbose=0)
        _, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
        errors = 1.0 - float(accuracy)
        trial.report(errors, epoch)
        if trial.should_prune():
            from optuna import TrialPruned

            raise TrialPruned
    return errors


if __name__ == "__main__":
    n_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    found = mw.tune(objective, n_trials, name="tune-objective", seed=0)
    print(found)
    print(f"best: {found.best_params}, {100 * found.best_value:.1f} % wrong")
