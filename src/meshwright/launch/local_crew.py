"""The workers of this host."""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.cluster.orders import Orders
from meshwright.devices import environment_to_inherit
from meshwright.launch.crew import Ended, Event
from meshwright.launch.guarding import Guard
from meshwright.launch.local_worker import LocalWorker
from meshwright.launch.loopback import free_port
from meshwright.launch.shares import exempt_from_proxies, shares_of_host

import psutil

LOOPBACK = "127.0.0.1"
_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def worker_command(script: Path, arguments: Sequence[str]) -> list[str]:
    """What is run as a worker; the folder that it is run in hides no modules."""
    module = "meshwright.launch.worker"
    return [sys.executable, "-P", "-m", module, str(script), *arguments]


class LocalCrew:
    """The workers of this host, as processes of the launcher.

    Arguments:
        ranks: Their numbers.
        command: What each of them runs, as `worker_command` says it.
        address: Where a coordinator listens; loopback if all workers are here.
        on_terminal: Those whose output is shown on a terminal, as it is.

    Raises:
        ConfigurationError: The GPUs of this host cannot be divided.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        command: Sequence[str],
        *,
        address: str = LOOPBACK,
        on_terminal: Sequence[int] = (),
    ) -> None:
        self.host = socket.gethostname()
        self.ranks = tuple(ranks)
        self.shares = shares_of_host(len(self.ranks), os.environ)
        self._command = list(command)
        self._address = address
        self._on_terminal = on_terminal
        self._workers: dict[int, LocalWorker] = {}
        self._left: list[Event] = []
        self._guard = Guard()
        self._memory = _memory_of_host()
        self._out_of_memory = 0

    def filenos(self) -> list[int]:
        """What to wait for; may change after each `take_events`."""
        alive = [w for w in self._workers.values() if not w.has_ended]
        return [number for worker in alive for number in worker.filenos()]

    def take_events(self) -> list[Event]:
        """What has happened since the last call; does not wait."""
        events, self._left = self._left, []
        for worker in self._workers.values():
            if not worker.has_ended:
                events += worker.take_events()
        return [self._explain(e) if isinstance(e, Ended) else e for e in events]

    def free_address(self) -> str:
        """`host:port` where a coordinator of rank 0 can listen now."""
        return f"{self._address}:{free_port(self._address)}"

    def start(self, orders: Sequence[Orders]) -> None:
        """Starts the workers of an attempt, with their orders in the order of ranks."""
        self._out_of_memory = _out_of_memory_kills()
        for order, share in zip(orders, self.shares, strict=True):
            worker = LocalWorker(
                self._command,
                order,
                {
                    **environment_to_inherit(),
                    **share.environment,
                    **exempt_from_proxies(order.coordinator or LOOPBACK, os.environ),
                },
                share.cores,
                terminal=order.rank in self._on_terminal,
            )
            self._workers[order.rank] = worker
            self._guard.watch(worker.process.pid)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Sends a signal to workers that live; to all if none are named."""
        for rank, worker in self._workers.items():
            if ranks is None or rank in ranks:
                worker.signal(number)

    def state_of(self, rank: int) -> str:
        """What the system says of a worker."""
        return self._workers[rank].state()

    def stacks_of(self, rank: int) -> str:
        """What the worker wrote of its stacks after the newest SIGUSR1."""
        return self._workers[rank].stacks()

    def kill(self) -> None:
        """Kills what lives, with all that it has started; `start` may come again."""
        for worker in self._workers.values():
            worker.kill()
            self._left += worker.close()
            self._guard.forget(worker.process.pid)
        self._workers.clear()

    def close(self) -> None:
        """Kills what lives, and lets go of the host."""
        self.kill()
        self._guard.close()

    def _explain(self, ended: Ended) -> Ended:
        return Ended(
            ended.rank,
            ended.status,
            ended.memory,
            memory_of_host=self._memory,
            killed_for_memory=_out_of_memory_kills() > self._out_of_memory,
        )


def _memory_of_host() -> int:
    sizes = [int(psutil.virtual_memory().total)]
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


def _out_of_memory_kills() -> int:
    """How many processes the system has ended for lack of memory, since it began."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
