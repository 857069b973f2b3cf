"""What a contender says and hears: one line when it is ready, one per repetition.

A contender is a script in a process of its own. It sets itself up, runs twice (the
first run compiles), and prints a line of JSON with what it is. Then, for every line on
its standard input, it runs once and prints a line with the seconds that took. To try
one by hand: `PYTHONPATH=benchmarks python benchmarks/contenders/jax_floor.py`, Enter.
"""

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

MARK = "@bench "
Repeat = Callable[[], dict[str, Any]]
PACKAGES = ("meshwright", "keras", "jax", "jaxlib", "tensorflow", "torch", "numpy")


def serve(
    repeat: Repeat,
    *,
    before: Callable[[], Any] = lambda: None,
    after: Repeat = dict,
    **facts: Any,
) -> None:
    """Runs `repeat` twice, says what this is, then once for every line that comes.

    `repeat` returns what is worth reporting. It is timed as a whole, unless it returns
    `seconds` of its own. `before` and `after` it is done what is not timed; `after`
    returns what else is worth reporting.
    """

    def run() -> dict[str, Any]:
        before()
        return timed(repeat) | after()

    began = time.time()
    first, second = run(), run()
    say(
        setup_seconds=began - _process_started(),
        first_seconds=first["seconds"],
        compile_seconds=max(first["seconds"] - second["seconds"], 0.0),
        python=platform.python_version(),
        versions=versions(),
        **facts,
    )
    for _ in sys.stdin:
        say(**run())


def timed(repeat: Repeat) -> dict[str, Any]:
    """What a repetition returns, with its seconds, and those of this process' cores.

    Far more seconds than cores account for tell of a machine that others use too.
    """
    began, busy = time.perf_counter(), time.process_time()
    found = repeat()
    seconds, cpu = time.perf_counter() - began, time.process_time() - busy
    return {"seconds": seconds, "cpu_seconds": cpu, **found}


def say(**words: Any) -> None:
    """A line to the harness; the mark tells it from progress bars and logs."""
    print(f"\n{MARK}{json.dumps(words)}", flush=True)


def versions() -> dict[str, str]:
    """Of the packages that this process has loaded."""
    loaded = [name for name in PACKAGES if name in sys.modules]
    return {name: _version(name) for name in loaded}


def _version(name: str) -> str:
    try:
        return metadata.version("tensorflow-cpu" if name == "tensorflow" else name)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules[name], "__version__", "unknown"))


def _process_started() -> float:
    """When this process began, by the clock of `time.time`."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
        up = float(uptime.read().split()[0])
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


def pin(core: int | None) -> None:
    """Keeps this process on one core, as `taskset` does; before threads are started."""
    if core is not None:
        os.sched_setaffinity(0, {core})


class Follower:
    """The second of two processes: this script with its arguments and `--rank 1`.

    It calls `follow`, and so does one repetition for every one of its leader's.
    """

    def __init__(self, address: str) -> None:
        command = [sys.executable, *sys.argv, "--rank", "1", "--address", address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )

    def send_on(self) -> None:
        """Lets it begin with a repetition."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def let_go(self) -> None:
        """Tells it that there will be no more."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()


def follow(repeat: Repeat) -> None:
    """Runs once for every line that comes."""
    for _ in sys.stdin:
        repeat()


def free_address() -> str:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
