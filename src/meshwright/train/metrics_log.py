"""`metrics.jsonl`: what a run measured, one JSON object a line."""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.cluster.records import append_json, read_lines, write_text


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
        with contextlib.suppress(OSError):
            append_json(self._file, {"step": step, "epoch": epoch, **_in_json(facts)})

    def cut(self, step: int) -> None:
        """Drops what is known of steps after this one: they are done again."""
        if not self._file.exists():
            return
        kept = [line for line in read_lines(self._file) if line["step"] <= step]
        with contextlib.suppress(OSError):
            write_text(self._file, "".join(f"{json.dumps(line)}\n" for line in kept))


def _in_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """NaN and infinity are no JSON."""
    return {
        name: None if isinstance(v, float) and not math.isfinite(v) else v
        for name, v in facts.items()
    }
