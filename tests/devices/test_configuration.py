"""`mw.configure`: what it takes, when it takes effect, what it says if it cannot."""

from pathlib import Path

import meshwright as mw
from meshwright.devices.settings import settings_from_environment
from meshwright.errors import ConfigurationError, LateConfigurationError

import jax
import pytest

from conftest import Run

FAKES = str(Path(__file__).parents[1] / "fakes")

NAMES = "print(*[d.name for d in mw.devices()])\n"


@pytest.mark.parametrize(
    ("virtual", "names"),
    [
        ("4", [f"CPU:{i}" for i in range(4)]),
        ("'CPU:2'", ["CPU:0", "CPU:1"]),
        ("'3'", ["CPU:0", "CPU:1", "CPU:2"]),
        ("'GPU:2'", ["GPU:0", "GPU:1", "CPU:0"]),
    ],
)
def test_virtual_devices_exist_in_jax_under_our_names(
    virtual: str, names: list[str], run_script: Run
) -> None:
    done = run_script(
        "import meshwright as mw\n"
        f"mw.configure(virtual={virtual})\n" + NAMES + "import jax\n"
        "print(len(jax.devices()))\n"
        "for d in mw.devices():\n"
        "    with mw.device(d) as name: print(name)\n"
    )
    full = [f"/device:{name}" for name in names]
    listed, count, *entered = done.stdout.splitlines()
    assert listed.split() == full
    assert int(count) == len(full)
    assert entered == full


@pytest.mark.parametrize(
    ("variable", "names"),
    [("GPU:2", "GPU:0 GPU:1 CPU:0"), ("CPU:2", "CPU:0 CPU:1"), ("2", "CPU:0 CPU:1")],
)
def test_the_environment_variable_does_the_same(
    variable: str, names: str, run_script: Run
) -> None:
    done = run_script("import meshwright as mw\n" + NAMES, MESHWRIGHT_VIRTUAL=variable)
    assert done.stdout.replace("/device:", "").strip() == names


def test_a_bad_environment_variable_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^MESHWRIGHT_VIRTUAL received 'four'"
    ):
        settings_from_environment({"MESHWRIGHT_VIRTUAL": "four"})


def test_work_without_a_scope_goes_to_the_first_stand_in_gpu(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "mw.configure(virtual='GPU:2')\n"
        "import jax.numpy as jnp\n"
        "from meshwright.devices.runtime import names_of\n"
        "print(*names_of(jnp.ones(3).sharding))\n"
    )
    assert done.stdout == "/device:GPU:0\n"


def test_stand_ins_take_the_place_of_real_gpus_with_a_warning(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "mw.configure(virtual='GPU:3')\n" + NAMES + "import jax\n"
        "print(jax.config.jax_platforms)\n",
        PYTHONPATH=FAKES,
        CUDA_VISIBLE_DEVICES="0,1,2,3",
    )
    assert (
        "script.py:2: PlacementWarning: virtual='GPU:3' replaces the real GPUs of "
        in (done.stderr)
    )
    assert (
        "(NVIDIA H200, NVIDIA H200, NVIDIA L4, NVIDIA L4) by stand-ins" in done.stderr
    )
    assert (
        done.stdout == "/device:GPU:0 /device:GPU:1 /device:GPU:2 /device:CPU:0\ncpu\n"
    )


def test_visible_growth_and_limit_reach_cuda_together(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "from jax._src import xla_bridge\n"
        "import jax\n"
        "def show():\n"
        "    print(xla_bridge.CUDA_VISIBLE_DEVICES.value, jax.config.jax_platforms,\n"
        "          jax.config.jax_pjrt_client_create_options)\n"
        "mw.configure(visible=['GPU:1', 'GPU:2'], memory_limit='15GiB',"
        " memory_growth=True)\n"
        "show()\n"
        "mw.configure(memory_growth=False)\n"
        "show()\n"
        "mw.configure(visible=[])\n"
        "show()\n"
        "mw.configure(visible='GPU')\n"
        "show()\n",
        PYTHONPATH=FAKES,
        CUDA_VISIBLE_DEVICES="0,1,2,3",
    )
    # 15 GiB of the larger card's 150 GiB: no card may take more than the limit.
    assert done.stdout.splitlines() == [
        "1,2 None {'memory_fraction': 0.1, 'preallocate': False}",
        "1,2 None {'memory_fraction': 0.1, 'preallocate': True}",
        "all cpu None",
        "0,1,2,3 None {'memory_fraction': 0.1, 'preallocate': True}",
    ]


