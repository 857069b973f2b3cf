"""`meshwright devices`."""

from meshwright.cli.output import json_option, print_json
from meshwright.devices.catalog import (
    Accelerator,
    accelerator_of,
    load_catalog,
    user_catalog_file,
)
from meshwright.devices.discovery import devices as list_devices
from meshwright.devices.sizes import format_bytes

import click


@click.command()
@click.option("--kind", help="Only devices of this kind: CPU, GPU or TPU.")
@click.option(
    "--catalog", is_flag=True, help="The accelerators that can be planned for."
)
@json_option
def devices(kind: str | None, catalog: bool, as_json: bool) -> None:
    """List the devices of this machine, without claiming any."""
    if catalog:
        _show_catalog(as_json)
        return
    found = list_devices(kind)
    if as_json:
        print_json([device.to_json() for device in found])
        return
    for device in found:
        known = accelerator_of(device)
        click.echo(device.describe() + (f", catalog: {known.name}" if known else ""))
    plural = "" if len(found) == 1 else "s"
    click.echo(f"{len(found)} device{plural}; is all well? meshwright doctor")


def _show_catalog(as_json: bool) -> None:
    entries = load_catalog(user_catalog_file()).accelerators
    if as_json:
        print_json([_to_json(entry) for entry in entries])
        return
    for entry in entries:
        flops = entry.peak_flops.get("bfloat16") or entry.peak_flops.get("float16")
        peak = f"{flops / 1e12:.0f} TFLOP/s in 16 bits" if flops else "peak unknown"
        memory = format_bytes(entry.memory) if entry.memory else "memory unknown"
        price = entry.price
        cost = f"${price.value:.2f}/h ({price.date})" if price else "price unknown"
        click.echo(f"{entry.name:<10}  {entry.title}: {peak}, {memory}, {cost}")
    click.echo(f"{len(entries)} accelerators; figures with their sources: --json")


def _to_json(entry: Accelerator) -> dict[str, object]:
    sources = {k: {"title": s.title, "url": s.url} for k, s in entry.sources.items()}
    price = entry.price
    return {
        "name": entry.name,
        "title": entry.title,
        "kind": entry.kind,
        "peak_flops": dict(entry.peak_flops),
        "memory": entry.memory,
        "memory_bandwidth": entry.memory_bandwidth,
        "link": {"bandwidth": entry.link.bandwidth, "latency": entry.link.latency},
        "network": {
            "bandwidth": entry.network.bandwidth,
            "latency": entry.network.latency,
        },
        "price": {"value": price.value, "date": str(price.date)} if price else None,
        "sources": sources,
    }
