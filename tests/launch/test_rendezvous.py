"""Launchers come together, or it is told within ten seconds why they do not."""

import os
import re
import select
import socket
import stat
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from meshwright.devices.device import Device
from meshwright.errors import PeerLostError, RendezvousError
from meshwright.launch.agent import join, wait_for_welcome
from meshwright.launch.facts import (
    Facts,
    check_reachable,
    find_differences,
    names_of,
    read_facts,
)
from meshwright.launch.handshake import Keys, Refused, admit, introduce
from meshwright.launch.interfaces import (
    VARIABLE,
    address_of_head,
    address_of_interface,
    address_towards,
    address_towards_host,
    check_may_listen,
    find_address,
)
from meshwright.launch.job import part_of_visible
from meshwright.launch.line import Line
from meshwright.launch.rendezvous import Rendezvous
from meshwright.launch.secret import read_secret, secret_of_run

import pytest

from meeting import HEAD, RUN, SECRET, facts_of, open_door

SECONDS = 10
"""What a bad rendezvous may take until its cause is told."""


def test_launchers_that_agree_come_together_and_are_told_so() -> None:
    with open_door() as door:
        lines = [
            door.arrive(facts_of(host, n, tasks=3)) for n, host in ((2, "c"), (1, "b"))
        ]
        found = door.rendezvous.gather({1: "b", 2: "c"}, facts_of("a", 0, tasks=3))
        assert [arrival.facts.host for arrival in found] == ["b", "c"]
        for line in lines:
            wait_for_welcome(line, "here")
        assert not door.logged


def test_who_is_missing_is_told_by_name() -> None:
    # faults.md row 16, G14
    with open_door() as door:
        door.arrive(facts_of("b", 1, tasks=3))
        with pytest.raises(RendezvousError) as caught:
            door.rendezvous.gather(
                {1: "task 1", 2: "host c"}, facts_of("a", 0, tasks=3), seconds=0.5
            )
        address = door.rendezvous.address
    assert caught.value.received == (
        f"After 0.5 s host c had not come to {address}; there: a, b."
    )
    assert caught.value.rule == "All launchers of a run come together before it starts."
    assert "MESHWRIGHT_INTERFACE" in caught.value.change
    assert caught.value.exit_code == 6


def test_the_others_hear_why_the_run_does_not_start() -> None:
    with open_door() as door:
        line = door.arrive(facts_of("b", 1, tasks=3))
        with pytest.raises(RendezvousError):
            door.rendezvous.gather({1: "b", 2: "c"}, seconds=0.3)
        with pytest.raises(RendezvousError, match="c had not come to"):
            wait_for_welcome(line, "b")


def test_whoever_is_told_to_be_patient_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.launch.rendezvous.GATHER_SECONDS", 0.2)
    with open_door() as door:
        with pytest.raises(RendezvousError):
            door.rendezvous.gather({1: "b", 2: "c"}, HEAD, seconds=1)
        assert door.logged == ["still waiting for b, c"]


def test_a_number_that_is_taken_is_told_with_both_who_have_it() -> None:
    # faults.md row 16
    with open_door() as door:
        first = door.arrive(facts_of("b", 1, tasks=3))
        door.arrive(facts_of("c", 1, tasks=3))
        with pytest.raises(RendezvousError) as caught:
            door.rendezvous.gather({1: "b", 2: "c"}, facts_of("a", 0, tasks=3))
        assert re.fullmatch(
            r"Task 1 came twice: [bc] \(127.0.0.1:\d+\), and [bc] \(127.0.0.1:\d+\)\.",
            caught.value.received,
        )
        assert caught.value.rule == "Each launcher of a run has a number of its own."
        assert "second copy of the job" in caught.value.change
        with pytest.raises(RendezvousError, match="came twice"):
            wait_for_welcome(first, "b")


def test_a_second_head_is_told() -> None:
    with open_door() as door:
        door.arrive(facts_of("b", 0))
        with pytest.raises(RendezvousError, match=r"Task 0 came twice: a \(this launc"):
            door.rendezvous.gather({1: "b"}, HEAD)


