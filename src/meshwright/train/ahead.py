"""Programs that are compiled in threads, ahead of their first call."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

_under_way: set[Future[Any]] = set()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=4, thread_name_prefix="meshwright-compile")


class Ahead:
    """Compiles programs while something else goes on."""

    def __init__(self) -> None:
        self._started: dict[Any, Future[Any]] = {}

    def start(self, program: Any, *shapes: Any) -> None:
        """Begins to compile a function under `jax.jit`, once.

        Arguments:
            program: The function.
            shapes: Shapes, types and placements of its arguments. The call finds what
                was compiled if its arguments are like them.
        """
        if program not in self._started:
            compiling = _threads().submit(lambda: program.lower(*shapes).compile())
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
