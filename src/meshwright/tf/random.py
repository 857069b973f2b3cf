"""`tf.random`: numbers by chance, of the sequence that `set_seed` begins."""

from typing import Any

from meshwright.tf.absent import refuse
from meshwright.tf.dtypes import in_jax
from meshwright.tf.tensors import Tensor, raw, wrap

import jax
import jax.numpy as jnp
import keras
import numpy as np


class _Sequence:
    chance = np.random.default_rng()


def set_seed(seed: int) -> None:
    """Begins the sequence anew; Keras' initializers and dropout follow it too.

    >>> from meshwright import tf
    >>> tf.random.set_seed(1)
    """
    _Sequence.chance = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)


def _key(seed: int | None) -> Any:
    drawn = _Sequence.chance.integers(2**31)
    return jax.random.key(int(drawn if seed is None else drawn ^ seed))


def _dims(shape: Any) -> tuple[int, ...]:
    return tuple(int(dim) for dim in np.ravel(np.asarray(raw(shape))))


def uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = "float32",
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Numbers that are equally likely.

    >>> from meshwright import tf
    >>> tf.random.uniform((2, 3)).shape
    TensorShape([2, 3])
    """
    kind = in_jax(dtype)
    if jnp.issubdtype(kind, jnp.integer):
        if maxval is None:
            raise ValueError("Must specify maxval for integer dtype")
        return wrap(jax.random.randint(_key(seed), _dims(shape), minval, maxval, kind))
    most = 1 if maxval is None else maxval
    return wrap(jax.random.uniform(_key(seed), _dims(shape), kind, minval, most))


def normal(
    shape: Any,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = "float32",
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Numbers of a normal distribution."""
    drawn = jax.random.normal(_key(seed), _dims(shape), in_jax(dtype))
    return wrap(drawn * stddev + mean)


def shuffle(value: Any, seed: int | None = None, name: str | None = None) -> Tensor:
    """The rows of a tensor in another order."""
    return wrap(jax.random.permutation(_key(seed), jnp.asarray(raw(value))))


__getattr__ = refuse(
    "tf.random",
    {"Generator": "keras.random.SeedGenerator", "stateless_uniform": "jax.random"},
)
