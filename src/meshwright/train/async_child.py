"""A worker process: `python -m meshwright.train.async_child SOCKET` computes gradients.

It knows nothing of Keras and of the script: programs and arrays come through a socket
that it inherited, and gradients go back. It ends when the other end is closed.
"""

import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PROGRAM, COMPUTE = "program", "compute"
DONE, FAILED = "done", "failed"


def serve(line: Connection) -> None:
    """Does what is asked for, until nobody asks any more."""
    programs: dict[int, Callable[..., Any]] = {}
    while True:
        try:
            # It comes from the process that started this one, and from nobody else.
            request, number, content = pickle.loads(line.recv_bytes())  # noqa: S301
        except (EOFError, OSError):
            return
        answer: tuple[str, Any]
        try:
            if request == PROGRAM:
                program, options, in_use = content
                programs = {key: programs[key] for key in programs if key in in_use}
                programs[number] = _load(program, options)
                answer = DONE, None
            else:
                answer = DONE, _on_host(programs[number](*content))
        except Exception:
            answer = FAILED, traceback.format_exc()
        try:
            line.send_bytes(pickle.dumps(answer, protocol=5))
        except OSError:
            return


def _load(program: Any, options: dict[str, Any] | None) -> Callable[..., Any]:
    import jax

    return jax.jit(program.call, compiler_options=options)


def _on_host(values: Any) -> Any:
    import jax

    return jax.device_get(values)


def main(number: str, cores: str) -> None:
    """Serves the socket of this number, on these cores if any are named."""
    # Ctrl-C is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    # Nobody else is to inherit it.
    os.set_inheritable(int(number), False)
    with Connection(socket.socket(fileno=int(number)).detach()) as line:
        serve(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
