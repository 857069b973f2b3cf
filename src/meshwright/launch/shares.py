"""Which part of a host each of its processes gets."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.devices.nvidia import read_nvml
from meshwright.errors import ConfigurationError

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_EXEMPTIONS = ("no_proxy", "NO_PROXY", "no_grpc_proxy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one process gets of its host."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that show it its devices."""
    cores: tuple[int, ...] = ()
    """The cores that it runs on; any if there are none."""
    says: str = ""
    """The share in words."""


def shares_of_host(
    num_processes: int, environment: Mapping[str, str]
) -> tuple[Share, ...]:
    """Divides the GPUs of this host between processes, or its cores if it has none.

    >>> [share.says for share in shares_of_host(1, {"JAX_PLATFORMS": "cpu"})]
    ['all cores']

    Raises:
        ConfigurationError: The GPUs cannot be divided.
    """
    gpus = _visible_gpus(environment)
    if gpus:
        return _share_gpus(gpus, num_processes)
    return tuple(
        Share(cores=piece, says=_says_cores(piece))
        for piece in share_cores(usable_cores(), num_processes)
    )


def share_cores(
    cores: Sequence[int], num_processes: int
) -> tuple[tuple[int, ...], ...]:
    """Cores in equal parts; empty parts, which mean all cores, if there are too few.

    >>> share_cores([0, 1, 2, 3, 4], 2), share_cores([0], 2)
    (((0, 1), (2, 3)), ((), ()))
    """
    each = len(cores) // num_processes
    if num_processes == 1 or not each:
        return ((),) * num_processes
    return tuple(tuple(cores[i * each : (i + 1) * each]) for i in range(num_processes))


def usable_cores() -> list[int]:
    """The cores that this process may run on; none where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return []


def exempt_from_proxies(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep connections between processes of a run away from proxies.

    >>> exempt_from_proxies("127.0.0.1:80", {"http_proxy": "http://proxy:3128"})
    {'no_proxy': '127.0.0.1,localhost', 'NO_PROXY': '127.0.0.1,localhost'}
    """
    if not any(name.lower() in _PROXIES for name in environment):
        return {}
    hosts = dict.fromkeys([address.rpartition(":")[0].strip("[]"), "localhost"])
    own = ",".join(hosts)
    return {
        name: f"{environment[name]},{own}" if environment.get(name) else own
        for name in _EXEMPTIONS
        if name in environment or name != "no_grpc_proxy"
    }


def _visible_gpus(environment: Mapping[str, str]) -> list[str]:
    if environment.get("JAX_PLATFORMS", "").lower() == "cpu":
        return []
    count = len(read_nvml().gpus)
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    names = asked.split(",") if asked is not None else map(str, range(count))
    return [name.strip() for name in names][:count]


def _share_gpus(gpus: Sequence[str], num_processes: int) -> tuple[Share, ...]:
    if num_processes == 1:
        return (Share(says=f"all GPUs ({len(gpus)})"),)
    if len(gpus) % num_processes:
        counts = [n for n in range(1, len(gpus) + 1) if len(gpus) % n == 0]
        raise ConfigurationError(
            f"{num_processes} processes were asked for on a host with {len(gpus)} "
            f"visible GPUs ({', '.join(gpus)}).",
            "Every process of a host gets as many of its GPUs as the others.",
            f"Use --processes {' or '.join(map(str, counts))}, or make other GPUs "
            "visible with CUDA_VISIBLE_DEVICES; JAX_PLATFORMS=cpu computes on the CPU.",
        )
    each = len(gpus) // num_processes
    pieces = [gpus[i * each : (i + 1) * each] for i in range(num_processes)]
    return tuple(
        Share(
            environment={"CUDA_VISIBLE_DEVICES": ",".join(piece)},
            says=f"{'GPU' if each == 1 else 'GPUs'} {', '.join(piece)}",
        )
        for piece in pieces
    )


def _says_cores(cores: Sequence[int]) -> str:
    if not cores:
        return "all cores"
    return f"{'core' if len(cores) == 1 else 'cores'} {', '.join(map(str, cores))}"
