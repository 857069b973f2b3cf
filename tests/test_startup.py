"""What `import meshwright` does to Keras and to the environment."""

from conftest import Run


def test_keras_runs_on_jax_without_being_told(run_script: Run) -> None:
    run_script("import meshwright, keras\nassert keras.config.backend() == 'jax'\n")


def test_keras_that_is_loaded_on_jax_is_welcome(run_script: Run) -> None:
    run_script("import keras, meshwright\n", KERAS_BACKEND="jax")


def test_another_backend_in_the_environment_is_replaced_with_a_warning(
    run_script: Run,
) -> None:
    done = run_script(
        "import meshwright, keras\nassert keras.config.backend() == 'jax'\n",
        KERAS_BACKEND="torch",
    )
    assert "script.py:1: MeshwrightWarning: KERAS_BACKEND=torch was set" in done.stderr
    assert "Set KERAS_BACKEND=jax to silence this." in done.stderr


def test_keras_that_is_loaded_on_another_backend_is_an_error(run_script: Run) -> None:
    done = run_script(
        "import sys, types\n"
        "keras = types.ModuleType('keras')\n"
        "keras.config = types.SimpleNamespace(backend=lambda: 'tensorflow')\n"
        "sys.modules['keras'] = keras\n"
        "try:\n"
        "    import meshwright\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__)\n"
        "    print(error)\n"
    )
    assert done.stdout.splitlines() == [
        "BackendError",
        "Keras is already loaded with the backend 'tensorflow'.",
        "Meshwright runs Keras on JAX, and a backend cannot change once loaded.",
        "Import meshwright before keras, or set KERAS_BACKEND=jax.",
    ]


def test_a_script_is_stopped_by_an_environment_that_cannot_be(run_script: Run) -> None:
    done = run_script("import meshwright\n", status=1, MESHWRIGHT_VIRTUAL="bogus")
    assert "ConfigurationError: MESHWRIGHT_VIRTUAL received 'bogus'" in done.stderr


def test_gpus_are_numbered_as_the_driver_does(run_script: Run) -> None:
    run_script(
        "import os, meshwright\n"
        "assert os.environ['CUDA_DEVICE_ORDER'] == 'PCI_BUS_ID'\n"
    )
