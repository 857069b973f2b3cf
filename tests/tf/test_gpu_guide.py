"""The code blocks of TensorFlow's GPU guide, with only the import line changed.

They print what the guide says, on four stand-in GPUs.
"""

from pathlib import Path

import pytest

from forks import Said, run_pieces

COUNT = """
print("Num GPUs Available: ", len(tf.config.list_physical_devices('GPU')))
"""

LOG = """
tf.debugging.set_log_device_placement(True)

# Create some tensors
a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
c = tf.matmul(a, b)

print(c)
"""

MANUAL = """
tf.debugging.set_log_device_placement(True)

# Place tensors on the CPU
with tf.device('/CPU:0'):
  a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
  b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

# Run on the GPU
c = tf.matmul(a, b)
print(c)
"""

VISIBLE = """
gpus = tf.config.list_physical_devices('GPU')
if gpus:
  # Restrict TensorFlow to only use the first GPU
  try:
    tf.config.set_visible_devices(gpus[0], 'GPU')
    logical_gpus = tf.config.list_logical_devices('GPU')
    print(len(gpus), "Physical GPUs,", len(logical_gpus), "Logical GPU")
  except RuntimeError as e:
    # Visible devices must be set before GPUs have been initialized
    print(e)
"""

GROWTH = """
gpus = tf.config.list_physical_devices('GPU')
if gpus:
  try:
    # Currently, memory growth needs to be the same across GPUs
    for gpu in gpus:
      tf.config.experimental.set_memory_growth(gpu, True)
    logical_gpus = tf.config.list_logical_devices('GPU')
    print(len(gpus), "Physical GPUs,", len(logical_gpus), "Logical GPUs")
  except RuntimeError as e:
    # Memory growth must be set before GPUs have been initialized
    print(e)
"""

LIMIT = """
gpus = tf.config.list_physical_devices('GPU')
if gpus:
  # Restrict TensorFlow to only allocate 1GB of memory on the first GPU
  try:
    tf.config.set_logical_device_configuration(
        gpus[0],
        [tf.config.LogicalDeviceConfiguration(memory_limit=1024)])
    logical_gpus = tf.config.list_logical_devices('GPU')
    print(len(gpus), "Physical GPUs,", len(logical_gpus), "Logical GPUs")
  except RuntimeError as e:
    # Virtual devices must be set before GPUs have been initialized
    print(e)
"""

ONE_GPU = """
tf.debugging.set_log_device_placement(True)

try:
  # Specify an invalid GPU device
  with tf.device('/device:GPU:2'):
    a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    c = tf.matmul(a, b)
except RuntimeError as e:
  print(e)
"""

SOFT = """
tf.config.set_soft_device_placement(True)
tf.debugging.set_log_device_placement(True)

# Creates some tensors
a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
c = tf.matmul(a, b)

print(c)
"""

VIRTUAL = """
gpus = tf.config.list_physical_devices('GPU')
if gpus:
  # Create 2 virtual GPUs with 1GB memory each
  try:
    tf.config.set_logical_device_configuration(
        gpus[0],
        [tf.config.LogicalDeviceConfiguration(memory_limit=1024),
         tf.config.LogicalDeviceConfiguration(memory_limit=1024)])
    logical_gpus = tf.config.list_logical_devices('GPU')
    print(len(gpus), "Physical GPU,", len(logical_gpus), "Logical GPUs")
  except RuntimeError as e:
    # Virtual devices must be set before GPUs have been initialized
    print(e)
"""

MIRRORED = """
tf.debugging.set_log_device_placement(True)
gpus = tf.config.list_logical_devices('GPU')
strategy = tf.distribute.MirroredStrategy(gpus)
with strategy.scope():
  inputs = tf.keras.layers.Input(shape=(1,))
  predictions = tf.keras.layers.Dense(1)(inputs)
  model = tf.keras.models.Model(inputs=inputs, outputs=predictions)
  model.compile(loss='mse',
                optimizer=tf.keras.optimizers.SGD(learning_rate=0.2))
"""

BY_HAND = """
tf.debugging.set_log_device_placement(True)

gpus = tf.config.list_logical_devices('GPU')
if gpus:
  # Replicate your computation on multiple GPUs
  c = []
  for gpu in gpus:
    with tf.device(gpu.name):
      a = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
      b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      c.append(tf.matmul(a, b))

  with tf.device('/CPU:0'):
    matmul_sum = tf.add_n(c)

  print(matmul_sum)
"""

FIT = """
import numpy as np
model.fit(np.ones((8, 1)), np.ones((8, 1)), verbose=0)
tf.debugging.set_log_device_placement(False)
devices = {s.device for s in model.weights[0].value.addressable_shards}
print(len(devices), "devices hold the weights")
"""

LATE = LOG + VISIBLE + GROWTH + LIMIT + VIRTUAL
HARD = "tf.config.set_soft_device_placement(False)\n" + ONE_GPU.replace("2'", "7'")

