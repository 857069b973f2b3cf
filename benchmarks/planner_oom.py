"""Whether what is said to fit a GPU runs there: `python benchmarks/planner_oom.py`.

Needs one GPU; two to three minutes. For some models a batch is sought, by the exact
memory level, with which a training step needs almost all memory that JAX may use, and
another with which it needs a bit more. Then each is trained for some steps of `fit`, in
a process of its own that may use a twentieth of the card, so that models of a few GiB
are enough. Batches are sought in processes too, one for each setting, and trials start
as soon as their batches are found. `--mock LIMIT` goes through the same on a CPU, where
a memory limit of Meshwright's plays the allocator; nothing is written then.

Batches are sought with kernels tried out, as `fit` does it; `--untried` seeks them by
what is known without, as `mw.preflight` does unless it is asked to try kernels.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
FRACTION = "0.05"
"""Of the card's memory, for each trial."""

AT_ONCE = 6
"""Trials that run at the same time; each has memory of its own.

They mostly compile.
"""

PATIENCE_SECONDS = 180
STEPS = 6
MOST_GUESSES = 8
"""Batches that are compiled for one trial; two or three are enough for most."""

FARTHEST_GUESS = 16
"""So many times the first guess, the second may be at the most."""

BELOW = (0.90, 1.0)
ABOVE = (1.03, 1.16)
"""Shares of the memory that JAX may use; what has to fit lies in one of these bands.

What is kept spare is part of it, so a bit above the whole there is still room, and
nobody can say what comes of it.
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, and the levers of its plan."""

    model: str
    levers: dict[str, Any] = field(default_factory=dict)
    guess: int
    """A batch size to start from; near the limit on an H200."""

    @property
    def name(self) -> str:
        """What it is called in results."""
        return ", ".join([self.model, *(f"{k}={v}" for k, v in self.levers.items())])


SETTINGS = [
    Setting(model="cnn", guess=540),
    Setting(model="cnn", levers={"precision": "bfloat16"}, guess=940),
    Setting(model="decoder", guess=54),
    Setting(
        model="decoder", levers={"precision": "bfloat16", "remat": True}, guess=300
    ),
    Setting(model="lstm", guess=190),
    Setting(model="unet", levers={"accumulate": 2}, guess=270),
    Setting(model="large", guess=27000),
    Setting(model="wide", guess=92000),
]
"""`large` is mostly weights and optimizer state; `wide` is one product, mostly."""

TARGETS = [
    (0.97, 1.08),
    (0.98, 1.08),
    (0.96, 1.06),
    (0.985, 1.05),
    (0.97, 1.06),
    (0.95, 1.10),
    (0.99, 1.06),
    (0.98, 1.06),
]
"""For each setting: shares of the memory that are aimed at."""


