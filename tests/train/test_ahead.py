"""Programs are compiled in threads, and not at once where they measure kernels."""

import threading
import time

from meshwright.train.ahead import Ahead, finish_all

import pytest


class Program:
    """Takes a while to be compiled, and notes how many others are meanwhile."""

    under_way = 0
    most = 0
    lock = threading.Lock()

    def lower(self, *shapes: object) -> "Program":
        return self

    def compile(self) -> None:
        with Program.lock:
            Program.under_way += 1
            Program.most = max(Program.most, Program.under_way)
        time.sleep(0.05)
        with Program.lock:
            Program.under_way -= 1


@pytest.mark.parametrize(("measures_kernels", "most"), [(True, 1), (False, 3)])
def test_programs_that_measure_kernels_are_compiled_one_after_the_other(
    measures_kernels: bool, most: int
) -> None:
    Program.most = 0
    ahead = Ahead(measures_kernels)
    programs = [Program() for _ in range(3)]
    for program in programs:
        ahead.start(program)
        ahead.start(program)  # which is once
    finish_all()
    assert Program.under_way == 0
    assert Program.most == most
