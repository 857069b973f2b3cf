"""`tf.Tensor`: an array of JAX's with TensorFlow's manners.

It holds the array itself, so Keras, NumPy and JAX take it as they take the array.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

from meshwright.devices.containers import map_leaves
from meshwright.devices.runtime import jax_devices, names_of
from meshwright.devices.scope import current_device, default_device
from meshwright.tf.dtypes import DType, as_dtype

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

_PROCESS = "/job:localhost/replica:0/task:0"


class TensorShape(tuple[int | None, ...]):
    """The shape of a tensor.

    >>> TensorShape((2, 3)), str(TensorShape((2, 3))), TensorShape((2,)).as_list()
    (TensorShape([2, 3]), '(2, 3)', [2])
    """

    __slots__ = ()

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self)

    def as_list(self) -> list[int | None]:
        """The dims as a list."""
        return list(self)

    def __repr__(self) -> str:
        return f"TensorShape({list(self)})"

    def __str__(self) -> str:
        return tuple.__repr__(self)


def full_name(device: str) -> str:
    """A device's name as TensorFlow's operations tell it.

    >>> full_name("/device:GPU:0")
    '/job:localhost/replica:0/task:0/device:GPU:0'
    """
    if device.startswith("/process:"):
        _, process, rest = device.split("/", 2)
        return f"/job:worker/replica:0/task:{process.split(':')[1]}/{rest}"
    return _PROCESS + device


def _operator(function: Callable[[Any, Any], Any]) -> Any:
    def compute(self: "Tensor", other: Any) -> Any:
        if hasattr(other, "values") and not hasattr(other, "__jax_array__"):
            return NotImplemented  # one value per replica
        return wrap(function(*together(self, other)))

    return compute


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    def compute(self: "Tensor", other: Any) -> Any:
        return wrap(function(*together(other, self)))

    return compute


@jax.tree_util.register_pytree_node_class
class Tensor:
    """An array on a device.

    >>> x = Tensor(jnp.ones((2,)))
    >>> x, x.device
    (<tf.Tensor: shape=(2,), dtype=float32, numpy=array([1., 1.], dtype=float32)>,
     '/job:localhost/replica:0/task:0/device:CPU:0')
    >>> print(x * 2)
    tf.Tensor([2. 2.], shape=(2,), dtype=float32)
    """

    __slots__ = ("__weakref__", "_array")
    __array_priority__ = 200

    def __init__(self, array: Any) -> None:
        self._array = array

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """Lets JAX's functions look inside."""
        return (self._array,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Self:
        """Lets JAX's functions put together what they looked into."""
        return cls(*children)

    @property
    def shape(self) -> TensorShape:
        """Its shape."""
        return TensorShape(self._array.shape)

    @property
    def ndim(self) -> int:
        """The number of its dims."""
        return int(self._array.ndim)

    @property
    def dtype(self) -> DType:
        """The type of its elements."""
        return as_dtype(self._array.dtype)

    @property
    def device(self) -> str:
        """The full name of the device that it lives on."""
        return full_name(names_of(self._array.sharding)[0])

    backing_device = device

    def numpy(self) -> Any:
        """Its value, on the host."""
        return np.asarray(self._array)[()]

    def get_shape(self) -> TensorShape:
        """Its shape."""
        return self.shape

    def set_shape(self, shape: Any) -> None:
        """Checks the shape, which is always known here."""
        if len(shape) != self.ndim or any(
            wanted not in (None, dim)
            for wanted, dim in zip(shape, self.shape, strict=True)
        ):
            raise ValueError(
                f"Tensor's shape {self.shape} is not compatible with "
                f"supplied shape {tuple(shape)}."
            )

    def __jax_array__(self) -> Any:
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = np.asarray(self._array)
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Any) -> "Tensor":
        return wrap(self._array[jax.tree.map(raw, index)])

    def __iter__(self) -> Iterator["Tensor"]:
        if not self.ndim:
            raise TypeError("Cannot iterate over a scalar tensor.")
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("Scalar tensor has no `len()`")
        return int(self._array.shape[0])

    def __bool__(self) -> bool:
        return bool(self._array)

    def __int__(self) -> int:
        return int(self._array)

    def __float__(self) -> float:
        return float(self._array)

    def __index__(self) -> int:
        return int(self._array.__index__())

    def __format__(self, spec: str) -> str:
        return format(self.numpy() if not self.ndim else str(self), spec)

    def __hash__(self) -> int:
        raise TypeError("Tensor is unhashable. Instead, use tensor.ref() as the key.")

    def ref(self) -> int:
        """What stands for it as a key."""
        return id(self._array)

    def _text(self, is_repr: bool) -> str:
        value = self.numpy()
        plain = value.item() if is_repr and not self.ndim else value
        text = repr(plain) if is_repr else str(value)
        return "\n" + text if "\n" in text else text

    def __str__(self) -> str:
        return f"tf.Tensor({self._text(False)}, {self._form()})"

    def __repr__(self) -> str:
        return f"<tf.Tensor: {self._form()}, numpy={self._text(True)}>"

    def _form(self) -> str:
        return f"shape={self.shape}, dtype={self.dtype.name}"

    __add__ = _operator(jnp.add)
    __sub__ = _operator(jnp.subtract)
    __mul__ = _operator(jnp.multiply)
    __truediv__ = _operator(jnp.true_divide)
    __floordiv__ = _operator(jnp.floor_divide)
    __mod__ = _operator(jnp.mod)
    __pow__ = _operator(jnp.power)
    __matmul__ = _operator(jnp.matmul)
    __eq__ = _operator(jnp.equal)
    __ne__ = _operator(jnp.not_equal)
    __lt__ = _operator(jnp.less)
    __le__ = _operator(jnp.less_equal)
    __gt__ = _operator(jnp.greater)
    __ge__ = _operator(jnp.greater_equal)
    __and__ = _operator(jnp.bitwise_and)
    __or__ = _operator(jnp.bitwise_or)
    __radd__ = _reflected(jnp.add)
    __rsub__ = _reflected(jnp.subtract)
    __rmul__ = _reflected(jnp.multiply)
    __rtruediv__ = _reflected(jnp.true_divide)
    __rfloordiv__ = _reflected(jnp.floor_divide)
    __rmod__ = _reflected(jnp.mod)
    __rpow__ = _reflected(jnp.power)
    __rmatmul__ = _reflected(jnp.matmul)

    def __neg__(self) -> "Tensor":
        return wrap(jnp.negative(*together(self)))

    def __abs__(self) -> "Tensor":
        return wrap(jnp.abs(*together(self)))

    def __invert__(self) -> "Tensor":
        return wrap(jnp.invert(*together(self)))


