"""Machines: read from a few letters, or from the devices that are here."""

import json
from dataclasses import replace
from typing import Any

import meshwright as mw
from meshwright.errors import (
    CatalogError,
    ConfigurationError,
    DeviceNameError,
    MachineError,
    MeshwrightError,
)
from meshwright.planner import machines
from meshwright.planner.machines import MOST_DEVICES, Machine, parse_machine

import pytest

GIB = 2**30


@pytest.mark.parametrize(
    ("spec", "hosts", "per_host", "printed"),
    [
        ("8xH200", 1, 8, "8 x H200, NVLink 4"),
        ("8 x h200", 1, 8, "8 x H200, NVLink 4"),
        ("H200", 1, 1, "1 x H200"),
        ("2xRTX4090", 1, 2, "2 x RTX4090, PCIe 4.0 x16"),
        (
            "4x8xH100",
            4,
            8,
            "4 x 8 x H100-SXM, NVLink 4, InfiniBand NDR 400 Gb/s between hosts",
        ),
        ("3xCPU", 1, 3, "3 x CPU"),
    ],
)
def test_machines_are_read_from_a_few_letters(
    spec: str, hosts: int, per_host: int, printed: str
) -> None:
    machine = parse_machine(spec)
    assert (machine.num_hosts, machine.devices_per_host) == (hosts, per_host)
    assert machine.num_devices == hosts * per_host
    assert str(machine) == printed
    assert not machine.is_here
    assert parse_machine(machine) == machine


def test_a_machine_of_the_catalog_has_its_figures() -> None:
    machine = parse_machine("4x8xH100")
    known = machine.accelerator
    assert known is not None
    assert known.price is not None
    assert machine.memory == known.memory
    assert (machine.link, machine.network) == (known.link, known.network)
    assert machine.price == known.price.value
    assert machine.dollars_per_hour() == 32 * known.price.value
    assert machine.dollars_per_hour(4) == 4 * known.price.value


def test_what_is_not_known_is_none() -> None:
    machine = parse_machine("3xCPU")
    assert machine.memory is None
    assert machine.usable_memory is None
    assert machine.dollars_per_hour() is None
    assert machine.memory_because == "the memory of the devices is not known"


def test_a_step_may_use_what_jax_takes_of_a_gpu() -> None:
    machine = parse_machine("H200")
    assert machine.memory is not None
    assert machine.usable_memory == int(0.75 * machine.memory)
    assert machine.memory_because == (
        "75% of 141.0 GiB, which is what JAX takes of a GPU without a limit"
    )
    chip = parse_machine("TPUv5e")
    assert chip.memory is not None
    assert chip.usable_memory == int(0.9 * chip.memory)


def test_memory_and_price_can_be_given() -> None:
    machine = parse_machine("8xH200", memory="40GiB", price=2.5)
    assert machine.usable_memory == 40 * GIB
    assert machine.memory_because == "as memory= says"
    assert machine.dollars_per_hour() == 20.0
    assert machine.price_date is None
    assert parse_machine(machine, memory=GIB).usable_memory == GIB
    card = parse_machine("H100")
    assert card.memory is not None
    assert card.memory < 80 * GIB, "what the driver of an 80 GB card says"
    assert parse_machine("H100", memory="80GiB").usable_memory == 80 * GIB


def test_the_devices_here_are_made_of_one_cpu() -> None:
    machine = parse_machine()
    assert machine.is_here
    assert machine.shares_cores
    assert (machine.num_hosts, machine.num_devices) == (1, 8)
    assert machine.devices == tuple(device.name for device in mw.devices())
    total = mw.devices()[0].memory
    assert total is not None
    assert machine.memory == total // 8, "they share the memory too"
    assert str(machine).endswith("), which share their cores")
    assert parse_machine(memory=2 * total).usable_memory == 2 * total, "a rehearsal"


