"""The same code under TensorFlow and under the façade, where TensorFlow is installed.

Its interpreter is `$TENSORFLOW_PYTHON`, or that of `.venv-tf`, which `make bench-peers`
makes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forks import environment_of_scripts

ROOT = Path(__file__).parents[2]

BEGINNING = """
import numpy as np
cpu = tf.config.list_physical_devices('CPU')[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(3)])

def tried(do):
    try:
        print(do())
    except Exception as error:
        known = (ValueError, TypeError, NotImplementedError, RuntimeError)
        kind = next((k.__name__ for k in known if type(error) is k), 'other')
        print(kind, str(error).split('\\n')[0][:60] if kind != 'other' else '')

strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])
context = tf.distribute.get_replica_context
def number():
    return tf.cast(context().replica_id_in_sync_group + 1, tf.float32)
def show(values):
    return [v.numpy().tolist() for v in strategy.experimental_local_results(values)]
"""

SNIPPETS = {
    "devices": """
print(tf.config.list_physical_devices('CPU'), tf.config.list_logical_devices())
print(tf.config.list_physical_devices('cpu'))
tried(lambda: tf.config.experimental.get_memory_info('foo'))
tried(lambda: tf.config.set_visible_devices('CPU:0'))
tried(lambda: tf.config.set_visible_devices([]))
tried(lambda: tf.config.threading.set_intra_op_parallelism_threads(3))
tried(lambda: tf.device(3).__enter__())
tried(lambda: tf.device(lambda: 3).__enter__())
for name in ('/CPU:0', 'CPU:1', 'cpu:1', '/device:CPU:1', 'cpu', None):
    with tf.device(name):
        print(tf.constant(1.0).device)
""",
    "tensors": """
a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
print(a, repr(a), tf.matmul(a, a, transpose_b=True), a[0, 1], a.shape, a.dtype)
print(tf.reduce_sum(a, axis=1), tf.reduce_mean(a), tf.reduce_mean([1, 2]))
print(tf.Variable(1.0), tf.Variable([1, 2], name='w'), tf.constant(True), -a + 1.0)
print(tf.add_n([a, a]), tf.cast(a, tf.int32), a > 2, tf.argmax(a, axis=1).numpy())
""",
    "variables": """
for when in ('ON_WRITE', 'ON_READ'):
    for how in ('NONE', 'SUM', 'MEAN', 'ONLY_FIRST_REPLICA'):
        with strategy.scope():
            v = tf.Variable(
                0.0, synchronization=getattr(tf.VariableSynchronization, when),
                aggregation=getattr(tf.VariableAggregation, how))
        print(when, how, type(v).__name__, [c.name for c in v.values])
        strategy.run(lambda: v.assign(number()))
        print(show(v))
        tried(lambda: v.numpy() if when == 'ON_WRITE' else v.read_value().numpy())
        tried(lambda: show(v.assign(10.0) and v))
        if (when, how) != ('ON_READ', 'ONLY_FIRST_REPLICA'):
            tried(lambda: show(v.assign_add(1.0) and v))
with strategy.scope():
    v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    tried(lambda: tf.Variable(1.0, synchronization=tf.VariableSynchronization.NONE))
tried(lambda: strategy.run(lambda: v.assign(1.0)))
outside = tf.Variable(0.0)
strategy.run(lambda: outside.assign_add(1.0))
print(outside.numpy(), strategy.extended.variable_created_in_scope(outside), v)
""",
    "data": """
for count, batch in ((10, 4), (11, 4), (9, 4), (5, 5), (2, 1)):
    dataset = tf.data.Dataset.range(count).batch(batch)
    print([show(b) for b in strategy.experimental_distribute_dataset(dataset)])
print([b.numpy().tolist() for b in tf.data.Dataset.range(7).map(lambda x: x * 2)
       .skip(1).repeat(2).batch(5).take(2)])
print(len(tf.data.Dataset.range(9).batch(4)), tf.data.Dataset.range(3).repeat()
      .cardinality().numpy())
context_of = lambda c: tf.data.Dataset.range(6).batch(c.get_per_replica_batch_size(4))
print([show(b) for b in strategy.distribute_datasets_from_function(context_of)])
""",
    "run": """
