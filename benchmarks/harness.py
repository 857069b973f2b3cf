"""Times programs against each other so that noise is not taken for a difference.

The contenders of a comparison live in processes of their own (`contender.py`) and
repeat in turns, one at a time, so that all see the same weather. The reference runs as
two processes. How far these two are apart is the A/A spread: a difference smaller than
that is not called one.
"""

import json
import math
import os
import platform
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from contender import MARK

HERE = Path(__file__).parent
RESULTS = HERE / "results"
REPEATS = 7
PATIENCE_SECONDS = 900.0

# Idle contenders must not spin, and what one compiled must not help another.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "KERAS_BACKEND": "jax",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
LEFT_OUT = ("JAX_COMPILATION_CACHE_DIR", "MESHWRIGHT_VIRTUAL", "XLA_FLAGS")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A script of `benchmarks/contenders`, with its arguments and its interpreter."""

    name: str
    script: str
    arguments: Sequence[str] = ()
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What we want: `ours` at least `speedup` times as fast as `theirs`.

    Or, without `theirs`, `ours` in at most `seconds`, or with that `test_accuracy`.
    """

    ours: str
    theirs: str = ""
    speedup: float = 0.0
    seconds: float = 0.0
    test_accuracy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contenders that do the same job; the first one is the reference."""

    name: str
    contenders: Sequence[Contender]
    bars: Sequence[Bar] = ()


@dataclass(kw_only=True)
class Timing:
    """What came of one contender."""

    name: str
    command: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    repetitions: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def seconds(self) -> list[float]:
        """Of every repetition."""
        return [found["seconds"] for found in self.repetitions]

    @property
    def median(self) -> float:
        """Of the repetitions; not a number if there is none."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def test_accuracies(self) -> list[float]:
        """Of the repetitions that said so."""
        return [r["test_accuracy"] for r in self.repetitions if "test_accuracy" in r]


@dataclass(kw_only=True)
class Outcome:
    """What came of a comparison."""

    name: str
    timings: list[Timing]
    twin: Timing
    bars: Sequence[Bar] = ()

    @property
    def reference(self) -> float:
        """The median over both processes of the reference."""
        both = [*self.timings[0].seconds, *self.twin.seconds]
        return statistics.median(both) if both else math.nan

    @property
    def spread(self) -> float:
        """How far the two processes of the reference are apart."""
        return aa_spread(self.timings[0].seconds, self.twin.seconds)

    def median_of(self, name: str) -> float:
        """The median of a contender, by name."""
        if name == self.timings[0].name:
            return self.reference
        return self.timing_of(name).median

    def timing_of(self, name: str) -> Timing:
        """What came of a contender, by name."""
        return next(timing for timing in self.timings if timing.name == name)


class ContenderError(Exception):
    """A contender ended, or said nothing for too long."""


def aa_spread(first: Sequence[float], twin: Sequence[float]) -> float:
    """How far two processes that do the same are apart, as a share.

    The larger of two: how far apart they are in a typical round, and in the medians.

    >>> aa_spread([1.0, 1.0, 1.0], [1.02, 1.1, 0.97])
    0.03
    """
    pairs = list(zip(first, twin, strict=False))
    if not pairs:
        return math.nan
    rounds = statistics.median(abs(b / a - 1) for a, b in pairs)
    medians = abs(statistics.median(twin) / statistics.median(first) - 1)
    return round(max(rounds, medians), 6)


def verdict(seconds: float, reference: float, spread: float) -> str:
    """How fast something is next to the reference, if that can be said.

    >>> verdict(1.0, 2.0, 0.03)
    '2.00x as fast'
    >>> verdict(1.0, 1.02, 0.03)
    'no difference beyond the A/A spread of 3.0 %'
    """
    if math.isnan(seconds) or math.isnan(reference):
        return "not measured"
    speed = reference / seconds
    if math.isnan(spread) or abs(math.log(speed)) <= math.log1p(spread):
        return f"no difference beyond the A/A spread of {show_share(spread)}"
    return f"{speed:.2f}x as fast"


