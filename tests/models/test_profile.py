"""Profiles of models, against what has been published and what can be counted."""

import resource
from typing import Any

from meshwright.errors import ProfileError
from meshwright.models.profile import (
    OUTSIDE,
    build_abstractly,
    profile_function,
    profile_model,
)

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

L = keras.layers


@pytest.mark.parametrize(
    ("name", "parameters", "products"),
    [
        ("VGG16", 138_357_544, 15.47e9),
        ("ResNet50", 25_636_712, 3.87e9),
        ("MobileNetV2", 3_538_984, 0.30e9),
    ],
)
def test_networks_have_the_parameters_and_products_that_are_published(
    name: str, parameters: int, products: float
) -> None:
    """Products and sums of products are two operations; activations are few more."""
    make = getattr(keras.applications, name)
    model = build_abstractly(lambda: make(weights=None))
    found = profile_model(model, batch_size=1)
    assert found.parameters == parameters
    assert found.flops == pytest.approx(2 * products, rel=0.08)
    twice = profile_model(model, batch_size=2)
    assert twice.flops == pytest.approx(2 * found.flops, rel=1e-3)


def decoder(blocks: int, width: int, hidden: int, words: int, length: int) -> Any:
    tokens = keras.Input((length,), dtype="int32")
    x = L.Embedding(words, width, name="words")(tokens)
    for i in range(blocks):
        attention = L.GroupQueryAttention(
            width // 64, 64, 8, use_bias=False, name=f"attention_{i}"
        )
        x = L.Add()([x, attention(L.RMSNormalization()(x), x, use_causal_mask=True)])
        normal = L.RMSNormalization()(x)
        gate = L.Dense(hidden, "silu", use_bias=False, name=f"gate_{i}")(normal)
        up = L.Dense(hidden, use_bias=False, name=f"up_{i}")(normal)
        down = L.Dense(width, use_bias=False, name=f"down_{i}")
        x = L.Add()([x, down(L.Multiply()([gate, up]))])
    return keras.Model(tokens, L.Dense(words, use_bias=False, name="next")(x))


def test_a_network_of_seventy_billion_parameters_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = build_abstractly(lambda: decoder(80, 8192, 28_672, 128_256, 1024))
    found = profile_model(model, batch_size=1)
    assert 6.5e10 < found.parameters < 7.5e10
    assert found.parameter_bytes == 4 * found.parameters
    table = next(layer for layer in found.layers if layer.name == "words")
    # Every parameter but those of the table meets every word once.
    least = 2 * (found.parameters - table.parameters) * 1024
    assert least < found.flops < 1.15 * least
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 2_000_000, "KiB"


def nested() -> keras.Model:
    inner = keras.Sequential([keras.Input((8,)), L.Dense(8, name="deep")], name="inner")
    inputs = keras.Input((4,))
    hidden = inner(L.Dense(8, activation="relu", name="first")(inputs))
    return keras.Model(inputs, L.Dense(2, name="head")(hidden + 1.0), name="net")


def test_layers_are_known_by_their_paths() -> None:
    found = {each.name: each for each in profile_model(nested(), 16).layers}
    assert list(found) == ["first", "inner/deep", OUTSIDE, "head"]
    deep, outside = found["inner/deep"], found[OUTSIDE]
    assert (deep.parameters, deep.parameter_bytes) == (72, 288)
    # A product, a bias that gets another shape, and their sum.
    assert deep.flops == 2 * 16 * 8 * 8 + 8 + 16 * 8
    assert deep.activation_bytes == (16 * 8 + 8 + 16 * 8) * 4
    assert deep.output_bytes == 16 * 8 * 4
    assert (outside.parameters, outside.flops) == (0, 16 * 8)


def test_a_profile_adds_up_and_prints_a_table() -> None:
    found = profile_model(nested(), 16)
    assert found.parameters == nested().count_params()
    *rows, total = str(found).split("\n")
    assert rows[0].split() == ["layer", "parameters", "MFLOP", "activations", "output"]
    assert [row.split()[0] for row in rows[1:]] == [
        *("first", "inner/deep", "(outside", "head"),
    ]
    assert total == (
        "net, batch of 16: 130 parameters (520 B), 0.00 GFLOP forward, 3.3 KiB of "
        "activations"
    )


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="mine")
        self.dense = L.Dense(3, name="dense")

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_a_model_that_does_not_know_its_inputs_is_shown_some() -> None:
    model = Subclassed()
    model(np.ones((1, 5)))
    with pytest.raises(ProfileError) as caught:
        profile_model(model, 7)
    assert str(caught.value).split("\n") == [
        "'mine', a Subclassed, does not say what its inputs are.",
        "Functional and Sequential models know their inputs, others are shown some.",
        "Pass a batch of inputs, or its shapes, as data.",
    ]
    shape = jax.ShapeDtypeStruct((7, 5), np.float32)
    (layer,) = profile_model(model, 7, shape).layers
    assert (layer.name, layer.parameters) == ("dense", 18)


def test_a_model_whose_inputs_may_have_any_length_is_shown_some() -> None:
    layers = [keras.Input((None, 8)), L.Dense(4)]
    model = keras.Sequential(layers, name="any")
    with pytest.raises(ProfileError) as caught:
        profile_model(model, 2)
    assert str(caught.value).split("\n") == [
        "'any' takes inputs of shape (None, None, 8).",
        "How much there is to do depends on every dim.",
        "Pass a batch of inputs, or its shapes, as data.",
    ]
    found = profile_model(model, 2, jax.ShapeDtypeStruct((2, 5, 8), np.float32))
    assert found.flops == 2 * 2 * 5 * 8 * 4 + 4 + 2 * 5 * 4


def test_a_model_that_is_not_built_is_refused() -> None:
    with pytest.raises(ProfileError) as caught:
        profile_model(Subclassed(), 7)
    assert str(caught.value).split("\n") == [
        "'mine' was to be profiled, and is not built.",
        "The shapes of weights are known when a model is built.",
        "Give it a keras.Input, call it on a batch, or call build(input_shape).",
    ]
    assert caught.value.exit_code == 2


def test_functions_are_profiled_by_their_scopes() -> None:
    def two(x: Any, w: Any) -> Any:
        with jax.named_scope("first"):
            x = x @ w
        with jax.named_scope("second"):
            return jnp.sin(x)

    found = profile_function(two, np.ones((4, 8)), np.ones((8, 8)))
    assert [(each.name, each.flops) for each in found.layers] == [
        ("first", 2 * 4 * 8 * 8),
        ("second", 4 * 8),
    ]
    assert found.batch_size == 4
