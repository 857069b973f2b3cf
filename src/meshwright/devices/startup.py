"""What `import meshwright` does besides naming things; it starts no device."""

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from meshwright.devices.compile_cache import start_compile_cache
from meshwright.devices.settings import (
    ENVIRONMENT_VARIABLE,
    keep_settings,
    settings_from_environment,
)
from meshwright.devices.start import watch_start
from meshwright.errors import BackendError, MeshwrightError, MeshwrightWarning

_VARIABLE = "KERAS_BACKEND"


def start_up() -> None:
    """Selects Keras' JAX backend, and readies the devices' configuration."""
    try:
        _select_jax_backend()
        watch_start()
        _configure_from_environment()
    except MeshwrightError as error:
        if not _is_command_line():
            raise
        _Held.error = error


class _Held:
    error: MeshwrightError | None = None


def raise_held_error() -> None:
    """Raises what went wrong at import, if the command line was to be told of it."""
    if _Held.error is not None:
        raise _Held.error


def _is_command_line() -> bool:
    """Whether `meshwright` runs, which is imported before it can show an error."""
    return (
        Path(sys.argv[0]).stem == "meshwright" or "meshwright.cli.main" in sys.orig_argv
    )


def _configure_from_environment() -> None:
    # CUDA numbers the fastest GPU first by default, NVML goes by the bus; names must
    # mean the same GPU to both.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    settings = start_compile_cache(settings_from_environment(os.environ))
    keep_settings(replace(settings, virtual=None))
    if settings.virtual is not None:
        # Devices need more of the house than an import should load.
        from meshwright.devices.configuration import apply

        apply(settings, ENVIRONMENT_VARIABLE)


def _select_jax_backend() -> None:
    keras = sys.modules.get("keras")
    if keras is not None:
        _check_loaded_backend(keras.config.backend())
        return
    asked = os.environ.get(_VARIABLE, "jax")
    os.environ[_VARIABLE] = "jax"
    if asked != "jax":
        warnings.warn(
            f"{_VARIABLE}={asked} was set, and Meshwright runs Keras on JAX: it is "
            f"'jax' for this process now. Set {_VARIABLE}=jax to silence this.",
            MeshwrightWarning,
            stacklevel=4,
        )


def _check_loaded_backend(backend: str) -> None:
    if backend != "jax":
        raise BackendError(
            f"Keras is already loaded with the backend {backend!r}.",
            "Meshwright runs Keras on JAX, and a backend cannot change once loaded.",
            f"Import meshwright before keras, or set {_VARIABLE}=jax.",
        )
