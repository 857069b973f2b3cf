"""A script for TensorFlow's devices and strategies, with one line of it changed.

Prints the devices, where an operation runs, how many replicas train, how often the
network is right, and the sum of what a function found on each replica. TensorFlow need
not be installed. Takes about 6 seconds on a two-core machine. With several GPUs it uses
them.
"""

from meshwright import tf  # was: import tensorflow as tf
from meshwright.data.mnist import load_digits

import keras

BATCH = 100
if len(tf.config.list_physical_devices("GPU")) < 2:
    import meshwright as mw

    mw.configure(virtual="GPU:2")  # the CPU plays two GPUs
x, y, x_test, y_test = load_digits()

print("GPUs:", len(tf.config.list_physical_devices("GPU")))
with tf.device("/GPU:1"):
    product = tf.matmul(tf.ones((2, 3)), tf.ones((3, 2)))
print("the product is on", product.device)

strategy = tf.distribute.MirroredStrategy()
print("replicas:", strategy.num_replicas_in_sync)
with strategy.scope():
    keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.Input((28, 28, 1)), *layers])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000).batch(BATCH)
model.fit(dataset.prefetch(tf.data.AUTOTUNE), epochs=3, verbose=0)
_, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"{accuracy:.1%} of the test images are right")
assert accuracy > 0.7


def count_right(inputs):
    """How often the network is right about one replica's part of a batch."""
    images, labels = inputs
    guesses = tf.argmax(model(images), axis=1)
    return tf.reduce_sum(tf.cast(guesses == tf.cast(labels, guesses.dtype), tf.int32))


inputs = next(iter(strategy.experimental_distribute_dataset(dataset)))
of_each = strategy.run(count_right, args=(inputs,))
total = strategy.reduce(tf.distribute.ReduceOp.SUM, of_each, axis=None)
print(f"right about {int(total)} of the {BATCH} images of one batch, by strategy.run")
