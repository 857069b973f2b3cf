"""TensorFlow's names for operations of JAX's; each is one call, and gives tensors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.tf.dtypes import in_jax
from meshwright.tf.started import initialize
from meshwright.tf.tensors import Tensor, raw, to_array, together, unwrap, wrap

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
"""A tensor, a variable, an array or a number."""


def elementwise(function: Callable[..., Any], num_inputs: int, doc: str) -> Any:
    """One of TensorFlow's operations, out of one of JAX's.

    >>> print(elementwise(jnp.add, 2, "The sum.")(1, 2))
    tf.Tensor(3, shape=(), dtype=int32)
    """

    def compute(*inputs: Array, name: str | None = None) -> Tensor:
        if len(inputs) != num_inputs:
            raise TypeError(
                f"{compute.__name__} takes {num_inputs} tensors, got {len(inputs)}"
            )
        return wrap(function(*together(*inputs)))

    compute.__doc__ = doc
    return compute


def constant(
    value: Any, dtype: Any = None, shape: Any = None, name: str | None = None
) -> Tensor:
    """A tensor of a value, on the device of the scope.

    >>> constant([1.0, 2.0])
    <tf.Tensor: shape=(2,), dtype=float32, numpy=array([1., 2.], dtype=float32)>
    """
    initialize()
    host = np.asarray(unwrap(value))
    if dtype is None and host.dtype == np.float64 and not hasattr(value, "dtype"):
        host = host.astype(np.float32)
    host = host.astype(in_jax(dtype) or jax.dtypes.canonicalize_dtype(host.dtype))
    if shape is not None:
        host = np.broadcast_to(host, shape) if host.size == 1 else host.reshape(shape)
    return wrap(jnp.asarray(host))


def convert_to_tensor(value: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    """A tensor of a value; one that is a tensor already stays on its device."""
    array = raw(value)
    if not isinstance(array, jax.Array):
        return constant(value, dtype)
    return wrap(array if dtype is None else array.astype(in_jax(dtype)))


def matmul(
    a: Array,
    b: Array,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: str | None = None,
) -> Tensor:
    """The product of two matrices.

    >>> print(matmul([[1.0, 2.0]], [[3.0], [4.0]]))
    tf.Tensor([[11.]], shape=(1, 1), dtype=float32)
    """
    left, right = together(a, to_array(b))
    if transpose_a:
        left = jnp.swapaxes(left, -1, -2)
    if transpose_b:
        right = jnp.swapaxes(right, -1, -2)
    return wrap(jnp.matmul(left, right))


@jax.jit  # type: ignore[untyped-decorator]
def _add_n(arrays: list[Any]) -> Any:
    return functools.reduce(jnp.add, arrays)


def add_n(inputs: Sequence[Array], name: str | None = None) -> Tensor:
    """The sum of tensors of one shape, taken to the device of the scope.

    >>> print(add_n([constant([1, 2]), constant([3, 4])]))
    tf.Tensor([4 6], shape=(2,), dtype=int32)
    """
    arrays = together(*inputs)
    shapes = {np.shape(array) for array in arrays}
    if len(shapes) != 1:
        raise ValueError(
            f"add_n received tensors of shapes {sorted(shapes)}. Inputs must have the "
            "same shape: reshape them, or add them with +."
        )
    return wrap(_add_n(arrays))


def _reduction(function: Callable[..., Any]) -> Any:
    def reduce(
        input_tensor: Array,
        axis: Any = None,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        (array,) = together(input_tensor)
        axis = tuple(axis) if isinstance(axis, list) else axis
        result = function(array, axis=axis, keepdims=keepdims)
        # The mean of whole numbers is a whole number, as in TensorFlow.
        is_whole = jnp.issubdtype(jnp.result_type(array), jnp.integer)
        if is_whole and jnp.issubdtype(result.dtype, jnp.floating):
            result = jnp.trunc(result).astype(array.dtype)
        return wrap(result)

    return reduce


reduce_sum = _reduction(jnp.sum)
reduce_mean = _reduction(jnp.mean)
reduce_max = _reduction(jnp.max)
reduce_min = _reduction(jnp.min)
reduce_prod = _reduction(jnp.prod)
reduce_all = _reduction(jnp.all)
reduce_any = _reduction(jnp.any)

add = elementwise(jnp.add, 2, "The sum, element by element.")
subtract = elementwise(jnp.subtract, 2, "The difference, element by element.")
multiply = elementwise(jnp.multiply, 2, "The product, element by element.")
divide = elementwise(jnp.true_divide, 2, "The quotient, element by element.")
pow = elementwise(jnp.power, 2, "The power, element by element.")
maximum = elementwise(jnp.maximum, 2, "The greater one, element by element.")
minimum = elementwise(jnp.minimum, 2, "The smaller one, element by element.")
equal = elementwise(jnp.equal, 2, "Whether elements are equal.")
not_equal = elementwise(jnp.not_equal, 2, "Whether elements differ.")
less = elementwise(jnp.less, 2, "Whether elements are smaller.")
greater = elementwise(jnp.greater, 2, "Whether elements are greater.")
logical_and = elementwise(jnp.logical_and, 2, "Whether both are true.")
logical_or = elementwise(jnp.logical_or, 2, "Whether one is true.")
logical_not = elementwise(jnp.logical_not, 1, "Whether elements are false.")
abs = elementwise(jnp.abs, 1, "The absolute values.")
negative = elementwise(jnp.negative, 1, "The negated values.")
square = elementwise(jnp.square, 1, "The squares.")
sqrt = elementwise(jnp.sqrt, 1, "The square roots.")
exp = elementwise(jnp.exp, 1, "The exponentials.")
log = elementwise(jnp.log, 1, "The natural logarithms.")
sin = elementwise(jnp.sin, 1, "The sines.")
cos = elementwise(jnp.cos, 1, "The cosines.")
tanh = elementwise(jnp.tanh, 1, "The hyperbolic tangents.")
sigmoid = elementwise(jax.nn.sigmoid, 1, "The logistic function.")
sign = elementwise(jnp.sign, 1, "The signs.")
round = elementwise(jnp.round, 1, "The nearest whole numbers.")
floor = elementwise(jnp.floor, 1, "The next lower whole numbers.")
identity = elementwise(jnp.array, 1, "A copy.")
stop_gradient = elementwise(
    jax.lax.stop_gradient, 1, "The values, through which no gradient flows."
)


def cast(x: Array, dtype: Any, name: str | None = None) -> Tensor:
    """The values in another type."""
    (array,) = together(x)
    return wrap(jnp.asarray(array).astype(in_jax(dtype)))


def reshape(tensor: Array, shape: Any, name: str | None = None) -> Tensor:
    """The same elements in another shape."""
    (array,) = together(tensor)
    return wrap(jnp.reshape(array, tuple(int(raw(dim)) for dim in shape)))


def transpose(a: Array, perm: Any = None, name: str | None = None) -> Tensor:
    """The dims in another order."""
    (array,) = together(a)
    return wrap(jnp.transpose(array, perm))


def concat(values: Sequence[Array], axis: int, name: str | None = None) -> Tensor:
    """Tensors one behind the other."""
    return wrap(jnp.concatenate(together(*values), axis))


def stack(values: Sequence[Array], axis: int = 0, name: str | None = None) -> Tensor:
    """Tensors along a dim that they did not have."""
    return wrap(jnp.stack(together(*values), axis))


def split(value: Array, num_or_size_splits: Any, axis: int = 0) -> list[Tensor]:
    """The parts of a tensor along a dim."""
    (array,) = together(value)
    where = num_or_size_splits
    if not isinstance(where, int):
        where = np.cumsum(where)[:-1].tolist()
    return [wrap(part) for part in jnp.split(array, where, axis)]


def squeeze(input: Array, axis: Any = None, name: str | None = None) -> Tensor:
    """Without the dims of size 1."""
    (array,) = together(input)
    return wrap(jnp.squeeze(array, axis if axis is None else tuple(np.ravel(axis))))


def expand_dims(input: Array, axis: int, name: str | None = None) -> Tensor:
    """With one more dim of size 1."""
    (array,) = together(input)
    return wrap(jnp.expand_dims(array, axis))


def tile(input: Array, multiples: Any, name: str | None = None) -> Tensor:
    """A tensor over and over."""
    (array,) = together(input)
    return wrap(jnp.tile(array, tuple(multiples)))


def gather(params: Array, indices: Array, axis: int = 0) -> Tensor:
    """Rows of a tensor."""
    array, where = together(params, indices)
    return wrap(jnp.take(array, jnp.asarray(where), axis=axis))


def argmax(input: Array, axis: int = 0, output_type: Any = "int64") -> Tensor:
    """Where the greatest elements are."""
    (array,) = together(input)
    return wrap(jnp.argmax(array, axis).astype(in_jax(output_type)))


def argmin(input: Array, axis: int = 0, output_type: Any = "int64") -> Tensor:
    """Where the smallest elements are."""
    (array,) = together(input)
    return wrap(jnp.argmin(array, axis).astype(in_jax(output_type)))


def where(condition: Array, x: Array, y: Array, name: str | None = None) -> Tensor:
    """Elements of one tensor or of another."""
    return wrap(jnp.where(*together(condition, x, y)))


def one_hot(indices: Array, depth: int, dtype: Any = "float32") -> Tensor:
    """Rows of zeros with a one."""
    (array,) = together(indices)
    return wrap(jax.nn.one_hot(array, depth, dtype=in_jax(dtype)))


def zeros(shape: Any, dtype: Any = "float32", name: str | None = None) -> Tensor:
    """A tensor of zeros."""
    return wrap(jnp.zeros(tuple(np.ravel(shape).astype(int)), in_jax(dtype)))


def ones(shape: Any, dtype: Any = "float32", name: str | None = None) -> Tensor:
    """A tensor of ones."""
    return wrap(jnp.ones(tuple(np.ravel(shape).astype(int)), in_jax(dtype)))


def fill(dims: Any, value: Any, name: str | None = None) -> Tensor:
    """A tensor of one value."""
    return wrap(jnp.full(tuple(dims), raw(value)))


def zeros_like(input: Array, dtype: Any = None, name: str | None = None) -> Tensor:
    """Zeros in the shape of another tensor."""
    return wrap(jnp.zeros_like(to_array(input), in_jax(dtype)))


def ones_like(input: Array, dtype: Any = None, name: str | None = None) -> Tensor:
    """Ones in the shape of another tensor."""
    return wrap(jnp.ones_like(to_array(input), in_jax(dtype)))


def range(start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None) -> Tensor:
    """Numbers in a row."""
    bounds = (0, start) if limit is None else (start, limit)
    first, last = (raw(bound) for bound in bounds)
    return wrap(jnp.arange(first, last, raw(delta), in_jax(dtype)))


def shape(input: Array, name: str | None = None) -> Tensor:
    """The shape of a tensor, as a tensor."""
    return constant(np.asarray(jnp.shape(to_array(input)), np.int32))


def size(input: Array, name: str | None = None) -> Tensor:
    """The number of elements, as a tensor."""
    return constant(np.int32(jnp.size(to_array(input))))


def rank(input: Array, name: str | None = None) -> Tensor:
    """The number of dims, as a tensor."""
    return constant(np.int32(jnp.ndim(to_array(input))))


def is_tensor(x: Any) -> bool:
    """Whether something is a tensor or a variable."""
    return isinstance(x, Tensor | jax.Array) or hasattr(x, "__jax_array__")


def executing_eagerly() -> bool:
    """Whether values are known while the code runs."""
    return not isinstance(jnp.zeros(()) + 0, jax.core.Tracer)


def print_(*inputs: Any, sep: str = " ", end: str = "\n", **_: Any) -> None:
    """Prints values to standard error, as `tf.print` does."""
    import sys

    texts = []
    for value in inputs:
        array = raw(value)
        if isinstance(array, jax.core.Tracer):
            raise NotImplementedError(
                "tf.print was called inside of a compiled function. Use "
                "jax.debug.print "
                "there, or return the value."
            )
        texts.append(
            str(np.asarray(array)) if isinstance(array, jax.Array) else str(value)
        )
    sys.stderr.write(sep.join(texts) + end)


def group(*_: Any, name: str | None = None) -> None:
    """Nothing is left to do: operations run in the order of the program."""


def no_op(name: str | None = None) -> None:
    """Nothing."""
