"""`diagnose`: each check on a good and on a bad machine."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwright.devices.compile_cache import CompileCache
from meshwright.launch import doctor, loopback
from meshwright.launch.doctor import FAIL, OK, WARN, Check, Diagnosis

import pytest

FAKES = str(Path(__file__).parents[1] / "fakes")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.processes
def test_this_machine_is_ready() -> None:
    diagnosis = doctor.diagnose()
    names = [check.name for check in diagnosis.checks]
    assert names == [
        *("versions", "machine", "devices", "nvml", "runtime"),
        *("disk", "cache", "ports", "proxies", "all-reduce"),
    ]
    assert diagnosis.status in (OK, WARN), str(diagnosis)
    assert json.loads(json.dumps(diagnosis.to_json()))["status"] == diagnosis.status
    assert "2 processes agree on 3" in str(diagnosis)
    assert "/device:CPU:7" in str(diagnosis), "the devices are listed"
    written = diagnosis.to_json()["checks"]
    assert set(written[0]) == {"name", "status", "detail", "fix"}
    assert written[0]["detail"].startswith("Python 3.")


def test_the_block_can_be_pasted_and_ends_in_one_verdict() -> None:
    checks = (
        Check(name="disk", status=OK, detail="fine\nvery fine"),
        Check(name="ports", status=WARN, detail="hm", fix="do this"),
    )
    assert str(Diagnosis(checks)).splitlines() == [
        "```text",
        "ok    disk         fine",
        "                   very fine",
        "warn  ports        hm",
        "                   fix: do this",
        "verdict: ready, with warnings: ports",
        "```",
    ]
    bad = Check(name="nvml", status=FAIL, detail="broken")
    assert Diagnosis((*checks, bad)).verdict == "verdict: not ready: nvml"
    assert Diagnosis(checks[:1]).verdict == "verdict: ready"


def test_old_or_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"keras": "3.14.0", "jax": "0.10.2", "orbax-checkpoint": "missing"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "1.0"))
    check = doctor.check_versions()
    assert check.status == FAIL
    assert check.fix == (
        "too old: keras 3.14.0 < 3.15.1; orbax-checkpoint missing < 0.12; "
        "run pip install -U meshwright"
    )


def test_a_package_that_is_not_there_is_called_missing() -> None:
    assert doctor._version("no-such-package") == "missing"


@pytest.mark.usefixtures("four_gpus")
def test_nvml_tells_of_driver_and_gpus() -> None:
    assert doctor.check_nvml().detail == "driver 580.1, visible GPUs: 4"


@pytest.mark.processes
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("plugins", "fix"),
    [
        ([], "pip install 'meshwright[cuda13]' (or [cuda12] for older drivers)"),
        (
            ["xla_cuda13"],
            "the CUDA plugin is there but was not used: look at JAX_PLATFORMS",
        ),
    ],
)
def test_a_gpu_that_jax_leaves_unused_is_a_warning(
    plugins: list[str], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = namedtuple("point", "name")
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point(p) for p in plugins]
    )
    check = doctor.check_runtime()
    assert check.status == WARN
    assert "JAX starts on cpu" in check.detail
    assert "4 GPUs stay unused" in check.detail
    assert (check.fix or "").startswith(fix)


def test_looking_at_a_gpu_does_not_take_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, str] = {}

    def run(*_: object, env: dict[str, str], **__: object) -> object:
        seen.update(env)
        return subprocess.CompletedProcess([], 0, stdout='["gpu", ["NVIDIA H200"]]')

    monkeypatch.setattr(subprocess, "run", run)
    assert "JAX starts on gpu with NVIDIA H200" in doctor.check_runtime().detail
    assert seen["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


@pytest.mark.processes
def test_a_jax_that_does_not_start_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    check = doctor.check_runtime()
    assert check.status == FAIL
    assert check.detail.startswith(
        "JAX does not start: RuntimeError: Unable to initialize"
    )
    assert check.fix == "run python -c 'import jax; jax.devices()' to see all of it"


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**20))
    check = doctor.check_disk()
    assert check.status == WARN
    assert check.detail.startswith("1.0 MiB free here; 1 MiB written and synced in")
    assert check.fix == "make room: checkpoints need it"


def test_a_folder_that_cannot_be_written_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    check = doctor.check_disk()
    assert check.status == FAIL
    assert "cannot write here: [Errno 13] Permission denied" in check.detail
    assert check.fix == "change to a folder that you may write to"


def test_the_compile_cache_is_shown_with_its_size_or_why_it_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(**known: Any) -> Check:
        cache = CompileCache(**{"size": None, **known})
        monkeypatch.setattr(doctor, "current_compile_cache", lambda: cache)
        return doctor.check_cache()

    (tmp_path / f"jit_step-{'0' * 64}-cache").write_bytes(bytes(2048))
    monkeypatch.setattr(Path, "home", lambda: tmp_path.parent)
    check = look(folder=tmp_path, size=2**20, because="the default")
    assert (check.status, check.fix) == (OK, None)
    assert check.detail == (
        "compiled programs take 2.0 KiB of at most 1.0 MiB, entries: 1, in "
        f"~/{tmp_path.name} (the default)"
    )
    monkeypatch.undo()
    check = look(folder=tmp_path / "new", because="JAX was told so")
    assert check.detail == (
        f"compiled programs take 0 B, entries: 0, in {tmp_path / 'new'} "
        "(JAX was told so)"
    )
    check = look(folder=None, because="it was switched off")
    assert (check.status, check.detail, check.fix) == (
        OK,
        "compiled programs are not kept: it was switched off",
        None,
    )
    check = look(folder=None, because="/x cannot be used: hm", is_broken=True)
    assert (check.status, check.detail, check.fix) == (
        WARN,
        "compiled programs are not kept: /x cannot be used: hm",
        "set MESHWRIGHT_COMPILE_CACHE to a folder that can be written to",
    )


def test_a_closed_loopback_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    check = doctor.check_port()
    assert check.status == FAIL
    assert check.detail == "the loopback interface does not answer: refused"
    assert check.fix == "allow connections to 127.0.0.1 in the firewall or container"


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_proxies")
def test_proxies_are_shown_without_their_passwords(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor.check_proxies().detail == "none set"
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    check = doctor.check_proxies()
    assert check.status == WARN
    assert "secret" not in str(check)
    assert check.detail == (
        "HTTPS_PROXY=http://***@proxy:3128; connections to this machine's own "
        "processes may hang"
    )
    assert check.fix == "export no_proxy=127.0.0.1,localhost"
    monkeypatch.setenv("no_proxy", "example.org, localhost")
    assert doctor.check_proxies().status == OK


@pytest.mark.processes
def test_an_all_reduce_that_fails_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback.all_reduce_over_loopback(timeout=0.2).detail == (
        "process 0: no answer in time; process 1: no answer in time"
    )
    monkeypatch.setattr(loopback, "__name__", "meshwright.no_such_module")
    result = loopback.all_reduce_over_loopback()
    assert not result.ok
    assert "process 0: " in result.detail
    assert "No module named" in result.detail
    monkeypatch.setattr(doctor, "all_reduce_over_loopback", lambda: result)
    check = doctor.check_all_reduce()
    assert (check.status, check.fix) == (
        FAIL,
        "see the checks on ports and proxies above",
    )