PRODUCT = "tf.Tensor(\n[[22. 28.]\n [49. 64.]], shape=(2, 2), dtype=float32)\n"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    pieces = {
        **{"count": COUNT, "log": LOG, "manual": MANUAL, "visible": VISIBLE},
        **{"growth": GROWTH, "limit": LIMIT, "one": ONE_GPU, "soft": SOFT},
        **{"virtual": VIRTUAL, "mirrored": MIRRORED + FIT, "by hand": BY_HAND},
        **{"late": LATE, "hard": HARD},
    }
    return run_pieces(
        pieces, tmp_path_factory.mktemp("guide"), MESHWRIGHT_VIRTUAL="GPU:4"
    )


def test_gpus_are_counted(said: dict[str, Said]) -> None:
    assert said["count"].out == "Num GPUs Available:  4\n"


def test_operations_are_logged_on_the_first_gpu(said: dict[str, Said]) -> None:
    on_gpu_0 = [("_EagerConst", "GPU:0"), ("_EagerConst", "GPU:0"), ("MatMul", "GPU:0")]
    assert said["log"].log == on_gpu_0
    assert said["log"].out == PRODUCT
    assert said["soft"].log == on_gpu_0
    assert said["soft"].out == PRODUCT
    line = "Executing op MatMul in device /job:localhost/replica:0/task:0/device:GPU:0"
    assert line in said["log"].err.splitlines()


def test_tensors_of_the_cpu_are_copied_to_the_gpu(said: dict[str, Said]) -> None:
    log = said["manual"].log
    assert log[:2] == [("_EagerConst", "CPU:0"), ("_EagerConst", "CPU:0")]
    assert log[-1] == ("MatMul", "GPU:0")
    assert said["manual"].out == PRODUCT


def test_visible_devices_restrict_the_logical_ones(said: dict[str, Said]) -> None:
    assert said["visible"].out == "4 Physical GPUs, 1 Logical GPU\n"


def test_memory_growth_and_limits_are_set_before_the_start(
    said: dict[str, Said],
) -> None:
    assert said["growth"].out == "4 Physical GPUs, 4 Logical GPUs\n"
    assert said["limit"].out == "4 Physical GPUs, 4 Logical GPUs\n"


def test_one_gpu_becomes_two(said: dict[str, Said]) -> None:
    # The guide has one GPU there; the other three stay.
    assert said["virtual"].out == "4 Physical GPU, 5 Logical GPUs\n"


def test_late_settings_raise_the_errors_of_the_guide(said: dict[str, Said]) -> None:
    assert said["late"].lines[3:] == [
        "Visible devices cannot be modified after being initialized",
        "Physical devices cannot be modified after being initialized",
        "Virtual devices cannot be modified after being initialized",
        "Virtual devices cannot be modified after being initialized",
    ]


def test_a_gpu_is_chosen_by_name(said: dict[str, Said]) -> None:
    assert said["one"].out == ""
    assert [device for _, device in said["one"].log] == ["GPU:2"] * 3


def test_a_missing_device_is_an_error_without_soft_placement(
    said: dict[str, Said],
) -> None:
    assert "/device:GPU:7 unknown device." in said["hard"].out
    assert "/device:GPU:3" in said["hard"].out, "what exists is listed"


def test_a_model_is_mirrored_on_all_gpus(said: dict[str, Said]) -> None:
    names = [f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(4)]
    line = f"INFO:tensorflow:Using MirroredStrategy with devices {tuple(names)}"
    assert line in said["mirrored"].err.splitlines()
    assert said["mirrored"].out == "4 devices hold the weights\n"


def test_work_is_replicated_by_hand(said: dict[str, Said]) -> None:
    of_each = [("_EagerConst", "GPU:{}")] * 2 + [("MatMul", "GPU:{}")]
    wanted = [(op, device.format(i)) for i in range(4) for op, device in of_each]
    assert said["by hand"].log == [*wanted, ("AddN", "CPU:0")]
    assert said["by hand"].out == (
        "tf.Tensor(\n[[ 88. 112.]\n [196. 256.]], shape=(2, 2), dtype=float32)\n"
    )


def test_one_gpu_of_one_becomes_two_and_growth_can_be_forced(tmp_path: Path) -> None:
    forced = "print(tf.config.experimental.get_memory_growth("
    forced += "tf.config.list_physical_devices('GPU')[0]))"
    said = run_pieces(
        {"virtual": VIRTUAL, "forced": forced},
        tmp_path,
        MESHWRIGHT_VIRTUAL="GPU:1",
        TF_FORCE_GPU_ALLOW_GROWTH="true",
    )
    assert said["virtual"].out == "1 Physical GPU, 2 Logical GPUs\n"
    assert said["forced"].out == "True\n"
