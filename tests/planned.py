"""Plans with made-up predictions, as the search would hand them over."""

from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.machines import Machine, parse_machine
from meshwright.planner.money import Wishes, choose, scaling_rows
from meshwright.planner.report import PlanReport

GIB = 2**30
BATCH = 1024


def candidate(
    machine: Machine, plan: Plan, seconds: float, gib: float, because: str = ""
) -> Candidate:
    """What is known of a plan; it fits if its memory is enough."""
    usable = machine.usable_memory
    fits = usable is None or gib * GIB <= usable
    if not fits:
        assert usable is not None
        because = f"predicted {gib:.1f} GiB per device > {usable / GIB:.1f} GiB"
    return Candidate(
        plan=plan,
        step_seconds=seconds,
        memory_bytes=int(gib * GIB),
        memory_by_kind={"parameters": int(gib * GIB)},
        bubble=plan.schedule_of().bubble if plan.stages > 1 else None,
        dollars_per_hour=machine.dollars_per_hour(plan.num_devices),
        fits=fits,
        because=because,
        parts={"compute": 0.75 * seconds, "communication": 0.25 * seconds},
        reason="" if fits else "memory",
    )


def indivisible(plan: Plan) -> Candidate:
    """A plan that cannot be, because six heads cannot be split."""
    because = f"6 heads are not divisible by {plan.tensor}"
    return Candidate(plan=plan, fits=False, reason="division", because=because)


def small_model(machine: Machine) -> list[Candidate]:
    """Fits everywhere, and is fastest on one device."""
    return [
        candidate(machine, Plan(), 0.010, 2),
        candidate(machine, Plan(data=8), 0.012, 1),
        candidate(machine, Plan(fsdp=8), 0.015, 0.5),
    ]


def large_model(machine: Machine) -> list[Candidate]:
    """Fits if its state is split: 112 GiB on one device."""
    stages = Plan(data=2, stages=4, microbatches=16)
    return [
        candidate(machine, Plan(), 1.0, 112),
        candidate(machine, Plan(remat=True), 1.3, 90),
        candidate(machine, Plan(data=8), 0.13, 110),
        candidate(machine, Plan(fsdp=8), 0.15, 14),
        candidate(machine, Plan(data=4, fsdp=2), 0.14, 60),
        candidate(machine, Plan(data=2, tensor=4), 0.18, 40),
        candidate(machine, stages, 0.20, 40),
        candidate(machine, Plan(fsdp=8, remat=True), 0.35, 10),
        indivisible(Plan(tensor=8)),
        indivisible(Plan(tensor=8, remat=True)),
    ]


def huge_model(machine: Machine) -> list[Candidate]:
    """Fits nowhere."""
    return [
        candidate(machine, Plan(), 100.0, 2000),
        candidate(machine, Plan(fsdp=8), 13.0, 280),
        candidate(machine, Plan(tensor=8), 15.0, 250),
    ]


def report(
    candidates: list[Candidate], machine: Machine, wishes: Wishes | None = None
) -> PlanReport:
    """The report on some plans, with the best of each number of devices."""
    asked = wishes or Wishes()
    choice = choose(candidates, asked, batch_size=BATCH)
    by_devices: dict[int, Candidate] = {}
    for each in (*choice.candidates, *choice.rejected):
        by_devices.setdefault(each.num_devices, each)
    rows = scaling_rows(
        by_devices, batch_size=BATCH, samples=asked.samples, epochs=asked.epochs
    )
    return PlanReport(
        model="net",
        batch_size=BATCH,
        machine=machine,
        best=choice.best,
        candidates=choice.candidates,
        rejected=choice.rejected,
        objective=str(asked.objective),
        error_band=0.1,
        samples=asked.samples,
        epochs=asked.epochs,
        scaling=rows,
    )


def eight_h200() -> Machine:
    """Eight devices of which a step may use 80 GiB."""
    return parse_machine("8xH200", memory="80GiB")
