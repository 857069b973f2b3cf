"""The spellings of a device: `/device:GPU:0`, `gpu:0`, `cpu`, as in TensorFlow."""

import re
from dataclasses import dataclass

from meshwright.errors import DeviceNameError, UnknownDeviceError

KINDS = ("CPU", "GPU", "TPU")

_SPELLING = re.compile(
    r"""
    (?P<process>/job:(?P<job>[a-z]\w*)(/replica:(?P<replica>\d+))?(/task:(?P<task>\d+))?)?
    /? (device:)?
    (?P<kind>[a-z]\w*)
    (:(?P<index>\d{1,6}|\*))?
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A kind of device and its index, `None` standing for "any of that kind"."""

    kind: str
    index: int | None

    def __str__(self) -> str:
        return f"/device:{self.kind}:{'*' if self.index is None else self.index}"


def parse_device_name(text: object, existing: tuple[str, ...] = ()) -> DeviceName:
    """Reads one spelling of a device.

    Arguments:
        text: What the user wrote.
        existing: Names of the devices that exist, for the error message.

    Raises:
        DeviceNameError: `text` does not spell a device.
        UnknownDeviceError: It spells a device of another process.

    >>> str(parse_device_name("gpu:1"))
    '/device:GPU:1'
    >>> str(parse_device_name("/job:localhost/replica:0/task:0/device:CPU:0"))
    '/device:CPU:0'
    >>> parse_device_name("cpu").index is None
    True
    """
    match = _SPELLING.fullmatch(text) if isinstance(text, str) else None
    if match is None or match["kind"].upper() not in KINDS:
        raise DeviceNameError(
            f"{text!r} (a {type(text).__name__}) is not the name of a device.",
            "A name is a kind and an index, as in 'GPU:0', 'gpu:0', '/GPU:0', "
            f"'/device:GPU:0' or 'cpu'; the kinds are {', '.join(KINDS)}.",
            _use_one_of(existing),
        )
    if match["process"] and not _is_this_process(match):
        raise UnknownDeviceError(
            f"{text} unknown device.",
            "Only devices of this process can be named: "
            "/job:localhost/replica:0/task:0.",
            _use_one_of(existing),
        )
    index = match["index"]
    return DeviceName(
        kind=match["kind"].upper(),
        index=None if index in (None, "*") else int(index),
    )


def parse_kind(text: str) -> str:
    """Reads a kind of device in either case.

    >>> parse_kind("gpu")
    'GPU'
    """
    if isinstance(text, str) and text.upper() in KINDS:
        return text.upper()
    raise DeviceNameError(
        f"{text!r} (a {type(text).__name__}) is not a kind of device.",
        f"The kinds are {', '.join(KINDS)}, in either case.",
        "Leave it out to list every device.",
    )


def _is_this_process(match: re.Match[str]) -> bool:
    at_home = match["job"].lower() == "localhost"
    return at_home and not int(match["replica"] or 0) and not int(match["task"] or 0)


def _use_one_of(existing: tuple[str, ...]) -> str:
    return f"Use one of: {', '.join(existing)}." if existing else "Use 'CPU:0'."
