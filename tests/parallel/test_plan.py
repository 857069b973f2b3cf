"""Plans, meshes and batches."""

from collections import Counter
from typing import Any

from meshwright.devices.step import batch_size
from meshwright.errors import PlanError
from meshwright.parallel.batch import BatchSplit
from meshwright.parallel.collectives import count_collectives
from meshwright.parallel.mesh import make_mesh, stage_meshes
from meshwright.parallel.plan import Plan

import jax
import numpy as np
import pytest

NAMES = tuple(f"/device:CPU:{i}" for i in range(8))


def test_the_product_of_the_degrees_is_the_number_of_devices() -> None:
    plan = Plan(data=2, fsdp=2, tensor=2)
    assert (plan.num_devices, plan.num_replicas) == (8, 4)
    assert plan.describe() == "data=2 x fsdp=2 x tensor=2"
    assert Plan().describe() == "one device"
    assert Plan(rules=(("a", ("tensor",)),)).to_json()["rules"] == [["a", ["tensor"]]]


@pytest.mark.parametrize("degree", [0, -1, 1.5, "2", True, None])
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "stages"])
def test_a_degree_is_a_whole_number_from_one(axis: str, degree: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**{axis: degree})
    assert str(caught.value).split("\n") == [
        f"A plan received {axis}={degree!r} (a {type(degree).__name__}).",
        "The degree of an axis is a whole number from 1.",
        f"Use {axis}=1 to leave that axis out.",
    ]


@pytest.mark.parametrize(
    ("field", "value", "rule", "change"),
    [
        (
            "accumulate",
            0,
            "A batch is computed in a whole number of microbatches from 1.",
            "Use accumulate=1 to compute it at once.",
        ),
        (
            "remat",
            "yes",
            "Rematerialisation is on or off.",
            "Use remat=True or remat=False.",
        ),
        (
            "offload",
            1,
            "Offloading is on or off.",
            "Use offload=True or offload=False.",
        ),
        (
            "precision",
            "int4",
            "Layers compute in float32, bfloat16, float16, or, with None, in what the "
            "model says.",
            "Use, for example, precision='bfloat16'.",
        ),
    ],
)
def test_levers_out_of_their_range_are_refused(
    field: str, value: Any, rule: str, change: str
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**{field: value})
    kind = type(value).__name__
    received = f"A plan received {field}={value!r} (a {kind})."
    assert str(caught.value).split("\n") == [received, rule, change]


def test_stages_keep_the_state_of_their_optimizer() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(stages=2, offload=True)
    assert str(caught.value).split("\n") == [
        "A plan received offload=True (a bool).",
        "The stages of a pipeline update their weights on their own, with the "
        "optimizer's state beside them.",
        "Leave offload out, or use fsdp= or tensor= instead of stages.",
    ]


def test_a_plan_with_stages_says_how_batches_flow() -> None:
    plan = Plan(data=2, stages=2)
    assert (plan.num_devices, plan.num_replicas, plan.num_pieces) == (4, 2, 2)
    assert (plan.microbatches, plan.schedule, plan.chunks) == (8, "1f1b", 1)
    assert plan.describe() == "data=2 x stages=2, microbatches=8, 1f1b"
    woven = Plan(stages=2, schedule="interleaved", microbatches=4, cuts=("a", "b", "c"))
    assert (woven.chunks, woven.num_pieces) == (2, 4)
    assert woven.to_json()["cuts"] == ["a", "b", "c"]
    one = Plan()
    assert (one.microbatches, one.schedule, one.chunks) == (None, None, None)


def test_the_schedule_of_a_tail_has_fewer_microbatches() -> None:
    """Also where the schedule wants a multiple of the stages."""
    plan = Plan(stages=2, schedule="interleaved", microbatches=4)
    for number in (1, 2, 3, 4):
        made = plan.schedule_of(number)
        done = Counter((a.kind, a.stage, a.chunk, a.microbatch) for a in made.actions)
        assert made.num_microbatches == number
        assert set(done.values()) == {1}
        assert len(done) == 2 * 2 * 2 * number
        assert {a.microbatch for a in made.actions} == set(range(number))
    assert Plan(stages=2, microbatches=4).schedule_of(3).num_microbatches == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("microbatches", 4),
        ("microbatches", 0),
        ("schedule", "1f1b"),
        ("schedule", ""),
        ("chunks", 2),
        ("cuts", ("head",)),
    ],
)
def test_what_belongs_to_stages_is_refused_without_them(field: str, value: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**{field: value})
    assert str(caught.value).split("\n") == [
        f"A plan received {field}={value!r} (a {type(value).__name__}).",
        "It says how a batch flows through several stages.",
        "Use stages=2 or more, or leave it out.",
    ]


