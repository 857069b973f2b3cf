"""The accelerator catalog and inventories of machines that need not be here."""

from pathlib import Path

from meshwright.devices.catalog import (
    Catalog,
    accelerator,
    accelerator_of,
    load_catalog,
)
from meshwright.devices.device import Device
from meshwright.devices.inventory import parse_inventory
from meshwright.errors import CatalogError

import pytest

PROMISED = (
    "V100 A100-40GB A100-80GB H100-SXM H100-PCIe H200 B200 L4 L40S RTX4090 A10 T4 "
    "TPUv5e TPUv5p CPU"
)


@pytest.fixture
def catalog() -> Catalog:
    return load_catalog(None)


def test_the_promised_accelerators_are_there(catalog: Catalog) -> None:
    assert [a.name for a in catalog.accelerators] == PROMISED.split()


def test_every_figure_has_a_source_and_nothing_else_has(catalog: Catalog) -> None:
    for entry in catalog.accelerators:
        figures = {f"peak_flops.{dtype}" for dtype in entry.peak_flops}
        for name in ("memory", "memory_bandwidth", "price"):
            figures |= {name} if getattr(entry, name) is not None else set()
        for name in ("link", "network"):
            speed = getattr(entry, name)
            figures |= {f"{name}.bandwidth"} if speed.bandwidth else set()
            figures |= {f"{name}.latency"} if speed.latency else set()
        assert set(entry.sources) == figures, entry.name
        assert all(s.title and s.url and s.read for s in entry.sources.values())


def test_figures_are_in_the_right_order_of_magnitude(catalog: Catalog) -> None:
    # Units slip easily (bits for bytes, tera for giga); no vendor is that far off.
    for entry in catalog.accelerators:
        assert all(1e11 < flops < 1e16 for flops in entry.peak_flops.values())
        assert entry.memory is None or 8e9 < entry.memory < 300e9
        assert entry.memory_bandwidth is None or 1e11 < entry.memory_bandwidth < 1e13
        for speed in (entry.link, entry.network):
            assert speed.bandwidth is None or 1e9 < speed.bandwidth < 2e12
            assert speed.latency is None or 1e-7 < speed.latency < 1e-4
        assert entry.price is None or 0.1 < entry.price.value < 50


@pytest.mark.parametrize(
    ("name", "flops", "memory_bandwidth"),
    [
        ("V100", 125e12, 900e9),
        ("A100-40GB", 312e12, 1555e9),
        ("A100-80GB", 312e12, 2039e9),
        ("H100-SXM", 989e12, 3350e9),
        ("H100-PCIe", 756e12, 2000e9),
        ("H200", 989e12, 4800e9),
        ("L4", 121e12, 300e9),
        ("L40S", 362e12, 864e9),
        ("RTX4090", 165e12, 1008e9),
        ("A10", 125e12, 600e9),
        ("T4", 65e12, 320e9),
    ],
)
def test_the_vendor_s_own_figures_are_met(
    name: str, flops: float, memory_bandwidth: float
) -> None:
    entry = accelerator(name)
    peak = entry.peak_flops.get("bfloat16") or entry.peak_flops["float16"]
    assert peak == pytest.approx(flops, rel=0.03)
    assert entry.memory_bandwidth == pytest.approx(memory_bandwidth, rel=0.03)


def test_an_unknown_figure_is_none_never_a_guess() -> None:
    cpu = accelerator("CPU")
    assert (cpu.memory, cpu.memory_bandwidth, cpu.price) == (None, None, None)
    assert (cpu.link.bandwidth, cpu.network.latency) == (None, None)
    assert cpu.peak_flops == {}
    assert "bfloat16" not in accelerator("V100").peak_flops


def test_names_and_aliases_work_in_either_case() -> None:
    assert accelerator("h100").name == "H100-SXM"
    assert accelerator("a100").name == "A100-80GB"
    assert accelerator("4090").name == "RTX4090"


def test_an_unknown_name_shows_the_near_misses() -> None:
    with pytest.raises(CatalogError) as caught:
        accelerator("H20")
    received, rule, change = str(caught.value).split("\n")
    assert received == "'H20' is not an accelerator of the catalog."
    assert rule == f"It knows {', '.join(PROMISED.split())}."
    assert change.startswith("Did you mean H200")
    assert change.endswith("set MESHWRIGHT_CATALOG to it.")


