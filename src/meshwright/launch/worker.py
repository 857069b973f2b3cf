"""A worker: `python -m meshwright.launch.worker SCRIPT ARGS` runs a script as ordered.

It joins the other processes of its run, runs the script as Python would, and tells its
launcher what came of it. Without orders it only runs the script.
"""

import contextlib
import ctypes
import faulthandler
import os
import re
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from meshwright.cluster.channel import VARIABLE as CHANNEL_VARIABLE
from meshwright.cluster.channel import channel
from meshwright.cluster.orders import VARIABLE as ORDERS_VARIABLE
from meshwright.cluster.orders import Orders, current_orders
from meshwright.cluster.preemption import EXIT_PREEMPTED, watch_for_preemption
from meshwright.errors import MeshwrightError, PeerLostError, RendezvousError

INTERRUPTED = 130

_PR_SET_PDEATHSIG = 1
_JOIN_SECONDS = 240
_HEARTBEAT_SECONDS = 100
_LEAVE_SECONDS = 24 * 3600
"""The first to end its script waits for the others; the launcher knows how long."""
_LONGEST_TRACEBACK = 20_000
_LOST_PEER = re.compile(
    r"Gloo .* failed|coordination.?service|NCCL|(?:reset|closed) by peer|heartbeat",
    re.IGNORECASE,
)


def main(arguments: list[str]) -> NoReturn:
    """Runs a script and ends the process with the status that it deserves."""
    _die_with_the_launcher()
    orders = current_orders()
    line = channel()
    # Programs that the script starts are no workers of this run.
    for variable in (ORDERS_VARIABLE, CHANNEL_VARIABLE):
        os.environ.pop(variable, None)
    line.enter("start")
    if orders is not None:
        _write_stacks_when_asked(orders)
        _end_lines_at_once()
    watch_for_preemption()
    script, *rest = arguments
    is_joined = orders is not None and orders.world > 1
    try:
        if is_joined:
            assert orders is not None
            _join(orders)
        line.enter("script")
        run_script(script, rest)
        status = 0
    except SystemExit as stop:
        status = _status_of(stop)
        if status not in (0, EXIT_PREEMPTED):
            _fail(_told_of_exit(status), is_joined)
    except KeyboardInterrupt:
        _fail(_told_of_exit(INTERRUPTED), is_joined)
    except BaseException as error:
        _fail(describe(error, script), is_joined)
    line.enter("end")
    _complete_saves()
    _flush()
    if is_joined:
        _leave()
    sys.exit(status)


def run_script(script: str, arguments: list[str]) -> None:
    """Runs a script as `python SCRIPT ARGUMENTS` would, within this process."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def describe(error: BaseException, script: str) -> dict[str, Any]:
    """What a launcher is told of an error that ended a script."""
    within = _in_script(error.__traceback__, script)
    words = "".join(traceback.format_exception(type(error), error, within))
    frames = [f for f in traceback.extract_tb(within) if f.filename == script]
    ours = error if isinstance(error, MeshwrightError) else None
    return {
        "type": type(error).__name__,
        "received": ours.received if ours else str(error),
        "rule": ours.rule if ours else None,
        "change": ours.change if ours else None,
        "exit_code": ours.exit_code if ours else 1,
        "step": getattr(error, "step", None),
        "where": f"{Path(script).name}:{frames[-1].lineno}" if frames else None,
        "follows": _is_about_peers(error),
        "traceback": words[-_LONGEST_TRACEBACK:],
    }


def _is_about_peers(error: BaseException) -> bool:
    """Whether it says that another process is gone, so that it is not the cause.

    JAX raises what Gloo says as a ValueError, among others.
    """
    return isinstance(error, PeerLostError) or bool(_LOST_PEER.search(str(error)))


def _told_of_exit(status: int) -> dict[str, Any]:
    return {
        "type": "KeyboardInterrupt" if status == INTERRUPTED else "SystemExit",
        "received": f"sys.exit({status})",
        "rule": None,
        "change": None,
        "exit_code": status,
        "step": None,
    }


def _in_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """A traceback without what lies between this file and the script."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename != script:
        inner = inner.tb_next
    return inner or trace


def _status_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _fail(told: dict[str, Any], is_joined: bool) -> NoReturn:
    """Tells why, and ends; joined processes do not wait for others at their exit."""
    _flush()
    line = channel()
    if current_orders() is None and "traceback" in told:
        sys.stderr.write(told["traceback"])
    line.say(failure=told)
    if is_joined:
        os._exit(told["exit_code"])
    _complete_saves()
    sys.exit(told["exit_code"])


def _complete_saves() -> None:
    """Completes what is under way, while Python can still start threads for it."""
    stores = sys.modules.get("meshwright.train.checkpoint_store")
    if stores is not None:
        with contextlib.suppress(Exception):  # of warnings that are errors
            stores.complete_saves()


def _die_with_the_launcher() -> None:
    """Lets the system kill this process when its parent dies, where it can."""
    if sys.platform == "linux" and current_orders() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_stacks_when_asked(orders: Orders) -> None:
    """In the signal's own handler, which needs neither the interpreter nor its lock."""
    path = orders.folder / f"stacks/{orders.attempt}-{orders.rank}.txt"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        descriptor = os.open(path, flags, 0o600)
        faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
        faulthandler.enable(file=descriptor)


def _end_lines_at_once() -> None:
    """What was printed before a process is killed is not lost."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)


def _join(orders: Orders) -> None:
    """Meets the other processes of the run, through JAX's coordinator."""
    import jax

    assert orders.coordinator is not None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_check_proxy_envs", False)  # the launcher has seen to it
    _fail_if_taken(orders)
    jax.distributed.initialize(
        orders.coordinator,
        num_processes=orders.world,
        process_id=orders.rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=orders.coordinator,
        initialization_timeout=_JOIN_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_LEAVE_SECONDS,
    )


def _fail_if_taken(orders: Orders) -> None:
    """JAX would share the port of another coordinator, or end without a reason."""
    if orders.rank != 0 or orders.coordinator is None:
        return
    host, _, port = orders.coordinator.rpartition(":")
    try:
        socket.create_server((host.strip("[]"), int(port))).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        taken = RendezvousError(
            f"The coordinator cannot listen on {orders.coordinator}: {why}.",
            "The first process of a run listens on an address of its own.",
            "End the program that listens there.",
        )
        _fail({**describe(taken, ""), "address_taken": True}, is_joined=True)


def _leave() -> None:
    """Waits until all have ended their script, and parts from them in good order."""
    import jax

    try:
        jax.distributed.shutdown()
    except RuntimeError:
        # Another one is gone, and the launcher knows why.
        os._exit(PeerLostError.exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
