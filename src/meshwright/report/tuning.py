"""`mw.tune`: a search over many trials, and the page that shows it.

It lives here and not with the trials, because it ends with a page, and rooms import
from those below them only.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.launch.console import Console
from meshwright.launch.stop import PREEMPTED, StopRequests
from meshwright.report.study_page import write_study_page
from meshwright.trials.objective import find_objective
from meshwright.trials.results import Direction, TuneReport
from meshwright.trials.slots import Devices, deal_slots
from meshwright.trials.study import Wish, search

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler


def tune(
    objective: Callable[..., float] | str,
    n_trials: int = 50,
    devices: Devices = "auto",
    *,
    per_device: int = 1,
    memory: int | str | None = None,
    direction: Direction = "minimize",
    name: str | None = None,
    storage: str | None = None,
    run: str | Path | None = None,
    retries: int = 2,
    trial_timeout: float | None = None,
    heartbeat: float = 10.0,
    seed: int | None = None,
    sampler: "BaseSampler | None" = None,
    pruner: "BasePruner | None" = None,
    verbose: bool = True,
) -> TuneReport:
    """Searches for the parameters that make an objective small or large.

    Optuna proposes and prunes. Every trial runs in a process of its own, which sees
    one device or its share of one. A trial that is killed or takes too long is tried
    again with the same parameters; one that raises has failed. The same call again
    goes on with the study, until it has `n_trials`.

    Arguments:
        objective: A function of a trial that returns a number, at the top level of a
            file, or `'FILE.py:NAME'`. The trial has Optuna's `suggest_float`,
            `suggest_int`, `suggest_categorical`, `report` and `should_prune`.
        n_trials: How many trials the study is to have, those that it has included.
        devices: `'auto'` takes every GPU, or every core where there is none; a number
            takes so many of them; or names such as `['GPU:0', 'GPU:2']`.
        per_device: So many trials share a device.
        memory: What each may have of a GPU's memory (`'8GiB'`); an equal part if left
            out.
        direction: `'minimize'` or `'maximize'`.
        name: The study's name; that of the objective and its file if left out.
        storage: The URL of a database; SQLite in the run folder if left out. With
            PostgreSQL (`'postgresql://user@host/db'`) any number of hosts can work on
            one study: make the same call on each.
        run: The run folder; `runs/<name>` if left out.
        retries: So often is a trial tried again that was killed or took too long.
        trial_timeout: Seconds that a trial may take.
        heartbeat: Seconds between signs of life. A host that misses six is taken to be
            gone, and others try its trials again.
        seed: Makes the proposals of one slot the same every time.
        sampler: An Optuna sampler; TPE if left out.
        pruner: An Optuna pruner; by the median if left out.
        verbose: Whether progress is shown.

    Returns:
        `best_params`, `best_value`, `trials`, the path of the `report`; printed, it is
        a table.

    Raises:
        StudyError: The objective, the study or its database cannot be worked with.
        TrialError: No trial has a value, or there is nothing to search.
        RunError: The run folder is in use, or cannot be used.
        ConfigurationError: Devices that are not there, or shares they cannot have.

    >>> import tempfile
    >>> import meshwright as mw
    >>> folder = Path(tempfile.mkdtemp())
    >>> code = "def objective(trial): return trial.suggest_float('x', 0, 1)"
    >>> _ = (folder / "line.py").write_text(code)
    >>> found = mw.tune(f"{folder}/line.py:objective", n_trials=2, devices=1,
    ...                 run=folder / "run", verbose=False)
    >>> len(found.trials), found.best_value == found.best_params["x"]
    (2, True)
    """
    _leave_a_script_that_is_loaded()
    found = find_objective(objective)
    wish = Wish(
        objective=found,
        n_trials=n_trials,
        deal=deal_slots(devices, per_device, memory),
        name=found.stem if name is None else name,
        direction=direction,
        storage=storage,
        run=None if run is None else Path(run),
        retries=retries,
        trial_timeout=trial_timeout,
        heartbeat=heartbeat,
        seed=seed,
        sampler=sampler,
        pruner=pruner,
    )
    with StopRequests() as stop:
        report, how = search(
            wish, Console(is_quiet=not verbose), stop, write_study_page
        )
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "preempted":
        raise SystemExit(PREEMPTED)
    return report


def _leave_a_script_that_is_loaded() -> None:
    """In the process of a trial, a script has done its part when it comes here."""
    loaded = getattr(sys.modules["__main__"], "__meshwright_loading__", None)
    if loaded is not None:
        raise loaded
