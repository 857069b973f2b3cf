"""What is not covered, and how Meshwright does it."""

from collections.abc import Callable, Mapping
from typing import Any

_COVERED = "docs/tf.md of Meshwright says what is covered."


def refuse(module: str, ways: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a module or class of the façade.

    Arguments:
        module: What users call it, as in `tf.config`.
        ways: By the name of what is not covered: what to use instead.

    >>> refuse("tf", {"Session": "call functions directly"})("Session")
    Traceback (most recent call last):
        ...
    AttributeError: tf.Session is not covered by meshwright.tf. In Meshwright: call ...
    """

    def raise_absent(name: str) -> Any:
        way = ways.get(name)
        hint = f" In Meshwright: {way}." if way else ""
        raise AttributeError(
            f"{module}.{name} is not covered by meshwright.tf.{hint} {_COVERED}"
        )

    return raise_absent