def test_other_options_of_the_gpu_client_are_kept(run_script: Run) -> None:
    done = run_script(
        "import jax\n"
        "import meshwright as mw\n"
        "jax.config.update('jax_pjrt_client_create_options', 'a:b;c:d')\n"
        "mw.configure(memory_growth=True)\n"
        "print(jax.config.jax_pjrt_client_create_options)\n",
        PYTHONPATH=FAKES,
        CUDA_VISIBLE_DEVICES="0,1,2,3",
    )
    assert done.stdout == "{'a': 'b', 'c': 'd', 'preallocate': False}\n"


def test_visible_twice_means_the_same_devices_twice(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "mw.configure(virtual=4)\n"
        "mw.configure(visible=['CPU:2', 'CPU:3'])\n"
        "mw.configure(visible=['CPU:2', 'CPU:3'])\n"
        + NAMES
        + "import jax; print(len(jax.devices()))\n"
        "mw.configure(visible=['CPU:2', 'CPU:3'])\n"
    )
    assert done.stdout == "/device:CPU:0 /device:CPU:1\n2\n"


def test_visible_restricts_devices_that_jax_made_itself(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "mw.configure(visible=['CPU:1', 'CPU:2'])\n"
        "import jax, jax.numpy as jnp\n"
        "kept = jnp.ones(3)\n"
        "mw.configure(visible=['CPU:1', 'CPU:2'])\n"
        "print(len(mw.devices()), len(jax.devices()))\n",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert done.stdout == "2 2\n"


def test_it_takes_effect_after_the_start_while_nothing_lives(run_script: Run) -> None:
    done = run_script(
        "import jax, jax.numpy as jnp\n"
        "import meshwright as mw\n"
        "(jnp.ones(3) + 1).block_until_ready()\n"
        "mw.configure(virtual='GPU:2')\n" + NAMES + "print(len(jax.devices()))\n"
        "with mw.device('GPU:1'): print(jnp.ones(3).devices())\n"
        "mw.configure(virtual=4)\n" + NAMES + "print(jax.jit(lambda x: x + 1)(1))\n"
    )
    assert done.stdout.splitlines() == [
        "/device:GPU:0 /device:GPU:1 /device:CPU:0",
        "3",
        "{CpuDevice(id=1)}",
        "/device:CPU:0 /device:CPU:1 /device:CPU:2 /device:CPU:3",
        "2",
    ]


def test_it_names_the_line_that_started_the_runtime_when_it_is_too_late(
    run_script: Run,
) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "import jax.numpy as jnp\n"
        "def prepare():\n"
        "    return jnp.ones((2, 3))\n"
        "kept = prepare()\n"
        "try:\n"
        "    mw.configure(virtual=4)\n"
        "except mw.errors.LateConfigurationError as error:\n"
        "    assert isinstance(error, RuntimeError)\n"
        "    print(error)\n"
        "print(len(mw.devices()), kept.sum())\n"
    )
    received, rule, change, unharmed = done.stdout.splitlines()
    assert received.startswith("configure(virtual=4) came after ")
    assert "script.py:4 had started the runtime, and 1 array lives" in received
    assert "float32[2, 3], 24 B" in received
    assert rule == (
        "Devices can be configured before the runtime starts, or while nothing lives "
        "on them."
    )
    assert change.startswith("Move configure(virtual=4) before ")
    assert "script.py:4, or delete these arrays first" in change
    assert unharmed == "1 6.0"


def test_a_start_through_keras_or_meshwright_is_blamed_on_the_user_s_line(
    run_script: Run,
) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "import keras\n"
        "layer = keras.layers.Dense(3)\n"
        "layer.build((None, 2))\n"
        "try:\n"
        "    mw.configure(virtual=4)\n"
        "except mw.errors.LateConfigurationError as error:\n"
        "    print(error)\n"
    )
    assert "script.py:4 had started the runtime" in done.stdout