def test_some_of_the_devices_here_can_be_named() -> None:
    machine = parse_machine(["CPU:1", mw.devices()[3]])
    assert machine.devices == ("/device:CPU:1", "/device:CPU:3")
    total = mw.devices()[0].memory
    assert total is not None
    assert machine.memory == total // 2


def gpu(index: int, model: str = "NVIDIA H200", **changes: Any) -> mw.Device:
    device = mw.Device(
        name=f"/device:GPU:{index}",
        kind="GPU",
        index=index,
        host="here",
        memory=140 * GIB,
        model=model,
    )
    return replace(device, **changes)


def with_devices(monkeypatch: pytest.MonkeyPatch, *listed: mw.Device) -> Machine:
    cpu = mw.devices("CPU")[0]
    monkeypatch.setattr(machines, "devices", lambda: [*listed, cpu])
    return parse_machine()


def test_gpus_are_taken_before_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = with_devices(monkeypatch, gpu(0), gpu(1))
    assert str(machine) == "2 x H200, NVLink 4"
    assert machine.memory == 140 * GIB, "what the driver says, not the catalog"
    assert not machine.shares_cores
    assert machine.price == parse_machine("H200").price


def test_a_limit_of_configure_is_what_a_step_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited = gpu(1, memory_limit=24 * GIB)
    machine = with_devices(monkeypatch, gpu(0), limited)
    assert machine.usable_memory == 24 * GIB
    assert machine.memory_because == "the memory_limit of meshwright.configure"


def test_of_unlike_devices_the_slowest_and_smallest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = gpu(1, "NVIDIA A100-SXM4-80GB", memory=80 * GIB)
    machine = with_devices(monkeypatch, gpu(0), small)
    assert machine.title == "A100-80GB"
    assert machine.memory == 80 * GIB
    odd = with_devices(monkeypatch, gpu(0), gpu(1, "home-made"))
    assert odd.accelerator is None
    assert odd.price is None


def test_stand_ins_share_cores_and_their_memory_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plays = [gpu(i, "stand-in", memory=None, stand_in=True) for i in range(2)]
    machine = with_devices(monkeypatch, *plays)
    assert machine.shares_cores
    assert machine.usable_memory is None


def test_processes_are_taken_for_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "process_count", lambda: 2)
    machine = parse_machine()
    assert (machine.num_hosts, machine.num_devices) == (2, 16)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ("H200", (1,)),
        ("8xH200", (1, 2, 4, 8)),
        ("12xH200", (1, 2, 4, 8, 12)),
        ("4x8xH100", (1, 2, 4, 8, 16, 32)),
        # Sixteen are no equal parts of three hosts of six.
        ("3x6xH100", (1, 2, 4, 8, 18)),
    ],
)
def test_sizes_to_compare_are_powers_of_two_and_all(
    spec: str, sizes: tuple[int, ...]
) -> None:
    machine = parse_machine(spec)
    assert machine.sizes() == sizes
    parts = [machine.part(size) for size in sizes]
    assert [part.num_devices for part in parts] == list(sizes)
    assert all(p.devices_per_host <= machine.devices_per_host for p in parts)
    assert parts[-1] == machine


def test_a_part_of_several_hosts_takes_as_few_as_can_be() -> None:
    machine = parse_machine("4x8xH100")
    assert (machine.part(8).num_hosts, machine.part(16).num_hosts) == (1, 2)


def test_a_part_of_one_cpu_has_more_memory_for_each_device() -> None:
    whole = parse_machine()
    total = mw.devices()[0].memory
    one = whole.part(1)
    assert whole.memory is not None
    assert total is not None
    assert one.memory == whole.memory * 8
    assert one.devices == ("/device:CPU:0",)
    assert parse_machine(memory="1GiB").part(1).usable_memory == GIB, "a limit stays"
    card = parse_machine("8xH200")
    assert card.part(1).memory == card.memory, "cards do not share"


