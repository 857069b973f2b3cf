"""The versions of the packages that a checkpoint is written with."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata

_PACKAGES = ("meshwright", "keras", "jax", "jaxlib", "orbax-checkpoint", "numpy")


@cache
def versions() -> Mapping[str, str]:
    """Those that are installed here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def differences(written: Mapping[str, str]) -> str:
    """How the versions here differ from others, in words; empty if they do not.

    >>> differences({**versions(), "jax": "0.9"})
    'jax 0.9 (here ...)'
    """
    here = versions()
    return ", ".join(
        f"{name} {version} (here {here[name]})"
        for name, version in sorted(written.items())
        if name in here and here[name] != version
    )
