"""The blocks of a guide to training on several GPUs, with only the import line changed.

What the guide leaves to its reader (a model, data, the names of layers) stands in
PREPARED; its own code is as it is there.
"""

import os

import pytest

from forks import Said, run_pieces

PREPARED = """
import keras, numpy as np
from keras import layers
from keras.layers import Conv2D, Dense, Flatten, MaxPooling2D
from keras.layers import BatchNormalization as BatchNorm
tf.random.set_seed(0)
x_train = np.random.default_rng(0).random((600, 8, 8, 1), 'float32')
y_train = np.eye(10, dtype='float32')[np.arange(600) % 10]
inputs = keras.Input((8, 8, 1))
def create_model():
    return keras.Sequential([
        keras.Input((8, 8, 1)), Conv2D(4, (3, 3), activation='relu'), BatchNorm(),
        MaxPooling2D(), Flatten(), Dense(10, activation='softmax')])
def devices_of(variable):
    return sorted({s.device.id for s in variable.value.addressable_shards})
"""

MAGIC_LINES = """
dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(256)

# 1. Create strategy (ONE line!)
strategy = tf.distribute.MirroredStrategy()

# 2. Wrap model creation (TWO lines!)
with strategy.scope():
    model = create_model()
    model.compile('adam', 'categorical_crossentropy')

# 3. That's it! Training is automatically distributed!
history = model.fit(dataset, epochs=5, verbose=0)
print(devices_of(model.weights[0]), len(history.history['loss']))
"""

DATA_PARALLEL = """
# Setup
strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

# Build model inside strategy scope
with strategy.scope():
    model = create_model()
    model.compile(optimizer='adam', loss='categorical_crossentropy')

# Prepare distributed dataset
GLOBAL_BATCH = 256  # Automatically split across GPUs
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
train_dataset = train_dataset.batch(GLOBAL_BATCH)
dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

# Train (automatically parallelized!)
history = model.fit(dist_dataset, epochs=10, verbose=0)

print([v.shape[0] for v in next(iter(dist_dataset))[0].values])
tf.random.set_seed(0)
alone = create_model()
alone.compile(optimizer='adam', loss='categorical_crossentropy')
tf.random.set_seed(0)
with strategy.scope():
    together = create_model()
    together.compile(optimizer='adam', loss='categorical_crossentropy')
together.set_weights(alone.get_weights())
one = alone.fit(x_train, y_train, batch_size=256, shuffle=False, verbose=0)
all_ = together.fit(train_dataset, verbose=0)
print(abs(one.history['loss'][0] - all_.history['loss'][0]) < 1e-5)
"""

BEST_PRACTICE = """
# Perfect for 95% of cases
strategy = tf.distribute.MirroredStrategy()
GLOBAL_BATCH = 128 * strategy.num_replicas_in_sync

with strategy.scope():
    model = create_model()
    model.compile('sgd', 'categorical_crossentropy')

print(GLOBAL_BATCH)
dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(GLOBAL_BATCH)
distributed_dataset = strategy.experimental_distribute_dataset(dataset)
model.fit(distributed_dataset, epochs=10, verbose=0)
"""

MODEL_PARALLEL = """
# Sequential execution through GPUs
with tf.device('/gpu:0'):
    # First layers
    x = Conv2D(32, (3,3))(inputs)
    x = BatchNorm()(x)
    x = MaxPooling2D()(x)
    # x now lives on GPU 0

# x automatically transferred to GPU 1
with tf.device('/gpu:1'):
    # Remaining layers
    x = Conv2D(64, (3,3))(x)
    x = Flatten()(x)
    outputs = Dense(10)(x)

model = keras.Model(inputs, outputs)
model.compile('sgd', keras.losses.CategoricalCrossentropy(from_logits=True))
model.fit(x_train[:64], y_train[:64], verbose=0)
print([devices_of(w) for w in (model.weights[0], model.weights[-1])])
print(model(x_train[:2]).device)
"""

HALVES = """
def build_layers_0_to_5():
    return keras.Sequential([keras.Input((8,)), Dense(16, activation='relu')])
def build_layers_6_to_10():
    return keras.Sequential([keras.Input((16,)), Dense(4)])

# Only when necessary
with tf.device('/gpu:0'):
    first_half = build_layers_0_to_5()

with tf.device('/gpu:1'):
    second_half = build_layers_6_to_10()

print(second_half(first_half(np.ones((2, 8), 'float32'))).device)
print([devices_of(half.weights[0]) for half in (first_half, second_half)])
"""

