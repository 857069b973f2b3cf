"""The compile cache: where it lies, what it holds, what happens if it cannot be."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import meshwright as mw
from meshwright.devices import compile_cache
from meshwright.devices.compile_cache import (
    current_compile_cache,
    default_folder,
    entries_of,
    sweep,
    use_compile_cache,
)
from meshwright.devices.settings import Settings, settings_from_environment
from meshwright.errors import CompileCacheWarning, ConfigurationError
from meshwright.launch.loopback import all_reduce_over_loopback

import jax
import pytest

from conftest import Run

COUNTING = """
import collections
import meshwright as mw
import jax
counts = collections.Counter()
def count(event, **_): counts[event.rsplit("/")[-1]] += 1
jax.monitoring.register_event_listener(count)
"""

# Donated arguments, shardings over eight devices, a callback, and what Keras compiles.
TRAINING = (
    COUNTING
    + """
import hashlib
import keras
import numpy as np
mw.configure(virtual=8)
keras.utils.set_random_seed(1)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)]
)
model.compile(optimizer="adam", loss="mse")
mw.distribute(model, mw.FSDP())
rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 8)), rng.normal(size=(64, 4))
model.fit(x, y, epochs=2, verbose=0)
digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.variables))
called = []
def note(value):
    called.append(float(value))
jax.jit(lambda v: jax.debug.callback(note, v.sum()))(np.ones(3, np.float32))
jax.effects_barrier()
print(digest.hexdigest(), *called)
print(counts["cache_misses"] > 0, counts["cache_hits"] > 0)
"""
)

SMALL = (
    COUNTING
    + """
for n in range(1, 13):
    print(float(jax.jit(lambda x: (x @ x.T).sum())(jax.numpy.ones((n, 3)))))
"""
)


@pytest.fixture
def own_cache() -> Iterator[None]:
    """Gives the tests' own cache back after a test that set up another."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    in_force = compile_cache._State.cache
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compile_cache._State.cache = in_force
    compile_cache._State.has_written = False
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def elsewhere(folder: Path) -> dict[str, str]:
    """An environment with a home of its own, as that of somebody who set nothing."""
    return {"JAX_COMPILATION_CACHE_DIR": "", "XDG_CACHE_HOME": str(folder)}


@pytest.mark.processes
def test_the_second_start_loads_what_the_first_compiled_and_computes_the_same_bits(
    run_script: Run, tmp_path: Path
) -> None:
    off = run_script(
        TRAINING, MESHWRIGHT_COMPILE_CACHE="off", **elsewhere(tmp_path / "off")
    )
    cold, warm = (run_script(TRAINING, **elsewhere(tmp_path)) for _ in range(2))
    assert off.stdout.splitlines()[1] == "False False"
    assert cold.stdout.splitlines()[1].startswith("True ")
    assert warm.stdout.splitlines()[1] == "False True"
    assert not (tmp_path / "off").exists()
    results = {run.stdout.splitlines()[0] for run in (off, cold, warm)}
    assert len(results) == 1
    assert results.pop().endswith(" 3.0"), "the callback of a cached program is called"
    # Messages of the compiler's own go to standard error as well.
    assert [run.stderr for run in (cold, warm)] == ["", ""]
    assert entries_of(tmp_path / "meshwright" / "compiled")


