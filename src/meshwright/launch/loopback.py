"""A real all-reduce between processes of this machine, to see that it works.

`python -m meshwright.launch.loopback ADDRESS INDEX COUNT` is one of the processes.
"""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

_SECONDS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopbackResult:
    """How an all-reduce over the loopback interface went."""

    ok: bool
    seconds: float
    detail: str


def free_port(address: str = "127.0.0.1") -> int:
    """A port of an address of this host that nobody uses now."""
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


def all_reduce_over_loopback(
    num_processes: int = 2, timeout: float = _SECONDS
) -> LoopbackResult:
    """Starts processes that add up their numbers; all must arrive at the same sum."""
    began = time.monotonic()
    address = f"127.0.0.1:{free_port()}"
    workers = [_start_worker(address, i, num_processes) for i in range(num_processes)]
    try:
        answers = [_answer(w, began + timeout - time.monotonic()) for w in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    expected = str(sum(range(1, num_processes + 1)))
    wrong = [f"process {i}: {a}" for i, a in enumerate(answers) if a != expected]
    detail = "; ".join(wrong) or f"{num_processes} processes agree on {expected}"
    return LoopbackResult(ok=not wrong, seconds=time.monotonic() - began, detail=detail)


def _start_worker(address: str, index: int, count: int) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "MESHWRIGHT_VIRTUAL"}
    return subprocess.Popen(
        [sys.executable, "-m", __name__, address, str(index), str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, "JAX_PLATFORMS": "cpu"},
    )


def _answer(worker: subprocess.Popen[str], timeout: float) -> str:
    try:
        out, err = worker.communicate(timeout=max(timeout, 0.1))
    except subprocess.TimeoutExpired:
        return "no answer in time"
    lines = (out if worker.returncode == 0 else err).strip().splitlines()
    return lines[-1] if lines else f"ended with status {worker.returncode}"


def _work(address: str, index: int, count: int) -> None:
    import jax
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        num_processes=count,
        process_id=index,
        coordinator_bind_address=address,
        initialization_timeout=_SECONDS,
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("process",))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    numbers = jax.make_array_from_process_local_data(
        sharded, np.array([index + 1], np.int32)
    )
    print(int(jax.jit(lambda x: x.sum())(numbers)))
    jax.distributed.shutdown()


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
