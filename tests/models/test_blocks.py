"""Functions in blocks: the same numbers, with less kept for the gradients."""

from itertools import pairwise
from typing import Any

import meshwright as mw
from meshwright.models.blocks import rematerialised
from meshwright.models.cuts import choose_cuts

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest


def tower(weights: list[Any], x: Any) -> Any:
    for weight in weights:
        x = jax.nn.gelu(jnp.tanh(x @ weight)) * 2
    return x


def weights(count: int = 16, width: int = 8) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(width, width))) for _ in range(count)]


def kept_for_gradients(function: Any, *args: Any) -> int:
    """Bytes that the backward pass takes over from the forward pass."""
    pull = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args)
    leaves = jax.tree.leaves(pull)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_values_and_gradients_are_the_same() -> None:
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)

    def loss(function: Any) -> Any:
        return jax.value_and_grad(lambda w: function(w, x).sum())(weights())

    expected, gradients = loss(tower)
    found, ours = loss(rematerialised(tower))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for a, b in zip(ours, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_far_less_is_kept_for_the_gradients() -> None:
    x = jnp.ones((512, 8))
    own = sum(w.nbytes for w in weights())
    plain = kept_for_gradients(tower, weights(), x) - own
    blocks = kept_for_gradients(rematerialised(tower), weights(), x) - own
    assert blocks <= 17 * x.nbytes < plain / 4


def test_containers_constants_and_inputs_that_come_out_again_pass_through() -> None:
    table = jnp.arange(3.0)

    def odd(x: Any) -> Any:
        return {"same": x, "five": 5.0, "made": jnp.sin(x) + table}

    out = rematerialised(odd)(jnp.ones(3))
    assert out["five"] == 5.0
    np.testing.assert_array_equal(out["same"], np.ones(3))
    np.testing.assert_allclose(out["made"], np.sin(1) + np.arange(3), rtol=1e-6)


def test_a_model_keeps_what_passes_between_blocks_and_no_more() -> None:
    model = keras.applications.MobileNetV2(
        alpha=0.35, weights=None, input_shape=(32, 32, 3), classes=4
    )
    trained = [w.value for w in model.trainable_variables]
    others = [w.value for w in model.non_trainable_variables]
    x = jnp.ones((16, 32, 32, 3))

    def forward(trained: Any) -> Any:
        return model.stateless_call(trained, others, x, training=True)[0]

    own = sum(w.nbytes for w in trained)
    plain = kept_for_gradients(forward, trained) - own
    blocks = kept_for_gradients(rematerialised(forward), trained) - own
    assert blocks < plain / 4


def test_split_weights_are_gathered_again_in_every_block() -> None:
    """So that FSDP never holds the weights of more than a block."""
    model = keras.Sequential(
        [keras.Input((64,)), *(keras.layers.Dense(64) for _ in "abcdefgh")]
    )
    model.compile(optimizer="sgd", loss="mse")
    x = np.ones((8, 64), np.float32)
    plain = mw.FSDP(8).explain(model, x, x).collectives
    blocks = mw.FSDP(8, remat=True).explain(model, x, x)
    assert blocks.collectives["all-gather"] > plain["all-gather"]
    assert mw.verify(model, x, x, mw.FSDP(8, remat=True)).ok


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_ordered_and_never_worse_than_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    produced = [int(n) for n in rng.integers(1, 50, 200)]
    alive = [0, *(int(n) for n in rng.integers(1, 50, 199))]
    cuts = choose_cuts(produced, alive)
    assert cuts == sorted(set(cuts))
    assert all(0 < cut < 200 for cut in cuts)
    ends = [0, *cuts, 200]
    largest = max(sum(produced[a:b]) for a, b in pairwise(ends))
    assert largest + sum(alive[cut] for cut in cuts) <= sum(produced)


def test_cuts_of_a_short_line_are_the_best_ones() -> None:
    """Against all possibilities."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        produced = [int(n) for n in rng.integers(1, 9, 8)]
        alive = [0, *(int(n) for n in rng.integers(1, 9, 7))]

        def cost(cuts: list[int], produced: Any = produced, alive: Any = alive) -> int:
            ends = [0, *cuts, 8]
            largest = max(sum(produced[a:b]) for a, b in pairwise(ends))
            return largest + sum(alive[cut] for cut in cuts)

        every = [[i + 1 for i in range(7) if bits >> i & 1] for bits in range(128)]
        best = min(cost(cuts) for cuts in every)
        assert cost(choose_cuts(produced, alive)) <= best * 1.05


def test_nothing_to_cut_is_no_trouble() -> None:
    assert choose_cuts([], []) == []
    assert choose_cuts([3], [0]) == []
    np.testing.assert_array_equal(rematerialised(lambda x: x)(jnp.ones(2)), np.ones(2))
