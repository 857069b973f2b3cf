"""Four classifiers of digits on four devices, trained side by side, that vote.

They differ in their architecture and their first weights. Takes about 10 seconds on a
two-core machine. With `meshwright train --processes 2 examples/ensemble.py` each
process trains two of them, on a core of its own, with the same results.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

if mw.process_count() == 1:
    mw.configure(visible=[], virtual=4)  # four devices made of the CPU

x, y, x_test, y_test = load_digits()


def make_member(seed: int, units: int) -> keras.Model:
    """A classifier whose hidden layer has so many units."""
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


widths = (32, 64, 32, 64)
members = [make_member(seed, units) for seed, units in enumerate(widths)]
ensemble = mw.Ensemble(members)
print(ensemble)
ensemble.fit(x, y, epochs=3, batch_size=50, verbose=2)

votes, answers = ensemble.predict(x_test, combine="vote", members=True)
mean = ensemble.predict(x_test).argmax(axis=1)
alone = [(answer.argmax(axis=1) == y_test).mean() for answer in answers]
print("each member:", ", ".join(f"{accuracy:.3f}" for accuracy in alone))
print(f"their vote: {(votes == y_test).mean():.3f}")
print(f"their mean: {(mean == y_test).mean():.3f}")
