"""What trials of a study ask for, and whether later ones ask for the same."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.errors import StudyError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_RULE = (
    "The trials of a study search one space; those of two do not tell which point is "
    "better."
)


class Space:
    """The parameters of the trials that a study has.

    An objective may ask for other bounds in every trial, so they are compared only if
    its code has changed since.

    Arguments:
        study: The study's name.
        trials: Those that have a value.
        is_same_code: Whether the objective is in the state in which they ran.
    """

    def __init__(
        self, study: str, trials: Iterable["FrozenTrial"], *, is_same_code: bool
    ) -> None:
        self._study = study
        self._is_same_code = is_same_code
        self._known: dict[str, set[str]] = {}
        self._always: set[str] | None = None
        for trial in trials:
            names = set(trial.distributions)
            self._always = names if self._always is None else self._always & names
            for name, distribution in trial.distributions.items():
                self._known.setdefault(name, set()).add(_spell(distribution))

    def check(self, name: str, wanted: "BaseDistribution") -> None:
        """Compares a parameter that is asked for.

        Raises:
            StudyError: The study knows it otherwise.
        """
        if self._is_same_code or self._always is None:
            return
        known = self._known.get(name)
        if known is None:
            names = ", ".join(sorted(self._known)) or "none"
            self._refuse(
                f"asks for {name!r}; the trials of study {self._study!r} have: {names}"
            )
        elif len(known) == 1 and _spell(wanted) not in known:
            (before,) = known
            self._refuse(
                f"asks for {name} in {_spell(wanted)}; in study {self._study!r} it is "
                f"in {before}"
            )

    def check_all(self, params: Mapping[str, Any]) -> None:
        """Compares what a trial has asked for, at its end.

        Raises:
            StudyError: It left out what all others have.
        """
        if self._is_same_code or self._always is None:
            return
        if missing := sorted(self._always - set(params)):
            self._refuse(
                f"asked for {', '.join(params) or 'nothing'} and not for "
                f"{', '.join(missing)}, as all trials of study {self._study!r} did"
            )

    def _refuse(self, what: str) -> None:
        raise StudyError(
            f"The objective {what}.",
            _RULE,
            "Give the study another name (name=, --name), or let the objective search "
            "what it did before.",
        )


def _spell(distribution: "BaseDistribution") -> str:
    """A distribution in words.

    >>> from optuna.distributions import FloatDistribution, CategoricalDistribution
    >>> _spell(FloatDistribution(1e-5, 0.1, log=True))
    '1e-05 ... 0.1, log'
    >>> _spell(CategoricalDistribution(["adam", "sgd"]))
    "one of ['adam', 'sgd']"
    """
    fields = distribution._asdict()
    if "choices" in fields:
        return f"one of {json.loads(json.dumps(list(fields['choices'])))}"
    words = f"{fields['low']} ... {fields['high']}"
    whole = "Int" in type(distribution).__name__
    if fields.get("step") not in (None, 1 if whole else None):
        words += f" by {fields['step']}"
    return words + (", log" if fields.get("log") else "") + (", whole" if whole else "")
