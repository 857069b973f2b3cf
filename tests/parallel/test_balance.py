"""Where a line of work is cut: against all possibilities."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise

from meshwright.models.parts import bytes_of, split_program
from meshwright.models.stages import Assignment, StagedProgram
from meshwright.models.work import FLOPS_PER_BYTE, cost_of
from meshwright.parallel.balance import NUM_CANDIDATES, choose_stage_cuts
from meshwright.parallel.plan import Plan
from meshwright.train.cut import PieceMap
from meshwright.train.stage_cut import StageCut

import keras
import numpy as np
import pytest
from jax.extend.core import Var

from test_equivalence import MODELS, build
from tracing import traced_training


class Line:
    """A line of work, and every way to cut it."""

    def __init__(self, seed: int, length: int = 9) -> None:
        rng = np.random.default_rng(seed)
        self.costs = [int(n) for n in rng.integers(0, 9, length)]
        self.travels = [0, *(int(n) for n in rng.integers(0, 9, length - 1))]
        self.is_cuttable = [bool(n) for n in rng.integers(0, 4, length)]
        self.held = [int(n) for n in rng.integers(0, 9, length)]

    def ways(self, num_stages: int) -> Iterator[tuple[int, ...]]:
        allowed = [i for i, may in enumerate(self.is_cuttable) if may and i]
        return combinations(allowed, num_stages - 1)

    def slowest(self, cuts: Sequence[int], cost_per_byte: float = 0.0) -> float:
        spans = pairwise([0, *cuts, len(self.costs)])
        tolls = pairwise([0, *(self.travels[cut] for cut in cuts), 0])
        return max(
            sum(self.costs[a:b]) + cost_per_byte * sum(toll)
            for (a, b), toll in zip(spans, tolls, strict=True)
        )

    def most_held(self, cuts: Sequence[int]) -> int:
        spans = pairwise([0, *cuts, len(self.costs)])
        return max(sum(self.held[a:b]) for a, b in spans)

    def carried(self, cuts: Sequence[int]) -> int:
        return sum(self.travels[cut] for cut in cuts)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("cost_per_byte", [0.0, 0.5, 3.0])
def test_no_other_cut_is_faster_or_as_fast_with_less_to_carry(
    num_stages: int, cost_per_byte: float
) -> None:
    for seed in range(40):
        line = Line(seed)
        found = choose_stage_cuts(
            *(line.costs, line.travels, line.is_cuttable, num_stages),
            cost_per_byte=cost_per_byte,
        )
        every = list(line.ways(num_stages))
        if found is None:
            assert not every
            continue
        assert tuple(found) in every
        ranks = [(line.slowest(c, cost_per_byte), line.carried(c)) for c in every]
        assert (line.slowest(found, cost_per_byte), line.carried(found)) == min(ranks)


@pytest.mark.parametrize("limit", [4, 12, 20])
def test_no_stage_holds_more_than_the_limit(limit: int) -> None:
    outcomes = set()
    for seed in range(60):
        line = Line(seed)
        found = choose_stage_cuts(
            *(line.costs, line.travels, line.is_cuttable, 3),
            held=line.held,
            limit=limit,
        )
        every = [cuts for cuts in line.ways(3) if line.most_held(cuts) <= limit]
        outcomes.add(found is None)
        if found is None:
            assert not every
            continue
        assert line.most_held(found) <= limit
        assert line.slowest(found) == min(map(line.slowest, every))
    assert True in outcomes
    assert limit == 4 or False in outcomes


def test_too_few_places_or_too_little_memory_is_no_cut() -> None:
    assert choose_stage_cuts([1, 1, 1], [0, 1, 1], [True] * 3, 4) is None
    assert choose_stage_cuts([1, 1, 1], [0, 1, 1], [True, False, True], 3) is None
    assert choose_stage_cuts([], [], [], 2) is None
    line = [1, 1, 1], [0, 1, 1], [True] * 3, 3
    assert choose_stage_cuts(*line, held=[1, 5, 1], limit=4) is None
    assert choose_stage_cuts(*line, held=[1, 4, 1], limit=4) == [1, 2]


def test_in_front_of_the_first_is_no_cut_even_if_it_is_allowed() -> None:
    assert choose_stage_cuts([1, 1], [0, 1], [True, True], 2) == [1]
    assert choose_stage_cuts([1, 1], [0, 1], [True, True], 3) is None


@pytest.mark.parametrize("num_stages", [2, 5])
def test_of_many_places_the_choice_is_nearly_the_best(num_stages: int) -> None:
    """More than are looked at: the slowest stage is near the mean of all."""
    rng = np.random.default_rng(2)
    length = 4 * NUM_CANDIDATES
    costs = [int(n) for n in rng.integers(1, 9, length)]
    travels = [int(n) for n in rng.integers(1, 9, length)]
    found = choose_stage_cuts(costs, travels, [True] * length, num_stages)
    assert found is not None
    slowest = max(sum(costs[a:b]) for a, b in pairwise([0, *found, length]))
    assert slowest < sum(costs) / num_stages * 1.01


def test_many_places_without_work_do_not_hide_the_few_with_work() -> None:
    rng = np.random.default_rng(2)
    length = 4 * NUM_CANDIDATES
    costs = [0] * (length - 40) + [1] * 40
    travels = [int(n) for n in rng.integers(1, 9, length)]
    found = choose_stage_cuts(costs, travels, [True] * length, 5)
    assert found is not None
    works = [sum(costs[a:b]) for a, b in pairwise([0, *found, length])]
    assert works == [8] * 5


def test_many_places_after_one_great_piece_of_work_are_places_still() -> None:
    length = 4 * NUM_CANDIDATES
    costs = [10**9, *[1] * (length - 1)]
    found = choose_stage_cuts(costs, [1] * length, [True] * length, 8)
    assert found is not None
    assert len(set(found)) == 7


# The battery's models. What a cut costs is written down here once more: from the
# definition of a piece's work, and from who reads what.

NAMES = ("cnn", "unet", "transformer", "two-tower", "lstm", "subclassed", "frozen")


@cache
def staged_model(name: str) -> StagedProgram:
    x, y = MODELS[name].data(8)
    return traced_training(build(name), x, y).staged


def work_of(staged: StagedProgram) -> list[int]:
    """Of each operation that is bound to its place."""
    pairs = zip(staged.program.jaxpr.eqns, staged.is_bound, strict=True)
    return [cost_of(operation) if bound else 0 for operation, bound in pairs]


def slowest_piece(
    staged: StagedProgram, found: Assignment | PieceMap, number: int
) -> int:
    """The work of the slowest piece, with what it receives and sends."""
    work = work_of(staged)
    parts = split_program(staged.program, found.owners, number)
    readers = [set(part.received) for part in parts]
    slowest = 0
    for piece, part in enumerate(parts):
        own = [w for w, owner in zip(work, found.owners, strict=True) if piece in owner]
        received = sum(bytes_of(v) for v in part.received)
        sent = sum(bytes_of(v) for v in part.sent for each in readers if v in each)
        slowest = max(slowest, sum(own) + FLOPS_PER_BYTE * (received + sent))
    return slowest


def fastest_cut(staged: StagedProgram, number: int) -> int:
    """The slowest piece of the best cut, found by trying all."""
    operations = staged.program.jaxpr.eqns
    work = np.cumsum([0, *work_of(staged)])
    makers = {
        v: made
        for made, operation in enumerate(operations)
        for v in operation.outvars
        if staged.is_bound[made]
    }
    rows = {v: row for row, v in enumerate(makers)}
    made = np.array(list(makers.values()))
    sizes = FLOPS_PER_BYTE * np.array([bytes_of(v) for v in makers])
    # How many of the first operations read each value.
    read = np.zeros((len(makers), len(operations) + 1), np.int32)
    for i, operation in enumerate(operations):
        for v in operation.invars:
            if isinstance(v, Var) and v in rows:
                read[rows[v], i + 1] = 1
    read = read.cumsum(axis=1)
    best = np.inf
    allowed = [i for i, may in enumerate(staged.is_cuttable) if may]
    for cuts in combinations(allowed, number - 1):
        spans = list(pairwise([0, *cuts, len(operations)]))
        homes = np.searchsorted(cuts, made, side="right")
        totals = [work[b] - work[a] for a, b in spans]
        for piece, (a, b) in enumerate(spans):
            travels = (read[:, b] > read[:, a]) & (homes != piece)
            totals[piece] += sizes[travels].sum()
            for home in range(piece):
                totals[home] += sizes[travels & (homes == home)].sum()
        best = min(best, max(totals))
    return int(best)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_automatic_cut_is_within_a_tenth_of_the_best(
    name: str, stages: int
) -> None:
    staged = staged_model(name)
    found = StageCut(name, Plan(stages=stages)).assign(staged)
    ours = slowest_piece(staged, found, stages)
    assert ours <= 1.1 * fastest_cut(staged, stages)


def test_the_automatic_cut_of_a_deep_network_is_within_a_tenth_of_the_best() -> None:
    """With more places for a cut than are looked at."""
    model = keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=4, classifier_activation=None
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)
    x, y = np.ones((8, 32, 32, 3), np.float32), np.zeros(8, np.int32)
    staged = traced_training(model, x, y).staged
    assert sum(staged.is_cuttable) > NUM_CANDIDATES
    ours = slowest_piece(staged, StageCut("deep", Plan(stages=2)).assign(staged), 2)
    assert ours <= 1.1 * fastest_cut(staged, 2)
