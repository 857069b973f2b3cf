"""Recurrent layers are traced alike wherever that is done, as loops or as calls."""

import importlib
from types import SimpleNamespace

from meshwright.models.library import library_workspace
from meshwright.models.operations import Operation
from meshwright.models.profile import build_abstractly, profile_model
from meshwright.models.training import SAMPLES, TrainingStep, trace_loss, trace_training
from meshwright.models.work import all_operations, count_flops

import jax
import jax.numpy as jnp
import keras
import pytest
from jax.experimental import rnn

L = keras.layers


def recurrent() -> keras.Model:
    layers = [keras.Input((30, 64)), L.LSTM(128, return_sequences=True, name="reader")]
    model = keras.Sequential([*layers, L.Bidirectional(L.LSTM(16)), L.Dense(1)])
    model.compile("adam", "mse")
    return model


def names_in(step: TrainingStep) -> list[str]:
    return [each.primitive.name for each in all_operations(step.program.jaxpr)]


def test_on_a_host_with_a_gpu_layers_are_the_loops_that_they_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or what cuDNN keeps for ten thousand samples would be taken for a constant."""
    model = build_abstractly(recurrent)
    here = names_in(trace_training(model)), profile_model(model, 8)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (names_in(trace_training(model)), profile_model(model, 8)) == here
    assert "scan" in here[0]
    assert trace_loss(model).program.jaxpr.eqns


def test_what_a_library_keeps_and_works_in_is_known_without_it() -> None:
    step = trace_training(build_abstractly(recurrent), library={"lstm"})
    calls = [
        each
        for each in all_operations(step.program.jaxpr)
        if each.primitive.name.startswith("library_lstm")
    ]
    assert [each.primitive.name for each in calls] == 2 * ["library_lstm"] + 2 * [
        "library_lstm_gradient"
    ]
    kept = calls[0].outvars[-1].aval
    assert kept.shape == (SAMPLES, 20 * 30 * 128)
    weights = [w.aval for w in calls[-1].outvars][:4]
    assert [w.shape for w in weights[1:3]] == 2 * [(1, SAMPLES, 128)]
    both_ways = calls[1].outvars[0].aval
    assert both_ways.shape == (SAMPLES, 30, 32)


def attending() -> keras.Model:
    inputs = keras.Input((64, 32))
    x = L.MultiHeadAttention(4, 8)(inputs, inputs, use_causal_mask=True)
    masked = L.MultiHeadAttention(4, 8)(
        x, x, attention_mask=keras.ops.ones((1, 64, 64))
    )
    model = keras.Model(inputs, L.Dense(1)(masked))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("names", [set(), {"attention"}], ids=["operations", "calls"])
def test_attention_in_half_precision_is_traced_without_asking_what_is_here(
    names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*args: object, **options: object) -> bool:
        raise AssertionError("what is here is not to matter")

    nn = importlib.import_module("keras.src.backend.jax.nn")
    monkeypatch.setattr(nn, "_can_use_flash_attention", ask)
    model = build_abstractly(attending)
    step = trace_training(model, precision="bfloat16", library=names)
    assert step.wanted == {"attention"}
    found = [name for name in names_in(step) if name.startswith("library")]
    assert found == (
        2 * ["library_attention"] + 2 * ["library_attention_gradient"] if names else []
    )
    whole = trace_training(model, library=names)
    assert not whole.wanted, "cuDNN has no kernel for float32"
    assert not any(name.startswith("library") for name in names_in(whole))


def test_what_attention_works_in_is_what_a_program_for_an_h200_gave_to_cudnn() -> None:
    facts = {"length": 128, "heads": 8, "size": 32}
    gradient = Operation("library_attention_gradient", "other", facts, [], [], [], "")
    assert library_workspace(gradient, 16) == pytest.approx(2_162_944, rel=1e-3)


@pytest.mark.parametrize(
    ("samples", "length", "numbers"),
    [
        (64, 30, 14_516_992),
        (64, 36, 15_598_336),
        (16, 30, 10_215_808),
        (16, 36, 10_486_144),
    ],
)
def test_the_workspace_is_what_programs_for_an_h200_gave_to_cudnn(
    samples: int, length: int, numbers: int
) -> None:
    facts = {"units": 128, "length": length, "num_weights": 4 * 128 * (64 + 128 + 2)}
    operation = Operation("library_lstm", "other", facts, [], [], [], "")
    given = 4 * numbers - 32 * 2**20
    assert library_workspace(operation, samples) == pytest.approx(given, rel=5e-3)


def test_the_arithmetic_of_a_library_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of a moment are dispatched by the hundred, which these are not."""

    def sizes(*args: object) -> tuple[int, int]:
        return 1, 1

    library = SimpleNamespace(compute_rnn_workspace_reserve_space_sizes=sizes)
    monkeypatch.setattr(rnn, "gpu_rnn", library)
    samples, length, features, units = 2, 5, 3, 4
    num_weights = 4 * units * (features + units + 2)

    def run(x: jax.Array, weights: jax.Array) -> jax.Array:
        state = jnp.zeros((1, samples, units))
        lengths = jnp.full((samples,), length, jnp.int32)
        facts = {"input_size": features, "hidden_size": units, "num_layers": 1}
        y, *_ = rnn.lstm(
            x, state, state, weights, lengths, **facts, dropout=0.0, bidirectional=False
        )
        return y

    x, weights = jnp.ones((samples, length, features)), jnp.ones(num_weights)
    forward = jax.make_jaxpr(run)(x, weights)
    assert count_flops(forward) >= 2 * samples * length * num_weights
    both = jax.make_jaxpr(lambda *args: jax.vjp(run, *args)[1](run(*args)))(x, weights)
    assert count_flops(both) >= 2 * count_flops(forward)
