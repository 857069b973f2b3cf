"""Shards: together everything, each once."""

from meshwright.data.shards import Shard
from meshwright.errors import DataError

import numpy as np
import pytest


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 16, 17, 100])
def test_shards_are_disjoint_and_together_the_whole(size: int, count: int) -> None:
    batch = {"x": np.arange(size), "y": (np.arange(size) * 2, np.float32(0.5))}
    parts = [Shard(index, count).samples(batch) for index in range(count)]
    np.testing.assert_array_equal(
        np.concatenate([part["x"] for part in parts]), np.arange(size)
    )
    np.testing.assert_array_equal(
        np.concatenate([part["y"][0] for part in parts]), 2 * np.arange(size)
    )
    assert all(part["y"][1] == 0.5 for part in parts)
    # Filled in order: full shares first, then the rest, then nothing.
    share = -(-size // count)
    lengths = [len(part["x"]) for part in parts]
    assert lengths == [max(0, min(share, size - i * share)) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_files", [8, 9, 15, 16, 31])
def test_files_are_shared_evenly_and_each_is_read_once(
    num_files: int, count: int
) -> None:
    files = [f"part-{number}" for number in range(num_files)]
    parts = [Shard(index, count).files(files) for index in range(count)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def test_fewer_files_than_processes_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        Shard(0, 4).files(["a", "b"])
    assert str(caught.value).split("\n") == [
        "4 processes received 2 files to share.",
        "A file is read by one process, so there are at least as many files.",
        "Write the data as 4 files or more (a multiple of it is best), start fewer "
        "processes, or share by sample.",
    ]


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_an_index_that_no_process_has_is_refused(index: int, count: int) -> None:
    with pytest.raises(DataError) as caught:
        Shard(index, count)
    assert str(caught.value).split("\n") == [
        f"Shard received index={index} and count={count}.",
        "The index counts from 0 up to one less than the count.",
        "Use, for example, Shard(mw.process_index(), mw.process_count()).",
    ]
