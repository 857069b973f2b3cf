"""Tensors, variables and operations."""

from typing import Any

from meshwright import tf

import jax
import keras
import numpy as np
import pytest


def test_tensors_print_as_tensorflow_s() -> None:
    x = tf.constant([[1, 2], [3, 4]])
    assert str(x) == "tf.Tensor(\n[[1 2]\n [3 4]], shape=(2, 2), dtype=int32)"
    assert repr(x) == (
        "<tf.Tensor: shape=(2, 2), dtype=int32, numpy=\n"
        "array([[1, 2],\n       [3, 4]], dtype=int32)>"
    )
    assert str(tf.constant(1.5)) == "tf.Tensor(1.5, shape=(), dtype=float32)"
    assert repr(tf.constant(1.5)) == "<tf.Tensor: shape=(), dtype=float32, numpy=1.5>"
    assert repr(tf.Variable(1.0, name="w")) == (
        "<tf.Variable 'w:0' shape=() dtype=float32, numpy=1.0>"
    )


def test_tensors_are_as_good_as_arrays() -> None:
    x = tf.constant([1.0, 2.0])
    assert x.shape.as_list() == [2]
    assert x.shape == (2,)
    assert x.dtype == tf.float32 == "float32"
    assert x.numpy().tolist() == [1.0, 2.0]
    assert np.asarray(x).tolist() == [1.0, 2.0]
    assert [float(v) for v in x] == [1.0, 2.0]
    assert float(x[1]) == 2.0
    assert len(x) == 2
    assert f"{x[0]:.2f}" == "1.00"
    assert (2 * x - 1 + [1.0, 1.0]).numpy().tolist() == [2.0, 4.0]
    assert (x @ x).numpy() == 5.0
    assert bool(tf.reduce_all(x == x))
    with pytest.raises(TypeError, match="Tensor is unhashable"):
        hash(x)
    with pytest.raises(TypeError, match="Scalar tensor has no"):
        len(x[0])
    with pytest.raises(TypeError, match="Cannot iterate over a scalar"):
        iter(x[0])
    with pytest.raises(ValueError, match="is not compatible with supplied shape"):
        x.set_shape((3,))
    x.set_shape((None,))


def test_operations_compute() -> None:
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    assert tf.reduce_sum(x).numpy() == 10.0
    assert tf.reduce_mean(x, axis=0).numpy().tolist() == [2.0, 3.0]
    assert tf.reduce_mean([1, 2]).numpy() == 1
    assert tf.reduce_max(x, axis=[0, 1], keepdims=True).shape == (1, 1)
    assert tf.matmul(x, x, transpose_b=True).numpy().tolist() == [[5, 11], [11, 25]]
    assert tf.matmul(x, x, transpose_a=True).numpy().tolist() == [[10, 14], [14, 20]]
    assert tf.cast(x, tf.int32).dtype == tf.int32
    assert tf.reshape(x, (4,)).numpy().tolist() == [1, 2, 3, 4]
    assert tf.reshape(x, (-1, 1)).shape == (4, 1)
    assert tf.transpose(x).numpy().tolist() == [[1, 3], [2, 4]]
    assert tf.concat([x, x], 0).shape == (4, 2)
    assert tf.stack([x, x]).shape == (2, 2, 2)
    assert [part.shape for part in tf.split(x, 2)] == [(1, 2), (1, 2)]
    assert [part.shape for part in tf.split(x, [1, 1], axis=1)] == [(2, 1), (2, 1)]
    assert tf.squeeze(tf.expand_dims(x, 0)).shape == (2, 2)
    assert tf.squeeze(tf.ones((1, 2, 1)), [0]).shape == (2, 1)
    assert tf.tile(x, (1, 2)).shape == (2, 4)
    assert tf.gather(x, [1]).numpy().tolist() == [[3.0, 4.0]]
    assert tf.argmax(x, 1).numpy().tolist() == [1, 1]
    assert tf.argmin(x, 1).numpy().tolist() == [0, 0]
    assert tf.where(x > 2, x, 0.0).numpy().tolist() == [[0, 0], [3, 4]]
    assert tf.one_hot([1], 2).numpy().tolist() == [[0.0, 1.0]]
    assert tf.fill((2,), 7).numpy().tolist() == [7, 7]
    assert tf.zeros_like(x).shape == tf.ones_like(x).shape == (2, 2)
    assert tf.range(3).numpy().tolist() == [0, 1, 2]
    assert tf.range(1, 7, 3).numpy().tolist() == [1, 4]
    assert tf.shape(x).numpy().tolist() == [2, 2]
    assert (tf.size(x).numpy(), tf.rank(x).numpy()) == (4, 2)
    assert tf.nn.softmax([0.0, 0.0]).numpy().tolist() == [0.5, 0.5]
    assert tf.math.reduce_sum is tf.reduce_sum
    assert tf.linalg.matmul is tf.matmul
    assert tf.is_tensor(x)
    assert not tf.is_tensor([1])
    assert tf.executing_eagerly()
    assert tf.constant(3, shape=(2,)).numpy().tolist() == [3, 3]
    assert tf.convert_to_tensor(x, tf.int32).dtype == tf.int32
    with pytest.raises(ValueError, match="Inputs must have the same shape"):
        tf.add_n([x, x[0]])
    with pytest.raises(TypeError, match="takes 2 tensors, got 1"):
        tf.add(x)


def test_numbers_by_chance_follow_the_seed() -> None:
    tf.random.set_seed(3)
    first = tf.random.uniform((4,)).numpy(), tf.random.normal((2,), 5.0).numpy()
    tf.random.set_seed(3)
    again = tf.random.uniform((4,)).numpy(), tf.random.normal((2,), 5.0).numpy()
    assert all((one == other).all() for one, other in zip(first, again, strict=True))
    drawn = tf.random.uniform((50,), 2, 5, dtype=tf.int32).numpy()
    assert set(drawn) == {2, 3, 4}
    assert sorted(tf.random.shuffle([1, 2, 3]).numpy()) == [1, 2, 3]
    with pytest.raises(ValueError, match="Must specify maxval"):
        tf.random.uniform((2,), dtype=tf.int32)


def test_printing_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    tf.print("a", tf.constant([1, 2]), 3, sep="|")
    assert capsys.readouterr().err == "a|[1 2]|3\n"
    with pytest.raises(NotImplementedError, match=r"Use jax.debug.print there"):
        jax.jit(tf.print)(1.0)


def test_containers_keep_their_order_and_masks_their_tensors() -> None:
    class Both(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return {"z": x, "a": (x, None)}

    outputs = Both()(np.ones((1, 2)))
    assert list(outputs) == ["z", "a"]
    assert isinstance(outputs["a"][0], tf.Tensor)
    assert outputs["a"][1] is None
    masked = keras.layers.Masking()(tf.constant([[[0.0], [1.0]]]))
    assert keras.layers.LSTM(1)(masked).shape == (1, 1)
