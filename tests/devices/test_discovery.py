"""Listing devices: real, virtual, restricted; nothing is started or claimed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import meshwright as mw
from meshwright.devices.configuration import _parse_visible
from meshwright.devices.device import Link
from meshwright.devices.discovery import list_devices
from meshwright.devices.nvidia import read_nvml
from meshwright.devices.settings import Settings, Virtual, keep_settings
from meshwright.errors import ConfigurationError, DeviceNameError

import psutil
import pytest

from conftest import Run

FAKES = str(Path(__file__).parents[1] / "fakes")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with four GPUs, as NVML would tell of it."""
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    sys.modules.pop("pynvml", None)


def test_the_cpu_is_described_by_the_operating_system() -> None:
    cpu = mw.devices("CPU")[0]
    assert (cpu.name, cpu.kind, cpu.index) == ("/device:CPU:0", "CPU", 0)
    assert cpu.memory == psutil.virtual_memory().total
    assert f"{psutil.cpu_count()} core" in cpu.model
    assert cpu.host
    assert not cpu.stand_in


def test_kinds_filter_the_list() -> None:
    assert len(mw.devices("cpu")) == 8
    assert mw.devices("GPU") == []
    with pytest.raises(DeviceNameError, match=r"'gpus'.*is not a kind of device"):
        mw.devices("gpus")


@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_described_by_nvml() -> None:
    gpus = mw.devices("GPU")
    assert [g.name for g in gpus] == [f"/device:GPU:{i}" for i in range(4)]
    first = gpus[0]
    assert (first.model, first.compute_capability) == ("NVIDIA H200", "9.0")
    assert first.memory == 150 * 2**30
    assert first.links == (
        Link(kind="PCIe", generation=5, lanes=16, peer=None),
        Link(kind="NVLink", generation=4, lanes=2, peer="/device:GPU:1"),
        Link(kind="NVLink", generation=4, lanes=1, peer=None),
    )
    assert gpus[3].links == (), "an unknown bus is left out, not guessed"
    assert sys.modules["pynvml"].is_open == 0, "NVML is closed again"


@pytest.mark.usefixtures("four_gpus")
def test_a_device_describes_itself_in_a_line() -> None:
    assert mw.devices("GPU")[0].describe() == (
        "/device:GPU:0  NVIDIA H200, 150.0 GiB, compute 9.0, PCIe 5 x16, "
        "NVLink 4 x2 to /device:GPU:1, NVLink 4 x1"
    )


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-222", "GPU-000"]),
        ("GPU-11", ["GPU-111"]),
        ("1,9,0", ["GPU-111"]),
        ("1,1,0", ["GPU-111"]),
    ],
)
def test_cuda_visible_devices_counts(
    variable: str, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    gpus = mw.devices("GPU")
    assert [g.uuid for g in gpus] == uuids
    assert [g.index for g in gpus] == list(range(len(uuids)))


@pytest.mark.usefixtures("four_gpus")
def test_visible_restricts_renumbers_and_forgets_links_to_hidden_devices() -> None:
    listed = list_devices(Settings(visible=("GPU:2", "gpu:0")))
    gpus = [d for d in listed if d.kind == "GPU"]
    assert [(g.name, g.uuid) for g in gpus] == [
        ("/device:GPU:0", "GPU-222"),
        ("/device:GPU:1", "GPU-000"),
    ]
    assert [link.peer for link in gpus[1].links] == [None, None]
    both = list_devices(Settings(visible=("GPU:1", "GPU:0")))
    assert both[0].links[1].peer == "/device:GPU:1", "links follow the new numbers"


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ((), ["CPU:0", "CPU:1"]),
        (("CPU",), ["CPU:0", "CPU:1"]),
        (("CPU:1",), ["CPU:0"]),
        (("GPU:3",), ["GPU:0", "CPU:0", "CPU:1"]),
        (("GPU",), ["GPU:0", "GPU:1", "GPU:2", "GPU:3", "CPU:0", "CPU:1"]),
        (("CPU:1", "GPU:3"), ["GPU:0", "CPU:0"]),
    ],
)
def test_accelerators_that_are_not_named_are_hidden_the_host_is_not(
    visible: tuple[str, ...], names: list[str]
) -> None:
    listed = list_devices(Settings(visible=visible, virtual=Virtual("CPU", 2)))
    assert [d.name for d in listed] == [f"/device:{name}" for name in names]


def test_visible_names_only_what_exists() -> None:
    with pytest.raises(ConfigurationError) as caught:
        list_devices(Settings(visible=("CPU:5",), virtual=Virtual("CPU", 2)))
    assert str(caught.value).split("\n") == [
        "visible names /device:CPU:5, which does not exist.",
        "Only existing devices can be made visible.",
        "Name some of: /device:CPU:0, /device:CPU:1.",
    ]


def test_visible_names_only_kinds_that_exist() -> None:
    with pytest.raises(
        ConfigurationError, match=r"visible names /device:TPU:\*, which"
    ):
        list_devices(Settings(visible=("TPU",), virtual=Virtual("CPU", 2)))


@pytest.mark.usefixtures("four_gpus")
def test_devices_that_were_listed_can_be_made_visible_after_a_restriction() -> None:
    keep_settings(Settings(visible=("GPU:2", "GPU:3")))
    assert _parse_visible(mw.devices("GPU")[:1]) == ("GPU:2",)


def test_visible_names_each_device_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        list_devices(Settings(visible=("CPU:1", "cpu"), virtual=Virtual("CPU", 2)))
    assert str(caught.value).split("\n") == [
        "visible received ['CPU:1', 'cpu'], which names a device twice.",
        "Each device is visible once.",
        "Name each once, out of: /device:CPU:0, /device:CPU:1.",
    ]


def test_stand_in_gpus_are_listed_as_gpus_beside_the_cpu() -> None:
    listed = list_devices(Settings(virtual=Virtual("GPU", 2), memory_limit=2**20))
    assert [d.name for d in listed] == [
        "/device:GPU:0",
        "/device:GPU:1",
        "/device:CPU:0",
    ]
    assert listed[0].stand_in
    assert listed[0].memory == listed[0].memory_limit == 2**20
    assert "stand-in GPU" in listed[0].model
    assert list_devices(Settings(virtual=Virtual("GPU", 1)))[0].memory is None


def test_cpus_that_jax_was_told_of_are_listed(run_script: Run) -> None:
    counting = "import meshwright as mw; print(len(mw.devices()))"
    flag = "--xla_force_host_platform_device_count=3"
    assert run_script(counting).stdout == "1\n"
    assert run_script(counting, XLA_FLAGS=flag).stdout == "3\n"
    assert run_script(counting, JAX_NUM_CPU_DEVICES="5").stdout == "5\n"


def test_a_machine_without_nvml_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_nvml().because == "the package nvidia-ml-py is not installed"


@pytest.mark.usefixtures("four_gpus")
def test_a_driver_that_does_not_answer_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pynvml

    def fail() -> None:
        raise pynvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert read_nvml().because == "NVML answered: Driver Not Loaded"
    assert mw.devices("GPU") == []


def test_json_has_every_field() -> None:
    written = mw.devices()[0].to_json()
    assert set(written) == set(mw.Device.__slots__)
    assert written["name"] == "/device:CPU:0"
