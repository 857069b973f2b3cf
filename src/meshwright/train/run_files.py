"""The files of a training that no launcher has started, for its report."""

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.cluster.records import write_json
from meshwright.cluster.run_config import moment, run_config
from meshwright.errors import ConfigurationError
from meshwright.train.metrics_log import MetricsLog
from meshwright.train.whereabouts import MEMORY, OCCUPATION, PLACEMENT

_OF_A_LAUNCHER = "launches.jsonl"


class RunFiles:
    """A folder with what a training was begun with, and what was measured.

    Another process that writes to the same folder begins it anew.

    Arguments:
        folder: The folder; made if it is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._metrics = MetricsLog(self.folder / "metrics.jsonl")
        self._has_begun = False

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Writes with what and by what a fit is begun."""
        if (self.folder / _OF_A_LAUNCHER).exists():
            raise ConfigurationError(
                f"Monitor received run={str(self.folder)!r}, which is a run of "
                "meshwright train.",
                "A folder belongs to one run, and the launcher writes its files.",
                "Use another folder, or leave run out.",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._has_begun:
            self._has_begun = True
            for name in ("metrics.jsonl", PLACEMENT, MEMORY, OCCUPATION):
                (self.folder / name).unlink(missing_ok=True)
            script, *arguments = sys.argv or ["python"]
            config = run_config(script, arguments, time.time())
            write_json(self.folder / "config.json", config)
        (self.folder / "finished.json").unlink(missing_ok=True)
        write_json(self.folder / "plan.json", plan)

    def add(self, step: int, epoch: int, numbers: Mapping[str, Any]) -> None:
        """Adds a line of metrics."""
        self._metrics.add(step, epoch, time=time.time(), **numbers)

    def end(self, step: int) -> None:
        """Says that a fit has ended well."""
        ended = {"ended": moment(time.time()), "step": step}
        write_json(self.folder / "finished.json", ended)

    def write(self, name: str, values: Any) -> None:
        """Writes what is known of the newest fit; never stops a training."""
        with contextlib.suppress(OSError):
            write_json(self.folder / name, values)
