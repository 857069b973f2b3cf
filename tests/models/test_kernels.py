"""The kernels of training steps, against closed forms and the compiler itself."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from meshwright.models.flattening import flatten
from meshwright.models.formulations import Platform
from meshwright.models.kernels import (
    Kernel,
    Kernels,
    Product,
    flattened,
    kernels_of,
    make_kernels,
    renewed_values,
)
from meshwright.models.operations import Size
from meshwright.models.profile import shape_of
from meshwright.models.training import SAMPLES, ready_to_train, trace_training

import jax
import jax.numpy as jnp
import keras
import pytest
from jax import lax

from conftest import FUSED_FOR_USERS

L = keras.layers
PLATFORMS: list[Platform] = ["cpu", "gpu"]
ONE, ALL = Size(1, 0), Size(1, 1)
WIDTHS = (64, 128, 96, 16)


def mlp() -> keras.Model:
    one, two, three = WIDTHS[1:]
    layers = [
        keras.Input((WIDTHS[0],)),
        L.Dense(one, activation="relu", name="one"),
        L.Dense(two, activation="relu", name="two"),
        L.Dense(three, name="three"),
    ]
    model = keras.Sequential(layers, name="mlp")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def convolutional() -> keras.Model:
    layers = [
        keras.Input((16, 16, 4)),
        L.Conv2D(8, 3, use_bias=False, name="first"),
        L.Conv2D(8, 3, groups=4, use_bias=False, name="grouped"),
        L.Conv2D(32, 3, strides=2, use_bias=False, name="strided"),
    ]
    model = keras.Sequential(layers, name="conv")
    model.compile("sgd", "mse")
    return model


def normed(optimizer: str = "sgd") -> keras.Model:
    layers = [keras.Input((16, 16, 4)), L.BatchNormalization(name="norm")]
    model = keras.Sequential(layers, name="normed")
    model.compile(optimizer, "mse")
    return model


@pytest.fixture(scope="module", params=PLATFORMS)
def of_mlp(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(trace_training(mlp()), request.param)


def products(found: Kernels) -> list[tuple[Kernel, Product]]:
    return [(kernel, each) for kernel in found.kernels for each in kernel.products]


def test_products_are_found_with_their_sizes_and_forms() -> None:
    found = kernels_of(trace_training(mlp()), "cpu")
    by_form: dict[str, list[Any]] = {"nn": [], "nt": [], "tn": []}
    for _, each in products(found):
        assert (each.batch, each.dtype, each.is_convolution) == (ONE, "float32", False)
        by_form[each.form].append((each.rows, each.inner, each.columns))
    pairs = list(pairwise(WIDTHS))
    assert by_form["nn"] == [(ALL, Size(a, 0), Size(b, 0)) for a, b in pairs]
    # Gradients of what a layer reads, and of its weights: from the last layer on.
    assert by_form["nt"] == [(ALL, Size(b, 0), Size(a, 0)) for a, b in pairs[:0:-1]]
    assert by_form["tn"] == [(Size(a, 0), ALL, Size(b, 0)) for a, b in pairs[::-1]]


def test_products_need_the_operations_of_the_closed_form(of_mlp: Kernels) -> None:
    pairs = list(pairwise(WIDTHS))
    for samples in (1, 64, 1000):
        wanted = sum(3 * 2 * samples * a * b for a, b in pairs)
        wanted -= 2 * samples * WIDTHS[0] * WIDTHS[1]  # data has no gradient
        assert sum(p.flops(samples) for _, p in products(of_mlp)) == wanted


def compiled_step(model: keras.Model, batch_size: int) -> Any:
    """The step that stock Keras and XLA make."""
    with ready_to_train(model, None, batch_size, metrics=False) as batch:
        state = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        shapes = tuple([shape_of(v) for v in group] for group in state)
        lowered = jax.jit(model.train_step).lower(shapes, batch)
        return lowered.compile(compiler_options=FUSED_FOR_USERS)


def wide_mlp() -> keras.Model:
    layers = [L.Dense(512, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((512,)), *layers], name="wide")
    model.compile("sgd", "mse")
    return model


def test_operations_are_those_that_the_compiler_counts() -> None:
    model = wide_mlp()
    found = kernels_of(trace_training(model), "cpu")
    counted = compiled_step(model, 256).cost_analysis()["flops"]
    flops = sum(p.flops(256) for _, p in products(found))
    assert flops == pytest.approx(counted, rel=0.03)


def test_kernels_are_about_as_many_as_the_compiler_makes() -> None:
    model = mlp()
    text = compiled_step(model, 256).as_text()
    entry = re.findall(r"= \S+ ([\w-]+)\(", text[text.index("ENTRY") :])
    made = Counter(entry)
    wanted = made["fusion"] + made["dot"] + made["reduce"] + made["convolution"]
    found = kernels_of(trace_training(model), "cpu", 256)
    assert len(found.kernels) == pytest.approx(wanted, rel=0.1)


def test_convolutions_are_found_with_what_they_compute() -> None:
    found = kernels_of(trace_training(convolutional()), "gpu")
    by_form: dict[str, list[Product]] = {}
    for kernel, each in products(found):
        assert kernel.kind == "convolution"
        assert each.is_convolution
        by_form.setdefault(each.form, []).append(each)
    assert {form: len(each) for form, each in by_form.items()} == {
        "outputs": 3,
        "kernel": 3,
        "inputs": 1,
        "spread": 1,
    }
    first, grouped, strided = by_form["outputs"]
    assert first[:4] == (ONE, Size(14 * 14, 1), Size(9 * 4, 0), Size(8, 0))
    assert grouped[:4] == (Size(4, 0), Size(12 * 12, 1), Size(9 * 2, 0), Size(2, 0))
    assert (grouped.groups, first.groups) == (4, 1)
    assert strided[:4] == (ONE, Size(5 * 5, 1), Size(9 * 8, 0), Size(32, 0))


def test_convolutions_need_the_operations_of_the_closed_form() -> None:
    found = kernels_of(trace_training(convolutional()), "gpu")
    flops: Counter[str] = Counter()
    for _, each in products(found):
        flops[each.form] += int(each.flops(10))
    layers = [14 * 14 * 9 * 4 * 8, 12 * 12 * 9 * 2 * 8, 5 * 5 * 9 * 8 * 32]
    assert flops["outputs"] == 2 * 10 * sum(layers)
    assert flops["kernel"] == 2 * 10 * sum(layers)
    # Gradients of inputs are computed at each place of the input.
    assert flops["spread"] == 2 * 10 * 12 * 12 * (9 * 32 // 4) * 8


def test_batched_products_have_a_batch() -> None:
    heads = jax.ShapeDtypeStruct((SAMPLES, 4, 6, 8), "float32")
    program = jax.make_jaxpr(lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k))
    found = make_kernels(flatten(program(heads, heads).jaxpr), "cpu")
    ((_, product),) = products(found)
    sizes = Size(4, 1), Size(6, 0), Size(8, 0), Size(6, 0)
    assert product == (*sizes, "float32", "nt", 1, False)
    assert product.flops(3) == 2 * 3 * 4 * 6 * 8 * 6


@pytest.mark.parametrize("platform", PLATFORMS)
def test_products_of_low_precision_say_so(platform: Platform) -> None:
    step = trace_training(mlp(), precision="bfloat16")
    found = products(kernels_of(step, platform))
    assert {each.dtype for _, each in found} == {"bfloat16"}


def test_phases_are_forward_backward_and_update(of_mlp: Kernels) -> None:
    phases: dict[str, list[Kernel]] = {}
    for kernel in of_mlp.kernels:
        phases.setdefault(kernel.phase, []).append(kernel)
    count = {
        phase: sum(len(kernel.products) for kernel in kernels)
        for phase, kernels in phases.items()
    }
    assert count == {"forward": 3, "backward": 5, "update": 0}
    assert list(of_mlp.phases) == [kernel.phase for kernel in of_mlp.kernels]
    # Adam renews two slots and the weight, each of six.
    kinds = Counter(
        of_mlp.buffers[b].updates
        for kernel in phases["update"]
        for b in kernel.makes
        if of_mlp.buffers[b].shape
    )
    assert kinds == {"slot": 12, "weight": 6}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_gradient_that_is_summed_over_samples_is_of_the_backward_pass(
    platform: Platform,
) -> None:
    """Even if it is computed together with the update of its weight."""
    found = kernels_of(trace_training(normed()), platform)
    renewing = [
        kernel
        for kernel in found.kernels
        if any(found.buffers[b].updates == "weight" for b in kernel.makes)
    ]
    assert len(renewing) == 2
    summing = [
        kernel
        for kernel in renewing
        if any(found.buffers[b].bytes.power for b in kernel.reads)
    ]
    assert len(summing) == (1 if platform == "gpu" else 0), "that of beta"
    assert all(kernel.phase == "backward" for kernel in summing)
    assert all(kernel.kind == "reduction" for kernel in summing)
    over_samples = [
        kernel
        for kernel in found.kernels
        if any(found.buffers[b].bytes.power for b in kernel.reads)
    ]
    assert "update" not in {kernel.phase for kernel in over_samples}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_buffers_know_what_they_were_and_what_they_become(platform: Platform) -> None:
    step = trace_training(normed("adam"))
    found = kernels_of(step, platform)
    given = Counter(b.given.kind for b in found.buffers if b.given is not None)
    assert given == Counter(each.kind for each in step.inputs)
    renewed = Counter(b.updates for b in found.buffers if b.updates is not None)
    # The learning rate is handed through.
    assert renewed == {"weight": 2, "state": 2, "slot": 5, "metric": 2}
    flat = flattened(step, platform)
    pairs = renewed_values(step, flat)
    for new, old in pairs.items():
        assert flat.values[new].shape == flat.values[old].shape


@pytest.mark.parametrize("platform", PLATFORMS)
def test_buffers_are_read_after_they_are_made(platform: Platform) -> None:
    found = kernels_of(trace_training(convolutional()), platform)
    makers = {b: i for i, kernel in enumerate(found.kernels) for b in kernel.makes}
    for number, kernel in enumerate(found.kernels):
        assert all(makers.get(b, -1) < number for b in kernel.reads)
        assert set(kernel.overwrites) <= set(kernel.reads)
    for buffer, last in found.last_reads.items():
        assert buffer in found.kernels[last].reads
        assert all(buffer not in each.reads for each in found.kernels[last + 1 :])
    assert set(found.returned) <= {*makers, *range(len(found.flat.inputs))}


def test_numbers_are_counted_with_those_in_between() -> None:
    x = jax.ShapeDtypeStruct((SAMPLES, 8), "float32")

    def run(x: Any) -> Any:
        return jnp.sum(jnp.exp(x) * x, axis=1)

    program = jax.make_jaxpr(run)(x)
    (kernel,) = make_kernels(flatten(program.jaxpr, "gpu"), "gpu").kernels
    assert kernel.numbers == Size(3 * 8, 1), "powers, products, and what is summed"
    assert kernel.dear == {"exp": Size(8, 1)}, "powers"
    assert kernel.summed == Size(8, 1)
    assert (kernel.kind, kernel.operation) == ("reduction", "reduce_sum")


def test_loops_keep_their_kernels_and_turns() -> None:
    x = jax.ShapeDtypeStruct((SAMPLES, 8), "float32")
    w = jax.ShapeDtypeStruct((8, 8), "float32")

    def run(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=7)[0]

    program = jax.make_jaxpr(run)(x, w)
    found = make_kernels(flatten(program.jaxpr, "gpu"), "gpu")
    (loop,) = [kernel for kernel in found.kernels if kernel.kind == "loop"]
    assert (loop.times, loop.operation) == (7, "scan")
    assert loop.inner is not None
    kinds = [kernel.kind for kernel in loop.inner.kernels]
    assert kinds == ["product", "elementwise"]


LAYERS: list[tuple[Callable[[], keras.layers.Layer], str]] = [
    (lambda: L.Dense(8, name="layer"), "product"),
    (lambda: L.Conv2D(4, 3, name="layer"), "convolution"),
    (lambda: L.LayerNormalization(name="layer"), "reduction"),
]


@pytest.mark.parametrize(("make", "kind"), LAYERS)
def test_kernels_are_named_by_what_takes_longest(
    make: Callable[[], keras.layers.Layer], kind: str
) -> None:
    model = keras.Sequential([keras.Input((16, 16, 4)), make()])
    model.compile("sgd", "mse")
    found = kernels_of(trace_training(model), "gpu")
    mine = [k for k in found.kernels if "layer" in k.layer and k.phase == "forward"]
    assert kind in {kernel.kind for kernel in mine}


def test_small_batches_are_fused_in_other_ways() -> None:
    step = trace_training(mlp())
    few, many = (len(kernels_of(step, "cpu", n).kernels) for n in (2, 4096))
    assert few != many