def make_model(name: str, scale: int) -> Any:
    """A compiled model; `scale` divides its widths, for a mock on a CPU."""
    import keras

    from_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    makers: dict[str, Callable[[], tuple[Any, Any]]] = {
        "cnn": lambda: _cnn(scale),
        "decoder": lambda: _decoder(scale),
        "lstm": lambda: _lstm(scale),
        "unet": lambda: _unet(scale),
        "large": lambda: _dense(8192 // scale, 4),
        "wide": lambda: _dense(8192 // scale, 1),
    }
    inputs, outputs = makers[name]()
    loss = from_logits if name in ("cnn", "decoder") else "mse"
    model = keras.Model(inputs, outputs, name=name)
    model.compile(optimizer="adam", loss=loss)
    return model


def _cnn(scale: int) -> tuple[Any, Any]:
    from keras import Input, layers

    inputs = x = Input((64, 64, 3))
    for filters in (128, 256, 512):
        for _ in range(2):
            x = layers.Conv2D(filters // scale, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.MaxPooling2D()(x)
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


def _decoder(scale: int) -> tuple[Any, Any]:
    from keras import Input, layers

    width, words = 1024 // scale, 8192 // scale
    inputs = Input((256,), dtype="int32")
    x = layers.Embedding(words, width)(inputs)
    for _ in range(4):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, width // 8)(h, h, use_causal_mask=True)
        h = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(h)
    return inputs, layers.Dense(words)(x)


def _lstm(scale: int) -> tuple[Any, Any]:
    from keras import Input, layers

    inputs = Input((128, 64))
    x = layers.LSTM(1024 // scale, return_sequences=True)(inputs)
    return inputs, layers.Dense(1)(layers.LSTM(1024 // scale)(x))


def _unet(scale: int) -> tuple[Any, Any]:
    from keras import Input, layers

    def convolved(x: Any, filters: int) -> Any:
        convolve = layers.Conv2D(filters // scale, 3, padding="same", use_bias=False)
        return layers.ReLU()(layers.BatchNormalization()(convolve(x)))

    inputs = Input((128, 128, 3))
    fine = convolved(inputs, 64)
    coarse = convolved(layers.MaxPooling2D()(fine), 128)
    back = layers.Conv2DTranspose(64 // scale, 2, strides=2)(coarse)
    joined = convolved(layers.Concatenate()([fine, back]), 64)
    return inputs, layers.Conv2D(1, 1)(joined)


def _dense(width: int, depth: int) -> tuple[Any, Any]:
    from keras import Input, layers

    inputs = x = Input((256,))
    for _ in range(depth):
        x = layers.Dense(width, activation="relu")(x)
    return inputs, layers.Dense(1)(x)


_FIXED = ("parameters", "optimizer state", "model state", "metrics")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A batch size, what it is said to need, and later what came of it."""

    setting: str
    model: str
    levers: dict[str, Any]
    batch: int
    step_bytes: int
    """What the compiled step needs."""
    trial_bytes: int
    """What kernels may need while they are tried out."""
    bytes_to_run: int
    """All that has to fit, with what is kept spare."""
    limit: int
    by_kind: dict[str, int]
    outcome: str = ""
    """`ran`, `out of memory`, or what else went wrong."""
    said: str = ""
    seconds: float = 0.0
    peak: int | None = None
    """Bytes in use at the most, by the allocator's account."""
    limit_there: int | None = None
    """What JAX might use in the process of the trial, by its own account."""

    @property
    def share(self) -> float:
        """All that has to fit, as a share of what JAX may use."""
        return self.bytes_to_run / self.limit

    @property
    def fixed_bytes(self) -> int:
        """What is needed whatever the batch."""
        return sum(self.by_kind.get(kind, 0) for kind in _FIXED)

    @property
    def is_said_to_fit(self) -> bool:
        """The verdict."""
        return self.bytes_to_run <= self.limit

    @property
    def is_right(self) -> bool:
        """Whether it came as it was said."""
        expected = "ran" if self.is_said_to_fit else "out of memory"
        return self.outcome == expected


class Search:
    """Looks for batch sizes with which a setting needs some share of the memory."""

    def __init__(
        self, setting: Setting, limit: int, scale: int, *, tries_kernels: bool = True
    ) -> None:
        from meshwright.models.profile import build_abstractly

        self._setting = setting
        self._limit = limit
        self._tries_kernels = tries_kernels
        self._model = build_abstractly(lambda: make_model(setting.model, scale))
        self._found: dict[int, Trial] = {}

    def find(self, target: float, band: tuple[float, float]) -> Trial | None:
        """A batch that lies in a band; None if there seems to be none."""
        for _ in range(MOST_GUESSES):
            low, high = band
            inside = [t for t in self._found.values() if low <= t.share <= high]
            if inside:
                return min(inside, key=lambda t: abs(t.share - target))
            batch = self._next(target)
            if batch is None:
                return None
            self._measure(batch)
        return None

    def _next(self, target: float) -> int | None:
        """What to try next; None if two batches that differ by 1 are too far apart.

        What is needed grows almost in proportion to the batch, so a line leads there;
        where it jumps, the two batches around the target are brought together.
        """
        if not self._found:
            return self._setting.guess
        known = sorted(self._found.values(), key=lambda t: t.batch)
        below = [t.batch for t in known if t.share < target]
        above = [t.batch for t in known if t.share >= target]
        # Microbatches that differ in size are another program, which needs more.
        unit = self._setting.levers.get("accumulate", 1)
        least = max(below, default=0) // unit + 1
        most = min((n // unit - 1 for n in above if n // unit >= least), default=None)
        guess = round(self._on_line(known, target) / unit)
        if most is None:
            return unit * min(max(guess, least), FARTHEST_GUESS * least)
        if least > most:
            return None
        return unit * (guess if least <= guess <= most else (least + most) // 2)

    def _on_line(self, known: Sequence[Trial], target: float) -> float:
        """The batch that should need so much."""
        near, *others = sorted(known, key=lambda t: abs(t.share - target))
        other = max(others, key=lambda t: abs(t.batch - near.batch), default=near)
        if (near.share - other.share) * (near.batch - other.batch) > 0:
            slope = (near.share - other.share) / (near.batch - other.batch)
            return near.batch + (target - near.share) / slope
        # What does not grow with the batch is known from a single one, and a line that
        # does not rise, because kernels of another kind were chosen, leads nowhere.
        last = max(known, key=lambda t: t.batch)
        fixed = last.fixed_bytes / self._limit
        return last.batch * (target - fixed) / (last.share - fixed)

    def _measure(self, batch: int) -> None:
        import meshwright as mw
        from meshwright.train.exact_memory import exact_memory

        strategy = mw.Single(**self._setting.levers)
        plan, mesh = strategy.plan, strategy.mesh
        tries = self._tries_kernels
        found = exact_memory(self._model, plan, mesh, batch, tries_kernels=tries)
        self._found[batch] = Trial(
            setting=self._setting.name,
            model=self._setting.model,
            levers=self._setting.levers,
            batch=batch,
            step_bytes=found.bytes_per_device,
            trial_bytes=found.trials,
            bytes_to_run=found.bytes_to_run,
            limit=self._limit,
            by_kind=dict(found.by_kind),
        )


def plan_trials(options: Any) -> list[Trial]:
    """Two for a setting: one is said to fit, and one is not."""
    number = [setting.name for setting in SETTINGS].index(options.plan)
    search = Search(
        SETTINGS[number],
        options.limit,
        options.scale,
        tries_kernels=not options.untried,
    )
    wanted = zip(TARGETS[number], (BELOW, ABOVE), strict=True)
    return [trial for aim in wanted if (trial := search.find(*aim)) is not None]


def plan_elsewhere(setting: Setting, limit: int, options: Any) -> list[Trial]:
    """Plans the trials of a setting in a process of its own, which takes no memory."""
    began = time.monotonic()
    words = ["--plan", setting.name, "--limit", str(limit)]
    try:
        done = _call(words, options, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    except subprocess.TimeoutExpired:
        _say(f"{setting.name}: no batches found in {PATIENCE_SECONDS} s")
        return []
    trials = [Trial(**found) for found in _last_line(done) or []]
    for trial in trials:
        _say(
            f"{trial.setting}: batch {trial.batch} needs {trial.share:.1%} of "
            f"{_gib(limit)} (step {_gib(trial.step_bytes)}, trials "
            f"{_gib(trial.trial_bytes)}; found after {time.monotonic() - began:.0f} s)"
        )
    if len(trials) < 2:
        _say(f"{setting.name}: {len(trials)} of 2 batches found {done.stderr[-600:]}")
    return trials


def _call(
    words: Sequence[str], options: Any, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Calls this script in a process that may use a part of the card."""
    command = [sys.executable, str(HERE), *words, "--scale", str(options.scale)]
    command += ["--mock", str(options.mock)] if options.mock else []
    command += ["--untried"] if options.untried else []
    fraction = {"XLA_PYTHON_CLIENT_MEM_FRACTION": FRACTION}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **fraction, **environment},
        timeout=PATIENCE_SECONDS,
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> Any:
    """What a process has said last, as JSON; None if it did not."""
    words = done.stdout.strip().splitlines()[-1:]
    return json.loads(words[0]) if words and words[0][0] in "[{" else None


def run_trial(trial: Trial, options: Any) -> Trial:
    """Trains in a process of its own; returns the trial with what came of it."""
    words = ["--trial", json.dumps(asdict(trial))]
    began = time.monotonic()
    try:
        done = _call(words, options, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})
        found = _last_line(done) or {}
        ended = {
            "outcome": f"ended with status {done.returncode}",
            "said": done.stderr.strip()[-300:],
        }
    except subprocess.TimeoutExpired:
        found, ended = {}, {"outcome": f"no end after {PATIENCE_SECONDS} s"}
    # What counts is the memory that the trial had.
    limit = found.get("limit_there") or trial.limit
    took = {"seconds": time.monotonic() - began, "limit": limit}
    result = Trial(**{**asdict(trial), **ended, **found, **took})
    word = "right" if result.is_right else "WRONG"
    _say(
        f"{result.setting}, batch {result.batch}, {result.share:.1%}: "
        f"{result.outcome}, {word} ({result.seconds:.0f} s) {result.said[:160]}"
    )
    return result


def train(trial: dict[str, Any], mock: int, scale: int) -> dict[str, Any]:
    """Runs `fit` for some steps; says what came of it."""
    import meshwright as mw
    from meshwright.devices.memory import is_out_of_memory
    from meshwright.errors import MemoryLimitError
    from meshwright.models.training import batch_shapes

    import jax
    import numpy as np

    if mock:
        # Of the limit, the step gets what is not meant for other things.
        spare = trial["bytes_to_run"] - trial["step_bytes"]
        mw.configure(memory_limit=mock - spare)
    try:
        model = make_model(trial["model"], scale)
        shapes = batch_shapes(model, num_samples=STEPS * trial["batch"])
        x, y = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        strategy = mw.Single(**trial["levers"])
        strategy.resident = False
        fitted = mw.distribute(model, strategy)
        fitted.fit(x, y, batch_size=trial["batch"], shuffle=False, verbose=0)
        jax.block_until_ready([v.value for v in model.variables])
        found = {"outcome": "ran", "said": ""}
    except MemoryLimitError as error:
        found = {"outcome": "out of memory", "said": str(error)[:300]}
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found = {"outcome": "out of memory", "said": str(error)[:300]}
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        **found,
        "peak": stats.get("peak_bytes_in_use"),
        "limit_there": stats.get("bytes_limit"),
    }


def summary(trials: Sequence[Trial]) -> str:
    """How often the verdict was right, in words."""
    right = sum(trial.is_right for trial in trials)
    false = [t for t in trials if t.is_said_to_fit and not t.is_right]
    strict = [t for t in trials if not t.is_said_to_fit and t.outcome == "ran"]
    peaks = [t.peak / t.bytes_to_run for t in trials if t.peak and t.outcome == "ran"]
    used = f" Those that ran used {min(peaks):.0%} to {max(peaks):.0%}" if peaks else ""
    return (
        f"{right} of {len(trials)} verdicts were right; {len(false)} were said to fit "
        f"and did not, {len(strict)} ran although they were said not to."
        f"{used and used + ' of what they were said to need.'}"
    )


def table(trials: Sequence[Trial]) -> str:
    """The trials as Markdown."""
    lines = [
        "| setting | batch | step | trials | to run | of the limit | verdict | outcome "
        "| peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for t in trials:
        sizes = [_gib(n) for n in (t.step_bytes, t.trial_bytes, t.bytes_to_run)]
        verdict = "fits" if t.is_said_to_fit else "does not fit"
        outcome = t.outcome if t.is_right else f"**{t.outcome}**"
        cells = [t.setting, str(t.batch), *sizes, f"{t.share:.1%}", verdict, outcome]
        lines.append(f"| {' | '.join([*cells, _gib(t.peak)])} |")
    return "\n".join(lines)


def write(
    trials: Sequence[Trial], device: str, seconds: float, *, untried: bool
) -> None:
    """Writes `results/<date>-planner-oom.json` and `.md`."""
    import jax
    import keras

    suite = "planner-oom-untried" if untried else "planner-oom"
    stem = HERE.parent / "results" / f"{date.today()}-{suite}"
    rows = [
        {**asdict(t), "share": t.share, "fits": t.is_said_to_fit, "right": t.is_right}
        for t in trials
    ]
    record = {
        "suite": suite,
        "device": device,
        "jax": jax.__version__,
        "keras": keras.__version__,
        "fraction": FRACTION,
        "seconds": seconds,
        "trials": rows,
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    page = [
        f"# {suite}, {date.today()}",
        f"{device}; jax {jax.__version__}, keras {keras.__version__}. {STEPS} steps of "
        f"`fit` each, in a process that may use {_gib(trials[0].limit)}. `step` is "
        "what the compiler says, `trials` what its trials of kernels may take, and "
        "`to run` what has to fit in all, with what is kept spare. "
        f"`python benchmarks/planner_oom.py{' --untried' * untried}`",
        table(trials),
        summary(trials),
    ]
    stem.with_suffix(".md").write_text("\n\n".join(page) + "\n")
    _say(f"written to {stem.with_suffix('.md').name}")


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f} GiB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options_of() -> Any:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mock", type=int, default=0, metavar="LIMIT", help="bytes")
    parser.add_argument("--scale", type=int, default=1, help="divides all widths")
    parser.add_argument("--trial", help="runs one trial; for the script itself")
    parser.add_argument(
        "--plan", help="plans a setting's trials; for the script itself"
    )
    parser.add_argument("--untried", action="store_true", help="see above")
    parser.add_argument("--limit", type=int, default=0, help="bytes, for --plan")
    return parser.parse_args()


def main() -> None:
    """Plans trials, runs each as soon as it is planned, and writes a table."""
    options = options_of()
    if options.mock:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.trial:
        found = train(json.loads(options.trial), options.mock, options.scale)
        print(json.dumps(found), flush=True)
        return
    if options.plan:
        planned = plan_trials(options)
        print(json.dumps([asdict(trial) for trial in planned]), flush=True)
        return
    # The same limit as the trials have, and no memory taken.
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = FRACTION
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    began = time.monotonic()
    import meshwright  # noqa: F401

    import jax

    device = jax.local_devices()[0]
    limit = options.mock or device.memory_stats()["bytes_limit"]
    _say(f"{device.device_kind}: each trial may use {_gib(limit)}")
    trials = plan_and_run(limit, options)
    print(f"{table(trials)}\n\n{summary(trials)}", flush=True)
    if not options.mock:
        took = time.monotonic() - began
        write(trials, device.device_kind, took, untried=options.untried)


def plan_and_run(limit: int, options: Any) -> list[Trial]:
    """Runs each trial as soon as it is planned; returns them by setting."""
    run: Callable[[Trial], Trial] = lambda trial: run_trial(trial, options)  # noqa: E731
    one_or = 1 if options.mock else None
    with (
        ThreadPoolExecutor(one_or or len(SETTINGS)) as planning,
        ThreadPoolExecutor(one_or or AT_ONCE) as running,
    ):
        plans = [planning.submit(plan_elsewhere, s, limit, options) for s in SETTINGS]
        planned = (trial for plan in as_completed(plans) for trial in plan.result())
        started = [running.submit(run, trial) for trial in planned]
        trials = [each.result() for each in started]
    order = {setting.name: number for number, setting in enumerate(SETTINGS)}
    return sorted(trials, key=lambda trial: (order[trial.setting], trial.batch))


if __name__ == "__main__":
    main()
