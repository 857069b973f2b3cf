"""Numbers of bytes, in and out of words."""

import re
from decimal import Decimal
from numbers import Integral

from meshwright.errors import ConfigurationError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", start=1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def is_count(value: object) -> bool:
    """Whether a value is a whole number, NumPy's included; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def parse_bytes(size: int | str, what: str) -> int:
    """Reads a size given as a number of bytes or as a text with a unit.

    Arguments:
        size: A whole number above zero, or a text such as `'24MiB'` or `'1.5 GB'`.
        what: The name of the setting, for the error message.

    >>> parse_bytes("24MiB", "memory_limit")
    25165824
    >>> parse_bytes("1.5 GB", "memory_limit")
    1500000000
    """
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        unit = _UNITS.get(match[2].upper())
        number = int(Decimal(match[1]) * unit) if unit else 0
    else:
        number = int(size) if is_count(size) else 0
    if number < 1:
        raise ConfigurationError(
            f"{what} received {size!r} (a {type(size).__name__}).",
            "A size is a whole number of bytes above zero, or a text with a unit: B, "
            "KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024).",
            f"Write, for example, {what}='24MiB'.",
        )
    return number


def format_bytes(number: int) -> str:
    """Writes a number of bytes as people read it.

    >>> format_bytes(25165824), format_bytes(1536), format_bytes(12)
    ('24.0 MiB', '1.5 KiB', '12 B')
    """
    if number < 1024:
        return f"{number} B"
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
