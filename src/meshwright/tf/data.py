"""`tf.data.Dataset`: arrays and generators, as TensorFlow chains them.

Elements are kept on the host. Iterating gives tensors; `fit` and strategies take the
arrays themselves, and Meshwright's own thread puts them onto the devices ahead of use.
"""

from collections.abc import Callable, Iterator
from typing import Any

from meshwright.tf.absent import refuse
from meshwright.tf.dtypes import as_dtype, in_jax
from meshwright.tf.operations import constant
from meshwright.tf.started import initialize
from meshwright.tf.tensors import Tensor, TensorShape, unwrap

import jax
import numpy as np

AUTOTUNE = -1
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2

_WAYS = {
    "interleave": "a keras.utils.PyDataset or Grain, which fit takes as they are",
    "save": "numpy.savez",
    "load": "numpy.load",
    "list_files": "Dataset.from_tensor_slices(sorted(glob.glob(pattern)))",
    "padded_batch": "pad in map, then batch",
    "window": "keras.utils.timeseries_dataset_from_array's windows as arrays",
}


class TensorSpec:
    """The shape and type of elements.

    >>> TensorSpec((None, 2), "float32")
    TensorSpec(shape=(None, 2), dtype=tf.float32, name=None)
    """

    def __init__(
        self, shape: Any = (), dtype: Any = "float32", name: Any = None
    ) -> None:
        self.shape = TensorShape(shape)
        self.dtype = as_dtype(dtype)
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return (
            f"TensorSpec(shape={self.shape}, dtype={self.dtype!r}, name={self.name!r})"
        )


Elements = Callable[[], Iterator[Any]]


