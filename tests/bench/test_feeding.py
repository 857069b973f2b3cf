"""Whether data comes as fast as it is trained on."""

import time
from collections.abc import Iterator
from typing import Any

import meshwright as mw
from meshwright.bench import feeding
from meshwright.bench.feeding import Feeding, measure_feeding
from meshwright.errors import DataError

import keras
import numpy as np
import pytest

from toys import BATCH, make_data, make_model

TWO = ["CPU:0", "CPU:1"]


def found(**figures: Any) -> Feeding:
    usual = {"model": "m", "strategy": "s", "kind": "generator", "batch_size": 10}
    return Feeding(**{**usual, **figures})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "SECONDS", 0.05)


def test_arrays_are_made_up_if_there_is_no_data() -> None:
    got = measure_feeding(make_model(), mw.Mirrored(TWO), None, BATCH)
    assert (got.kind, got.is_made_up, got.batch_size) == ("arrays", True, BATCH)
    assert "made-up arrays, since no data was named" in str(got)
    assert "Name the data that you train on" in got.advice()
    assert min(got.reading, got.moving, got.training) > 0


def test_data_that_sleeps_is_found_to_be_what_takes_the_time() -> None:
    def slow() -> Iterator[Any]:
        for batch in make_data():
            time.sleep(0.1)
            yield batch

    got = measure_feeding(make_model(), mw.Single("CPU:0"), slow, BATCH)
    assert got.kind == "generator"
    assert got.reading < 10 * BATCH * 1.1
    assert got.starves
    assert "reading is what takes it" in got.advice()


def test_a_pydataset_is_read_by_its_items() -> None:
    class Data(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return np.zeros((BATCH, 8), "float32"), np.zeros((BATCH,), "int32")

    got = measure_feeding(make_model(), mw.Single("CPU:0"), Data(), BATCH)
    assert got.kind == "Data"
    assert got.reading > 0


def test_what_can_be_read_once_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        measure_feeding(make_model(), mw.Single("CPU:0"), make_data(), BATCH)
    assert caught.value.received == (
        "bench received a generator, which gives its batches once."
    )
    assert "several times" in caught.value.rule
    assert caught.value.change == "Pass a function that makes it."


def test_data_without_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match="without a batch"):
        measure_feeding(make_model(), mw.Single("CPU:0"), lambda: iter([]), BATCH)


def test_the_advice_names_what_takes_the_time() -> None:
    fast = found(reading=200.0, moving=100.0, training=100.0)
    assert not fast.starves
    assert "fast enough" in fast.advice()
    late = found(reading=60.0, moving=50.0, training=100.0)
    assert late.waiting == 0.5
    assert "for 50 % of the time: reading is what takes it" in late.advice()
    heavy = found(reading=1000.0, moving=50.0, training=100.0)
    assert "moving batches onto them is what takes it" in heavy.advice()
    arrays = found(kind="arrays", reading=60.0, moving=50.0, training=100.0)
    assert "fit keeps them there" in arrays.advice()
    assert "50 % of the time" in str(late)
