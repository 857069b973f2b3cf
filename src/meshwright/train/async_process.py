"""Workers that are processes: they may die, and come back."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from meshwright.errors import StrategyError
from meshwright.train.async_child import COMPUTE, FAILED, PROGRAM
from meshwright.train.async_worker import (
    Computed,
    ProgramKey,
    Pulled,
    Task,
    Worker,
    WorkerLostError,
)

import jax
from jax import export

_OF_THIS_PROCESS = ("MESHWRIGHT_", "XLA_FLAGS", "JAX_PLATFORMS")
"""Variables that say what devices this process has; a worker has one CPU."""

_GOODBYE_SECONDS = 5.0


class Exported(NamedTuple):
    """A program for another process."""

    number: int
    portable: export.Exported
    structure: Any
    """That of what it returns."""


class ProcessWorker(Worker):
    """Computes gradients in a process of its own, on a CPU.

    The process is started when there is something to do, and again after it has died.

    Arguments:
        number: Its number, from 0.
        cores: The cores that it uses; all if there are none.
        options: What XLA is told when it compiles for a CPU.

    Attributes:
        process: The process, if it was started.
    """

    def __init__(
        self,
        number: int,
        cores: list[int],
        options: dict[str, Any] | None,
    ) -> None:
        self._options = options
        self._cores = cores
        self._programs: dict[ProgramKey, Exported] = {}
        self._sent: set[int] = set()
        self._num_exported = 0
        self._line: Connection | None = None
        self.process: subprocess.Popen[bytes] | None = None
        super().__init__(number, f"process {number}")

    def start_anew(self, delay: float, patience: float) -> None:
        """Sets its figures back; a process that died meanwhile does not count."""
        super().start_anew(delay, patience)
        if self.process is not None and self.process.poll() is not None:
            self.end()

    def prepare(self, key: ProgramKey, program: Any, state: Any) -> Callable[[], None]:
        """Exports a program; what is returned starts the process and sends it there."""

        def flat(state: Any, batch: Any) -> list[Any]:
            # Inside of another program it can have no options for the compiler.
            return jax.tree.leaves(program.__wrapped__(state, batch))

        batch = key.shapes.tree
        structure = jax.tree.structure(jax.eval_shape(program, state, batch))
        portable = _exported(flat, state, batch)
        self._programs[key] = Exported(self._num_exported, portable, structure)
        self._num_exported += 1

        def send() -> None:
            # If it dies of it, that is told when something is to be computed.
            with contextlib.suppress(WorkerLostError):
                self._send_program(self._programs[key])

        return send

    def find(self, task: Task, pulled: Pulled) -> Computed:
        """Has the process compute."""
        program = self._programs[task.key]
        self._send_program(program)
        given = jax.device_get(tuple(pulled[:3]))
        leaves = self._ask(COMPUTE, program.number, (given, task.batch))
        computed: Computed = jax.tree.unflatten(program.structure, leaves)
        return computed

    def forget(self, step: int) -> None:
        """Lets go of programs; the process does when it gets another one."""
        # At a moment of the garbage collector's; the list is made at once.
        for key in [key for key in list(self._programs) if key.step == step]:
            del self._programs[key]

    def interrupt(self) -> None:
        """Ends the process; the thread that waits for it hears of that."""
        process = self.process  # the thread lets go of it when it hears
        if process is not None:
            process.kill()
            process.wait()

    def end(self) -> None:
        """Ends the process."""
        if self.process is not None and self._line is not None:
            _end(self.process, self._line)
        self.process = self._line = None
        self._sent.clear()

    def _send_program(self, program: Exported) -> None:
        if self._line is None:
            self._start()
        if program.number not in self._sent:
            in_use = [each.number for each in list(self._programs.values())]
            content = (program.portable, self._options, in_use)
            self._ask(PROGRAM, program.number, content)
            self._sent.add(program.number)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OF_THIS_PROCESS)
        }
        cores = ",".join(map(str, self._cores))
        module = "meshwright.train.async_child"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), cores],
                pass_fds=[theirs.fileno()],
                env={**environment, "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL,
            )
        self._line = Connection(ours.detach())
        weakref.finalize(self, _end, self.process, self._line)

    def _ask(self, request: str, number: int, content: Any) -> Any:
        assert self._line is not None
        words = pickle.dumps((request, number, content), protocol=5)
        try:
            self._line.send_bytes(words)
            if not self._line.poll(self.patience):
                raise self._lost(f"said nothing for {self.patience:g} s")
            answer = self._line.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        self.figures.bytes_moved += len(words) + len(answer)
        outcome, value = pickle.loads(answer)  # noqa: S301  (it is a child's)
        if outcome == FAILED:
            raise RuntimeError(value)
        return value

    def _lost(self, because: str | None = None) -> WorkerLostError:
        process = self.process
        assert process is not None
        if because is None:
            because = _how_it_ended(process)
        self.end()
        return WorkerLostError(because)


def _exported(program: Any, state: Any, batch: Any) -> export.Exported:
    try:
        exported = export.export(jax.jit(program), platforms=["cpu"])(state, batch)
    except (NotImplementedError, ValueError) as error:
        raise StrategyError(
            "A training step cannot be sent to worker processes: "
            f"{str(error).splitlines()[0]}",
            "They know nothing of the script, so a step must not call back into it.",
            "Leave processes out: then devices of this process are the workers.",
        ) from error
    return _without_functions(exported)


def _without_functions(exported: export.Exported) -> export.Exported:
    """The same program, to be pickled: its own format asks for one more library.

    Both processes run the same JAX, and nobody there asks for its gradients.
    """
    values = {field.name: getattr(exported, field.name) for field in fields(exported)}
    functions = [name for name, value in values.items() if callable(value)]
    return replace(exported, **dict.fromkeys(functions))


def shares_of_cores(number: int) -> list[list[int]]:
    """The cores of each of so many processes; none if there are too few of them."""
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(number)]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < number:
        return [[] for _ in range(number)]
    return [cores[i::number] for i in range(number)]


def _how_it_ended(process: "subprocess.Popen[bytes]") -> str:
    try:
        status = process.wait(_GOODBYE_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its socket"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _end(process: "subprocess.Popen[bytes]", line: Connection) -> None:
    line.close()
    if process.poll() is None:
        process.kill()
    process.wait()
