"""What is said about a failure: the cause that is known, and no more than that."""

import signal

from meshwright.launch.crew import Ended
from meshwright.launch.failures import failure_of, failure_of_lost, first_cause
from meshwright.launch.member import Member
from meshwright.launch.stragglers import Stragglers
from meshwright.launch.supervisor import delay_before
from meshwright.launch.watch import Limits, find_overdue, who_did_not_come
from meshwright.launch.worker import describe

import pytest

GIB = 2**30


def killed(memory: int, *, by_system: bool = False) -> Member:
    return Member(
        rank=1,
        host="b",
        section="step",
        step=37,
        status=-signal.SIGKILL,
        memory=memory,
        memory_of_host=16 * GIB,
        killed_for_memory=by_system,
    )


@pytest.mark.parametrize(
    ("member", "is_probable"),
    [
        (killed(15 * GIB), True),
        (killed(2 * GIB, by_system=True), True),
        (killed(2 * GIB), False),
    ],
)
def test_a_kill_is_put_down_to_memory_if_something_speaks_for_it(
    member: Member, is_probable: bool
) -> None:  # faults.md row 11
    failure = failure_of(member, "runs/a")
    assert failure.received == (
        "Rank 1 on b was killed by SIGKILL in a step after step 37"
        f"{', probably out of memory' if is_probable else ''}; "
        f"it held {member.memory / GIB:.1f} GiB at most, its host has 16.0 GiB."
    )
    batches = "Use smaller batches, remat=True or fewer processes on this host. "
    assert failure.change.startswith(batches) == is_probable
    assert failure.exit_code == 6


def test_status_and_section_are_told_of_a_process_that_told_nothing() -> None:
    member = Member(rank=0, host="a", section="checkpoint", step=4, status=9)
    failure = failure_of(member, "runs/a")
    assert failure.received == (
        "Rank 0 on a ended with exit status 9 while it saved after step 4."
    )
    assert failure.exit_code == 9


def test_a_lost_host_is_named_with_the_reason() -> None:
    failure = failure_of_lost("b", "its agent has gone")
    assert failure.received == "Host b is gone with its workers: its agent has gone."
    assert failure.rule == "Every host of a run stays until the run has ended."
    assert failure.change == (
        "Look at that host and the network between. The same command goes on from the "
        "last checkpoint."
    )
    assert failure.exit_code == 6


def test_the_cause_is_not_what_followed_from_it() -> None:
    follows = Member(rank=0, host="a", failure={"follows": True})
    aborted = Member(rank=1, host="a", status=-signal.SIGABRT)
    raised = Member(rank=2, host="a", failure={"type": "ValueError"})
    dead = Member(rank=3, host="a", status=-signal.SIGKILL)
    assert first_cause([follows, aborted]) is follows
    assert first_cause([follows, aborted, raised]) is raised
    assert first_cause([follows, raised, dead]) is dead


@pytest.mark.parametrize(
    "text",
    [
        "UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer",
        "INTERNAL: Gloo all-reduce failed: timed out",
        "UNAVAILABLE: Failed to send RPC to coordination service.",
        "NCCL operation ncclCommInitRank failed",
    ],
)
def test_errors_about_other_processes_are_known_by_their_words(text: str) -> None:
    assert describe(ValueError(text), "script.py")["follows"]
    assert not describe(ValueError("boom"), "script.py")["follows"]


def test_whoever_is_stopped_ended_early_or_in_its_script_keeps_the_others() -> None:
    def pair(**of_second: object) -> list[Member]:
        first = Member(rank=0, host="a", section="step", step=4)
        second = Member(rank=1, host="a", section="step", step=4)
        for name, value in of_second.items():
            setattr(second, name, value)
        return [first, second]

    none: dict[int, str] = {}
    late, because = who_did_not_come(pair(), {1: "stopped"}, none)
    assert ([m.rank for m in late], because) == ([1], "it is stopped (SIGSTOP)")
    late, because = who_did_not_come(pair(section="end"), none, none)
    assert [m.rank for m in late] == [1]
    assert because == "it has come to the end of its script while the others work"
    late, because = who_did_not_come(pair(section="script"), none, none)
    assert ([m.rank for m in late], because) == ([1], "it is in its script")
    waiting = 'Thread 1:\n  File "/lib/jax/_src/array.py", line 3 in _value'
    late, because = who_did_not_come(pair(), none, {0: waiting, 1: waiting})
    assert (late, because) == ([], "all are at the same place")


def test_those_that_wait_for_the_last_one_at_the_end_are_not_overdue() -> None:
    early = Member(rank=0, host="a", section="end")
    busy = Member(rank=1, host="a", section="script")
    later = early.seen_at + 1e6
    assert find_overdue([early, busy], Limits(), later) is None
    busy.section = "end"
    assert find_overdue([early, busy], Limits(), later) is not None


def test_delays_grow_and_differ() -> None:
    assert {delay_before(1) for _ in range(9)} != {delay_before(1)}
    assert all(0.25 <= delay_before(1) <= 0.75 for _ in range(99))
    assert all(30 <= delay_before(1000) <= 90 for _ in range(99))


def test_a_little_slower_is_no_straggler() -> None:
    def notices(slow: float, usual: float) -> list[str | None]:
        stragglers = Stragglers({0: "a", 1: "b"})
        said = []
        for _ in range(40):
            stragglers.hear(0, usual)
            said.append(stragglers.hear(1, slow))
        return [words for words in said if words]

    assert notices(0.19, 0.1) == []
    assert notices(0.003, 0.0001) == [], "too short to matter"
    assert notices(0.3, 0.1) == [
        "rank 1 on b is slower than the others, which wait for it: 0.3 s of its own "
        "for each step, they need 0.1 s"
    ]


def test_an_end_is_told_without_what_is_not_known() -> None:
    assert Ended(0, 1, 5).memory_of_host == 0
    member = killed(5)
    member.memory_of_host = 0
    assert "its host has unknown" not in failure_of(member, "a").received
