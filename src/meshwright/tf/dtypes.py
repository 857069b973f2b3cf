"""`tf.float32` and its like."""

from typing import Any

import jax


class DType:
    """A type of elements, as TensorFlow prints it.

    >>> float32, float32 == "float32", float32.as_numpy_dtype
    (tf.float32, True, <class 'numpy.float32'>)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = jax.dtypes.canonicalize_dtype(jax.numpy.dtype(name))

    @property
    def as_numpy_dtype(self) -> Any:
        """NumPy's type of it."""
        return jax.numpy.dtype(self.name).type

    @property
    def is_floating(self) -> bool:
        """Whether it is one of floating-point numbers."""
        return bool(jax.numpy.issubdtype(self.dtype, jax.numpy.floating))

    @property
    def is_integer(self) -> bool:
        """Whether it is one of whole numbers."""
        return bool(jax.numpy.issubdtype(self.dtype, jax.numpy.integer))

    def __eq__(self, other: object) -> bool:
        try:
            return self.name == as_dtype(other).name
        except TypeError:
            return False

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"tf.{self.name}"

    def __str__(self) -> str:
        return f"<dtype: {self.name!r}>"


def as_dtype(dtype: Any) -> DType:
    """The type that a name, a type of NumPy's or one of these means.

    >>> as_dtype("int32")
    tf.int32
    """
    if isinstance(dtype, DType):
        return dtype
    return DType(jax.numpy.dtype("bool" if dtype is bool else dtype).name)


def in_jax(dtype: Any) -> Any:
    """The type of JAX's that values of a type have here; None stays None.

    Types of 64 bits are those of 32, unless JAX is told to use 64.
    """
    return None if dtype is None else as_dtype(dtype).dtype


float16 = half = DType("float16")
bfloat16 = DType("bfloat16")
float32 = DType("float32")
float64 = double = DType("float64")
int8 = DType("int8")
int16 = DType("int16")
int32 = DType("int32")
int64 = DType("int64")
uint8 = DType("uint8")
uint16 = DType("uint16")
uint32 = DType("uint32")
uint64 = DType("uint64")
bool_ = DType("bool")
complex64 = DType("complex64")