def test_a_machine_is_json() -> None:
    facts = json.loads(json.dumps(parse_machine("8xH200").to_json(), allow_nan=False))
    assert facts["name"] == "8 x H200, NVLink 4"
    assert facts["num_devices"] == 8
    assert facts["price_date"] == "2026-08-22"
    assert parse_machine("CPU").to_json()["price"] is None


NOT_A_SPEC = [
    "Write NAME, DEVICESxNAME or HOSTSxDEVICESxNAME, with counts from 1.",
    "For example '8xH200', or '2x8xH100' for two hosts of eight.",
]
NAMES = ", ".join(f"/device:CPU:{i}" for i in range(8))
NO_LIST = (
    "It takes a text such as '8xH200', a list of at least one device that is here, or "
    "None for all of the best kind."
)
BAD_LIST = "They are devices of one kind that exist here, each named once."
NO_LISTS: list[Any] = [[], 8, {"CPU:0"}]
BAD: list[tuple[Any, dict[str, Any], type[MeshwrightError], list[str]]] = [
    *(
        (text, {}, CatalogError, [f"{text!r} (a str) does not describe devices."])
        for text in ("0xH200", "", "8x", "-1xH200", "2x2x2xH100", "0x8xH100")
    ),
    (
        "99999x99999xH200",
        {},
        MachineError,
        [
            "'99999x99999xH200' has 9,999,800,001 devices.",
            f"A machine has at most {MOST_DEVICES:,}.",
            "Write, for example, '4x8xH100' for four hosts of eight.",
        ],
    ),
    *(
        (
            wrong,
            {},
            MachineError,
            [
                f"devices received {wrong!r} (a {type(wrong).__name__}).",
                NO_LIST,
                "Write, for example, devices='8xH200' or devices=['/device:CPU:0'].",
            ],
        )
        for wrong in NO_LISTS
    ),
    *(
        (
            wrong,
            {},
            MachineError,
            [f"devices received {names}.", BAD_LIST, f"Name some of: {NAMES}."],
        )
        for wrong, names in (
            (["CPU:0", "cpu:0"], ["/device:CPU:0", "/device:CPU:0"]),
            (["CPU:0", "GPU:0"], ["/device:CPU:0", "/device:GPU:0"]),
        )
    ),
    (
        "8xH200",
        {"memory": "200GiB"},
        MachineError,
        [
            "memory received 200.0 GiB for H200.",
            "One such device has 141.0 GiB.",
            "Use less, or other devices.",
        ],
    ),
    *(
        (
            "8xH200",
            {"price": wrong},
            MachineError,
            [
                f"price received {wrong!r} (a {type(wrong).__name__}).",
                "A price is US dollars for one device for one hour, from 0.",
                "Write, for example, price=2.5.",
            ],
        )
        for wrong in (-1, float("nan"), "2", True)
    ),
]


@pytest.mark.parametrize(("spec", "options", "error", "lines"), BAD)
def test_what_is_no_machine_is_refused(
    spec: Any, options: dict[str, Any], error: type[MeshwrightError], lines: list[str]
) -> None:
    with pytest.raises(error) as caught:
        parse_machine(spec, **options)
    expected = lines if len(lines) == 3 else lines + NOT_A_SPEC
    assert str(caught.value).split("\n") == expected
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == 2


def test_devices_of_two_kinds_are_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, gpu(0))
    with pytest.raises(MachineError, match="devices of one kind"):
        parse_machine(["GPU:0", "CPU:0"])


def test_near_misses_and_sizes_are_refused_where_they_are_read() -> None:
    for spelled in ("8xH20O", "xH200"):
        with pytest.raises(CatalogError, match=r"Did you mean .*H200"):
            parse_machine(spelled)
    with pytest.raises(ConfigurationError, match="memory received -1"):
        parse_machine("8xH200", memory=-1)
    with pytest.raises(DeviceNameError, match="'first' "):
        parse_machine(["first"])
