"""A study from its name to its end: opened or gone on with, searched, summed up."""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Literal

from meshwright.devices.sizes import is_count
from meshwright.errors import StudyError, TrialError
from meshwright.launch.console import Console
from meshwright.launch.run_folder import RunFolder, open_run
from meshwright.launch.stop import StopRequests
from meshwright.trials.ledger import Ledger
from meshwright.trials.objective import Objective
from meshwright.trials.progress import Progress
from meshwright.trials.results import Direction, TuneReport
from meshwright.trials.search import Search, all_failed
from meshwright.trials.slots import Deal
from meshwright.trials.space import Space
from meshwright.trials.storage import Database, need_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

_OBJECTIVE, _CODE = "meshwright:objective", "meshwright:code"
_GRACE = 6
"""A launcher that misses so many heartbeats in a row is gone."""
_WATCH_SECONDS = 20.0
_LARGEST_NAME = 120

Outcome = Literal["finished", "interrupted", "preempted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is to be searched, and how; checked when it is made.

    Raises:
        StudyError: A value that cannot be meant.
    """

    objective: Objective
    n_trials: int
    deal: Deal
    name: str
    direction: Direction = "minimize"
    storage: str | None = None
    """The URL of a database; a file in the run folder if left out."""
    run: Path | None = None
    """The run folder; `runs/<name>` if left out."""
    retries: int = 2
    trial_timeout: float | None = None
    heartbeat: float = 10.0
    seed: int | None = None
    sampler: "BaseSampler | None" = None
    pruner: "BasePruner | None" = None

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str, example: str) -> None:
            value = getattr(self, name)
            raise StudyError(f"{name} received {value!r}.", rule, f"Write {example}.")

        if not is_count(self.n_trials) or self.n_trials < 1:
            refuse("n_trials", "A study has one trial at least.", "n_trials=50")
        if self.direction not in ("minimize", "maximize"):
            refuse(
                "direction",
                "A value is to be made small or large: 'minimize' or 'maximize'.",
                "direction='maximize' for an accuracy",
            )
        if not is_count(self.retries) or self.retries < 0:
            refuse(
                "retries",
                "It is how often a trial is tried again that was killed or hung.",
                "retries=2",
            )
        for name in ("trial_timeout", "heartbeat"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                refuse(name, "It is a number of seconds above zero.", f"{name}=600")
        is_path = set(self.name) & {"/", "\\", "\0"} or self.name in (".", "..")
        if not self.name or is_path or len(self.name) > _LARGEST_NAME:
            refuse(
                "name",
                "A study's name is also that of its folder, so it has no slashes and "
                f"at most {_LARGEST_NAME} characters.",
                "name='first-search'",
            )

    @property
    def folder(self) -> Path:
        """Where its run folder is; launchers on several hosts have one each."""
        if self.run is not None:
            return self.run
        if self.storage is None:
            return Path("runs", self.name)
        return Path("runs", f"{self.name}-{gethostname()}")


def search(
    wish: Wish,
    console: Console,
    stop: StopRequests,
    show: Callable[[TuneReport], None],
) -> tuple[TuneReport, Outcome]:
    """Works on a study until it has all of its trials.

    Arguments:
        wish: What is wanted.
        console: Where it is told.
        stop: Whether it is to stop.
        show: Called with what there is, now and then and at the end.

    Raises:
        RunError: The run folder cannot be used.
        StudyError: The database cannot be used, or the study is another one.
        TrialError: No trial has a value.
    """
    need_optuna()
    with open_run(wish.folder) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's, which nobody can do anything about
        progress = Progress(console, wish.name, wish.n_trials, wish.direction)
        url = wish.storage or f"sqlite:///{folder.path / 'study.db'}"
        with Database(url, progress.say, lambda: stop.is_wanted) as database:
            study = _open_study(wish, database)
            folder.begin(wish.objective.file or Path(wish.objective.label), [])
            session = _Session(wish, folder, database, study, progress, show)
            return session.work(stop)


class _Session:
    """This launcher's work on a study that is open."""

    def __init__(
        self,
        wish: Wish,
        folder: RunFolder,
        database: Database,
        study: "Study",
        progress: Progress,
        show: Callable[[TuneReport], None],
    ) -> None:
        self._wish = wish
        self._folder = folder
        self._database = database
        self._study = study
        self._progress = progress
        self._write = show
        self._began = time.monotonic()
        self._ledger = Ledger(
            study,
            database,
            total=wish.n_trials,
            retries=wish.retries,
            grace=_GRACE * wish.heartbeat,
            folder=folder.path,
            is_alone=wish.storage is None,
            say=progress.say,
        )

    def work(self, stop: StopRequests) -> tuple[TuneReport, Outcome]:
        """Runs what is missing, and sums up."""
        same = _has_same_code(self._study, self._database, self._wish.objective)
        with _noted(self._folder, len(self._wish.deal.slots)) as notes, self._progress:
            self._ledger.recover()
            if not same:
                self._ledger.retry_failed()
            self._progress.begin(self._ledger)
            _say_what_there_is(self._wish, self._ledger, self._folder, self._progress)
            try:
                how = self._search(stop, same).run()
            except TrialError:
                self._show(self._report())
                raise
            notes.append(how)
        _keep_code(self._study, self._database, self._wish.objective)
        importance = self._database.do(lambda: importance_of(self._study))
        done = replace(self._report(), importance=importance)
        self._show(done)
        if how == "finished" and not done.complete:
            raise all_failed(
                self._wish.objective.label,
                [t.because or t.state for t in done.trials],
                self._folder.path / "logs",
            )
        return done, how

    def _search(self, stop: StopRequests, same: bool) -> Search:
        return Search(
            self._wish.objective,
            self._wish.deal.slots,
            self._ledger,
            folder=self._folder.path,
            database=self._database,
            space=_space_of(self._study, self._database, same),
            timeout=self._wish.trial_timeout,
            heartbeat=self._wish.heartbeat,
            progress=self._progress,
            stop=stop,
            watch=_Watch(self._folder, lambda: self._show(self._report())),
        )

    def _show(self, report: TuneReport) -> None:
        """A page that cannot be written ends no search."""
        try:
            self._write(report)
        except OSError as error:
            self._progress.say(f"{report.report} was not written: {error}")

    def _report(self) -> TuneReport:
        return TuneReport(
            study=self._wish.name,
            direction=self._wish.direction,
            objective=self._wish.objective.label,
            trials=self._ledger.records(),
            n_trials=self._wish.n_trials,
            storage=self._database.shown,
            folder=self._folder.path,
            seconds=time.monotonic() - self._began,
            because=self._wish.deal.because,
        )


def importance_of(study: "Study") -> dict[str, float]:
    """How much of the differences each parameter explains; empty if that is unknown."""
    optuna = need_optuna()
    try:
        found = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    except (ValueError, TypeError, RuntimeError):  # too few trials, or all alike
        return {}
    return {name: round(float(share), 6) for name, share in found.items()}


class _Watch:
    """Keeps the run folder's lock warm, and shows what there is now and then."""

    def __init__(self, folder: RunFolder, show: Callable[[], None]) -> None:
        self._folder = folder
        self._show = show
        self._shown_at = time.monotonic()

    def __call__(self) -> None:
        self._folder.beat()
        if time.monotonic() - self._shown_at > _WATCH_SECONDS:
            self._shown_at = time.monotonic()
            self._show()


def _open_study(wish: Wish, database: Database) -> "Study":
    """The study of this name, made if there is none."""
    optuna = need_optuna()
    study: Study = database.do(
        lambda: optuna.create_study(
            study_name=wish.name,
            storage=database.storage,
            direction=wish.direction,
            pruner=wish.pruner,
            load_if_exists=True,
        )
    )
    study.sampler = wish.sampler or _sampler(study, database, wish.seed)
    directions = [d.name.lower() for d in database.do(lambda: study.directions)]
    if directions != [wish.direction]:
        raise StudyError(
            f"Study {wish.name!r} in {database.shown} is to {' and '.join(directions)}"
            f", not to {wish.direction}.",
            "A study keeps its direction; its trials were chosen for it.",
            f"Give direction={directions[0]!r}, or another name (name=, --name).",
        )
    before = database.do(lambda: study.user_attrs).get(_OBJECTIVE)
    if before is None:
        database.do(lambda: study.set_user_attr(_OBJECTIVE, wish.objective.label))
        _keep_code(study, database, wish.objective)
    elif before != wish.objective.label:
        raise StudyError(
            f"Study {wish.name!r} in {database.shown} is of {before}, not of "
            f"{wish.objective.label}.",
            "The trials of a study are of one objective, or their values could not be "
            "compared.",
            "Give the study another name (name=, --name).",
        )
    return study


def _sampler(study: "Study", database: Database, seed: int | None) -> "BaseSampler":
    """TPE; one that goes on with a study does not propose again what it began with."""
    if seed is not None:
        seed += len(database.do(lambda: study.get_trials(deepcopy=False)))
    sampler: BaseSampler = need_optuna().samplers.TPESampler(seed=seed)
    return sampler


def _has_same_code(study: "Study", database: Database, objective: Objective) -> bool:
    """Whether the objective is in the state in which the study last ran."""
    before = database.do(lambda: study.user_attrs).get(_CODE)
    return before is None or before == objective.digest()


def _keep_code(study: "Study", database: Database, objective: Objective) -> None:
    digest = objective.digest()
    database.do(lambda: study.set_user_attr(_CODE, digest))


def _space_of(study: "Study", database: Database, same: bool) -> Space:
    states = need_optuna().trial.TrialState
    finished = (states.COMPLETE, states.PRUNED)
    trials = database.do(lambda: study.get_trials(deepcopy=False, states=finished))
    return Space(study.study_name, trials, is_same_code=same)


def _say_what_there_is(
    wish: Wish, ledger: Ledger, folder: RunFolder, progress: Progress
) -> None:
    ended = sum(r.state in ("complete", "pruned", "failed") for r in ledger.records())
    progress.say(
        f"study {wish.name}: {wish.n_trials} trials of {wish.objective.label}, "
        f"{wish.deal.because}"
    )
    progress.say(f"run folder {folder.path}")
    if ledger.is_done():
        progress.say(
            f"the study has its {ended} trials; there is nothing to do. A larger "
            "number of trials goes on"
        )
    elif ended:
        progress.say(f"goes on after the {ended} trials that have ended")


@contextmanager
def _noted(folder: RunFolder, slots: int) -> Iterator[list[Any]]:
    """Notes in the run folder that this launcher worked on it, and how that ended."""
    folder.begin_launch(slots)
    how: list[Any] = []
    try:
        yield how
    finally:
        folder.end_launch(how[0] if how else "failed", 0 if how else 1)
