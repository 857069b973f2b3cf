"""Digits, learned synchronously, and asynchronously with a worker that is slow.

One of two workers takes longer for every batch; the other one goes on without it, until
the bound on the staleness makes it wait. Takes about 15 seconds on a two-core
machine; both trainings come to about the same accuracy.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

mw.configure(visible=[], virtual=2)  # two devices made of the CPU
EPOCHS, BATCH = 4, 64
digits = load_digits()


def train(strategy, rate):
    """Trains a small network, and says how well."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = keras.layers.Dense(64, activation="relu")
        layers = [keras.layers.Flatten(), hidden, keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((28, 28, 1)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    model.fit(digits.x_train, digits.y_train, BATCH, epochs=EPOCHS, verbose=0)
    _, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    print(f"{strategy!r}: {100 * accuracy:.1f} % right")
    return accuracy


synchronous = train(mw.Mirrored(), rate=0.2)
strategy = mw.AsyncServer(max_staleness=8)
strategy.delays = {1: 0.01}  # worker 1 takes some milliseconds longer for each batch
asynchronous = train(strategy, rate=0.1)
print(f"\n{strategy.staleness}\n\n{strategy.workers}")
assert min(synchronous, asynchronous) > 0.8