PIPELINE = """
from meshwright.tf import distribute as pipeline

strategy = pipeline.PipelineStrategy(
    num_micro_batches=4,
    devices=['/gpu:0', '/gpu:1', '/gpu:2', '/gpu:3']
)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), *[Dense(8, 'tanh') for _ in range(7)], Dense(10)])
    model.compile('sgd', 'mse')
model.fit(x_train[:64, 0, :, 0], y_train[:64], batch_size=32, verbose=0)
import meshwright as mw
print(sorted({d for row in mw.placement(model) for d in row.devices}))
print(strategy.meshwright)
"""

LEARNING_RATE = """
num_gpus = len(tf.config.list_logical_devices('GPU'))
# Linear scaling rule (Facebook paper)
base_lr = 0.001
scaled_lr = base_lr * num_gpus

# Or use warmup
lr_schedule = keras.optimizers.schedules.PolynomialDecay(
    initial_learning_rate=scaled_lr,
    decay_steps=1000,
    end_learning_rate=base_lr
)
print(round(float(lr_schedule(0)), 6), round(float(lr_schedule(1000)), 6))
"""

INPUT = """
from meshwright.tf.data import AUTOTUNE
preprocess = lambda x, y: (x / 2, y)
dataset = tf.data.Dataset.from_tensor_slices((x_train[:8], y_train[:8]))

dataset = dataset.prefetch(tf.data.AUTOTUNE)  # Overlap data loading
dataset = dataset.cache()  # Cache in memory if fits
dataset = dataset.map(preprocess, num_parallel_calls=AUTOTUNE)

first = next(iter(dataset))[0]
print(len(dataset), bool(np.allclose(first, x_train[0] / 2)))
"""

MIXED = """
# 2-3x speedup on modern GPUs
tf.keras.mixed_precision.set_global_policy('mixed_float16')

with tf.distribute.MirroredStrategy().scope():
    model = create_model()
    model.compile('adam', 'categorical_crossentropy')
model.fit(x_train[:64], y_train[:64], verbose=0)
print(model.layers[0].compute_dtype, model.weights[0].dtype)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    pieces = {
        **{"magic": MAGIC_LINES, "data": DATA_PARALLEL, "best": BEST_PRACTICE},
        **{"model": MODEL_PARALLEL, "halves": HALVES, "pipeline": PIPELINE},
        **{"rate": LEARNING_RATE, "input": INPUT, "mixed": MIXED},
    }
    return run_pieces(
        {name: PREPARED + code for name, code in pieces.items()},
        tmp_path_factory.mktemp("guide"),
        MESHWRIGHT_VIRTUAL="GPU:4",
        XLA_FLAGS=os.environ["XLA_FLAGS"],
    )


def test_three_lines_train_on_all_gpus(said: dict[str, Said]) -> None:
    assert said["magic"].out == "[0, 1, 2, 3] 5\n"


def test_the_data_parallel_block_counts_devices_and_splits_batches(
    said: dict[str, Said],
) -> None:
    assert said["data"].lines[:2] == ["Number of devices: 4", "[64, 64, 64, 64]"]


def test_it_trains_as_one_device_does(said: dict[str, Said]) -> None:
    assert said["data"].lines[2] == "True"


def test_the_batch_grows_with_the_gpus(said: dict[str, Said]) -> None:
    assert said["best"].out == "512\n"


def test_layers_train_where_they_were_put(said: dict[str, Said]) -> None:
    weights, output = said["model"].lines
    assert weights == "[[0], [1]]"
    assert output.endswith("/device:GPU:1")
    output, weights = said["halves"].lines
    assert output.endswith("/device:GPU:1")
    assert weights == "[[0], [1]]"


def test_the_pipeline_that_the_guide_dreams_of_trains(said: dict[str, Said]) -> None:
    devices, pipeline = said["pipeline"].lines
    assert devices == str([f"/device:GPU:{i}" for i in range(4)])
    assert pipeline == "Pipeline(stages=4, microbatches=4, 1f1b)"


def test_the_learning_rate_scales_with_the_gpus(said: dict[str, Said]) -> None:
    assert said["rate"].out == "0.004 0.001\n"


def test_the_input_pipeline_runs(said: dict[str, Said]) -> None:
    assert said["input"].out == "8 True\n"


def test_mixed_precision_trains(said: dict[str, Said]) -> None:
    assert said["mixed"].out == "float16 float32\n"
