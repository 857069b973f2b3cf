"""What `import meshwright` does besides naming things; it starts no device."""

import os
import sys
import warnings

from meshwright.devices.configuration import configure_from_environment
from meshwright.devices.start import watch_start
from meshwright.errors import BackendError, MeshwrightWarning

_VARIABLE = "KERAS_BACKEND"


def start_up() -> None:
    """Selects Keras' JAX backend, and readies the devices' configuration."""
    _select_jax_backend()
    watch_start()
    configure_from_environment()


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