@pytest.mark.parametrize(
    ("late", "received"),
    [
        (
            facts_of("b", 2, tasks=3),
            "The hosts of the run differ: number of launchers 2 on a, 3 on b.",
        ),
        (facts_of("b", 2), r"b (127.0.0.1:PORT) came as task 2, and the run has tasks"),
    ],
    ids=["another world", "no such task"],
)
def test_a_wrong_number_of_launchers_is_told(late: Facts, received: str) -> None:
    # faults.md row 16
    with open_door() as door:
        door.arrive(late)
        with pytest.raises(RendezvousError) as caught:
            door.rendezvous.gather({1: "b"}, HEAD)
        told = re.sub(r"127.0.0.1:\d+", "127.0.0.1:PORT", caught.value.received)
        assert told.startswith(received)


@pytest.mark.parametrize(
    ("changes", "difference", "change"),
    [
        # faults.md row 17
        (
            {"versions": {**HEAD.versions, "keras": "3.14.0"}},
            "keras 3.15.1 on a, 3.14.0 on b",
            "Install the same packages on all hosts.",
        ),
        (
            {"versions": {k: v for k, v in HEAD.versions.items() if k != "jax"}},
            "jax 0.12.0 on a, none on b",
            "Install the same packages on all hosts.",
        ),
        (
            {"script": "train.py (cba987654321)"},
            "script train.py (123456789abc) on a, train.py (cba987654321) on b",
            "Copy the script to all hosts, or put it on a shared disk.",
        ),
        (
            {"arguments": ("--epochs", "4")},
            "arguments --epochs 3 on a, --epochs 4 on b",
            "Start all of them with the same command.",
        ),
        # faults.md row 19
        (
            {"devices": "7 x GPU H200"},
            "devices 8 x GPU H200 on a, 7 x GPU H200 on b",
            "Leave out the hosts that differ, or hide devices on the others.",
        ),
        (
            {"devices": "1 x CPU", "hidden": ""},
            "devices 8 x GPU H200 on a, 1 x CPU (CUDA_VISIBLE_DEVICES='') on b",
            "Unset CUDA_VISIBLE_DEVICES where it hides the GPUs.",
        ),
        ({"processes": 2}, "workers 1 on a, 2 on b", "Start all of them with the same"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_hosts_that_differ_are_told_with_the_difference(
    changes: dict[str, Any], difference: str, change: str
) -> None:
    with open_door() as door:
        line = door.arrive(facts_of("b", 1, **changes))
        with pytest.raises(RendezvousError) as caught:
            door.rendezvous.gather({1: "b"}, HEAD)
        assert caught.value.received == f"The hosts of the run differ: {difference}."
        assert "same script with the same arguments and packages" in caught.value.rule
        assert caught.value.change.startswith(change)
        with pytest.raises(RendezvousError, match="hosts of the run differ"):
            wait_for_welcome(line, "b")


def test_those_who_agree_are_named_together_and_tasks_of_one_host_apart() -> None:
    everybody = [
        facts_of("a", 0),
        facts_of("b", 1, devices="x"),
        facts_of("b", 2),
        facts_of("c", 3, devices="x"),
    ]
    assert names_of(everybody) == ["a", "b (task 1)", "b (task 2)", "c"]
    assert find_differences(everybody) == [
        "devices 8 x GPU H200 on a, b (task 2), x on b (task 1), c"
    ]


def test_a_launcher_tells_what_it_has_without_starting_a_device(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()")
    facts = read_facts(script, ["-x"], host="a", task=0, tasks=1, processes=1)
    assert re.fullmatch(r"train.py \([0-9a-f]{12}\)", facts.script)
    assert facts.devices == "8 x CPU", "as the tests are configured"
    assert {"python", "meshwright", "keras", "jax", "jaxlib", "numpy"} < {
        *facts.versions
    }
    assert Facts.from_json(facts.to_json()) == facts
    secret = read_facts(
        script, ["--api-key=sesame"], host="a", task=0, tasks=1, processes=1
    )
    assert "sesame" not in str(secret), "what differs is shown, and secrets are not"
    missing = read_facts(tmp_path / "no.py", [], host="a", task=0, tasks=1, processes=1)
    assert missing.script == "no.py (No such file or directory)"


def test_a_host_with_another_run_folder_is_told() -> None:
    with open_door() as door:
        door.arrive(facts_of("b", 1, folder="run 6"))
        with pytest.raises(RendezvousError) as caught:
            door.rendezvous.gather({1: "b"}, HEAD)
    assert caught.value.received == (
        "The run folder on b is not the one that the launcher sees."
    )
    assert "--run DIR" in caught.value.change


def test_whoever_listens_everywhere_tells_an_address_that_others_can_reach() -> None:
    with open_door(EVERY) as door:
        assert door.rendezvous.host != EVERY
        door.arrive(facts_of("b", 1))
        # The check of names is for hosts in a network; these say that they have GPUs.
        assert len(door.rendezvous.gather({1: "b"}, HEAD)) == 1


def test_tasks_of_a_host_that_see_the_same_gpus_take_a_part_each() -> None:
    gpus = tuple(f"GPU-{n}" for n in range(4))
    with open_door() as door:
        lines = [door.arrive(facts_of("a", n, tasks=4, gpus=gpus)) for n in (1, 2)]
        lines.append(door.arrive(facts_of("b", 3, tasks=4, gpus=("GPU-x",))))
        with pytest.raises(RendezvousError) as caught:
            door.rendezvous.gather(
                {1: "1", 2: "2", 3: "3"}, facts_of("a", 0, tasks=4, gpus=gpus)
            )
    assert caught.value.received == (
        "GPUs of a are seen by several tasks: 4 by task 0; 4 by task 1; 4 by task 2."
    )
    assert "srun --gpus-per-task" in caught.value.change
    with open_door() as door:
        first = door.arrive(facts_of("a", 1, tasks=3, gpus=gpus))
        second = door.arrive(facts_of("b", 2, tasks=3, gpus=("GPU-x",)))
        own = facts_of("a", 0, tasks=3, gpus=gpus)
        door.rendezvous.gather({1: "1", 2: "2"}, own)
        assert door.rendezvous.part_of(0) == (0, 2)
        assert wait_for_welcome(first, "a") == (1, 2)
        assert wait_for_welcome(second, "b") is None
    assert part_of_visible((0, 2), "GPU-0,GPU-1") == "GPU-0"


@pytest.mark.parametrize("address", ["127.0.1.1", ""])
def test_a_cpu_host_whose_name_leads_nowhere_is_told(address: str) -> None:
    # faults.md row 14
    bad = facts_of("b", 1, devices="8 x CPU", own_address=address)
    good = facts_of("a", 0, devices="8 x CPU", own_address="10.0.0.1")
    with pytest.raises(RendezvousError) as caught:
        check_reachable([good, bad])
    assert caught.value.received == (
        f"The name of b stands for {address or 'nothing'} there."
    )
    assert "/etc/hosts of b" in caught.value.change
    check_reachable([good, facts_of("b", 1, own_address=address)])  # it has GPUs


def test_stand_ins_are_the_same_on_cpus_of_all_kinds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = [
        Device(
            name=f"/device:GPU:{n}",
            kind="GPU",
            index=n,
            host="a",
            memory=None,
            model=f"stand-in GPU (CPU of kind {n})",
            stand_in=True,
        )
        for n in range(2)
    ]
    monkeypatch.setattr("meshwright.launch.facts._listed", lambda: listed)
    facts = read_facts(tmp_path, [], host="a", task=0, tasks=1, processes=1)
    assert facts.devices == "2 x GPU stand-in"
    with pytest.raises(RendezvousError, match="stands for"):
        check_reachable([replace(facts, own_address="127.0.0.1")])


def test_a_clock_that_is_off_is_noticed_and_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # faults.md row 21
    with open_door() as door:
        ahead = SimpleNamespace(time=lambda: time.time() + 90)
        monkeypatch.setattr("meshwright.launch.agent.time", ahead)
        door.arrive(facts_of("b", 1))
        monkeypatch.undo()
        (arrival,) = door.rendezvous.gather({1: "b"}, HEAD)
        assert arrival.skew == pytest.approx(90, abs=5)
        (notice,) = door.logged
        assert re.fullmatch(
            r"the clock of b is (8|9)\d\.\d s ahead; times in logs of b are those of "
            r"its clock",
            notice,
        )


def test_another_secret_or_another_run_is_refused_on_both_sides() -> None:
    # faults.md row 24, G13
    with open_door() as door:
        with pytest.raises(RendezvousError) as caught:
            door.arrive(facts_of("b", 1), secret=b"guessed, and guessed wrong")
        assert caught.value.received == (
            f"b went to {door.rendezvous.address}, but the launcher there has another "
            "secret."
        )
        assert "MESHWRIGHT_SECRET_FILE" in caught.value.change
        with pytest.raises(RendezvousError, match="belongs to another run"):
            door.arrive(facts_of("b", 1), run="run 8")
        with pytest.raises(
            RendezvousError, match=r"Refused: .*does not know the run's"
        ):
            door.rendezvous.gather({1: "b"}, HEAD, seconds=0.3)
        assert [re.sub(r"1:\d+", "1", line) for line in door.logged] == [
            "refused a connection from 127.0.0.1: it does not know the run's secret",
            "refused a connection from 127.0.0.1: it belongs to another run",
        ]


EVERY = ".".join("0000")

STRANGERS = {
    "web": b"GET / HTTP/1.1\r\n\r\n",
    "huge length": b"\xff" * 64,
    "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a replayed greeting": b"meshwright run 1" + bytes(80),
    "a port scan": b"",
}


def test_strangers_are_refused_and_logged_and_disturb_nobody() -> None:
    # faults.md row 24, G13
    with open_door() as door:
        silent = [door.stranger() for _ in range(80)]  # more than may be in the doorway
        silent[0].settimeout(2)
        assert silent[0].recv(48, socket.MSG_WAITALL)
        assert silent[0].recv(1) == b"", "the first has to leave when many come"
        drop = door.stranger()
        drop.sendall(b"m")  # ... and one that sends its greeting byte by byte
        for words in STRANGERS.values():
            with door.stranger() as stranger:
                stranger.sendall(words)
        began = time.monotonic()
        line = door.arrive(facts_of("b", 1))
        (arrival,) = door.rendezvous.gather({1: "b"}, HEAD)
        assert time.monotonic() - began < 2, "nobody waits for the silent ones"
        wait_for_welcome(line, "b")
        until(lambda: len(door.rendezvous._refused) == 86, seconds=8)
        assert arrival.line.lost is None
        assert len(door.logged) == 20, "a flood of strangers fills no log"
        assert door.logged[-1].endswith("; no more are told of")
        assert all(
            line.startswith("refused a connection from 127.0.0.9:")
            for line in door.logged
        )
        told = "\n".join(door.rendezvous._refused)
        assert (
            "it began with b'GET / HTTP/1.1\\r\\n\\r\\n', which is no greeting" in told
        )
        assert "it left after 0 of 96 bytes" in told
        assert "it said 1 of 96 bytes in time" in told
        for stranger in (*silent, drop):
            stranger.close()


def until(holds: Any, *, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stranger_learns_nothing_but_that_somebody_listens() -> None:
    with open_door() as door, door.stranger() as stranger:
        stranger.sendall(b"meshwright run 1" + bytes(80))
        heard = b""
        while more := stranger.recv(4096):
            heard += more
        assert heard[:16] == b"meshwright run 1"
        assert heard[48:] == b"\x02" + bytes(32), "another run; and no proof"


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def shaken() -> tuple[tuple[socket.socket, Keys], tuple[socket.socket, Keys]]:
    ours, theirs = connected()
    keys: list[Keys] = []
    head = threading.Thread(target=lambda: keys.append(admit(ours, SECRET, RUN)))
    head.start()
    mine = introduce(theirs, SECRET, RUN)
    head.join()
    return (ours, keys[0]), (theirs, mine)


def test_an_impostor_of_the_head_is_found_out() -> None:
    # It takes every proof, and cannot give one itself.
    ours, theirs = connected()
    ours.sendall(b"meshwright run 1" + bytes(32) + b"\x00" + bytes(32))
    with pytest.raises(Refused, match="whoever listens there does not know the run's"):
        introduce(theirs, SECRET, RUN)
    ours.close()
    theirs.close()


def test_a_proof_cannot_be_sent_back() -> None:
    ours, theirs = connected()
    echo = threading.Thread(target=lambda: theirs.sendall(theirs.recv(48) + bytes(48)))
    echo.start()
    with pytest.raises(Refused, match="another run"):
        admit(ours, SECRET, RUN)
    echo.join()
    ours.close()
    theirs.close()


def test_a_proof_that_was_listened_to_is_worth_nothing_at_another_time() -> None:
    # faults.md row 24
    ours, theirs = connected()
    ours.sendall(b"meshwright run 1" + bytes(32))

    def be_honest() -> None:
        with suppress(Refused):  # nobody answers
            introduce(theirs, SECRET, RUN)

    member = threading.Thread(target=be_honest)
    member.start()
    proof = ours.recv(96, socket.MSG_WAITALL)
    ours.close()
    member.join()
    theirs.close()
    with open_door() as door, door.stranger() as stranger:
        stranger.recv(48, socket.MSG_WAITALL)
        stranger.sendall(proof)
        assert stranger.recv(33, socket.MSG_WAITALL) == b"\x01" + bytes(32)
        until(lambda: door.logged)
        assert door.logged[0].endswith("it does not know the run's secret")


@pytest.mark.parametrize("attack", ["change", "repeat", "swap", "insert", "reflect"])
def test_nobody_can_put_anything_into_a_connection(attack: str) -> None:
    # faults.md row 24
    (one, ones_keys), (two, twos_keys) = shaken()
    wire, far = connected()  # what the second hears goes through the attacker's hands
    speaker = Line(one, ones_keys)
    try:
        for number in range(2):
            speaker.send({"do": "close", "number": number})
        heard = b""
        while heard.count(b"}") < 2:
            heard += two.recv(4096)
        size = len(heard) // 2
        messages = [heard[:size], heard[size:]]
        sent = {
            "change": messages[0].replace(b"close", b"start"),
            "repeat": messages[0] * 2,
            "swap": messages[1] + messages[0],
            "insert": b"\x00\x00\x00\x02" + bytes(32) + b"{}",
            "reflect": messages[0],
        }[attack]
        keys = ones_keys if attack == "reflect" else twos_keys
        listener = Line(far, keys)
        wire.sendall(sent)
        until(lambda: listener.lost is not None)
        assert listener.lost == (
            "the connection brought a message that the other side has not signed"
        )
        assert len(listener.take()) == (1 if attack == "repeat" else 0)
        listener.close()
    finally:
        speaker.close()
        for end in (two, wire):
            end.close()


def test_whoever_says_nothing_for_a_while_is_lost() -> None:
    # faults.md row 22
    (one, ones_keys), (two, _) = shaken()
    line = Line(one, ones_keys, silence=1.5)
    began = time.monotonic()
    until(lambda: line.lost is not None, seconds=5)
    assert line.lost == "it said nothing for 1.5 s"
    assert time.monotonic() - began >= 1.5
    line.wait(5)
    assert time.monotonic() - began < 5, "whoever waits is woken"
    line.close()
    two.close()


def test_two_who_have_nothing_to_say_stay_together() -> None:
    (one, ones_keys), (two, twos_keys) = shaken()
    lines = [Line(one, ones_keys, silence=1.5), Line(two, twos_keys, silence=1.5)]
    time.sleep(2.5)
    assert [line.lost for line in lines] == [None, None]
    lines[0].send({"much": "x" * 3_000_000})
    until(lambda: select.select([lines[1].fileno()], [], [], 0)[0])
    (message,) = lines[1].take()
    assert len(message["much"]) == 3_000_000
    lines[0].close()
    until(lambda: lines[1].lost is not None)
    assert lines[1].lost == "it closed the connection"
    lines[1].close()


def test_a_lost_launcher_is_waited_for_and_then_given_up() -> None:
    with open_door() as door:
        first = door.arrive(facts_of("b", 1))
        (before,) = door.rendezvous.gather({1: "b"}, HEAD)
        with pytest.raises(RendezvousError, match=r"Task 1 came twice: b .*, and c "):
            wait_for_welcome(door.arrive(facts_of("c", 1)), "c")
        assert "refused a launcher: Task 1 came twice" in door.logged[-1]
        first.close()
        until(lambda: before.line.lost is not None)
        with pytest.raises(PeerLostError) as caught:
            door.rendezvous.come_back(before, 0.1)
        assert caught.value.received == (
            "Host b was lost (it closed the connection), and did not come back within "
            "0.1 s."
        )
        second = door.arrive(facts_of("b", 1))
        assert door.rendezvous.come_back(before, 5).line.lost is None
        wait_for_welcome(second, "b")


def test_a_launcher_that_cannot_reach_the_head_says_so() -> None:
    # faults.md row 14
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RendezvousError) as caught:
        join(f"127.0.0.1:{port}", secret=SECRET, run=RUN, facts=facts_of("b", 1))
    assert caught.value.received == (
        f"b cannot reach the launcher at 127.0.0.1:{port}: Connection refused."
    )
    assert "a firewall?" in caught.value.change


def test_a_launcher_whose_head_goes_while_it_waits_says_so() -> None:
    with open_door() as door:
        line = door.arrive(facts_of("b", 1))
        until(lambda: door.rendezvous._seats)
        door.rendezvous._seats[1].line.close()
        with pytest.raises(
            RendezvousError, match="b lost the launcher while it waited"
        ):
            wait_for_welcome(line, "b")


def test_a_name_that_nobody_knows_is_told() -> None:
    # faults.md row 14
    began = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        find_address("no-such-host.invalid")
    assert time.monotonic() - began < SECONDS
    assert caught.value.received.startswith(
        "No address is known for the host 'no-such-host.invalid': "
    )
    assert "getent hosts no-such-host.invalid" in caught.value.change


def test_a_resolver_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()

    def ask_for_long(*_: object, **__: object) -> None:
        released.wait()
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", ask_for_long)
    with pytest.raises(RendezvousError, match=r"no answer in 0\.1 s"):
        find_address("slow", seconds=0.1)
    released.set()


@pytest.mark.parametrize("address", ["", "*", EVERY, "::", "::0"])
def test_a_launcher_listens_on_every_interface_only_if_it_is_asked_to(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # faults.md G13
    with pytest.raises(RendezvousError) as caught:
        check_may_listen(address)
    assert "--allow-public-bind" in caught.value.change
    assert check_may_listen(address, allow_public_bind=True) == address
    monkeypatch.setenv(VARIABLE, address or EVERY)
    with pytest.raises(RendezvousError, match="every interface"):
        address_towards_host("127.0.0.2")


def test_the_address_is_that_of_the_chosen_interface_or_of_the_way_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards_host("me@127.0.0.5") == address_towards("127.0.0.5")
    monkeypatch.setenv(VARIABLE, "lo")
    assert address_of_head("anybody") == "127.0.0.1"
    assert address_towards_host("anybody") == "127.0.0.1"
    assert address_of_interface("127.0.0.7") == "127.0.0.7"
    with pytest.raises(RendezvousError) as caught:
        address_of_interface("eth99")
    assert caught.value.received == "The chosen interface is 'eth99'."
    assert "lo" in caught.value.change


def test_a_port_that_is_taken_is_told() -> None:
    # faults.md row 15
    with open_door() as door, pytest.raises(RendezvousError) as caught:
        Rendezvous(
            "127.0.0.1", secret=SECRET, run=RUN, log=print, port=door.rendezvous.port
        )
    assert re.fullmatch(
        r"The launcher cannot listen on 127.0.0.1:\d+: Address already in use\.",
        caught.value.received,
    )
    assert "ss -ltnp" in caught.value.change


def test_a_secret_is_read_if_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123\n")
    path.chmod(0o600)
    assert secret_of_run(tmp_path, {}) == b"0123456789abcdef0123"
    other = tmp_path / "other"
    other.write_text("fedcba9876543210fedc")
    other.chmod(0o400)
    named = {"MESHWRIGHT_SECRET_FILE": str(other)}
    assert secret_of_run(tmp_path, named) == b"fedcba9876543210fedc"


def test_a_secret_that_others_may_know_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"

    def told() -> str:
        with pytest.raises(RendezvousError) as caught:
            read_secret(path)
        return caught.value.received

    assert told() == f"The secret {path} cannot be read: No such file or directory."
    path.write_text("0123456789abcdef")
    path.chmod(0o640)
    assert told() == f"The secret {path} has mode 0640."
    path.chmod(0o600)
    path.write_text("short")
    assert told() == f"The secret {path} has 5 bytes."
    link = tmp_path / "link"
    path.rename(link)
    path.symlink_to(link)
    assert "cannot be read: Too many levels of symbolic links" in told()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.chown(path, 12345, -1)
    with pytest.raises(RendezvousError, match="belongs to user 12345, not 0"):
        read_secret(path)
