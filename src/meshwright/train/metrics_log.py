"""`metrics.jsonl`: what a run measured, one JSON object a line."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """The metrics of a run, in its order, also if it was interrupted.

    A log that cannot be written never stops a training.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, step: int, epoch: int, **facts: Any) -> None:
        """Adds a line.

        Arguments:
            step: The step, counted over the whole run.
            epoch: Its epoch.
            facts: Numbers by name.
        """
        line = {"step": step, "epoch": epoch, **_in_json(facts)}
        with contextlib.suppress(OSError), self._file.open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def cut(self, step: int) -> None:
        """Drops what is known of steps after this one: they are done again."""
        if not self._file.exists():
            return
        kept = [
            line for line in self._file.read_text().splitlines() if _step(line) <= step
        ]
        beside = self._file.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            beside.write_text("".join(f"{line}\n" for line in kept))
            os.replace(beside, self._file)


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return math.inf  # half a line, from a process that was killed


def _in_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """NaN and infinity are no JSON."""
    return {
        name: None if isinstance(v, float) and not math.isfinite(v) else v
        for name, v in facts.items()
    }
