"""Programs that are compiled in threads, ahead of their first call."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

_under_way: set[Future[Any]] = set()


@cache
def _threads(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, thread_name_prefix="meshwright-compile")


class Ahead:
    """Compiles programs while something else goes on.

    Arguments:
        measures_kernels: Whether compiling runs kernels on the devices, to choose the
            fastest. Programs are then compiled one after the other: two of them would
            disturb each other's measurements. Together, those of the reference CNN
            took 60 s on one H200 and were slower; one after the other they take 16 s
            (`benchmarks/h200.py`).
    """

    def __init__(self, measures_kernels: bool) -> None:
        self._num_threads = 1 if measures_kernels else 4
        self._started: dict[Any, Future[Any]] = {}

    def start(self, program: Any, *shapes: Any) -> None:
        """Begins to compile a function under `jax.jit`, once.

        Arguments:
            program: The function.
            shapes: Shapes, types and placements of its arguments. The call finds what
                was compiled if its arguments are like them.
        """
        if program not in self._started:
            threads = _threads(self._num_threads)
            compiling = threads.submit(lambda: program.lower(*shapes).compile())
            self._started[program] = compiling
            _under_way.add(compiling)
            compiling.add_done_callback(_under_way.discard)

    def finish(self, program: Any) -> None:
        """Waits for a program that is being compiled, if it is.

        One that could not be compiled says so again when it is called.
        """
        if program in self._started:
            wait([self._started[program]])


def finish_all() -> None:
    """Waits for everything that is being compiled.

    On GPUs kernels are chosen by measuring them, so nothing else may run meanwhile.
    """
    wait(list(_under_way))