class Dataset:
    """A series of elements, each a tree of tensors; every iteration begins anew.

    >>> dataset = Dataset.range(5).map(lambda x: x * x).batch(2)
    >>> [batch.numpy().tolist() for batch in dataset]
    [[0, 1], [4, 9], [16]]
    """

    def __init__(
        self, elements: Elements, size: int, first_dim: int | None = 0
    ) -> None:
        initialize()
        self._elements = elements
        self._size = size
        # Of batches: their size if all are equal, None if not; 0 if there are none.
        self._first_dim = first_dim

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> "Dataset":
        """The rows of arrays."""
        arrays = _on_host(tensors)
        sizes = {len(leaf) for leaf in jax.tree.leaves(arrays)}
        if len(sizes) != 1:
            raise ValueError(
                f"from_tensor_slices received arrays of {sorted(sizes)} rows. All have "
                "the same number of rows."
            )
        (size,) = sizes

        def rows() -> Iterator[Any]:
            return (jax.tree.map(lambda a, i=i: a[i], arrays) for i in range(size))

        return Dataset(rows, size)

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> "Dataset":
        """One element."""
        value = _on_host(tensors)
        return Dataset(lambda: iter([value]), 1)

    @staticmethod
    def range(*bounds: int, **_: Any) -> "Dataset":
        """Whole numbers in a row."""
        numbers = range(*bounds)
        return Dataset(lambda: (np.int64(n) for n in numbers), len(numbers))

    @staticmethod
    def from_generator(
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Any = (),
        output_signature: Any = None,
    ) -> "Dataset":
        """What a generator function yields."""
        return Dataset(
            lambda: (_on_host(e) for e in generator(*args)), UNKNOWN_CARDINALITY
        )

    @staticmethod
    def zip(*datasets: Any, name: str | None = None) -> "Dataset":
        """Elements of several datasets side by side."""
        chosen = datasets[0] if isinstance(datasets[0], tuple) else datasets
        sizes = [d._size for d in chosen if d._size != INFINITE_CARDINALITY]
        size = min(sizes) if sizes else INFINITE_CARDINALITY
        return Dataset(
            lambda: zip(*(d._elements() for d in chosen), strict=False), size
        )

    def _then(
        self, change: Callable[[Iterator[Any]], Iterator[Any]], size: int | None = None
    ) -> "Dataset":
        known = self._size if size is None else size
        return Dataset(lambda: change(self._elements()), known, self._first_dim)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        **_: Any,
    ) -> "Dataset":
        """As many elements as one, with a dim more."""
        size = int(batch_size)
        if size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")

        def batches(elements: Iterator[Any]) -> Iterator[Any]:
            waiting: list[Any] = []
            for element in elements:
                waiting.append(element)
                if len(waiting) == size:
                    yield _stack(waiting)
                    waiting = []
            if waiting and not drop_remainder:
                yield _stack(waiting)

        whole, rest = divmod(self._size, size)
        num = (
            whole + bool(rest and not drop_remainder) if self._size >= 0 else self._size
        )
        batched = self._then(batches, num)
        batched._first_dim = size if drop_remainder else None
        return batched

    def unbatch(self, name: str | None = None) -> "Dataset":
        """The rows of the elements."""

        def rows(elements: Iterator[Any]) -> Iterator[Any]:
            for element in elements:
                for i in range(len(jax.tree.leaves(element)[0])):
                    yield jax.tree.map(lambda a, i=i: a[i], element)

        flat = self._then(rows, UNKNOWN_CARDINALITY)
        flat._first_dim = 0
        return flat

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> "Dataset":
        """What a function makes of each element; it is called with tensors."""

        def mapped(elements: Iterator[Any]) -> Iterator[Any]:
            return (_on_host(_call(map_func, element)) for element in elements)

        return self._then(mapped)

    def filter(
        self, predicate: Callable[..., Any], name: str | None = None
    ) -> "Dataset":
        """The elements for which a function is true."""

        def kept(elements: Iterator[Any]) -> Iterator[Any]:
            return (e for e in elements if bool(_call(predicate, e)))

        return self._then(kept, UNKNOWN_CARDINALITY)

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
        name: str | None = None,
    ) -> "Dataset":
        """Mixed within a buffer, anew in every iteration."""
        root = np.random.default_rng(seed)

        def mixed(elements: Iterator[Any]) -> Iterator[Any]:
            chance = root if reshuffle_each_iteration else np.random.default_rng(seed)
            waiting: list[Any] = []
            for element in elements:
                waiting.append(element)
                if len(waiting) > max(buffer_size, 1) - 1:
                    yield waiting.pop(chance.integers(len(waiting)))
            while waiting:
                yield waiting.pop(chance.integers(len(waiting)))

        return self._then(mixed)

    def repeat(self, count: int | None = None, name: str | None = None) -> "Dataset":
        """Over and over; for ever if no count is given."""
        is_endless = count is None or count < 0
        if is_endless or self._size < 0:
            size = INFINITE_CARDINALITY if is_endless else self._size
        else:
            size = self._size * int(count or 0)

        def again() -> Iterator[Any]:
            done = 0
            while is_endless or done < int(count or 0):
                is_empty = True
                for element in self._elements():
                    is_empty = False
                    yield element
                if is_empty:
                    return
                done += 1

        return Dataset(again, size, self._first_dim)

    def take(self, count: int, name: str | None = None) -> "Dataset":
        """The first elements."""

        def first(elements: Iterator[Any]) -> Iterator[Any]:
            for number, element in enumerate(elements, 1):
                if number <= count or count < 0:
                    yield element
                if number == count:
                    return

        known = self._size if count < 0 else min(count, self._size)
        if self._size < 0 and count >= 0:
            known = count if self._size == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY
        if count == 0:
            return Dataset(lambda: iter(()), 0)
        return self._then(first, known)

    def skip(self, count: int, name: str | None = None) -> "Dataset":
        """Without the first elements."""

        def rest(elements: Iterator[Any]) -> Iterator[Any]:
            return (e for number, e in enumerate(elements) if number >= count)

        return self._then(rest, max(0, self._size - count) if self._size >= 0 else None)

    def shard(self, num_shards: int, index: int, name: str | None = None) -> "Dataset":
        """Every so many-th element."""

        def own(elements: Iterator[Any]) -> Iterator[Any]:
            return (e for n, e in enumerate(elements) if n % num_shards == index)

        size = -(-(self._size - index) // num_shards) if self._size >= 0 else None
        return self._then(own, size)

    def concatenate(self, dataset: "Dataset", name: str | None = None) -> "Dataset":
        """With another dataset behind."""

        def both() -> Iterator[Any]:
            yield from self._elements()
            yield from dataset._elements()

        sizes = self._size, dataset._size
        return Dataset(both, sum(sizes) if min(sizes) >= 0 else min(sizes))

    def enumerate(self, start: int = 0, name: str | None = None) -> "Dataset":
        """With their numbers."""

        def numbered(elements: Iterator[Any]) -> Iterator[Any]:
            return ((np.int64(n), e) for n, e in enumerate(elements, start))

        return self._then(numbered)

    def cache(self, filename: str = "", name: str | None = None) -> "Dataset":
        """Kept in memory after the first iteration; a file is not written."""
        kept: list[Any] = []
        is_whole = False

        def remembered() -> Iterator[Any]:
            nonlocal is_whole
            if is_whole:
                yield from kept
                return
            fresh = []
            for element in self._elements():
                fresh.append(element)
                yield element
            kept[:], is_whole = fresh, True

        return Dataset(remembered, self._size, self._first_dim)

    def prefetch(self, buffer_size: int, name: str | None = None) -> "Dataset":
        """Accepted: `fit` and strategies prepare batches ahead by themselves."""
        return self

    def with_options(self, options: Any, name: str | None = None) -> "Dataset":
        """Accepted."""
        return self

    def options(self) -> "Options":
        """The options."""
        return Options()

    def apply(self, transformation_func: Callable[["Dataset"], "Dataset"]) -> "Dataset":
        """What a function makes of the dataset."""
        return transformation_func(self)

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any]) -> Any:
        """One value of all elements."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def cardinality(self, name: str | None = None) -> Tensor:
        """The number of elements; -1 if they never end, -2 if it is not known."""
        return constant(np.int32(self._size))

    def as_numpy_iterator(self) -> Iterator[Any]:
        """The elements as arrays of NumPy's."""
        return self._elements()

    @property
    def global_batches(self) -> "_Batches":
        """The elements as `fit` and strategies take them."""
        return _Batches(self)

    @property
    def element_spec(self) -> Any:
        """The shapes and types of the elements; it looks at the first one."""
        first = next(self._elements(), None)

        def spec(array: Any) -> TensorSpec:
            shape = np.shape(array)
            if self._first_dim != 0:
                shape = (self._first_dim, *shape[1:])
            return TensorSpec(shape, np.asarray(array).dtype)

        return jax.tree.map(spec, first)

    def __iter__(self) -> Iterator[Any]:
        return map(_as_tensors, self._elements())

    def __len__(self) -> int:
        if self._size < 0:
            kind = "infinite" if self._size == INFINITE_CARDINALITY else "unknown"
            raise TypeError(f"The dataset is {kind}.")
        return self._size

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<tf.data.Dataset of {self._size} elements>"

    def __getattr__(self, name: str) -> Any:
        return refuse("tf.data.Dataset", _WAYS)(name)


