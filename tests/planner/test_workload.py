"""Training steps as the planner sees them: layers, sums, weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

from meshwright.models.blocks import keeps_blocks_apart
from meshwright.models.profile import build_abstractly
from meshwright.parallel.plan import Plan
from meshwright.planner.workload import Layers, Workload

import keras
import numpy as np
import pytest

L = keras.layers


def mlp() -> keras.Model:
    layers = [
        keras.Input((64,)),
        L.Dense(128, activation="relu", name="one"),
        L.Dense(96, activation="relu", name="two"),
        L.Dense(16, name="three"),
    ]
    model = keras.Sequential(layers, name="mlp")
    model.compile("adam", "mse")
    return model


def skipping() -> keras.Model:
    inputs = keras.Input((64,))
    short = L.Dense(32, name="first")(inputs)
    wide = L.Dense(128, activation="relu", name="wide")(short)
    back = L.Dense(32, name="back")(wide)
    model = keras.Model(inputs, L.Dense(4, name="last")(L.Add()([short, back])))
    model.compile("sgd", "mse")
    return model


def normed(times: int) -> keras.Model:
    layers: list[Any] = [keras.Input((8, 8, 4))]
    for _ in range(times):
        layers += [L.Conv2D(4, 1, use_bias=False), L.BatchNormalization()]
    layers += [L.GlobalAveragePooling2D(), L.Dense(2)]
    model = keras.Sequential(layers, name="normed")
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def work() -> Workload:
    return Workload.of(build_abstractly(mlp), "GPU")


def of_model(layers: Layers) -> list[str]:
    return [name for name in layers.names if not name.startswith("compile_loss")]


def test_layers_come_in_the_order_of_the_forward_pass(work: Workload) -> None:
    assert work.name == "mlp"
    assert of_model(work.layers(None, False)) == ["one", "two", "three"]


def test_layers_are_found_once(work: Workload) -> None:
    assert work.layers(None, False) is work.layers(None, False)
    assert work.layers(None, True) is not work.layers(None, False)
    assert work.kernels_for(None, False) is work.kernels_for(None, False)


def test_kernels_of_all_passes_belong_to_their_layer(work: Workload) -> None:
    layers = work.layers(None, False)
    kernels = layers.kernels.kernels
    assert len(layers.numbers) == len(kernels)
    for kernel, number in zip(kernels, layers.numbers, strict=True):
        if kernel.products:
            assert layers.names[number] in ("one", "two", "three")
        if kernel.phase == "update":
            assert number == -1


def test_what_layers_take_adds_up_by_phase(work: Workload) -> None:
    layers = work.layers(None, False)
    kernels = layers.kernels.kernels
    flops = np.array([sum(p.flops(10) for p in k.products) for k in kernels])
    sizes = {"one": 64 * 128, "two": 128 * 96, "three": 96 * 16}
    forward = dict(zip(layers.names, layers.sums(flops, "forward"), strict=True))
    backward = dict(zip(layers.names, layers.sums(flops, "backward"), strict=True))
    for name, size in sizes.items():
        assert forward[name] == 2 * 10 * size
        assert backward[name] == (1 if name == "one" else 2) * 2 * 10 * size
    assert layers.sums(flops, "update").sum() == 0


def test_what_passes_between_layers_is_counted_for_each_sample(work: Workload) -> None:
    layers = work.layers(None, False)
    crossing = dict(zip(layers.names, layers.crossing, strict=True))
    assert crossing["one"] == 0
    assert crossing["two"] == 128 * 4
    assert crossing["three"] == 96 * 4


def test_what_skips_layers_passes_between_all_of_them() -> None:
    layers = Workload.of(build_abstractly(skipping), "GPU").layers(None, False)
    crossing = dict(zip(layers.names, layers.crossing, strict=True))
    assert crossing["back"] == (128 + 32) * 4
    assert crossing["last"] == 32 * 4


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_each_batch_norm_sums_twice_over_the_batch(kind: str) -> None:
    sums = [
        Workload.of(build_abstractly(partial(normed, times)), kind).num_batch_sums(
            None, False
        )
        for times in (0, 1, 3)
    ]
    assert sums[0] <= 1, "no more than that of the loss"
    assert sums[1] - sums[0] == 2
    assert sums[2] - sums[0] == 6


def test_remat_does_not_sum_over_the_batch_more_often() -> None:
    work = Workload.of(build_abstractly(lambda: normed(2)), "GPU")
    assert work.num_batch_sums(None, True) == work.num_batch_sums(None, False)


def test_weights_have_their_bytes(work: Workload) -> None:
    assert work.weight_sizes == {
        "mlp/one/kernel": 64 * 128 * 4,
        "mlp/one/bias": 128 * 4,
        "mlp/two/kernel": 128 * 96 * 4,
        "mlp/two/bias": 96 * 4,
        "mlp/three/kernel": 96 * 16 * 4,
        "mlp/three/bias": 16 * 4,
    }
    assert work.weight_bytes(1) == sum(work.weight_sizes.values())


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_weights_on_a_device_are_divided_by_the_degree(
    work: Workload, degree: int
) -> None:
    sizes = work.weight_sizes
    layouts = work.layouts_for(Plan(tensor=degree))
    whole = sum(n for path, n in sizes.items() if "tensor" not in layouts[path].spec)
    assert whole == sizes["mlp/two/bias"], "a layer that sums up has it once"
    divided = sum(sizes.values()) - whole
    assert work.weight_bytes(degree) == pytest.approx(whole + divided / degree)


def test_tensor_splits_the_work_and_adds_up_where_columns_meet_rows(
    work: Workload,
) -> None:
    kernels = work.kernels_for(None, False)
    split = work.split_for(None, False, 2)
    assert len(split.divided_kernels) == len(kernels.kernels)
    assert len(split.divided_buffers) == len(kernels.buffers)
    for kernel, is_divided in zip(kernels.kernels, split.divided_kernels, strict=True):
        assert is_divided or not kernel.products
    # Forward after the second layer, backward before the third one.
    added = [kernels.buffers[b].shape[1:] for b in split.all_reduced]
    assert added == [(96,), (96,)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_products_are_of_the_precision_that_is_asked_for(
    work: Workload, precision: str
) -> None:
    found = [p for k in work.kernels_for(precision, False).kernels for p in k.products]
    assert {p.dtype for p in found} == {precision}


def deep() -> keras.Model:
    layers = [L.Dense(16, activation="tanh") for _ in range(6)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("kind", "is_more"), [("CPU", keeps_blocks_apart("cpu")), ("GPU", True)]
)
def test_with_remat_products_are_there_again_where_blocks_are_kept_apart(
    kind: str, is_more: bool
) -> None:
    work = Workload.of(build_abstractly(deep), kind)
    plain, again = (
        sum(len(kernel.products) for kernel in work.kernels_for(None, remat).kernels)
        for remat in (False, True)
    )
    assert plain == 3 * 6 - 1
    assert (again > plain) == is_more


def test_memory_is_that_of_the_same_step(work: Workload) -> None:
    found = work.memory.estimate(Plan(), 64)
    assert found.parameters == work.weight_bytes(1)


MAKERS: list[tuple[str, Callable[[Any], bool]]] = [
    ("CPU", lambda kernel: kernel.kind == "product" and len(kernel.members) > 1),
    ("GPU", lambda kernel: kernel.kind == "product" and len(kernel.members) == 1),
    ("TPU", lambda kernel: kernel.kind == "product" and len(kernel.members) == 1),
]


@pytest.mark.parametrize(("kind", "is_expected"), MAKERS)
def test_kernels_are_those_of_the_kind_of_device(
    kind: str, is_expected: Callable[[Any], bool]
) -> None:
    kernels = Workload.of(build_abstractly(mlp), kind).kernels_for(None, False).kernels
    forward = [k for k in kernels if k.phase == "forward" and k.products]
    assert len(forward) == 3
    assert all(is_expected(kernel) for kernel in forward)


def test_data_is_shown_if_the_model_does_not_know() -> None:
    inputs = keras.Input((None, 8))
    model = keras.Model(inputs, L.Dense(4, name="out")(inputs))
    model.compile("sgd", "mse")
    data = np.zeros((2, 5, 8), "float32"), np.zeros((2, 5, 4), "float32")
    work = Workload.of(model, "GPU", data)
    kernels = work.kernels_for(None, False).kernels
    ((first,), *_) = [k.products for k in kernels if k.products]
    assert first.flops(3) == 2 * 3 * 5 * 8 * 4
