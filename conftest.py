"""Eight CPU devices, one compile cache, and clean settings, for tests and doctests."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for variable in [*os.environ]:
    if variable.startswith("MESHWRIGHT_") or variable == "KERAS_BACKEND":
        del os.environ[variable]
# The process that starts workers of these tests has JAX, which sets it.
os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
# Workers of these tests inherit the width of a terminal that there is none of.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)
# Who runs the tests in the background makes all that they start ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Compiling is most of what the tests do; what is compiled runs for milliseconds.
IN_HASTE = ["--xla_backend_optimization_level=0"]
IN_HASTE += ["--xla_cpu_parallel_codegen_split_count=1"]
FUSED_FOR_USERS: dict[str, bool] = {}
"""Options of a compilation whose kernels are those that users get."""
if version("jaxlib").startswith("0.10."):
    # The older of two emitters of loops, in a fourth of the time. Newer XLA has one
    # only, and ends at flags that it does not know.
    IN_HASTE += ["--xla_cpu_use_fusion_emitters=false"]
    FUSED_FOR_USERS = {"xla_cpu_use_fusion_emitters": True}
os.environ.setdefault("XLA_FLAGS", " ".join(IN_HASTE))
os.environ["XDG_CONFIG_HOME"] = str(ROOT / ".cache" / "no-configuration")

import meshwright as mw  # noqa: E402
from meshwright.devices.settings import current_settings, keep_settings  # noqa: E402

import jax  # noqa: E402

mw.configure(virtual=8)

Run = Callable[..., "subprocess.CompletedProcess[str]"]

collect_ignore = ["tests/launch/trained.py", "tests/train/checkpoint_worker.py"]
"""Scripts that tests run; to look for doctests in them would run them here."""

OF_TESTS = ("KERAS_BACKEND", "JAX_PLATFORMS", "CUDA_DEVICE_ORDER", "XLA_FLAGS")
"""What scripts of their own do not inherit: they run as users run them."""


def leave_old_objects_alone() -> None:
    """Keeps Python from looking through all that stays, such as what JAX has traced.

    Looking for garbage among it took half of the time of the whole suite.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Leaves alone what was imported, and looks for garbage when there may be some.

    To trace a step makes thousands of objects that stay for as long as it does.
    """
    gc.set_threshold(50_000, 10, 10)
    leave_old_objects_alone()


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_left_alone() -> Iterator[None]:
    """Does so after each module."""
    yield
    leave_old_objects_alone()


@pytest.fixture(autouse=True)
def clean_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Undoes what a test set that needs no restart of the runtime."""
    if "meshwright.tf.manners" in sys.modules:
        # What the façade teaches Keras is for its own tests only.
        is_of_facade = "tf" in request.path.parent.relative_to(ROOT).parts
        sys.modules["meshwright.tf.manners"].mind_manners(is_of_facade)
    before = current_settings()
    yield
    keep_settings(before)
    mw.set_soft_placement(True)
    mw.set_placement_log(False)


@pytest.fixture(scope="module")
def small_programs_are_cached() -> Iterator[None]:
    """Keeps programs that JAX finds too small, for tests that share many of them."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)


@pytest.fixture
def run_script(tmp_path: Path) -> Run:
    """Runs Python source as a script of its own, in a process of its own."""

    def run(
        source: str, *, status: int = 0, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        script = tmp_path / "script.py"
        script.write_text(source)
        base = {k: v for k, v in os.environ.items() if k not in OF_TESTS}
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            env={**base, **environment},
            cwd=tmp_path,
            timeout=200,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run
