"""Prefetch: order, errors, bounds, and threads that end."""

import gc
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from meshwright.data.prefetch import THREAD_NAME, prefetch

import pytest


def threads() -> int:
    return sum(t.name == THREAD_NAME for t in threading.enumerate())


def wait_until_gone() -> bool:
    deadline = time.monotonic() + 20
    while threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not threads()


def count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def test_results_come_in_order_and_the_thread_ends_with_its_source() -> None:
    ahead = prefetch(iter(range(100)), lambda n: n * n, depth=3)
    assert list(ahead) == [n * n for n in range(100)]
    assert list(ahead) == []
    assert wait_until_gone()


def test_results_are_made_in_another_thread() -> None:
    (maker,) = prefetch(iter([0]), lambda _: threading.get_ident())
    assert maker != threading.get_ident()


def test_no_more_than_depth_batches_are_taken_ahead() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for number in count():
            taken.append(number)
            yield number

    ahead = prefetch(source(), lambda n: n, depth=2)
    for step in range(5):
        assert next(ahead) == step
        deadline = time.monotonic() + 20
        while len(taken) < step + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(taken) == step + 3
    ahead.close()
    assert wait_until_gone()


@pytest.mark.parametrize("culprit", ["source", "put"])
def test_an_error_comes_where_its_batch_would_with_its_traceback(culprit: str) -> None:
    def fail_at_two(number: int) -> int:
        if number == 2:
            raise KeyError("the third")
        return number

    def source() -> Iterator[int]:
        for number in range(9):
            yield fail_at_two(number) if culprit == "source" else number

    ahead = prefetch(source(), fail_at_two if culprit == "put" else lambda n: n)
    assert next(ahead) == 0
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="the third") as caught:
        next(ahead)
    frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[0].startswith("test_an_error_comes")
    assert frames[-1] == "fail_at_two"
    with pytest.raises(StopIteration):
        next(ahead)
    assert wait_until_gone()


def test_a_put_that_raises_stopiteration_does_not_hang() -> None:
    def put(_: int) -> int:
        raise StopIteration

    assert list(prefetch(count(), put)) == []
    assert wait_until_gone()


def test_closing_early_ends_the_thread_and_the_iteration() -> None:
    ahead = prefetch(count(), lambda n: n)
    assert next(ahead) == 0
    ahead.close()
    assert not threads()
    assert list(ahead) == []
    ahead.close()


def test_dropping_the_iterator_ends_the_thread() -> None:
    ahead = prefetch(count(), lambda n: n)
    next(ahead)
    assert threads() == 1
    del ahead
    gc.collect()
    assert wait_until_gone()


def test_a_consumer_that_raises_ends_the_thread() -> None:
    def consume() -> None:
        for number in prefetch(count(), lambda n: n):
            if number == 3:
                raise RuntimeError

    with pytest.raises(RuntimeError) as caught:
        consume()
    del caught  # its traceback holds the iterator
    gc.collect()
    assert wait_until_gone()


def test_closing_does_not_wait_forever_for_a_source_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.data.prefetch.PATIENCE", 0.05)
    never = threading.Event()

    def source() -> Iterator[Any]:
        yield 0
        never.wait()

    ahead = prefetch(source(), lambda n: n)
    assert next(ahead) == 0
    ahead.close()
    assert list(ahead) == []
    never.set()
    assert wait_until_gone()


def test_a_waiting_consumer_wakes_up_when_another_thread_closes() -> None:
    go_on = threading.Event()

    def source() -> Iterator[Any]:
        go_on.wait()
        yield 0

    ahead = prefetch(source(), lambda n: n)
    got: list[Any] = []
    consumer = threading.Thread(target=lambda: got.extend(ahead))
    consumer.start()
    closer = threading.Thread(target=ahead.close)
    closer.start()
    consumer.join(20)
    assert not consumer.is_alive()
    go_on.set()
    closer.join(20)
    assert got == []
    assert wait_until_gone()