def test_gradients_are_not_accumulated_twice() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(stages=2, accumulate=4)
    assert str(caught.value).split("\n") == [
        "A plan received accumulate=4 (a int).",
        "The microbatches of a pipeline add up their gradients already.",
        "Use microbatches= of Pipeline or Hybrid for it.",
    ]


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"stages": 2}, 2),
        ({"stages": 4}, 4),
        ({"stages": 2, "schedule": "interleaved"}, 4),
    ],
    ids=["two", "four", "chunks"],
)
def test_every_piece_but_the_first_begins_at_a_named_layer(
    options: Any, pieces: int
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**options, cuts=("body", "head"))
    assert str(caught.value).split("\n") == [
        "A plan received cuts=('body', 'head') (a tuple).",
        f"{pieces} pieces begin at {pieces - 1} layers; the first begins at the "
        "inputs.",
        "Name as many layers, or none.",
    ]


def test_layers_have_names() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(stages=3, cuts=("body", 2))  # type: ignore[arg-type]
    assert str(caught.value).split("\n") == [
        "A plan received cuts=('body', 2) (a tuple).",
        "Pieces begin at layers, which have names.",
        "Use, for example, cuts=('block3', 'head').",
    ]


def test_what_no_schedule_takes_is_refused_by_the_plan() -> None:
    """With the texts of the schedules."""
    for options, received in (
        ({"microbatches": 0}, "A schedule received num_microbatches=0 (a int)."),
        ({"microbatches": 2.5}, "A schedule received num_microbatches=2.5 (a float)."),
        ({"schedule": "gpip"}, "'gpip' is not a schedule."),
        ({"chunks": 3}, "The schedule '1f1b' received num_chunks=3."),
    ):
        with pytest.raises(PlanError) as caught:
            Plan(stages=2, **options)
        assert caught.value.received == received


def test_stages_lie_apart_and_their_devices_are_neighbours() -> None:
    mesh = make_mesh(Plan(data=2, tensor=2, stages=2), NAMES)
    assert dict(mesh.shape) == {"stages": 2, "data": 2, "fsdp": 1, "tensor": 2}
    first, second = stage_meshes(mesh)
    assert [d.id for d in first.devices.flat] == [0, 1, 2, 3]
    assert [d.id for d in second.devices.flat] == [4, 5, 6, 7]
    assert first.axis_names == second.axis_names == ("data", "fsdp", "tensor")
    whole = make_mesh(Plan(data=8), NAMES)
    assert stage_meshes(whole) == [whole]


def test_the_mesh_has_neighbours_along_its_last_axis() -> None:
    mesh = make_mesh(Plan(data=2, tensor=4), NAMES)
    shape = {"data": 2, "fsdp": 1, "tensor_0": 2, "tensor_1": 2}
    assert dict(mesh.shape) == shape
    assert [d.id for d in mesh.devices[0, 0].flat] == [0, 1, 2, 3]


def test_a_batch_lies_along_some_parts_of_the_axes() -> None:
    mesh = make_mesh(Plan(data=2, fsdp=4), NAMES)
    assert BatchSplit(6, mesh).axes == ("data",)
    assert BatchSplit(4, mesh).axes == ("data", "fsdp_0")
    assert BatchSplit(7, mesh).axes == ()
    assert BatchSplit(8, mesh).axes == ("data", "fsdp_0", "fsdp_1")
    six = make_mesh(Plan(data=6), NAMES[:6])
    assert BatchSplit(9, six).axes == ("data_1",)
    placed = BatchSplit(9, six).put(np.arange(9))
    assert placed.sharding.shard_shape((9,)) == (3,)


@pytest.mark.parametrize(
    ("size", "pieces"), [(1, 1), (7, 1), (6, 2), (12, 4), (8, 8), (24, 8), (4, 4)]
)
def test_a_batch_is_split_into_as_many_equal_pieces_as_divide(
    size: int, pieces: int
) -> None:
    mesh = make_mesh(Plan(data=4, fsdp=2), NAMES)
    split = BatchSplit(size, mesh)
    data = {"x": np.arange(size * 3.0).reshape(size, 3), "y": np.arange(size)}
    put = split.put(data)
    assert split.pieces == pieces
    assert put["x"].sharding.shard_shape(put["x"].shape) == (size // pieces, 3)
    assert len(put["x"].sharding.device_set) == 8
    np.testing.assert_array_equal(put["y"], data["y"])
    assert batch_size(data) == size


def test_absent_parts_of_a_batch_stay_absent() -> None:
    split = BatchSplit(4, make_mesh(Plan(data=8), NAMES))
    x, y = split.put((np.ones((4, 1)), None))
    assert x.shape == (4, 1)
    assert y is None


def test_only_what_has_the_size_of_the_batch_is_kept_split() -> None:
    split = BatchSplit(8, make_mesh(Plan(data=8), NAMES))
    sample, other = map(jax.jit(split.keep), (np.ones((8, 2)), np.ones((3, 2))))
    assert sample.sharding.shard_shape((8, 2)) == (1, 2)
    assert other.sharding.shard_shape((3, 2)) == (3, 2)


def test_collectives_are_counted_with_their_asynchronous_forms() -> None:
    text = """
    %a = f32[4] all-reduce(%b), to_apply=%add
    %c = f32[4] all-reduce-start(%b)
    %d = f32[4] all-reduce-done(%c)
    %e = f32[8] all-gather(%d)
    """
    assert count_collectives(text) == {"all-gather": 1, "all-reduce": 2}
