"""Programs over several CPU devices of one process run one after the other.

These devices share one pool of threads. If two programs are under way, all threads may
be waiting in the collectives of one for devices whose turn in the other needs a thread,
and nothing moves any more: XLA ends the process after 40 s. It was seen with plain JAX
0.10.2 and two devices, as soon as matrices are large enough to be multiplied by several
threads; the same program did not stop with 0.12, which is no proof. A program that
begins when the one before is done cannot get there.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

from meshwright.cluster.identity import process_count

import jax
from jax.sharding import Mesh


class _Turn:
    """The newest program that takes turns."""

    def __init__(self) -> None:
        # Devices can be set up anew only when no array lives.
        self._outputs: list[ReferenceType[jax.Array]] = []

    def keep(self, outputs: Any) -> None:
        """Remembers what a program returned, which may still be computed."""
        leaves = jax.tree.leaves(outputs)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        self._outputs = [ref(x) for x in arrays if not isinstance(x, jax.core.Tracer)]

    def wait(self) -> None:
        """Waits until the program is done."""
        for output in self._outputs:
            array = output()
            # What was donated to a later program was ready before that began.
            if array is not None and not array.is_deleted():
                array.block_until_ready()
                return  # all are ready at the same time


_newest = _Turn()
_lock = threading.Lock()


def run_in_turn(mesh: Mesh, program: Callable[..., Any], *args: Any) -> Any:
    """Calls a program over a mesh, after the one before if the devices want it."""
    if not needs_turns(mesh):
        return program(*args)
    return _run_after_newest(program, *args)


def run_in_order(mesh: Mesh, program: Callable[..., Any], *args: Any) -> Any:
    """Calls a program over some devices of a pipeline.

    A GPU runs programs in the order in which they are called. CPUs run whatever is
    ready: the forward passes of all microbatches before anything else, and programs of
    several processes in another order in each. In a run of several processes on CPUs
    each program waits for the one before.
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    if process_count() > 1 and is_cpu:
        return _run_after_newest(program, *args)
    return run_in_turn(mesh, program, *args)


class Call(NamedTuple):
    """A program, a function under `jax.jit`, and what it is called with."""

    mesh: Mesh
    program: Any
    args: tuple[Any, ...]


def run_together(calls: Sequence[Call]) -> list[Any]:
    """Calls programs that do not wait for each other; returns what they return.

    A GPU starts when it is told to, and its caller goes on. CPU devices compute one
    after the other what one thread tells them, so each is told by a thread of its own.
    Options of JAX's hold for a thread: this one compiles.
    """
    if process_count() > 1 or not all(_is_one_cpu(call.mesh) for call in calls):
        return [run_in_order(call.mesh, call.program, *call.args) for call in calls]
    programs = [_compiled(call.program, call.args) for call in calls]
    if len(calls) == 1:
        return [programs[0](*calls[0].args)]
    args = [call.args for call in calls]
    return list(_threads().map(lambda program, args: program(*args), programs, args))


def _is_one_cpu(mesh: Mesh) -> bool:
    return bool(mesh.size == 1 and mesh.devices.flat[0].platform == "cpu")


_executables: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _compiled(program: Any, args: tuple[Any, ...]) -> Any:
    """The executable of a program that is always called with like arguments."""
    if program not in _executables:
        _executables[program] = program.lower(*args).compile()
    return _executables[program]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="meshwright-device")


def _run_after_newest(program: Callable[..., Any], *args: Any) -> Any:
    with _lock:
        _newest.wait()
        outputs = program(*args)
        _newest.keep(outputs)
    return outputs


def needs_turns(mesh: Mesh) -> bool:
    """Whether devices of a mesh share a pool of threads."""
    local = mesh.local_devices
    return len(local) > 1 and local[0].platform == "cpu"
