"""What devices did for a short while, as JAX's profiler saw it."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from meshwright.devices.runtime import jax_devices, name_of

import jax

_EXCHANGES = re.compile(
    "all-reduce|all-gather|reduce-scatter|all-to-all|collective|ragged-all|send|recv"
    "|nccl|MemcpyP2P"
)
"""Operations and kernels that move values between devices."""

_WITHIN = re.compile(r"(while|conditional|call)(\.|$)")
"""Operations that consist of others, which are seen themselves."""

_GPU = re.compile(r"/device:GPU:(\d+)")

Span = tuple[float, float]
"""When something began and ended."""


@dataclass(frozen=True, slots=True)
class Occupation:
    """What one device did, as shares of a while.

    >>> round(Occupation(computing=0.5, communicating=0.2).idle, 3)
    0.3
    """

    computing: float
    """It computed; what it exchanged at the same time cost nothing."""
    communicating: float
    """It exchanged values with others, or waited for them, and did nothing else."""

    @property
    def idle(self) -> float:
        """It did nothing."""
        return max(1.0 - self.computing - self.communicating, 0.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """What devices did for a short while.

    >>> sample = Sample(0.25, {"GPU:0": Occupation(0.5, 0.25), "GPU:1": Occupation(0.5, 0.5)})
    >>> sample.split(at_work=0.5)
    {'computing': 0.2857142857142857, 'communicating': 0.21428571428571427, 'pausing': 0.0}
    """  # noqa: E501

    seconds: float
    """How long the while was."""
    devices: Mapping[str, Occupation]

    def split(self, at_work: float, compiling: float = 0.0) -> dict[str, float]:
        """Divides the share of a time in which devices had work.

        What they paused is what the sample has more of than was waited for.

        Arguments:
            at_work: The share, as steps were timed.
            compiling: The share in which programs were compiled, of which samples
                know nothing.
        """
        rest = 1.0 - compiling
        if compiling and rest > 0:
            return {p: s * rest for p, s in self.split(at_work / rest).items()}
        each = self.devices.values()
        computing = sum(d.computing for d in each) / len(each)
        communicating = sum(d.communicating for d in each) / len(each)
        busy = computing + communicating
        scale = at_work / busy if busy > at_work else 1.0
        return {
            "computing": computing * scale,
            "communicating": communicating * scale,
            "pausing": max(at_work - busy, 0.0),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self | None:
        """What `to_json` wrote; None if there is nothing."""
        if not values.get("devices"):
            return None
        devices = {
            name: Occupation(each["computing"], each["communicating"])
            for name, each in values["devices"].items()
        }
        return cls(values["seconds"], devices)

    def to_json(self) -> dict[str, Any]:
        """Its figures."""
        return {
            "seconds": round(self.seconds, 6),
            "devices": {
                name: {
                    "computing": round(each.computing, 4),
                    "communicating": round(each.communicating, 4),
                    "idle": round(each.idle, 4),
                }
                for name, each in self.devices.items()
            },
        }


class Look:
    """A look at the devices of this process, which begins when it is made.

    Raises:
        RuntimeError: A profile is being taken already.
    """

    def __init__(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-")
        try:
            jax.profiler.start_trace(self._folder.name, profiler_options=options)
        except BaseException:
            self._folder.cleanup()
            raise

    def end(self) -> None:
        """Looks no longer."""
        jax.profiler.stop_trace()

    def sample(self, names: Sequence[str]) -> Sample | None:
        """What was seen until the end; None if that was no operation on any device.

        Arguments:
            names: The devices that were expected to work.
        """
        with self._folder as folder:
            (file,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(file))
            return sample_of(profile.planes, names)


def sample_of(planes: Iterable[Any], names: Sequence[str]) -> Sample | None:
    """Reads what devices did from the planes of a profile.

    Arguments:
        planes: Those of `jax.profiler.ProfileData`.
        names: The devices that are expected to have worked.
    """
    computing: dict[str, list[Span]] = defaultdict(list)
    exchanging: dict[str, list[Span]] = defaultdict(list)
    for name, operation, span in _operations(planes):
        exchanges = _EXCHANGES.match(operation)
        (exchanging if exchanges else computing)[name].append(span)
    spans = [s for group in (computing, exchanging) for e in group.values() for s in e]
    ends = [moment for span in spans for moment in span]
    whole = max(ends, default=0.0) - min(ends, default=0.0)
    if not whole:
        return None
    found = {}
    for name in dict.fromkeys([*names, *sorted({*computing, *exchanging})]):
        computed = _length(computing[name])
        busy = _length([*computing[name], *exchanging[name]])
        found[name] = Occupation(computed / whole, (busy - computed) / whole)
    return Sample(whole / 1e9, found)


def _operations(planes: Iterable[Any]) -> Iterator[tuple[str, str, Span]]:
    """Device, operation, and when it ran, for all of a profile."""
    names = {_place(device): name_of(device) for device in jax_devices().values()}
    for plane in planes:
        gpu = _GPU.match(plane.name)
        for line in plane.lines:
            if gpu and not line.name.startswith("Stream"):
                continue  # the same again, put together in other ways
            for event in line.events:
                facts = dict(event.stats)
                place = ("gpu", int(gpu[1])) if gpu else ("cpu", _ordinal(facts))
                operation = str(facts.get("hlo_op") or (event.name if gpu else ""))
                if "nccl" in event.name.lower():
                    operation = event.name
                if place in names and operation and not _WITHIN.match(operation):
                    yield names[place], operation, (event.start_ns, event.end_ns)


def _place(device: jax.Device) -> tuple[str, int]:
    kind = "cpu" if device.platform == "cpu" else "gpu"
    return kind, device.local_hardware_id


def _ordinal(facts: Mapping[str, Any]) -> int:
    return int(facts.get("device_ordinal", -1))


def _length(spans: Sequence[Span]) -> float:
    """How long at least one of them lasted.

    >>> _length([(4.0, 6.0), (0.0, 2.0), (1.0, 3.0)])
    5.0
    """
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
