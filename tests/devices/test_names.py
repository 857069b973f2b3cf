"""The spellings of devices."""

from meshwright.devices.names import parse_device_name, parse_kind
from meshwright.errors import DeviceNameError, UnknownDeviceError

import pytest

SPELLINGS = [
    ("/device:GPU:0", "/device:GPU:0"),
    ("GPU:0", "/device:GPU:0"),
    ("gpu:0", "/device:GPU:0"),
    ("/GPU:0", "/device:GPU:0"),
    ("/gpu:12", "/device:GPU:12"),
    ("/device:gpu:1", "/device:GPU:1"),
    ("/job:localhost/replica:0/task:0/device:GPU:0", "/device:GPU:0"),
    ("/job:localhost/device:CPU:1", "/device:CPU:1"),
    ("tpu:3", "/device:TPU:3"),
    ("cpu", "/device:CPU:*"),
    ("/CPU", "/device:CPU:*"),
    ("GPU:*", "/device:GPU:*"),
]


@pytest.mark.parametrize(("text", "name"), SPELLINGS)
def test_every_spelling_of_tensorflow_is_read(text: str, name: str) -> None:
    assert str(parse_device_name(text)) == name


@pytest.mark.parametrize(
    "text",
    [
        *("foo", "gpu0", "GPU:-1", "GPU:0:1", "/device:FOO:0", "GPU:1.5", " GPU:0", ""),
        *(3, None, ["GPU:0"], "GPU:99999999", "/job:localhost", print),
    ],
)
def test_anything_else_shows_what_came_and_what_exists(text: object) -> None:
    with pytest.raises(DeviceNameError) as caught:
        parse_device_name(text, ("/device:CPU:0", "/device:GPU:0"))
    received, rule, change = str(caught.value).split("\n")
    assert (
        received == f"{text!r} (a {type(text).__name__}) is not the name of a device."
    )
    assert "'GPU:0'" in rule
    assert change == "Use one of: /device:CPU:0, /device:GPU:0."


@pytest.mark.parametrize(
    "text",
    [
        "/job:worker/replica:0/task:7/device:CPU:0",
        "/job:localhost/replica:0/task:1/device:CPU:0",
        "/job:localhost/replica:2/task:0/device:CPU:0",
    ],
)
def test_devices_of_other_processes_are_unknown(text: str) -> None:
    with pytest.raises(UnknownDeviceError, match="unknown device") as caught:
        parse_device_name(text, ("/device:CPU:0",))
    assert str(caught.value).split("\n") == [
        f"{text} unknown device.",
        "Only devices of this process can be named: /job:localhost/replica:0/task:0.",
        "Use one of: /device:CPU:0.",
    ]


def test_kinds_are_read_in_either_case() -> None:
    assert [parse_kind(k) for k in ("cpu", "GPU", "Tpu")] == ["CPU", "GPU", "TPU"]


@pytest.mark.parametrize("kind", ["FOO", "", "GPU:0", 3])
def test_an_unknown_kind_is_an_error_not_an_empty_list(kind: str) -> None:
    with pytest.raises(DeviceNameError) as caught:
        parse_kind(kind)
    assert str(caught.value).split("\n") == [
        f"{kind!r} (a {type(kind).__name__}) is not a kind of device.",
        "The kinds are CPU, GPU, TPU, in either case.",
        "Leave it out to list every device.",
    ]