@pytest.mark.processes
def test_several_processes_share_one_folder(tmp_path: Path) -> None:
    environment = {**os.environ, **elsewhere(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", SMALL]
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [worker.communicate(timeout=200)[0] for worker in workers]
    expected = "".join(f"{3.0 * n * n}\n" for n in range(1, 13))
    assert said == [expected] * 3
    after = subprocess.run(
        [sys.executable, "-c", SMALL + "print(counts['cache_misses'])"],
        env={**environment, "JAX_RAISE_PERSISTENT_CACHE_ERRORS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert after.stdout == expected + "0\n", "every entry is whole"
    assert after.stderr == ""


@pytest.mark.processes
def test_the_processes_of_one_run_share_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in elsewhere(tmp_path).items():
        monkeypatch.setenv(name, value)
    first, second = all_reduce_over_loopback(), all_reduce_over_loopback()
    assert (first.detail, second.detail) == ("2 processes agree on 3",) * 2
    assert entries_of(tmp_path / "meshwright" / "compiled")


def test_an_import_starts_no_device_and_loads_nothing_for_the_cache(
    run_script: Run, tmp_path: Path
) -> None:
    run_script(
        "import sys, jax\n"
        "before = set(sys.modules)\n"
        "import meshwright\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "assert new == {'meshwright'}, new\n"
        "print(jax.config.jax_compilation_cache_dir)\n",
        **elsewhere(tmp_path),
    )
    folder = tmp_path / "meshwright" / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700, "only this user may put code there"


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_folder_that_jax_was_told_of_stays(
    by_variable: bool, run_script: Run, tmp_path: Path
) -> None:
    theirs = str(tmp_path / "theirs")
    told = f"jax.config.update('jax_compilation_cache_dir', {theirs!r})\n"
    done = run_script(
        "import jax\n" + ("" if by_variable else told) + "import meshwright as mw\n"
        "mw.configure(memory_limit='1GiB')\n"
        "print(jax.config.jax_compilation_cache_dir)\n"
        "print(jax.config.jax_persistent_cache_min_compile_time_secs)\n",
        MESHWRIGHT_COMPILE_CACHE=str(tmp_path / "ours"),
        JAX_COMPILATION_CACHE_DIR=theirs if by_variable else "",
    )
    assert done.stdout.splitlines() == [theirs, "1.0"]
    assert not (tmp_path / "ours").exists()


def test_a_cache_that_jax_was_told_to_leave_off_stays_off_until_it_is_asked_for(
    run_script: Run, tmp_path: Path
) -> None:
    script = "import jax\nimport meshwright as mw\n{}\njax.jit(lambda x: x + 1)(1)\n"
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "0", **elsewhere(tmp_path / "none")}
    run_script(script.format(""), **environment)
    assert not (tmp_path / "none").exists()
    asked = tmp_path / "asked"
    run_script(
        script.format(f"mw.configure(compile_cache={str(asked)!r})"), **environment
    )
    assert entries_of(asked), "whoever asks Meshwright for it has it"


def test_small_programs_are_kept_unless_jax_was_told_otherwise(
    run_script: Run, tmp_path: Path
) -> None:
    script = (
        "import jax, meshwright\n"
        "print(jax.config.jax_persistent_cache_min_compile_time_secs)\n"
    )
    done = run_script(script, **elsewhere(tmp_path))
    assert done.stdout == "0.0\n"
    done = run_script(
        script, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="1", **elsewhere(tmp_path)
    )
    assert done.stdout == "1.0\n"


@pytest.mark.usefixtures("own_cache")
def test_the_folder_can_change_at_any_time(tmp_path: Path) -> None:
    def compile_something(size: int) -> None:
        jax.jit(lambda x: x * 3 + size)(jax.numpy.ones(size)).block_until_ready()

    first, second = tmp_path / "first", tmp_path / "second"
    mw.configure(compile_cache=first)
    compile_something(3)
    num_first = len(entries_of(first))
    assert num_first > 0
    mw.configure(compile_cache=str(second))
    compile_something(5)
    assert len(entries_of(first)) == num_first
    num_second = len(entries_of(second))
    assert num_second > 0
    mw.configure(compile_cache="off")
    compile_something(7)
    assert len(entries_of(second)) == num_second
    assert current_compile_cache().folder is None


@pytest.mark.usefixtures("own_cache")
def test_the_default_can_be_had_back_with_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mw.configure(compile_cache="off")
    mw.configure(compile_cache="on")
    assert current_compile_cache().folder == tmp_path / "meshwright" / "compiled"
    assert current_compile_cache().size == 2 * 2**30
    mw.configure(compile_cache_size="3MiB")
    assert current_compile_cache().size == 3 * 2**20


@pytest.mark.usefixtures("own_cache")
def test_a_bound_of_jax_s_own_is_left_to_jax(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_max_size", 1000)
    try:
        mw.configure(compile_cache=tmp_path)
        assert current_compile_cache().size is None
    finally:
        jax.config.update("jax_compilation_cache_max_size", -1)


def test_what_the_environment_asks_for_is_read() -> None:
    settings = settings_from_environment(
        {
            "MESHWRIGHT_COMPILE_CACHE": "~/programs",
            "MESHWRIGHT_COMPILE_CACHE_SIZE": "5 MB",
        }
    )
    assert settings == Settings(
        compile_cache=str(Path.home() / "programs"), compile_cache_size=5_000_000
    )
    off = settings_from_environment({"MESHWRIGHT_COMPILE_CACHE": "off"})
    assert off == Settings(compile_cache="off")
    with pytest.raises(
        ConfigurationError, match=r"^MESHWRIGHT_COMPILE_CACHE_SIZE received 'huge'"
    ):
        settings_from_environment({"MESHWRIGHT_COMPILE_CACHE_SIZE": "huge"})


@pytest.mark.parametrize("value", [3, True, "", ["a"]])
def test_bad_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        mw.configure(compile_cache=value)  # type: ignore[arg-type]
    assert str(caught.value).split("\n") == [
        f"compile_cache received {value!r} (a {type(value).__name__}).",
        "It takes 'on' (the folder for caches of this user), 'off', or a folder.",
        "Write, for example, compile_cache='/scratch/compiled'.",
    ]


@pytest.mark.parametrize(
    ("platform", "environment", "folder"),
    [
        ("linux", {}, ".cache/meshwright/compiled"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, ".cache/meshwright/compiled"),
        ("darwin", {}, "Library/Caches/meshwright/compiled"),
        ("win32", {}, ".cache/meshwright/compiled"),
    ],
)
def test_the_default_folder_is_where_the_system_keeps_caches(
    platform: str, environment: dict[str, str], folder: str
) -> None:
    assert default_folder(environment, platform) == Path.home() / folder


def test_the_default_folder_can_be_named_by_the_system(tmp_path: Path) -> None:
    named = {"LOCALAPPDATA": str(tmp_path)}
    assert default_folder(named, "win32") == tmp_path / "meshwright" / "compiled"
    named = {"XDG_CACHE_HOME": str(tmp_path)}
    assert default_folder(named, "darwin") == tmp_path / "meshwright" / "compiled"


def said_of(settings: Settings) -> str:
    with pytest.warns(CompileCacheWarning) as caught:
        use_compile_cache(settings)
    assert len(caught) == 1
    assert jax.config.jax_compilation_cache_dir is None
    assert current_compile_cache().is_broken
    return str(caught[0].message)


def warning(because: str) -> str:
    return (
        f"The compile cache is off, because {because}. Every start compiles all its "
        "programs again. Set MESHWRIGHT_COMPILE_CACHE to a folder that can be written "
        "to, or to 'off'."
    )


@pytest.mark.usefixtures("own_cache")
def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    told = said_of(Settings(compile_cache=str(file)))
    assert told == warning(f"{file} cannot be used: File exists")
    told = said_of(Settings(compile_cache=str(file / "below")))
    assert told == warning(f"{file / 'below'} cannot be used: Not a directory")
    assert file.read_text() == "mine"


@pytest.mark.usefixtures("own_cache")
def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert said_of(Settings()) == warning("there is no home folder for it")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_to_is_named_with_the_reason(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    told = said_of(Settings(compile_cache=str(tmp_path)))
    assert told == warning(f"{tmp_path} cannot be used: {os.strerror(number)}")


@pytest.mark.usefixtures("own_cache")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**20))
    told = said_of(Settings(compile_cache=str(tmp_path)))
    assert told == warning(f"{tmp_path} cannot be used: only 1.0 MiB are free")


@pytest.mark.processes
def test_work_goes_on_without_a_cache_after_one_warning(
    run_script: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = run_script(
        "import jax\nimport meshwright as mw\n"
        "mw.configure(memory_limit='1GiB')\n"
        "print(jax.jit(lambda x: x + 1)(1))\n",
        MESHWRIGHT_COMPILE_CACHE=str(tmp_path / "file"),
        JAX_COMPILATION_CACHE_DIR="",
    )
    assert done.stdout == "2\n"
    assert done.stderr.count("Warning") == 1
    assert "script.py:2: CompileCacheWarning: The compile cache is off" in done.stderr


def make_entry(folder: Path, name: str, size: int, used: float) -> Path:
    path = folder / f"jit_{name}-{'0' * 64}-cache"
    path.write_bytes(bytes(size))
    os.utime(path, (used, used))
    return path


def test_the_entries_that_were_used_longest_ago_make_room(tmp_path: Path) -> None:
    autotuned = tmp_path / "xla_gpu_per_fusion_autotune_cache_dir" / "kernel"
    autotuned.parent.mkdir()
    autotuned.write_bytes(bytes(50))
    os.utime(autotuned, (5.0, 5.0))
    old, young = (make_entry(tmp_path, f"at_{t}", 100, t) for t in (10.0, 30.0))
    middle = make_entry(tmp_path, "at_20", 100, 20.0)
    mine = tmp_path / "holiday-cache"
    mine.write_bytes(bytes(1000))
    assert sum(entry.bytes for entry in entries_of(tmp_path)) == 350
    sweep(tmp_path, 350)
    assert all(path.exists() for path in (autotuned, old, middle, young))
    sweep(tmp_path, 250)
    assert [p.exists() for p in (autotuned, old, middle, young)] == [False, False] + [
        True
    ] * 2
    sweep(tmp_path, 1)
    assert not entries_of(tmp_path)
    assert mine.exists(), "other files are nobody's to delete"


def test_an_entry_that_was_never_written_does_not_stay(tmp_path: Path) -> None:
    empty, whole = make_entry(tmp_path, "a", 0, 20.0), make_entry(tmp_path, "b", 9, 9.0)
    sweep(tmp_path, 100)
    assert (empty.exists(), whole.exists()) == (False, True)


@pytest.mark.processes
def test_a_process_leaves_the_folder_within_its_bound(
    run_script: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "meshwright" / "compiled"
    run_script(SMALL, **elsewhere(tmp_path))
    before = sum(entry.bytes for entry in entries_of(folder))
    assert before > 20_000
    run_script(SMALL, MESHWRIGHT_COMPILE_CACHE_SIZE="20KB", **elsewhere(tmp_path))
    assert sum(entry.bytes for entry in entries_of(folder)) == before, (
        "who writes nothing does not sweep"
    )
    more = SMALL.replace("range(1, 13)", "range(13, 16)")
    run_script(more, MESHWRIGHT_COMPILE_CACHE_SIZE="20KB", **elsewhere(tmp_path))
    left = sum(entry.bytes for entry in entries_of(folder))
    assert 0 < left <= 20_000


@pytest.mark.processes
def test_an_error_about_memory_names_the_layers_of_this_model_not_of_a_cached_one(
    run_script: Run, tmp_path: Path
) -> None:
    script = (
        "import meshwright as mw\n"
        "import keras, numpy as np\n"
        "mw.configure(memory_limit='64KiB')\n"
        "model = keras.Sequential([keras.Input((8,)),\n"
        "    keras.layers.Dense(64, 'relu', name='{}'), keras.layers.Dense(8)])\n"
        "try:\n"
        "    model.predict(np.ones((4096, 8)), batch_size=4096, verbose=0)\n"
        "except mw.errors.MemoryLimitError as error:\n"
        "    print(*error.largest)\n"
    )
    for name in ("first", "second"):
        done = run_script(script.format(name), **elsewhere(tmp_path))
        assert f"{name}" in done.stdout.split(), done.stdout
