"""Results that others have published, found again by the planner.

None of its figures was chosen with them in mind.
"""

from itertools import product

from meshwright.models.profile import build_abstractly
from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.machines import parse_machine
from meshwright.planner.money import Wishes, choose
from meshwright.planner.prediction import Predictor
from meshwright.planner.search import Search
from meshwright.planner.speeds import known_speed
from meshwright.planner.workload import Workload
from meshwright.strategies.planning import search

import keras
import pytest

L = keras.layers
GB = 1e9


def gpt(layers: int, width: int, heads: int, length: int = 2048) -> keras.Model:
    """A decoder as Megatron-LM trains it: a vocabulary of 51,200, gelu, LayerNorm."""
    tokens = keras.Input((length,), dtype="int32")
    x = L.Embedding(51_200, width)(tokens)
    for _ in range(layers):
        h = L.LayerNormalization()(x)
        x = x + L.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=True)
        h = L.Dense(4 * width, activation="gelu")(L.LayerNormalization()(x))
        x = x + L.Dense(width)(h)
    x = L.LayerNormalization()(x)
    model = keras.Model(tokens, L.Dense(51_200, use_bias=False)(x), name="gpt")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def resnet50() -> keras.Model:
    """As in the tutorial of PyTorch on model parallelism: SGD, without momentum."""
    model = keras.applications.ResNet50(weights=None)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def test_state_of_7_5_billion_parameters_over_64_devices_as_in_the_zero_paper() -> None:
    """120 GB whole, 31.4 GB with the optimizer's state over 64, 1.9 GB with all of it.

    There, a parameter has 16 bytes: weight and gradient in float16, and a float32 copy
    with two moments. Here it has 12 bytes of state, and gradients live shortly.
    """
    model = build_abstractly(lambda: gpt(8, 8192, 64, length=8))
    memory = Workload.of(model, "GPU").memory
    whole, split = (memory.estimate(plan, 64) for plan in (Plan(), Plan(fsdp=64)))
    state = whole.parameters + whole.optimizer
    assert state / 12 == pytest.approx(7.5e9, rel=0.05)
    assert 16 * state / 12 == pytest.approx(120 * GB, rel=0.05)
    shard = split.parameters + split.optimizer
    assert 16 * shard / 12 == pytest.approx(1.9 * GB, rel=0.05)


def test_layers_on_two_devices_are_slower_than_one_if_the_model_fits() -> None:
    """ResNet50 with a batch of 120, whose halves lie on two devices, is 7 % slower.

    In microbatches it is faster, so that splitting the layers alone is the reason.
    """
    machine = parse_machine("2xA100")
    model = build_abstractly(resnet50)
    work = Workload.of(model, "GPU")
    times = Predictor(work, machine, known_speed(machine).speed)
    one = times.predict(Plan(), 120).seconds
    in_turn = Plan(stages=2, microbatches=1, schedule="gpipe")
    assert 1.0 < times.predict(in_turn, 120).seconds / one < 1.25
    overlapping = Plan(stages=2, microbatches=6, schedule="gpipe")
    assert times.predict(overlapping, 120).seconds < one


@pytest.mark.parametrize(
    ("layers", "width", "heads", "num_devices", "batch", "tensor", "stages"),
    [
        (24, 2304, 24, 32, 512, 1, 1),
        (30, 3072, 32, 64, 512, 2, 1),
        (36, 4096, 32, 128, 512, 4, 1),
        (40, 6144, 48, 256, 1024, 8, 1),
    ],
)
@pytest.mark.soak
def test_megatrons_degrees_are_among_the_best_three(
    layers: int,
    width: int,
    heads: int,
    num_devices: int,
    batch: int,
    tensor: int,
    stages: int,
) -> None:
    """Of its table of models from 1.7 to 18.4 billion parameters, on A100 of 80 GB.

    It recomputed activations, computed in 16 bits, and did not shard its state.
    """
    machine = parse_machine(f"{num_devices // 8}x8xA100")
    model = build_abstractly(lambda: gpt(layers, width, heads))
    work = Workload.of(model, "GPU")
    found = _without_fsdp(
        search(work, machine, known_speed(machine), batch, "bfloat16"), num_devices
    )
    ranked = choose(found, Wishes(), batch_size=batch).candidates
    degrees = list(dict.fromkeys((c.plan.tensor, c.plan.stages) for c in ranked))
    assert (tensor, stages) in degrees[:3]


def _without_fsdp(made: Search, num_devices: int) -> list[Candidate]:
    return made.among(
        Plan(data=num_devices // (tensor * stages), tensor=tensor, stages=stages)
        for tensor, stages in product((1, 2, 4, 8), repeat=2)
        if num_devices % (tensor * stages) == 0
    )
