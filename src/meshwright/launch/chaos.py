"""A run that is disturbed on purpose, and compared with one that is not.

Both are real runs of `meshwright train`. Faults strike inside of the processes
(`cluster/faults.py`), or kill the launcher itself. In the end all that was trained must
be the same, bit for bit.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.cluster.faults import VARIABLE, Fault
from meshwright.cluster.records import append_json, read_lines, write_json
from meshwright.errors import RunError
from meshwright.train.checkpoint_export import newest_good, open_good

KINDS = (
    *("kill", "kill", "hang", "gil", "slow", "nan"),
    *("raise", "disk-full", "corrupt-last", "term", "launcher"),
)
"""What strikes, by chance; what is named twice does so twice as often."""

RESUMABLE = (6, 7, 75, -signal.SIGKILL)
"""How launchers end whose runs can go on."""

POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """What is done to a run, and how it came out of it."""

    kind: str
    rank: int | None
    step: int
    struck: float | None = None
    """Seconds after the run began; None if it has not struck."""
    resumed: int | None = None
    """After which step the run went on; None if nothing had to be restarted."""
    lost_seconds: float | None = None
    """Until it went on."""

    def __str__(self) -> str:
        where = "launcher" if self.rank is None else f"rank {self.rank}"
        return f"{self.kind} of {where} at step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """What came of a run that was disturbed."""

    steps: int
    troubles: tuple[Trouble, ...]
    launches: int
    restarts: int
    different: tuple[str, ...]
    """Names of arrays that are not the same, bit for bit."""
    arrays: int
    seconds: float
    undisturbed_seconds: float

    @property
    def is_identical(self) -> bool:
        """Whether nothing was lost."""
        return not self.different

    @property
    def struck(self) -> int:
        """How many faults have struck."""
        return sum(trouble.struck is not None for trouble in self.troubles)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {**asdict(self), "identical": self.is_identical, "struck": self.struck}

    def __str__(self) -> str:
        """A log in Markdown."""
        rows = [
            f"| {t.step} | {t.kind} | {'launcher' if t.rank is None else t.rank} | "
            f"{_seconds(t.struck)} | {'-' if t.resumed is None else t.resumed} | "
            f"{_seconds(t.lost_seconds)} |"
            for t in self.troubles
        ]
        verdict = (
            f"all {self.arrays} arrays are identical, bit for bit"
            if self.is_identical
            else f"{len(self.different)} of {self.arrays} arrays differ: "
            f"{', '.join(self.different[:5])}"
        )
        return "\n".join(
            [
                "| step | fault | rank | struck after | went on after step | lost |",
                "|---|---|---|---|---|---|",
                *rows,
                "",
                f"{self.struck} of {len(self.troubles)} faults struck a run of "
                f"{self.steps} steps; {self.restarts} restarts, {self.launches} "
                f"launches, {self.seconds:.0f} s instead of "
                f"{self.undisturbed_seconds:.0f} s.",
                f"Compared with the undisturbed run: {verdict}.",
            ]
        )


def draw_troubles(
    number: int, steps: int, processes: int, save_every: int, seed: int
) -> list[Trouble]:
    """Faults by chance, in the order of their steps.

    >>> [str(trouble) for trouble in draw_troubles(2, 100, 2, 10, seed=1)]
    ['kill of rank 1 at step 19', 'kill of rank 1 at step 74']
    """
    chance = random.Random(seed)  # noqa: S311 - for tests, not for secrets
    drawn = []
    for step in sorted(chance.randint(2, max(steps, 2)) for _ in range(number)):
        kind = chance.choice(KINDS)
        if kind == "corrupt-last" and step < 4 * save_every:
            kind = "kill"  # there is nothing yet that could be fallen back to
        rank = None if kind == "launcher" else chance.randrange(processes)
        drawn.append(Trouble(kind=kind, rank=rank, step=step))
    return drawn


def unleash(
    command: Callable[[Path], Sequence[str]],
    folder: Path,
    *,
    faults: int,
    seed: int,
    processes: int,
    save_every: int,
    say: Callable[[str], None],
) -> Chaos:
    """Runs a training undisturbed, and then with faults.

    Arguments:
        command: The arguments of `meshwright train` that train in a folder.
        folder: Where both runs are kept.
        faults: How many there are.
        seed: What chance depends on.
        processes: Processes of the run.
        save_every: Steps between checkpoints.
        say: Takes a line for people.

    Raises:
        RunError: The undisturbed run fails, or the other one cannot go on.
    """
    calm, wild = folder / "undisturbed", folder / "disturbed"
    say("first the undisturbed run")
    began = time.monotonic()
    _expect_success(_launch(command(calm), {}, None), calm)
    undisturbed = time.monotonic() - began
    steps = _last_step(calm)
    troubles = draw_troubles(faults, steps, processes, save_every, seed)
    say(f"{faults} faults for {steps} steps: {', '.join(map(str, troubles))}")
    began, moment = time.monotonic(), time.time()
    launches = _launch_until_finished(command(wild), wild, troubles, say)
    seconds = time.monotonic() - began
    arrays, different = compare(calm, wild)
    return Chaos(
        steps=steps,
        troubles=tuple(_what_came_of(troubles, wild, moment)),
        launches=launches,
        restarts=sum(e["event"] == "restart" for e in _events(wild)),
        different=different,
        arrays=arrays,
        seconds=seconds,
        undisturbed_seconds=undisturbed,
    )


def compare(one: Path, other: Path) -> tuple[int, tuple[str, ...]]:
    """The number of arrays in the last checkpoints of two runs, and which differ."""
    found = []
    for run in (one, other):
        folder = run / "checkpoints"
        reader = open_good(folder, newest_good(folder))
        entries = reader.manifest.arrays.items()
        found.append({name: reader.read(entry) for name, entry in entries})
    first, second = found
    names = sorted(first.keys() | second.keys())
    return len(names), tuple(n for n in names if not _are_same(first, second, n))


def _are_same(first: Any, second: Any, name: str) -> bool:
    if name not in first or name not in second:
        return False
    one, two = first[name], second[name]
    is_alike = one.shape == two.shape and one.dtype == two.dtype
    return bool(is_alike and one.tobytes() == two.tobytes())


def _launch_until_finished(
    command: Sequence[str],
    run: Path,
    troubles: Sequence[Trouble],
    say: Callable[[str], None],
) -> int:
    """Launches a run again and again; returns how many launches it took."""
    inside = [t for t in troubles if t.rank is not None]
    spelled = {VARIABLE: "; ".join(_spell(trouble) for trouble in inside)}
    kills = [t.step for t in troubles if t.rank is None]
    for launches in range(1, len(troubles) + 3):
        status = _launch(command, spelled, _Killer(run, kills))
        if status == 0:
            return launches
        if status not in RESUMABLE:
            break
        say(f"launch {launches} ended with {status}; the same command once more")
    _expect_success(status, run)
    raise AssertionError("a run that never ends is refused above")


def _spell(trouble: Trouble) -> str:
    factor = 2.0 if trouble.kind == "slow" else 1.0
    assert trouble.rank is not None
    kind: Any = trouble.kind
    return str(Fault(kind=kind, rank=trouble.rank, step=trouble.step, factor=factor))


class _Killer:
    """Kills a launcher when its run has got to certain steps."""

    def __init__(self, run: Path, steps: list[int]) -> None:
        self._run = run
        self._steps = steps

    def look(self, launcher: "subprocess.Popen[str]") -> None:
        """Kills it, if it is time to."""
        if not self._steps:
            return
        saved = [e["step"] for e in _events(self._run) if e["event"] == "saved"]
        if saved and saved[-1] >= self._steps[0]:
            step = self._steps.pop(0)
            record = {"fault": f"launcher@step={step}", "time": time.time()}
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
            append_json(self._run / "faults.jsonl", record)


def _launch(
    command: Sequence[str], environment: dict[str, str], killer: "_Killer | None"
) -> int:
    launcher = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli.main", "train", *command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        while launcher.poll() is None:
            if killer is not None:
                killer.look(launcher)
            time.sleep(POLL_SECONDS)
    finally:
        launcher.terminate()
        launcher.wait()
    return launcher.returncode


def _expect_success(status: int, run: Path) -> None:
    if status:
        failed = [e for e in _events(run) if e["event"] == "failed"]
        why = failed[-1]["received"] if failed else "its launcher did not say why"
        raise RunError(
            f"The run in {run} ended with {status}: {why}",
            "A run without faults ends well, and with faults it goes on.",
            f"Look at {run}/events.jsonl and {run}/logs.",
        )


def _what_came_of(
    troubles: Sequence[Trouble], run: Path, began: float
) -> list[Trouble]:
    """The same troubles, with what the run folder knows of them."""
    struck = {r["fault"]: r["time"] for r in read_lines(run / "faults.jsonl")}
    resumed = [e for e in _events(run) if e["event"] == "resumed"]
    found = []
    for trouble in troubles:
        is_inside = trouble.rank is not None
        name = _spell(trouble) if is_inside else f"launcher@step={trouble.step}"
        if name not in struck:
            found.append(trouble)
            continue
        when = struck[name]
        known = replace(trouble, struck=when - began)
        after = [event for event in resumed if event["time"] >= when]
        if after and trouble.kind not in ("slow", "disk-full"):
            step, lost = int(after[0]["step"]), float(after[0]["time"] - when)
            known = replace(known, resumed=step, lost_seconds=lost)
        found.append(known)
    return found


def _events(run: Path) -> list[dict[str, Any]]:
    return list(read_lines(run / "events.jsonl"))


def _last_step(run: Path) -> int:
    step = max((e.get("step") or 0 for e in _events(run)), default=0)
    if not step:
        raise RunError(
            f"The run in {run} has no step.",
            "Faults strike between the steps of a fit.",
            "Let the script train a model with a strategy: with strategy.scope(), or "
            "mw.distribute(model, strategy).",
        )
    return int(step)


def save_report(folder: Path, found: Chaos) -> None:
    """Writes what came of it into the folder of the runs."""
    write_json(folder / "chaos.json", found.to_json())
    (folder / "chaos.md").write_text(f"{found}\n")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