def device(model: str) -> Device:
    return Device(
        name="/device:GPU:0", kind="GPU", index=0, host="", memory=1, model=model
    )


def test_a_real_gpu_finds_its_entry() -> None:
    found = accelerator_of(device("NVIDIA H200"))
    assert found is not None
    assert found.name == "H200"
    assert accelerator_of(device("NVIDIA GTX 1060")) is None


MINE = """
[sources.me]
title = "measured at home"
url = "file:///notes"
read = 2026-01-02

[accelerators.Mine]
title = "My own"
kind = "GPU"
aliases = ["my-gpu"]
memory = { value = 8e9, source = "me" }
"""


def test_a_user_s_file_adds_to_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    monkeypatch.setenv("MESHWRIGHT_CATALOG", str(file))
    assert accelerator("My-GPU").memory == 8_000_000_000
    assert accelerator("H200").name == "H200"


def test_the_configuration_folder_is_the_usual_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meshwright").mkdir()
    (tmp_path / "meshwright" / "accelerators.toml").write_text(MINE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert accelerator("mine").title == "My own"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("value = 8e9", "value = 0"), "memory is {'value': 0, 'source': 'me'}"),
        (('{ value = 8e9, source = "me" }', "8e9"), "memory is 8000000000.0"),
        (('source = "me"', 'source = "you"'), "memory has source 'you'"),
        (('"GPU"', '"QPU"'), "kind is 'QPU'"),
        (("memory =", "peak_flops.int3 ="), "peak_flops has ['int3']"),
        (("memory =", "price ="), "price has date None"),
    ],
)
def test_a_fault_in_a_user_s_file_is_named(
    change: tuple[str, str], fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE.replace(*change))
    with pytest.raises(CatalogError) as caught:
        load_catalog(file)
    received, rule, fix = str(caught.value).split("\n")
    assert received == f"{file}: [accelerators.Mine] {fault}."
    assert rule.startswith("In a catalog, ")
    assert fix == "Correct the entry; leave a figure out if it is unknown."


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE.replace("my-gpu", "h100"))
    with pytest.raises(CatalogError) as caught:
        load_catalog(file)
    received, rule, change = str(caught.value).split("\n")
    assert (
        received
        == f"{file}: 'h100' is the name of two accelerators, H100-SXM and Mine."
    )
    assert rule == "Names and aliases are unique, whatever their case."
    assert change == "Rename one of them."


@pytest.mark.parametrize("content", [None, "not = [toml"])
def test_a_file_that_cannot_be_read_is_named(
    content: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    if content:
        file.write_text(content)
    with pytest.raises(CatalogError) as caught:
        load_catalog(file)
    received, rule, change = str(caught.value).split("\n")
    assert received.startswith(f"The catalog file {file} could not be read: ")
    assert rule.startswith("MESHWRIGHT_CATALOG names a TOML file")
    assert change == "Correct the file, or unset the variable."


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "name"),
    [
        ("8xH200", 1, 8, "H200"),
        ("2x8xH100", 2, 8, "H100-SXM"),
        ("H200", 1, 1, "H200"),
        ("4 x rtx 4090", 1, 4, "RTX4090"),
        ("3xCPU", 1, 3, "CPU"),
    ],
)
def test_inventories_are_read(text: str, hosts: int, per_host: int, name: str) -> None:
    inventory = parse_inventory(text)
    assert (inventory.hosts, inventory.devices_per_host) == (hosts, per_host)
    assert inventory.accelerator.name == name
    assert inventory.num_devices == hosts * per_host
    assert parse_inventory(str(inventory)) == inventory


@pytest.mark.parametrize(
    "text", ["0xH200", "8*H200", "", "8x", "2x2x2xH100", 8, "-1xH200"]
)
def test_other_texts_are_no_inventory(text: str) -> None:
    with pytest.raises(CatalogError) as caught:
        parse_inventory(text)
    assert str(caught.value).split("\n") == [
        f"{text!r} (a {type(text).__name__}) does not describe devices.",
        "Write NAME, DEVICESxNAME or HOSTSxDEVICESxNAME, with counts from 1.",
        "For example '8xH200', or '2x8xH100' for two hosts of eight.",
    ]