print(show(strategy.run(number)), strategy.run(lambda: 'text'))
print(show(strategy.run(lambda x, y: x * y, (2.0,), {'y': tf.constant(3.0)})))
tried(lambda: strategy.run(lambda x: x, args='text'))
values = strategy.run(number)
print(*(strategy.reduce(op, values, axis=None) for op in ('SUM', 'mean')))
tried(lambda: strategy.reduce('MAX', values, axis=None))
tried(lambda: strategy.reduce('SUM', tf.constant(1.0), axis=None))
dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 30.0]).batch(3)
parts, = strategy.experimental_distribute_dataset(dataset)
print(strategy.reduce('MEAN', parts, axis=0), strategy.reduce('SUM', parts, axis=0))
print(strategy.gather(parts, axis=0))
def talk():
    x = number()
    merged = context().merge_call(
        lambda s, v: s.reduce('SUM', v, axis=None) * 10.0, args=(x,))
    return (context().all_reduce('SUM', x), merged + x,
            context().all_gather(tf.reshape(x, (1,)), axis=0))
print([show(part) for part in strategy.run(talk)])
print(tf.distribute.has_strategy(), tf.distribute.in_cross_replica_context())
with strategy.scope():
    print(context(), tf.distribute.in_cross_replica_context())
""",
    "loss": """
average = tf.nn.compute_average_loss
losses = tf.constant([1.0, 3.0])
print(show(strategy.run(lambda: average(losses))))
print(show(strategy.run(lambda: average(losses, global_batch_size=0))))
tried(lambda: strategy.run(lambda: average(tf.constant(1.0))))
print(show(strategy.run(lambda: tf.nn.scale_regularization_loss(tf.constant(4.0)))))
mse = tf.keras.losses.MeanSquaredError()
print(show(strategy.run(lambda: mse(tf.constant([[0.0]]), tf.constant([[2.0]])))))
""",
    "gradients": """
x = tf.Variable(3.0)
with tf.GradientTape(persistent=True) as tape:
    y = x * x
    z = tf.reduce_sum(tf.nn.relu(tf.constant([-1.0, 1.0]) * x) + tf.exp(x))
print(tape.gradient(y, x), tape.gradient(z, x), tape.gradient(y, tf.Variable(1.0)))
""",
    "loop": """
def linear():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.set_weights([np.array([[1.0], [2.0]], 'float32'), np.zeros(1, 'float32')])
    return model
x = np.arange(16, dtype='float32').reshape(8, 2) / 16
dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
with strategy.scope():
    model, optimizer = linear(), tf.keras.optimizers.Adam(0.1)
    each = tf.keras.losses.MeanSquaredError(reduction='none')
    metric = tf.keras.metrics.Mean()
    optimizer.build(model.trainable_variables)
def step(inputs):
    a, b = inputs
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(each(b, model(a)), global_batch_size=4)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    metric.update_state(loss)
    return loss
@tf.function
def both(inputs):
    return strategy.reduce('SUM', strategy.run(step, args=(inputs,)), axis=None)
for inputs in strategy.experimental_distribute_dataset(dataset):
    print(round(float(both(inputs)), 4))
print([w.round(4).tolist() for w in model.get_weights()])
print(round(float(metric.result()), 4))
with strategy.scope():
    fitted = linear()
    fitted.compile(tf.keras.optimizers.SGD(0.1), 'mse')
history = fitted.fit(dataset, epochs=2, verbose=0)
print([round(float(l), 4) for l in history.history['loss']])
print([w.round(4).tolist() for w in fitted.get_weights()])
""",
}

KNOWN = {
    # The façade makes numbers of 32 bits of all, unless JAX is told to use 64.
    "dtype=int64": "dtype=int32",
}


def tensorflow() -> str:
    beside = ROOT / ".venv-tf" / "bin" / "python"
    python = os.environ.get("TENSORFLOW_PYTHON") or (
        str(beside) if beside.exists() else ""
    )
    if not python:
        pytest.skip("no TensorFlow: set TENSORFLOW_PYTHON, or run make bench-peers")
    return python


def said_by(python: str, line: str, **environment: str) -> dict[str, list[str]]:
    blocks = [f"print('##', {name!r})\n{code}" for name, code in SNIPPETS.items()]
    done = subprocess.run(
        [python, "-c", line + BEGINNING + "\n".join(blocks)],
        capture_output=True,
        text=True,
        env={**environment_of_scripts(), **environment},
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for theirs, ours in KNOWN.items():
        done.stdout = done.stdout.replace(theirs, ours)
    _, *parts = done.stdout.split("## ")
    return {p.split("\n")[0]: p.split("\n")[1:] for p in parts}


@pytest.fixture(scope="module")
def said() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    python = tensorflow()
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    theirs = said_by(python, "import tensorflow as tf\n", **quiet)
    return said_by(sys.executable, "from meshwright import tf\n"), theirs


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_same_code_says_the_same(
    name: str, said: tuple[dict[str, list[str]], dict[str, list[str]]]
) -> None:
    ours, theirs = said
    assert ours[name] == theirs[name]
