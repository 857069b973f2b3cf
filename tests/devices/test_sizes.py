"""Bytes in words."""

from meshwright.devices.sizes import format_bytes, parse_bytes
from meshwright.errors import ConfigurationError

import pytest


@pytest.mark.parametrize(
    ("size", "number"),
    [
        (1, 1),
        (2**40, 2**40),
        ("24MiB", 24 * 2**20),
        ("24 mib", 24 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("100", 100),
        ("7B", 7),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_read(size: int | str, number: int) -> None:
    assert parse_bytes(size, "memory_limit") == number


@pytest.mark.parametrize(
    "size", [0, -1, "0GiB", "much", "1 XB", "-5MiB", 1.5, True, "", "0.1B"]
)
def test_anything_else_shows_what_came(size: int | str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(size, "memory_limit")
    received, rule, change = str(caught.value).split("\n")
    assert received == f"memory_limit received {size!r} (a {type(size).__name__})."
    assert "whole number of bytes above zero" in rule
    assert change == "Write, for example, memory_limit='24MiB'."


def test_sizes_are_written_as_people_read_them() -> None:
    sizes = [0, 1023, 1024, 2**20, 3 * 2**29, 5 * 2**40]
    written = ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.5 GiB", "5.0 TiB"]
    assert [format_bytes(size) for size in sizes] == written
