"""With what a run was begun: what its `config.json` holds."""

import os
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from typing import Any

from meshwright.cluster.redaction import redact_arguments, redact_environment

_VERSIONS = ("meshwright", "keras", "jax", "jaxlib", "numpy", "orbax-checkpoint")


def run_config(script: str, arguments: Sequence[str], began: float) -> dict[str, Any]:
    """Script, arguments, environment and versions, without secrets.

    Arguments:
        script: The script.
        arguments: Its own.
        began: When it began, in seconds since the epoch.
    """
    return {
        "script": script,
        "arguments": redact_arguments(arguments),
        "environment": redact_environment(os.environ),
        "began": moment(began),
        "versions": {name: _version(name) for name in _VERSIONS},
    }


def moment(seconds: float) -> str:
    """A time as people and programs read it."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
