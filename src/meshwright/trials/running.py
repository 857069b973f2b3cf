"""One attempt at a trial, in a process of its own."""

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cluster.orders import Orders
from meshwright.errors import MeshwrightError, StudyError
from meshwright.launch.crew import Ended, Said
from meshwright.launch.local_worker import LocalWorker
from meshwright.trials import worker
from meshwright.trials.ledger import Outcome
from meshwright.trials.objective import Objective
from meshwright.trials.slots import Slot
from meshwright.trials.space import Space
from meshwright.trials.storage import Database

if TYPE_CHECKING:
    from optuna import Trial

_FAREWELL_SECONDS = 10.0
"""So long may a process take to end after it has said what came of its trial."""
_DUMP_SECONDS = 0.5
NO_PARAMETER = "it asked for no parameter"
"""Why a trial fails that is like all others."""
_FRAME_WORDS = 'File "'
_CALLS = {
    *("suggest_float", "suggest_int", "suggest_categorical"),
    *("report", "should_prune", "set_user_attr", "params", "user_attrs"),
}


class LoadingError(Exception):
    """The objective cannot be found or its file fails, which no other trial changes."""


class RunningTrial:
    """An attempt at a trial: its process, its questions, and what comes of it.

    Attributes:
        outcome: What came of it, once that is known.
        reported: What it reported last.
    """

    def __init__(
        self,
        trial: "Trial",
        slot: Slot,
        objective: Objective,
        *,
        folder: Path,
        database: Database,
        space: Space,
    ) -> None:
        self.trial = trial
        self.slot = slot
        self.outcome: Outcome | None = None
        self.reported: float | None = None
        self.began = time.monotonic()
        self._objective = objective
        self._database = database
        self._space = space
        self._waited = database.waited
        self._told: float | None = None
        self._stacks = folder / f"stacks/{trial.number}-{slot.number}.txt"
        self.log = folder / f"logs/{trial.number}-{slot.number}.txt"
        self.worker = LocalWorker(
            [sys.executable, "-P", worker.__file__],
            Orders(run=str(folder), rank=slot.number, attempt=trial.number),
            {**os.environ, **slot.environment},
        )

    @property
    def seconds(self) -> float:
        """How long it has taken, without waiting for the database."""
        waited = self._database.waited - self._waited
        return time.monotonic() - self.began - waited

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone and what came of it is known."""
        return self.worker.has_ended

    def follow(self) -> None:
        """Answers what it asks, and notes what it says.

        Raises:
            LoadingError: There is no objective to run.
            StudyError: It searches another space than the study, or the database
                stays away.
        """
        for event in self.worker.take_events():
            if isinstance(event, Said):
                self._hear(event.facts)
            elif isinstance(event, Ended) and self.outcome is None:
                self.outcome = Outcome("lost", because=_why_ended(event))

    def hurry(self, limit: float | None) -> None:
        """Kills it if it takes longer than it may."""
        if self.outcome is not None:
            self._told = self._told or time.monotonic()
            if time.monotonic() - self._told > _FAREWELL_SECONDS:
                self.kill()
        elif limit is not None and self.seconds > limit:
            where = self._where_it_is()
            self.outcome = Outcome(
                "lost", because=f"it took longer than {limit:g} s{where}"
            )
            self.kill()

    def kill(self) -> None:
        """Ends its process with all that it has started."""
        self.worker.kill()

    def close(self) -> None:
        """Lets go of it."""
        self.worker.kill()
        self.worker.close()

    def _hear(self, facts: Mapping[str, Any]) -> None:
        if "call" in facts:
            self.worker.answer(self._answer(facts))
        elif "value" in facts:
            self.outcome = self._judge(float(facts["value"]))
        elif "pruned" in facts:
            self.outcome = Outcome("pruned")
        elif "failure" in facts:
            failure = facts["failure"]
            place = f" ({failure['place']})" if failure["place"] else ""
            if failure.get("loading"):
                self.outcome = Outcome("returned")
                raise LoadingError(f"{failure['text']}{place}")
            self.outcome = Outcome("failed", because=f"{failure['text']}{place}")

    def _judge(self, value: float) -> Outcome:
        params = self._database.do(lambda: self.trial.params)
        try:
            self._space.check_all(params)
        except StudyError:
            self.outcome = Outcome("returned")
            raise
        if not params:
            return Outcome("failed", because=NO_PARAMETER)
        if math.isnan(value):
            return Outcome("failed", because="it returned nan")
        return Outcome("complete", value)

    def _answer(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What a call of the objective's gives, or the error that it raises."""
        name, arguments, named = facts["call"], facts["arguments"], facts["named"]
        if name == "begin":
            return {"value": self._begin()}
        if name not in _CALLS:
            return {"error": f"no trial has {name!r}", "type": "AttributeError"}
        if name == "report":
            self.reported = float(arguments[0])
        try:
            if name.startswith("suggest_"):
                self._check(name, arguments, named)
            value = self._database.do(lambda: self._do(name, arguments, named))
        except MeshwrightError:
            raise
        except Exception as error:  # what a call raises is for the objective to see
            return {"error": str(error), "type": type(error).__name__}
        # Pruners answer with NumPy's booleans.
        return {"value": value.item() if hasattr(value, "item") else value}

    def _do(self, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        found = getattr(self.trial, name)
        return found(*arguments, **named) if callable(found) else found

    def _check(
        self, call: str, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Compares what is asked for with what other trials were."""
        from optuna import distributions

        kinds = {
            "suggest_float": distributions.FloatDistribution,
            "suggest_int": distributions.IntDistribution,
            "suggest_categorical": distributions.CategoricalDistribution,
        }
        name, *rest = arguments
        self._space.check(name, kinds[call](*rest, **named))

    def _begin(self) -> dict[str, Any]:
        """What the process has to know."""
        return {
            **self._objective.to_json(),
            "number": self.trial.number,
            "device": self.slot.device,
            "cores": list(self.slot.cores),
            "stacks": str(self._stacks),
            "path": sys.path,
            "argv": sys.argv,
        }

    def _where_it_is(self) -> str:
        """The line at which it hangs, if it tells."""
        self.worker.signal(signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)
        lines = [
            line.strip()
            for line in self.worker.stacks().splitlines()
            if _FRAME_WORDS in line and worker.__file__ not in line
        ]
        file = str(self._objective.file)
        own = [line for line in lines if file in line] or lines
        if not own:
            return ""
        return f"; it was at {own[0].replace(file, Path(file).name)}"


def _why_ended(ended: Ended) -> str:
    if ended.status < 0:
        name = signal.Signals(-ended.status).name
        return f"its process was killed ({name})"
    return f"its process ended with status {ended.status} and told nothing"