def wrap(value: Any) -> Any:
    """Containers in which arrays of JAX's are tensors, unless they are being traced."""
    return map_leaves(lambda leaf: Tensor(leaf) if is_concrete(leaf) else leaf, value)


def is_concrete(value: Any) -> bool:
    """Whether something is an array that has a value and a place."""
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def raw(value: Any) -> Any:
    """The array in a tensor or variable; anything else is itself."""
    if isinstance(value, Tensor):
        return value._array
    if isinstance(value, jax.Array | keras.KerasTensor):
        return value
    return raw(value.__jax_array__()) if hasattr(value, "__jax_array__") else value


def unwrap(value: Any) -> Any:
    """Containers in which tensors and variables are arrays of JAX's."""
    return map_leaves(raw, value)


def without_tensors(value: Any) -> Any:
    """Containers in which tensors are arrays, and everything else is as it was."""
    return map_leaves(
        lambda leaf: leaf._array if isinstance(leaf, Tensor) else leaf, value
    )


def to_array(value: Any) -> Any:
    """The array in a tensor, variable or list; numbers are themselves."""
    value = raw(value)
    if isinstance(value, list | tuple):
        value = jnp.asarray(np.asarray(jax.tree.map(raw, value, is_leaf=_is_tensor)))
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def together(*values: Any) -> list[Any]:
    """Arrays where one operation can use them: TensorFlow's silent copy.

    That is the device of the scope; without one, all devices of a strategy if something
    lies on these, and the default device if not.
    """
    arrays = [to_array(value) for value in values]
    fixed = [array for array in arrays if _is_fixed(array)]
    if not fixed:
        return arrays
    target = _meeting_place(fixed)
    return [bring(array, target) for array in arrays]


def _meeting_place(fixed: list[Any]) -> Any:
    on_several = [a.sharding for a in fixed if len(a.sharding.device_set) > 1]
    if current_device() is None and on_several:
        return whole_on(on_several[0])
    return jax_devices()[current_device() or default_device()]


def whole_on(place: Any) -> Any:
    """The place in which arrays are whole on all devices of another."""
    is_split = isinstance(place, NamedSharding) and not place.is_fully_replicated
    return NamedSharding(place.mesh, PartitionSpec()) if is_split else place


def bring(array: Any, target: Any) -> Any:
    """An array where others are; one that nobody fixed goes there by itself."""
    devices = target.device_set if isinstance(target, Sharding) else {target}
    is_elsewhere = _is_fixed(array) and array.devices() != devices
    return jax.device_put(array, target) if is_elsewhere else array


def _is_fixed(array: Any) -> bool:
    return is_concrete(array) and bool(array.committed)