def judge(bar: Bar, outcome: Outcome) -> str:
    """Whether a bar was met, with the figure, and if not whether noise may be why."""
    if bar.test_accuracy:
        return _judge_accuracy(bar, outcome.timing_of(bar.ours).test_accuracies)
    ours = outcome.median_of(bar.ours)
    if bar.theirs:
        wanted = f"at least {bar.speedup:.2f}x as fast as {bar.theirs}"
        reached = outcome.median_of(bar.theirs) / ours / bar.speedup
        found = f"{reached * bar.speedup:.2f}x"
    else:
        wanted, reached = f"at most {bar.seconds:g} s", bar.seconds / ours
        found = f"{ours:.3g} s"
    if math.isnan(reached):
        return f"{bar.ours}, {wanted}: not measured"
    within = abs(math.log(reached)) <= math.log1p(outcome.spread)
    word = "met" if reached >= 1 else "missed"
    note = " (by less than the A/A spread)" if within and word == "missed" else ""
    return f"{bar.ours}, {wanted}: {found}, {word}{note}"


def _judge_accuracy(bar: Bar, accuracies: Sequence[float]) -> str:
    wanted = f"{bar.ours}, test accuracy at least {bar.test_accuracy:.2%}"
    if not accuracies:
        return f"{wanted}: not measured"
    word = "met" if statistics.median(accuracies) >= bar.test_accuracy else "missed"
    return f"{wanted}: {show_accuracies(accuracies)}, {word}"


class Running:
    """A contender's process: started, asked for repetitions, stopped."""

    def __init__(self, contender: Contender, patience: float = PATIENCE_SECONDS):
        script = HERE / "contenders" / contender.script
        command = [contender.python, str(script), *contender.arguments]
        shown = [_without_folders(word) for word in command[:2]]
        self.timing = Timing(name=contender.name, command=[*shown, *command[2:]])
        self._patience = patience
        self._folder = tempfile.TemporaryDirectory()
        self._stderr = Path(self._folder.name, "stderr")
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="replace",
                start_new_session=True,
                env=self._environment(contender),
            )
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _environment(self, contender: Contender) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in LEFT_OUT}
        paths = [str(HERE), *filter(None, [inherited.get("PYTHONPATH")])]
        return {
            **inherited,
            **ENVIRONMENT,
            "XDG_CACHE_HOME": self._folder.name,
            "PYTHONPATH": os.pathsep.join(paths),
            **contender.environment,
        }

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(MARK):
                    self._said.put(json.loads(line.removeprefix(MARK)))
        self._said.put(None)

    def get_ready(self) -> None:
        """Waits until it has set itself up and compiled."""
        self.timing.facts = self._hear()

    def repeat(self) -> None:
        """Lets it run once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderError(self._last_words()) from None
        self.timing.repetitions.append(self._hear())

    def stop(self) -> None:
        """Ends it; what does not end by itself is killed with its children."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0 if self.timing.error else 20)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()
        self._folder.cleanup()

    def _hear(self) -> dict[str, Any]:
        try:
            said = self._said.get(timeout=self._patience)
        except queue.Empty:
            raise ContenderError(f"no word for {self._patience:g} s") from None
        if said is None:
            raise ContenderError(self._last_words())
        return said

    def _last_words(self) -> str:
        self._process.wait()
        status = self._process.returncode
        return last_line(self._stderr.read_text()) or f"ended with status {status}"


def _without_folders(path: str) -> str:
    """A path as seen from the root of the project; of others the name alone."""
    root, found = HERE.parent, Path(path)
    return str(found.relative_to(root)) if found.is_relative_to(root) else found.name


def last_line(text: str) -> str:
    """The last line that names an error, or else the last that says something.

    >>> last_line("ValueError: no such job\\n---\\nSome frames were removed.\\n")
    'ValueError: no such job'
    >>> last_line("F1 rendezvous.cc:127] Aborting.\\n    @  0x7f05  (unknown)\\n")
    'F1 rendezvous.cc:127] Aborting.'
    """
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    telling = [line for line in lines if line and not line.startswith("@ ")]
    return (errors or telling or [""])[-1]


def run_comparison(
    comparison: Comparison, repeats: int = REPEATS, patience: float = PATIENCE_SECONDS
) -> Outcome:
    """Starts all contenders one after the other, then repeats them in turns.

    Every other round goes backwards, so that none always follows the same one.
    """
    first, *others = comparison.contenders
    running: list[Running] = []
    try:
        for contender in (first, first, *others):
            running.append(Running(contender, patience))
            _try(running[-1], "get_ready")
        for number in range(repeats):
            for one in running[:: -1 if number % 2 else 1]:
                _try(one, "repeat")
    finally:
        for one in running:
            one.stop()
    reference, twin, *rest = [one.timing for one in running]
    return Outcome(
        name=comparison.name,
        timings=[reference, *rest],
        twin=twin,
        bars=comparison.bars,
    )


