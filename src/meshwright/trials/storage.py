"""The database of a study: opening it, and waiting for it when it is away."""

import time
import warnings
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from meshwright.cluster.redaction import redact_arguments
from meshwright.errors import StudyError

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

Result = TypeVar("Result")

OPENING_SECONDS = 10.0
"""So long may a database be locked or away when a study is opened."""
PATIENCE_SECONDS = 120.0
"""So long may it be away while trials run; they go on meanwhile."""
_PAUSE_SECONDS = 0.5
_CONNECT_SECONDS = 5


def need_optuna() -> Any:
    """Optuna, which the extra `tune` installs.

    Raises:
        StudyError: It is not there.
    """
    try:
        optuna = import_module("optuna")
    except ImportError as error:
        raise StudyError(
            f"Optuna cannot be imported: {error}.",
            "mw.tune lets Optuna propose and prune trials.",
            "Install the extra: pip install 'meshwright[tune]'.",
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the console says it all
    return optuna


class Database:
    """Where a study is kept.

    Arguments:
        url: As SQLAlchemy spells it.
        say: Hears when the database is away, and when it is back.
        is_stopping: Whether nobody wants to wait any more.

    Attributes:
        waited: Seconds that were spent on waiting for it.

    Raises:
        StudyError: It cannot be reached, or is no database for studies.
    """

    def __init__(
        self,
        url: str,
        say: Callable[[str], None] = print,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.shown = redact_arguments([url])[0]
        self.waited = 0.0
        self._say = say
        self._is_stopping = is_stopping
        self.storage: RDBStorage = self._open(_with_driver(url))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.storage.remove_session()
        self.storage.engine.dispose()

    def do(self, action: Callable[[], Result]) -> Result:
        """Does something with it, again and again while it is away.

        Raises:
            StudyError: It stays away.
        """
        return self._insist(
            action,
            PATIENCE_SECONDS,
            "Nothing is lost: trials that ended are kept in the run folder, and the "
            "same call goes on with them.",
        )

    def _open(self, url: str) -> "RDBStorage":
        optuna = need_optuna()
        is_file = url.startswith("sqlite")
        arguments: dict[str, Any] = {"pool_pre_ping": True}
        if is_file or "psycopg" in url:
            name = "timeout" if is_file else "connect_timeout"
            arguments["connect_args"] = {name: _CONNECT_SECONDS}

        def connect() -> "RDBStorage":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return optuna.storages.RDBStorage(url, engine_kwargs=arguments)

        return self._insist(connect, OPENING_SECONDS, "The study was not touched.")

    def _insist(
        self, action: Callable[[], Result], patience: float, lost: str
    ) -> Result:
        began = time.monotonic()
        told = False
        while True:
            try:
                result = action()
            except Exception as error:
                if not _is_of_database(error):
                    raise
                away = time.monotonic() - began
                is_away = _is_away(error)
                may_pass = is_away or _is_made_by_others(error)
                if away >= patience or not may_pass or self._is_stopping():
                    raise self._explain(error, away, lost) from error
                if is_away and not told:
                    self._say(
                        f"the database does not answer: {_reason(error)}; waiting"
                    )
                    told = True
                _pause()
            else:
                if told:
                    self.waited += time.monotonic() - began
                    self._say("the database answers again")
                return result

    def _explain(self, error: Exception, seconds: float, lost: str) -> StudyError:
        reason = _reason(error)
        if "locked" in reason:
            change = (
                "Close the program that holds it, or give another one with storage=."
            )
        elif isinstance(error, ImportError) or "NoSuchModule" in reason:
            change = (
                "Install its driver (for PostgreSQL: pip install 'psycopg[binary]')."
            )
        else:
            change = "Start it, or give the URL of one that can be reached."
        return StudyError(
            f"The database {self.shown} cannot be used ({seconds:.0f} s): {reason}.",
            f"A study is kept in a database that answers. {lost}",
            change,
        )


def _pause() -> None:
    time.sleep(_PAUSE_SECONDS)


def _with_driver(url: str) -> str:
    """PostgreSQL through psycopg, unless another driver is named."""
    for scheme in ("postgresql://", "postgres://"):
        if url.startswith(scheme):
            return f"postgresql+psycopg://{url.removeprefix(scheme)}"
    return url


def _is_of_database(error: Exception) -> bool:
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    return bool(
        names
        & {
            "sqlalchemy.exc.SQLAlchemyError",
            "optuna.exceptions.StorageInternalError",
            "builtins.ImportError",
        }
    )


def _is_away(error: Exception) -> bool:
    """Whether it is away, or locked, and may be back."""
    kinds = {"OperationalError", "InterfaceError", "TimeoutError", "DBAPIError"}
    return bool(kinds & _kinds(error))


def _is_made_by_others(error: Exception) -> bool:
    """Whether other launchers make the same tables at this moment."""
    is_double = "IntegrityError" in _kinds(error)
    return is_double or "already exists" in _reason(error)


def _kinds(error: Exception) -> set[str]:
    return {type(each).__name__ for each in (error, error.__cause__) if each}


def _reason(error: Exception) -> str:
    """What the driver said, in a line and without the statement."""
    inner: Any = error.__cause__ if error.__cause__ is not None else error
    inner = getattr(inner, "orig", None) or inner
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    text = lines[0] if lines else type(inner).__name__
    return redact_arguments([f"{type(inner).__name__}: {text}".rstrip(".")])[0]