def test_each_start_has_its_own_line(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "import jax.numpy as jnp\n"
        "jnp.ones(3)\n"
        "mw.configure(virtual=4)\n"
        "kept = [jnp.ones(3)]\n"
        "kept.append(kept)\n"
        "try:\n"
        "    mw.configure(virtual=2)\n"
        "except mw.errors.LateConfigurationError as error:\n"
        "    print(error)\n"
        "del kept\n"
        "mw.configure(virtual=2)\n" + NAMES
    )
    assert "script.py:5 had started the runtime" in done.stdout
    assert done.stdout.endswith("/device:CPU:0 /device:CPU:1\n"), "cycles are collected"


def test_a_start_before_the_import_is_said_to_be_one(run_script: Run) -> None:
    done = run_script(
        "import jax.numpy as jnp\n"
        "kept = jnp.ones(3)\n"
        "import meshwright as mw\n"
        "try:\n"
        "    mw.configure(virtual=4)\n"
        "except mw.errors.LateConfigurationError as error:\n"
        "    print(error)\n"
    )
    assert "came after a line that ran before `import meshwright` had started" in (
        done.stdout
    )


def test_several_processes_cannot_be_reconfigured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jax.devices()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(LateConfigurationError) as caught:
        mw.configure(virtual=3)
    received, _, change = str(caught.value).split("\n")
    assert "had started a runtime of several processes." in received
    assert change.startswith("Move configure(virtual=3) before ")


def test_the_identical_value_is_always_fine() -> None:
    kept = jax.numpy.ones(3)
    mw.configure(virtual=8)
    mw.configure(virtual="CPU:8")
    mw.configure()
    assert kept.sum() == 3


def test_a_count_that_jax_already_has_is_identical(run_script: Run) -> None:
    run_script(
        "import jax.numpy as jnp\n"
        "import meshwright as mw\n"
        "kept = jnp.ones(3)\n"
        "mw.configure(virtual=3)\n",
        XLA_FLAGS="--xla_force_host_platform_device_count=3",
    )


def test_a_limit_on_cpus_takes_effect_at_any_time() -> None:
    kept = jax.numpy.ones(3)
    mw.configure(memory_limit="1GiB")
    assert {d.memory_limit for d in mw.devices()} == {2**30}
    mw.configure(memory_growth=True)
    assert {d.memory_limit for d in mw.devices()} == {2**30}
    assert kept.sum() == 3


@pytest.mark.parametrize(
    "virtual", [0, -1, 1025, "GPU", "TPU:4", "GPU:0", "", 2.0, True, "x"]
)
def test_bad_counts_are_refused(virtual: int | str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        mw.configure(virtual=virtual)
    assert str(caught.value).split("\n") == [
        f"virtual received {virtual!r} (a {type(virtual).__name__}).",
        "It takes a count from 1 to 1024, or a text with a kind: '8' and 'CPU:8' make "
        "eight devices of the CPU, 'GPU:4' makes four stand-in GPUs.",
        "Write, for example, virtual='GPU:4'.",
    ]


@pytest.mark.parametrize("visible", [3, [3], {"GPU:0": 1}])
def test_bad_visible_values_are_refused(visible: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        mw.configure(visible=visible)  # type: ignore[arg-type]
    assert str(caught.value).split("\n") == [
        f"visible received {visible!r} (a {type(visible).__name__}).",
        "It takes names or kinds of devices: one, or a list of them.",
        "Write, for example, visible=['GPU:0', 'GPU:1'] or visible='CPU'.",
    ]


def test_growth_is_true_or_false() -> None:
    with pytest.raises(ConfigurationError) as caught:
        mw.configure(memory_growth="yes")  # type: ignore[arg-type]
    assert str(caught.value).split("\n") == [
        "memory_growth received 'yes' (a str).",
        "It takes True (GPU memory is taken as needed) or False (at once).",
        "Write memory_growth=True.",
    ]


def test_a_refused_value_changes_nothing() -> None:
    before = mw.devices()
    with pytest.raises(ConfigurationError):
        mw.configure(memory_limit="1GiB", visible=["GPU:9"])
    assert mw.devices() == before
