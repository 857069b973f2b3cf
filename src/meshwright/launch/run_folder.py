"""The run folder: what has to outlive the processes of a run, and who may write it."""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshwright.cluster.records import append_json, read_lines, write_json, write_text
from meshwright.cluster.run_config import moment, run_config
from meshwright.errors import RunError

_FILES = {
    *("config.json", "lock", "secret", "head.json", "launches.jsonl", "plan.json"),
    *("placement.json", "memory.json", "devices.json", "finished.json"),
    *("metrics.jsonl", "events.jsonl", "faults.jsonl"),
    *("logs", "stacks", "checkpoints", "earlier", "report.html"),
}
"""What can lie in a run folder before its `config.json` does."""

_STAYS = {"lock", "secret", "earlier"}
_BEAT_SECONDS = 5.0


class RunFolder:
    """A folder that this launcher holds; the lock goes when the process does.

    Attributes:
        path: Where it is, absolute.
        wall_before: Seconds that launchers of this run had lived before this one.
    """

    def __init__(self, path: Path, lock: int, began: float) -> None:
        self.path = path
        self.began = began
        self._lock = lock
        self._beat = 0.0
        self.unwritten: str | None = None
        """Why an event could not be written, the first time that this happened."""
        self.wall_before = self._finish_launches()
        _write_holder(lock, began)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    @property
    def config(self) -> dict[str, Any] | None:
        """What the run was begun with; None if it has not begun."""
        return _read_json(self.path / "config.json")

    @property
    def finished(self) -> dict[str, Any] | None:
        """What is known of the end of a run that has ended well."""
        return _read_json(self.path / "finished.json")

    @property
    def has_begun(self) -> bool:
        """Whether there is anything of a run in it."""
        return any(entry.name not in _STAYS for entry in self.path.iterdir())

    def begin(self, script: Path, arguments: Sequence[str]) -> None:
        """Writes down what is run, if the run has not begun yet."""
        for name in ("logs", "stacks"):
            (self.path / name).mkdir(mode=0o700, exist_ok=True)
        if self.config is None:
            config = run_config(str(script), arguments, self.began)
            write_json(self.path / "config.json", config)

    def set_aside(self) -> Path:
        """Moves the run that lies in it into a folder within, and returns that."""
        earlier = self.path / "earlier"
        earlier.mkdir(mode=0o700, exist_ok=True)
        numbers = [int(e.name) for e in earlier.iterdir() if e.name.isdecimal()]
        place = earlier / str(max(numbers, default=0) + 1)
        place.mkdir(mode=0o700)
        for entry in list(self.path.iterdir()):
            if entry.name not in _STAYS:
                entry.rename(place / entry.name)
        self.wall_before = 0.0
        return place

    def begin_launch(self, processes: int) -> None:
        """Notes that this launcher has begun to work on the run."""
        self._append(
            "launches.jsonl",
            {
                "began": self.began,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "processes": processes,
            },
        )

    def end_launch(self, outcome: str, exit_code: int) -> None:
        """Notes when and how it ended."""
        self._append(
            "launches.jsonl",
            _end_of_launch(self.began, time.time(), outcome, exit_code),
        )

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Notes that the script has ended well; there is nothing more to do."""
        self.check_is_there()
        ended = {"ended": moment(time.time()), **facts}
        write_json(self.path / "finished.json", ended)

    def check_is_there(self) -> None:
        """Raises a RunError if the folder was deleted."""
        if not (self.path / "config.json").exists():
            raise RunError(
                f"The run folder {self.path} is gone.",
                "A run keeps its checkpoints there; without them it cannot go on, and "
                "what it has done is lost when its processes end.",
                "Leave the folder where it is until the run has ended, and start anew.",
            )

    def note(self, event: str, **facts: Any) -> None:
        """Adds a line to `events.jsonl`; a run does not end because that fails."""
        self._append("events.jsonl", {"time": time.time(), "event": event, **facts})

    def beat(self) -> None:
        """Shows now and then that the launcher is alive, by the time of its lock."""
        now = time.monotonic()
        if now - self._beat > _BEAT_SECONDS:
            self._beat = now
            with contextlib.suppress(OSError):
                os.utime(self._lock)

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            append_json(self.path / name, value)
        except OSError as error:
            self.unwritten = self.unwritten or f"{name}: {error.strerror}"

    def _finish_launches(self) -> float:
        """Sums up the lives of launchers; one that was killed lived until its beat."""
        path = self.path / "launches.jsonl"
        launches: dict[float, dict[str, Any]] = {}
        for line in read_lines(path):
            if isinstance(line.get("began"), float):
                launches.setdefault(line["began"], {}).update(line)
        for began, launch in launches.items():
            if "ended" not in launch:
                ended = max(began, os.fstat(self._lock).st_mtime)
                launch["ended"] = ended
                self._append(path.name, _end_of_launch(began, ended, "killed", None))
        return sum(launch["ended"] - began for began, launch in launches.items())


def open_run(path: Path) -> RunFolder:
    """Makes a run folder, or takes one, and locks it.

    Raises:
        RunError: It cannot be made or written, holds something else, or belongs to
            another launcher that is alive.
    """
    path = path.expanduser().absolute()
    began = time.time()
    try:
        _make_folder(path)
        lock = _take_lock(path)
        try:
            _make_secret(path / "secret")
            return RunFolder(path, lock, began)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        why = f"{error.strerror} ({error.filename})"
        raise RunError(
            f"The run folder {path} cannot be used: {why}.",
            "A run keeps its checkpoints, logs and events in a folder that it can make "
            "and write.",
            "Give another folder with --run DIR, or make this one yours.",
        ) from error


def _make_folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        names = {entry.name for entry in path.iterdir()}
        if "config.json" not in names and names - _FILES:
            raise RunError(
                f"{path} holds {sorted(names - _FILES)[0]!r} and no config.json.",
                "A run has a folder of its own, which is empty when it begins.",
                "Give another folder with --run DIR.",
            ) from None
    path.chmod(0o700)


def _take_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(path / "lock", flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(lock)
        os.close(lock)
        raise RunError(
            f"The run folder {path} is in use: {holder}.",
            "One launcher works on a run at a time.",
            "Wait for it, end it, or give another folder with --run DIR.",
        ) from None
    return lock


def _write_holder(lock: int, began: float) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": moment(began)}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(holder).encode(), 0)


def _holder(lock: int) -> str:
    try:
        found = json.loads(os.pread(lock, 4096, 0))
        return (
            f"process {found['pid']} on {found['host']} has held it since "
            f"{found['since']}"
        )
    except (ValueError, KeyError, TypeError):
        return "another process has just taken it"


def _make_secret(path: Path) -> None:
    if path.exists():
        path.chmod(0o600)
    else:
        write_text(path, f"{secrets.token_hex(32)}\n")


def _end_of_launch(
    began: float, ended: float, outcome: str, exit_code: int | None
) -> dict[str, Any]:
    return {"began": began, "ended": ended, "outcome": outcome, "exit_code": exit_code}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(
            f"{path} is no JSON: {error}.",
            "It is written whole or not at all, so something else has changed it.",
            "Repair it, or give another folder with --run DIR.",
        ) from error
    return dict(value)
