"""What a run folder tells of its run; nothing of it has to be there but the folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cluster.records import read_lines
from meshwright.devices.occupation import Sample
from meshwright.errors import RunError

PARTS = ("devices", "input", "host", "compile")
"""What the time of steps goes into, as `metrics.jsonl` calls it."""

PARTS_OF_WORK = ("computing", "communicating", "pausing")
"""What the share of devices divides into, where these were looked at."""

_FACTS = {
    *("step", "epoch", "time", "goodput"),
    *("samples_per_second", "step_seconds", "timed_seconds"),
    *(f"{part}_share" for part in (*PARTS, *PARTS_OF_WORK)),
}
"""What a line of metrics holds beside loss and metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run, as its folder tells of it.

    Attributes:
        name: The name of the folder.
        folder: Where it is.
        config: With what it was begun.
        plan: By what the newest fit was trained.
        variables: Where they lay.
        memory: What a step took on each device, by kind.
        occupation: What each device did when it was looked at; None if it was not.
        metrics: What was measured, in order.
        events: What happened.
        launches: When launchers worked on it.
        finished: Of its end, if it has ended well.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    variables: Sequence[Mapping[str, Any]]
    memory: Mapping[str, Mapping[str, Any]]
    occupation: Sample | None
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    launches: Sequence[Mapping[str, Any]]
    finished: Mapping[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Reads what there is.

        Raises:
            RunError: There is no run in the folder.
        """
        if not (folder / "config.json").is_file():
            what = "no config.json" if folder.is_dir() else "no such folder"
            raise RunError(
                f"A report of {str(folder)!r} was asked for: {what}.",
                "A report is made of a run folder, which meshwright train writes.",
                "Name the folder that train names when it starts, such as runs/train.",
            )
        return cls(
            name=folder.resolve().name,
            folder=folder,
            config=_read(folder / "config.json", {}),
            plan=_read(folder / "plan.json", {}),
            variables=_read(folder / "placement.json", []),
            memory=_read(folder / "memory.json", {}),
            occupation=Sample.from_json(_read(folder / "devices.json", {})),
            metrics=list(read_lines(folder / "metrics.jsonl")),
            events=list(read_lines(folder / "events.jsonl")),
            launches=list(read_lines(folder / "launches.jsonl")),
            finished=_read(folder / "finished.json", None),
        )

    @property
    def state(self) -> str:
        """How far it is, in words."""
        if self.finished is not None:
            return f"finished after step {self.finished['step']}"
        if not self.metrics:
            return "no step was logged"
        last = self.metrics[-1]["step"]
        return f"not finished; the last step that was logged is {last}"

    @property
    def ends_of_epochs(self) -> list[Mapping[str, Any]]:
        """The last line of each epoch."""
        last = {line["epoch"]: line for line in self.metrics}
        return list(last.values())

    @property
    def names(self) -> list[str]:
        """Loss and metrics, without those of validation."""
        found = dict.fromkeys(name for line in self.metrics for name in line)
        return [n for n in found if n not in _FACTS and not n.startswith("val_")]

    def series(self, name: str) -> list[tuple[float, float]]:
        """A figure by step, where it is known."""
        return [
            (float(line["step"]), float(line[name]))
            for line in self.metrics
            if isinstance(line.get(name), int | float)
        ]

    @property
    def shares(self) -> Mapping[str, float]:
        """What the time of all steps that were timed went into.

        What devices had to do is divided as it was when they were looked at.
        """
        timed = [line for line in self.metrics if "timed_seconds" in line]
        total = sum(line["timed_seconds"] for line in timed)
        if not total:
            return {}
        found = {
            part: sum(line[f"{part}_share"] * line["timed_seconds"] for line in timed)
            / total
            for part in PARTS
        }
        if self.occupation is None:
            return found
        at_work = found.pop("devices")
        return {**self.occupation.split(at_work, found["compile"]), **found}

    @property
    def wall_seconds(self) -> float:
        """How long launchers worked on it."""
        began = {e["began"]: e["ended"] for e in self.launches if "ended" in e}
        return sum(ended - start for start, ended in began.items())

    @property
    def bytes_by_device(self) -> Mapping[str, Mapping[str, int]]:
        """What variables take on each device, by kind."""
        found: dict[str, dict[str, int]] = {d: {} for d in self.plan.get("devices", [])}
        for variable in self.variables:
            kind = variable["kind"]
            if variable["memory"] == "pinned_host":
                kind = f"{kind}, in the memory of the host"
            for device in variable["devices"]:
                kinds = found.setdefault(device, {})
                kinds[kind] = kinds.get(kind, 0) + variable["bytes"]
        return found


def _read(file: Path, otherwise: Any) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return otherwise