def _try(one: Running, verb: str) -> None:
    """A contender that fails sits out the rest, and the others go on."""
    if one.timing.error:
        return
    print(f"  {one.timing.name}: {verb.replace('_', ' ')}", file=sys.stderr, flush=True)
    try:
        getattr(one, verb)()
    except ContenderError as error:
        one.timing.error = str(error)


def table(outcome: Outcome) -> str:
    """A comparison as Markdown."""
    head = [
        f"### {outcome.name}",
        "",
        f"A/A spread {show_share(outcome.spread)}; speed is next to the first row.",
        "",
        "| contender | median | from … to | a step | speed | compile | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [_row(timing, outcome) for timing in outcome.timings]
    bars = [f"- {judge(bar, outcome)}" for bar in outcome.bars]
    return "\n".join([*head, *rows, *([""] if bars else []), *bars])


def _row(timing: Timing, outcome: Outcome) -> str:
    if timing.error:
        return f"| {timing.name} | failed: {timing.error} | | | | | |"
    is_reference = timing is outcome.timings[0]
    median = outcome.reference if is_reference else timing.median
    seconds = [*timing.seconds, *(outcome.twin.seconds if is_reference else [])]
    last = timing.repetitions[-1] if timing.repetitions else {}
    steps = timing.facts.get("steps")
    told = "-" if "loss" not in last else f"{last['loss']:.3g}"
    if timing.test_accuracies:
        told += f", test accuracy {show_accuracies(timing.test_accuracies)}"
    cells = [
        timing.name,
        show_seconds(median),
        f"{show_seconds(min(seconds))} … {show_seconds(max(seconds))}",
        show_seconds(median / steps) if steps else "-",
        "1" if is_reference else verdict(median, outcome.reference, outcome.spread),
        show_seconds(timing.facts["compile_seconds"]),
        told,
    ]
    return f"| {' | '.join(cells)} |"


def show_share(share: float) -> str:
    """A share of one in percent.

    >>> show_share(0.034)
    '3.4 %'
    """
    return f"{100 * share:.1f} %"


def show_accuracies(accuracies: Sequence[float]) -> str:
    """The median of some, and how far they range.

    >>> show_accuracies([0.991, 0.989, 0.9905])
    '99.05% (98.90% … 99.10%)'
    """
    middle = statistics.median(accuracies)
    return f"{middle:.2%} ({min(accuracies):.2%} … {max(accuracies):.2%})"


def show_seconds(seconds: float) -> str:
    """Seconds in a unit that fits.

    >>> show_seconds(1.234), show_seconds(0.0456), show_seconds(0.000121)
    ('1.23 s', '45.6 ms', '121 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def hardware() -> dict[str, Any]:
    """The machine that all this was measured on."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
    }


def write_results(
    suite: str, outcomes: Sequence[Outcome], settings: dict[str, Any]
) -> Path:
    """Writes `results/<date>-<suite>.json` and `.md`; returns the latter."""
    stem = RESULTS / f"{date.today()}-{suite}"
    record = {
        "suite": suite,
        "settings": {**settings, "environment": ENVIRONMENT},
        "comparisons": [
            {
                **asdict(outcome),
                "aa_spread": outcome.spread,
                "bars": [judge(bar, outcome) for bar in outcome.bars],
            }
            for outcome in outcomes
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report(suite, outcomes, settings))
    return stem.with_suffix(".md")


def report(suite: str, outcomes: Sequence[Outcome], settings: dict[str, Any]) -> str:
    """All comparisons of a suite as one page."""
    facts = [timing.facts for outcome in outcomes for timing in outcome.timings]
    packages = {k: v for f in facts for k, v in f.get("versions", {}).items()}
    devices = sorted({f["device"] for f in facts if "device" in f})
    data = sorted({f["data"] for f in facts if "data" in f})
    machine = settings["hardware"]
    lines = [
        f"# {suite}, {date.today()}",
        f"{machine['cpu']}, {machine['cores']} cores; devices: {', '.join(devices)}; "
        f"Python {platform.python_version()}; "
        + ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
        + f"; data: {', '.join(data) or 'none'}.",
        f"Medians of {settings['repeats']} repetitions in turns, each contender in a "
        f"process of its own, compile time apart. `{settings['command']}`",
        *(table(outcome) for outcome in outcomes),
    ]
    return "\n\n".join(lines) + "\n"
