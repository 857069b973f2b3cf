"""`tf.config` before and after the start of the runtime."""

from pathlib import Path

from meshwright import tf

import pytest

from conformance import semantics
from forks import Said, run_pieces

STARTED = "from meshwright.devices.start import has_started\n"

BEFORE = {
    "listing": STARTED
    + "print([d.name for d in tf.config.list_physical_devices()], has_started())\n"
    "print(tf.config.list_physical_devices('gpu'), has_started())\n"
    "print([d.name for d in tf.config.list_logical_devices()], has_started())\n",
    "quiet": STARTED
    + "tf.random.set_seed(1)\ntf.keras.Input((2,))\nprint(has_started())\n",
    "range": STARTED + "tf.data.Dataset.range(3)\nprint(has_started())\n",
    "scope": STARTED + "with tf.device('GPU:1'): print(has_started())\n",
    "mirrored": STARTED + "tf.distribute.MirroredStrategy()\nprint(has_started())\n",
    "operation": STARTED + "tf.add(1, 2)\nprint(has_started())\n",
    "hidden": "tf.config.set_visible_devices([], 'CPU')\n"
    "print(tf.config.list_logical_devices('CPU'), tf.constant(1.0).device)\n"
    "print([d.name for d in tf.config.get_visible_devices()])\n",
    "nothing": "tf.config.set_visible_devices([])\n"
    "try: tf.constant(1.0)\n"
    "except tf.errors.NotFoundError as error: print(error)\n",
    "again": "gpus = tf.config.list_physical_devices('GPU')\n"
    "tf.config.set_visible_devices(gpus[2:], 'GPU')\n"
    "parts = [tf.config.LogicalDeviceConfiguration(memory_limit=64)]\n"
    "tf.config.set_logical_device_configuration(gpus[3], parts)\n"
    "print(len(tf.config.list_logical_devices('GPU')))\n"
    "tf.config.set_visible_devices(gpus[2:], 'GPU')\n"
    "tf.config.set_logical_device_configuration(gpus[3], list(parts))\n"
    "print(tf.config.get_logical_device_configuration(gpus[3]) == parts)\n",
    "unequal": "gpus = tf.config.list_physical_devices('GPU')\n"
    "tf.config.experimental.set_memory_growth(gpus[0], True)\n"
    "try: tf.config.list_logical_devices()\n"
    "except ValueError as error: print(error)\n",
    "together": "gpu = tf.config.list_physical_devices('GPU')[0]\n"
    "part = tf.config.LogicalDeviceConfiguration(memory_limit=64)\n"
    "tf.config.set_logical_device_configuration(gpu, [part])\n"
    "for g in tf.config.list_physical_devices('GPU'):\n"
    "    tf.config.experimental.set_memory_growth(g, True)\n"
    "import meshwright as mw\n"
    "tf.config.list_logical_devices()\n"
    "print(mw.devices('CPU')[0].memory_limit, mw.devices('GPU')[0].memory_limit)\n",
    "threads": "tf.config.threading.set_intra_op_parallelism_threads(3)\n"
    "print(tf.config.threading.get_intra_op_parallelism_threads())\n",
    "memory": "with tf.device('GPU:1'): x = tf.ones((256, 256))\n"
    "print(tf.config.experimental.get_memory_info('GPU:1'))\n"
    "del x\n"
    "print(tf.config.experimental.get_memory_info('GPU:1'))\n"
    "tf.config.experimental.reset_memory_stats('GPU:1')\n"
    "print(tf.config.experimental.get_memory_info('GPU:1'))\n",
    "details": "gpu = tf.config.list_physical_devices('GPU')[0]\n"
    "print(tf.config.experimental.get_device_details(gpu)['device_name'])\n",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    folder = tmp_path_factory.mktemp("config")
    return run_pieces(BEFORE, folder, MESHWRIGHT_VIRTUAL="GPU:4")


CPU = tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")


@semantics("4.1.1", "same")
def test_physical_devices_are_listed_without_a_start(said: dict[str, Said]) -> None:
    gpus = [f"/physical_device:GPU:{i}" for i in range(4)]
    first, second, _ = said["listing"].lines
    assert first == f"{['/physical_device:CPU:0', *gpus]} False"
    assert second == "[] False"
    assert tf.config.list_physical_devices("XPU") == []


@semantics("4.1.2", "same")
def test_logical_devices_are_listed_by_starting(said: dict[str, Said]) -> None:
    gpus = [f"/device:GPU:{i}" for i in range(4)]
    assert said["listing"].lines[2] == f"{['/device:CPU:0', *gpus]} True"


@semantics("4.1.3", "same")
def test_what_starts_the_runtime(said: dict[str, Said]) -> None:
    assert said["quiet"].out == "False\n"
    for starting in ("range", "scope", "mirrored", "operation"):
        assert said[starting].out == "True\n", starting


@semantics("4.1.4", "same")
def test_there_are_no_details_of_a_cpu(said: dict[str, Said]) -> None:
    assert tf.config.experimental.get_device_details(CPU) == {}
    assert said["details"].out.startswith("stand-in GPU (")


@semantics("4.1.5", "same")
def test_memory_is_told_of_gpus_only(said: dict[str, Said]) -> None:
    info = tf.config.experimental.get_memory_info
    with pytest.raises(
        ValueError, match="Allocator stats not available for device 'CPU:0'"
    ):
        info("CPU:0")
    with pytest.raises(ValueError, match="No matching devices found for 'GPU:0'"):
        info("GPU:0")
    with pytest.raises(
        ValueError, match=r"Failed parsing device name: 'foo'. Note a valid"
    ):
        info("foo")
    assert said["memory"].lines == [
        "{'current': 262144, 'peak': 262144}",
        "{'current': 0, 'peak': 262144}",
        "{'current': 0, 'peak': 0}",
    ]


@semantics("4.1.6", "same")
def test_only_physical_devices_can_be_made_visible(said: dict[str, Said]) -> None:
    for wrong in ("CPU:0", 3, [CPU, "CPU:1"]):
        with pytest.raises(ValueError, match="Unrecognized device: "):
            tf.config.set_visible_devices(wrong)
    no_cpu, names = said["hidden"].lines
    assert no_cpu == "[] /job:localhost/replica:0/task:0/device:GPU:0"
    assert names == str([f"/physical_device:GPU:{i}" for i in range(4)])
    assert said["nothing"].out == "No CPU devices are available in this process\n"


@semantics("4.1.7", "same")
def test_visible_devices_cannot_change_late(said: dict[str, Said]) -> None:
    everything = tf.config.list_physical_devices()
    tf.config.set_visible_devices(everything)
    with pytest.raises(
        RuntimeError,
        match=r"^Visible devices cannot be modified after being initialized$",
    ):
        tf.config.set_visible_devices(everything[:1])
    assert said["again"].lines == ["2", "True"]


@semantics("4.1.8", "same")
def test_threads_cannot_change_late_and_placement_can(said: dict[str, Said]) -> None:
    threading = tf.config.threading
    tf.constant(1.0)
    for kind, change in {
        "Intra": threading.set_intra_op_parallelism_threads,
        "Inter": threading.set_inter_op_parallelism_threads,
    }.items():
        change(0)
        text = f"^{kind} op parallelism cannot be modified after initialization.$"
        with pytest.raises(RuntimeError, match=text):
            change(5)
    assert threading.get_inter_op_parallelism_threads() == 0
    tf.config.set_soft_device_placement(False)
    assert not tf.config.get_soft_device_placement()
    tf.debugging.set_log_device_placement(True)
    assert tf.debugging.get_log_device_placement()
    tf.debugging.set_log_device_placement(False)
    assert said["threads"].out == "3\n"


@semantics("4.2.1", "better", "`get_memory_growth` of a CPU is True, not a KeyError.")
def test_cpus_always_grow() -> None:
    with pytest.raises(ValueError, match="Cannot set memory growth on non-GPU"):
        tf.config.experimental.set_memory_growth(CPU, True)
    assert tf.config.experimental.get_memory_growth(CPU) is True


@semantics("4.2.2", "better", "Growth and a limit can be combined.")
@semantics("4.2.6", "better", "Limits hold on CPUs too.")
def test_growth_and_limits_are_combined(said: dict[str, Said]) -> None:
    assert said["together"].out == f"{64 * 2**20} {64 * 2**20}\n"
    without = [tf.config.LogicalDeviceConfiguration()]
    other = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    with pytest.raises(ValueError, match="Unrecognized device"):
        tf.config.set_logical_device_configuration(other, without)


@semantics("4.2.3", "same")
@semantics("4.2.8", "same")
def test_growth_and_parts_cannot_change_late(said: dict[str, Said]) -> None:
    # That of growth is among the blocks of the GPU guide, which has GPUs.
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.constant(1.0)
    with pytest.raises(
        RuntimeError,
        match=r"^Virtual devices cannot be modified after being initialized$",
    ):
        tf.config.set_logical_device_configuration(CPU, two)


@semantics("4.2.4", "same")
def test_gpus_grow_alike(said: dict[str, Said]) -> None:
    assert said["unequal"].out == "Memory growth cannot differ between GPU devices\n"


@semantics("4.2.5", "same")
def test_parts_have_a_limit_a_priority_and_a_place() -> None:
    part = tf.config.LogicalDeviceConfiguration()
    assert part.memory_limit is part.experimental_priority is None
    assert part.experimental_device_ordinal is None


@semantics("4.2.7", "better", "None is accepted, as TensorFlow's documents say.")
def test_a_device_is_left_whole() -> None:
    tf.config.set_logical_device_configuration(CPU, None)
    tf.config.set_logical_device_configuration(CPU, [])
    assert tf.config.get_logical_device_configuration(CPU) is None
    with pytest.raises(ValueError, match="Unrecognized device: 'CPU:0'"):
        tf.config.set_logical_device_configuration("CPU:0", [])  # type: ignore[arg-type]


def test_real_gpus_are_hidden_and_limited_and_not_split(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    asking = "import meshwright as mw\ngpus = tf.config.list_physical_devices('GPU')\n"
    part_of_gpu = "part = tf.config.LogicalDeviceConfiguration(memory_limit=64)\n"
    pieces = {
        "hidden": asking + "tf.config.set_visible_devices(gpus[1:3], 'GPU')\n"
        "print([d.model for d in mw.devices('GPU')])\n"
        "print(tf.config.experimental.get_device_details(gpus[3]))\n",
        "limited": asking
        + part_of_gpu
        + "tf.config.set_logical_device_configuration(gpus[0], [part])\n"
        "print(mw.devices('GPU')[0].memory_limit)\n",
        "split": asking
        + part_of_gpu
        + "try: tf.config.set_logical_device_configuration(gpus[0], [part] * 2)\n"
        "except ValueError as error: print(error)\n",
    }
    said = run_pieces(
        pieces,
        tmp_path_factory.mktemp("real"),
        PYTHONPATH=str(Path(__file__).parents[1] / "fakes"),
        CUDA_VISIBLE_DEVICES="0,1,2,3",
    )
    models, details = said["hidden"].lines
    assert models == "['NVIDIA H200', 'NVIDIA L4']"
    assert details == "{'device_name': 'NVIDIA L4', 'compute_capability': (8, 9)}"
    assert said["limited"].out == f"{64 * 2**20}\n"
    assert said["split"].lines[0] == (
        "tf.config was asked to make several GPUs of /physical_device:GPU:0."
    )
    assert "MESHWRIGHT_VIRTUAL=GPU:2" in said["split"].out


def test_a_cpu_is_split_and_a_gpu_needs_a_limit(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pieces = {
        "split": "cpu, = tf.config.list_physical_devices('CPU')\n"
        "part = tf.config.LogicalDeviceConfiguration()\n"
        "tf.config.set_logical_device_configuration(cpu, [part] * 3)\n"
        "print([d.name for d in tf.config.list_logical_devices()])\n"
        "print(tf.config.list_physical_devices())\n"
    }
    folder = tmp_path_factory.mktemp("split")
    split = run_pieces(pieces, folder, CUDA_VISIBLE_DEVICES="")["split"].lines
    assert split[0] == str([f"/device:CPU:{i}" for i in range(3)])
    assert split[1] == str([CPU])