class _Batches:
    """The elements of a dataset, as arrays."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self._dataset._elements()

    def __len__(self) -> int:
        return len(self._dataset)


class Options:
    """Options of a dataset; they are accepted.

    >>> Options().experimental_distribute.auto_shard_policy = "DATA"
    """

    def __init__(self) -> None:
        object.__setattr__(self, "_kept", {})

    def __getattr__(self, name: str) -> Any:
        return self._kept.setdefault(name, Options())

    def __setattr__(self, name: str, value: Any) -> None:
        self._kept[name] = value


def _on_host(tree: Any) -> Any:
    def fetch(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.astype(in_jax(array.dtype)) if array.dtype.kind == "f" else array

    return jax.tree.map(fetch, _lists_to_arrays(unwrap(tree)))


def _lists_to_arrays(tree: Any) -> Any:
    """Lists are arrays and tuples are trees, as in TensorFlow."""
    if isinstance(tree, tuple):
        return tuple(map(_lists_to_arrays, tree))
    if isinstance(tree, dict):
        return {key: _lists_to_arrays(value) for key, value in tree.items()}
    return np.asarray(tree) if isinstance(tree, list) else tree


def _as_tensors(element: Any) -> Any:
    return jax.tree.map(constant, element)


def _call(function: Callable[..., Any], element: Any) -> Any:
    tensors = _as_tensors(element)
    return function(*tensors) if isinstance(tensors, tuple) else function(tensors)


def _stack(elements: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *elements)


__getattr__ = refuse(
    "tf.data",
    {
        "TFRecordDataset": "Grain, or a generator with Dataset.from_generator",
        "TextLineDataset": "Dataset.from_generator over the lines of a file",
        "experimental": "Dataset's own methods, or Grain",
    },
)
