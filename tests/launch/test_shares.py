"""Each process of a host gets its part of it, and connections that no proxy sees."""

import os
from pathlib import Path

from meshwright.errors import ConfigurationError
from meshwright.launch import shares
from meshwright.launch.shares import exempt_from_proxies, shares_of_host

import pytest


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        gpus = tuple(range(8))

    monkeypatch.setattr(shares, "read_nvml", Nvml)


@pytest.mark.usefixtures("eight_gpus")
def test_gpus_are_divided_between_processes() -> None:
    parts = shares_of_host(4, {})
    seen = [part.environment["CUDA_VISIBLE_DEVICES"] for part in parts]
    assert seen == ["0,1", "2,3", "4,5", "6,7"]
    assert [part.says for part in parts][:2] == ["GPUs 0, 1", "GPUs 2, 3"]


@pytest.mark.usefixtures("eight_gpus")
def test_one_process_sees_what_the_launcher_sees() -> None:
    (part,) = shares_of_host(1, {"CUDA_VISIBLE_DEVICES": "3,5"})
    assert (part.environment, part.cores) == ({}, ())


@pytest.mark.usefixtures("eight_gpus")
def test_gpus_that_do_not_divide_are_refused() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "0, 1, 2, 3, GPU-aa, GPU-bb"}

    class Six:
        gpus = tuple(range(6))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "read_nvml", Six)
        with pytest.raises(ConfigurationError) as caught:
            shares_of_host(4, visible)
        seen = [
            p.environment["CUDA_VISIBLE_DEVICES"] for p in shares_of_host(3, visible)
        ]
    assert str(caught.value).splitlines() == [
        "4 processes were asked for on a host with 6 visible GPUs (0, 1, 2, 3, GPU-aa, "
        "GPU-bb).",
        "Every process of a host gets as many of its GPUs as the others.",
        "Use --processes 1 or 2 or 3 or 6, or make other GPUs visible with "
        "CUDA_VISIBLE_DEVICES; JAX_PLATFORMS=cpu computes on the CPU.",
    ]
    assert seen == ["0,1", "2,3", "GPU-aa,GPU-bb"]


@pytest.mark.usefixtures("eight_gpus")
def test_on_the_cpu_cores_are_divided_and_gpus_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7, 9})
    parts = shares_of_host(2, {"JAX_PLATFORMS": "cpu"})
    assert [part.cores for part in parts] == [(4, 5), (6, 7)]
    assert [part.environment for part in parts] == [{}, {}]
    crowded = shares_of_host(6, {"JAX_PLATFORMS": "cpu"})
    assert {part.cores for part in crowded} == {()}


@pytest.mark.processes
def test_a_worker_runs_on_its_cores(tmp_path: Path) -> None:
    from staged_workers import END, play

    done = play(tmp_path, "print(*sorted(os.sched_getaffinity(0)))" + END)
    cores = [done.log(0, rank).split() for rank in (0, 1)]
    if len(os.sched_getaffinity(0)) > 1:
        assert cores[0]
        assert cores[1]
        assert not set(cores[0]) & set(cores[1])


def test_connections_of_a_run_go_around_proxies() -> None:  # faults.md row 20
    assert exempt_from_proxies("10.0.0.7:4000", {}) == {}
    given = {"HTTPS_PROXY": "http://p:1", "no_proxy": "intern", "no_grpc_proxy": ""}
    assert exempt_from_proxies("10.0.0.7:4000", given) == {
        "no_proxy": "intern,10.0.0.7,localhost",
        "NO_PROXY": "10.0.0.7,localhost",
        "no_grpc_proxy": "10.0.0.7,localhost",
    }
