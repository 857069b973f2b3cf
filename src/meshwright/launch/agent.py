"""What a launcher does on a host that is not the head's: as it is told.

`python -m meshwright.launch.agent` is started through ssh, and reads from its standard
input what it has to know; the secret is on no command line.
"""

import json
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from meshwright.cluster.orders import Orders
from meshwright.errors import MeshwrightError, RendezvousError
from meshwright.launch.crew import Crew, Event, Lost
from meshwright.launch.facts import Facts
from meshwright.launch.handshake import Refused, introduce
from meshwright.launch.head_file import read_head
from meshwright.launch.interfaces import chosen_address, find_address
from meshwright.launch.job import Job, Part
from meshwright.launch.line import Line, Message

LOST = 6
"""The exit status of an agent whose head is gone."""

_CONNECT_SECONDS = 3.0
_LOOK_SECONDS = 0.25


def join(address: str, *, secret: bytes, run: str, facts: Facts) -> Line:
    """Goes to the head, proves itself and says what it is.

    Raises:
        RendezvousError: The head cannot be reached, or is somebody else.
    """
    host, _, port = address.rpartition(":")
    host = find_address(host.strip("[]"))
    source = (chosen_address() or "", 0)
    try:
        connection = socket.create_connection(
            (host, int(port)), _CONNECT_SECONDS, source
        )
    except OSError as error:
        raise RendezvousError(
            f"{facts.host} cannot reach the launcher at {address}: "
            f"{error.strerror or error}.",
            "The launcher and its hosts are in one network.",
            f"Try `nc -vz {host} {port}` on {facts.host} (a firewall?), or choose "
            "another network with MESHWRIGHT_INTERFACE.",
        ) from error
    try:
        keys = introduce(connection, secret, run)
    except Refused as reason:
        connection.close()
        raise RendezvousError(
            f"{facts.host} went to {address}, but {reason}.",
            "The launchers of a run prove to each other that they know its secret.",
            "Let all hosts see the same run folder, or one MESHWRIGHT_SECRET_FILE.",
        ) from reason
    line = Line(connection, keys)
    line.send({"facts": facts.to_json(), "clock": time.time()})
    return line


def wait_for_welcome(line: Line, host: str) -> Part:
    """Waits until all launchers are there.

    Returns:
        Which part of the GPUs this launcher takes, if others see the same ones.

    Raises:
        RendezvousError: The head sent this one, or everybody, away.
    """
    while True:
        message = line.take_first()  # the next ones may be for `serve`
        if message is not None and "welcome" in message:
            part = message["welcome"]
            return None if part is None else (int(part[0]), int(part[1]))
        if message is not None and "refused" in message:
            raise RendezvousError(*message["refused"])
        if line.lost is not None:
            raise RendezvousError(
                f"{host} lost the launcher while it waited for the others: "
                f"{line.lost}.",
                "All launchers of a run come together before it starts.",
                "Look at the output of the launcher (task 0).",
            )
        line.wait(1)


def serve(line: Line, crew: Crew) -> int | None:
    """Does what the head says, and tells it what happens.

    A signal that asks this process to stop goes to its workers: they save, and the
    head hears how they end.

    Returns:
        The exit status that the head wants, or None if the head is lost. No worker
        lives any more.
    """
    asked_to_stop: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        asked_to_stop.append(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        while line.lost is None:
            _wait_for([line.fileno(), *crew.filenos()])
            if asked_to_stop:
                asked_to_stop.clear()
                crew.signal(signal.SIGTERM)
            events = crew.take_events()
            if events:
                line.send({"events": [_packed(event) for event in events]})
            for message in line.take():
                if "leave" in message:
                    return int(message["leave"])
                line.send(_obey(crew, message))
        return None
    finally:
        crew.kill()
        line.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for(filenos: Sequence[int]) -> None:
    """Waits until one of them can be read, and not long, for the sake of signals."""
    poll = select.poll()
    for number in filenos:
        poll.register(number, select.POLLIN)
    poll.poll(_LOOK_SECONDS * 1000)


def _packed(event: Event) -> tuple[str, dict[str, Any]]:
    assert not isinstance(event, Lost), "an agent's own crew is here"
    return type(event).__name__, asdict(event)


def _obey(crew: Crew, message: Message) -> Message:
    try:
        answer = _DEEDS[message["do"]](crew, message)
    except MeshwrightError as error:
        beats = [error.received, error.rule, error.change]
        return {"to": message["number"], "failed": beats}
    except OSError as error:
        beats = [
            f"{message['do']} failed: {error}.",
            "An agent starts and ends workers on its host.",
            "Look at the limits of the user there (ulimit -a), and at the run folder.",
        ]
        return {"to": message["number"], "failed": beats}
    return {"to": message["number"], "answer": answer}


_DEEDS: Mapping[str, Callable[[Crew, Message], Any]] = {
    "free_address": lambda crew, _: crew.free_address(),
    "start": lambda crew, m: crew.start([Orders(**order) for order in m["orders"]]),
    "signal": lambda crew, m: crew.signal(m["signal"], m["ranks"]),
    "state_of": lambda crew, m: crew.state_of(m["rank"]),
    "stacks_of": lambda crew, m: crew.stacks_of(m["rank"]),
    "kill": lambda crew, _: crew.kill(),
}


def main() -> NoReturn:
    """An agent that ssh has started; why it cannot join goes to the standard output."""
    knows = json.loads(sys.stdin.readline())
    folder, run = Path(knows["folder"]), knows["run"]
    job = Job(
        folder=folder,
        script=Path(knows["script"]),
        arguments=tuple(knows["arguments"]),
        processes=knows["processes"],
    )
    try:
        facts = job.facts(
            host=knows["host"],
            task=knows["task"],
            tasks=knows["tasks"],
            folder=_launch_of(folder, run),
        )
        secret = bytes.fromhex(knows["secret"])
        line = join(knows["address"], secret=secret, run=run, facts=facts)
        part = wait_for_welcome(line, facts.host)
        crew = job.crew(facts.task, line.address, part)
    except MeshwrightError as error:
        print(json.dumps({"error": [error.received, error.rule, error.change]}))
        sys.exit(error.exit_code)
    status = serve(line, crew)
    crew.close()
    sys.exit(LOST if status is None else status)


def _launch_of(folder: Path, run: str) -> str | None:
    """Which launch the run folder belongs to; shared disks show news a little late."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while (head := read_head(folder)) is None or head.run != run:
        if time.monotonic() > deadline:
            return None if head is None else head.run
        time.sleep(0.1)
    return run


if __name__ == "__main__":
    main()
