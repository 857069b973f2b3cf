"""`tf.Variable`: a variable of Keras' with TensorFlow's manners.

What an assignment means while a strategy runs is decided in `distribute.updates`.
"""

import enum
from typing import Any

from meshwright.devices.keras_hooks import current_stateless_scope
from meshwright.devices.runtime import names_of
from meshwright.tf.absent import refuse
from meshwright.tf.distribute import updates
from meshwright.tf.distribute.contexts import current_replica, current_strategy
from meshwright.tf.dtypes import in_jax
from meshwright.tf.functions import refuse_variable_of_later_call
from meshwright.tf.operations import constant
from meshwright.tf.tensors import Tensor, TensorShape, full_name, raw, wrap

import jax
import jax.numpy as jnp
import keras
import numpy as np


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are made one.

    >>> VariableSynchronization.ON_READ.value
    'on_read'
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(enum.Enum):
    """How they are made one.

    >>> VariableAggregation.MEAN.value
    'mean'
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class Variable(keras.Variable):
    """A value that can be assigned.

    Arguments:
        initial_value: Its first value, or a function that gives it.
        trainable: Whether optimizers and layers take it for a weight.
        validate_shape: Accepted.
        name: Its name.
        dtype: The type of its elements.
        synchronization: When copies on several devices are made one.
        aggregation: How they are.
        shape: Its shape, if `initial_value` does not tell.

    >>> from meshwright import tf
    >>> v = tf.Variable(1.0)
    >>> v.assign_add(2.0)
    <tf.Variable 'Variable:0' shape=() dtype=float32, numpy=3.0>
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Chooses the kind of variable that the strategy of the scope has."""
        replica, strategy = current_replica(), current_strategy()
        if cls is not Variable or strategy is None:
            return super().__new__(cls)
        if replica is not None:
            return replica.once_for_all(lambda: Variable(*args, **kwargs))
        if _choice(kwargs.get("synchronization", "auto")) == "on_read":
            return super().__new__(SyncOnReadVariable)
        return super().__new__(strategy.variable_kind(MirroredVariable))

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Any = VariableSynchronization.AUTO,
        aggregation: Any = VariableAggregation.NONE,
        shape: Any = None,
    ) -> None:
        if hasattr(self, "_short_name"):
            return  # it was made once, for all replicas
        if initial_value is None:
            raise ValueError(
                "`initial_value` must be a Tensor or an object convertible to a "
                "Tensor. Received None."
            )
        refuse_variable_of_later_call()
        value = initial_value() if callable(initial_value) else initial_value
        array = raw(constant(value, dtype) if not _is_array(value) else value)
        if dtype is not None:
            array = array.astype(in_jax(dtype))
        when = _choice(synchronization)
        strategy = current_strategy()
        if when == "none" and strategy is not None:
            raise ValueError(
                "`NONE` variable synchronization mode is not supported with "
                "tf.distribute "
                f"strategy. Please change the synchronization for variable: {name}"
            )
        self._strategy = strategy
        if trainable is None:
            trainable = when != "on_read"
        super().__init__(
            array,
            trainable=trainable,
            dtype=array.dtype.name,
            aggregation=_choice(aggregation),
            synchronization="auto" if when == "none" else when,
            name=(name or "Variable").split("/")[-1],
        )
        self._short_name = name or "Variable"

    @property
    def name(self) -> str:
        """Its name, as TensorFlow numbers it."""
        return f"{self._short_name}:0"

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was made."""
        return self._strategy

    @property
    def shape(self) -> TensorShape:
        """Its shape."""
        return TensorShape(self._shape)

    @property
    def device(self) -> str:
        """The full name of the device that it lives on."""
        return full_name(names_of(updates.local_value(self).sharding)[0])

    @property
    def value(self) -> Any:
        """Its value here, as an array of JAX's."""
        if isinstance(self._value, jax.core.Tracer) or self._value is None:
            return super().value
        if current_replica() is None and current_stateless_scope() is not None:
            return super().value
        return updates.read(self)

    def read_value(self) -> Tensor:
        """Its value here."""
        return wrap(jnp.array(self.value))

    def numpy(self) -> Any:
        """Its value, on the host."""
        return np.asarray(self.value)[()]

    def __jax_array__(self) -> Any:
        return self.value

    def assign(self, value: Any, **_: Any) -> "Variable":
        """Gives it another value."""
        updates.assign(self, value, "assign")
        return self

    def assign_add(self, value: Any, **_: Any) -> "Variable":
        """Adds to its value."""
        updates.assign(self, value, "assign_add")
        return self

    def assign_sub(self, value: Any, **_: Any) -> "Variable":
        """Takes from its value."""
        updates.assign(self, value, "assign_sub")
        return self

    def scatter_sub(self, *_: Any, **__: Any) -> None:
        """Not there for variables that are made one when they are read."""
        if self.synchronization == "on_read":
            raise NotImplementedError(
                "Variables with synchronization=ON_READ doesn't support scatter_sub"
            )
        absent("scatter_sub")

    def __repr__(self) -> str:
        text = repr(self.numpy().item() if not self.shape else self.numpy())
        text = "\n" + text if "\n" in text else text
        return (
            f"<tf.Variable '{self.name}' shape={self.shape} dtype={self._dtype}, "
            f"numpy={text}>"
        )


def _arithmetic(name: str) -> Any:
    def compute(self: Variable, *others: Any) -> Any:
        return getattr(wrap(self.value), name)(*others)

    return compute


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(Variable, _form, _arithmetic(_form))
for _name in ("__neg__", "__abs__", "__getitem__", "__lt__", "__le__", "__gt__"):
    setattr(Variable, _name, _arithmetic(_name))
for _name in ("__ge__", "__float__", "__int__", "__bool__"):
    setattr(Variable, _name, _arithmetic(_name))


class MirroredVariable(Variable):
    """One that every replica has a copy of."""

    @property
    def values(self) -> tuple["Component", ...]:
        """The copies."""
        return tuple(
            Component(self, i, array) for i, array in enumerate(updates.copies(self))
        )

    def __repr__(self) -> str:
        copies = ",\n".join(f"  {i}: {copy!r}" for i, copy in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{copies}\n}}"


class SyncOnReadVariable(MirroredVariable):
    """One of which every replica changes its own copy, until it is read."""


class AggregatingVariable(Variable):
    """One that lives on one device, and takes updates from all replicas."""


class Component:
    """A copy of a variable.

    >>> Component.__name__
    'Component'
    """

    def __init__(self, variable: Variable, index: int, array: Any) -> None:
        suffix = f"/replica_{index}" if index else ""
        self.name = f"{variable._short_name}{suffix}:0"
        self._array = array

    @property
    def device(self) -> str:
        """The full name of its device."""
        return full_name(names_of(self._array.sharding)[0])

    def numpy(self) -> Any:
        """Its value, on the host."""
        return np.asarray(self._array)[()]

    def read_value(self) -> Tensor:
        """Its value."""
        return Tensor(self._array)

    def __jax_array__(self) -> Any:
        return self._array

    def __repr__(self) -> str:
        text = repr(self.numpy().item() if not self._array.ndim else self.numpy())
        return (
            f"<tf.Variable '{self.name}' shape={TensorShape(self._array.shape)} "
            f"dtype={self._array.dtype.name}, numpy={text}>"
        )


def _is_array(value: Any) -> bool:
    return isinstance(raw(value), jax.Array)


def _choice(value: Any) -> str:
    return str(getattr(value, "value", value)).lower()


absent = refuse("tf.Variable", {"scatter_sub": "assign the whole value"})
