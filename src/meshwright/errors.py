"""Every error and warning that Meshwright raises on purpose.

    MeshwrightError
    ├── BackendError              (ImportError)   Keras runs on another backend
    ├── DeviceNameError           (ValueError)    not the spelling of a device
    ├── UnknownDeviceError        (RuntimeError)  a device that is not there
    ├── ConfigurationError        (ValueError)    a value that cannot be configured
    ├── LateConfigurationError    (RuntimeError)  the runtime has already started
    ├── CatalogError              (ValueError)    unknown accelerator, bad catalog file
    ├── MachineError              (ValueError)    devices that make no machine
    ├── ModelFileError            (ValueError)    a file that gives no model
    ├── ObjectiveError            (ValueError)    wishes that no plan can have
    ├── DataError                 (ValueError)    data that a model cannot be trained on
    ├── EnsembleError             (ValueError)    models that make no ensemble
    ├── MemoryLimitError          (MemoryError)   a step needs more than its limit
    ├── PlacementError            (RuntimeError)  work that the placement does not allow
    ├── CheckpointError           (RuntimeError)  checkpoints that cannot be used
    ├── HangError                 (TimeoutError)  a run that does not go on
    ├── NumericError              (ArithmeticError) a loss that is no finite number
    ├── PeerLostError             (TimeoutError)  a process that says nothing any more
    ├── RendezvousError           (ConnectionError) processes that do not come together
    ├── RunError                  (RuntimeError)  a run folder that cannot be used
    ├── PackedTrialsError         (ValueError)    trials that are not one program
    ├── PerReplicaError           (ValueError)    values of replicas that do not fit
    ├── PlanError                 (ValueError)    degrees that do not make a plan
    ├── ProfileError              (ValueError)    a model whose shapes are not known
    ├── RuleError                 (ValueError)    a placement rule that cannot apply
    ├── StudyError                (RuntimeError)  a study that cannot be worked on
    ├── TrialError                (RuntimeError)  trials of which none has a value
    ├── StrategyError             (RuntimeError)  a strategy used where it cannot be
    ├── WorkerError               (RuntimeError)  a worker that failed at its batch
    ├── LearningRateError         (ValueError)    rates, rules, batches that are none
    └── UnsupportedVersionError   (RuntimeError)  a library without what is needed

    MeshwrightWarning             (UserWarning)
    ├── CheckpointWarning                         a checkpoint that is lost or damaged
    ├── CompileCacheWarning                       compiled programs cannot be kept
    ├── PlacementWarning                          a device was replaced by another
    ├── BatchWarning                              a batch leaves devices without work
    ├── MonitorWarning                            a training cannot be shown any more
    └── WorkerWarning                             a worker died, and others go on

An error speaks in three beats: what was received, the rule, what to change.
Each class is explained in `docs/errors.md`.
"""

from collections.abc import Mapping
from typing import ClassVar


class MeshwrightError(Exception):
    """Base of all errors.

    Attributes:
        received: What was received, with its values.
        rule: The rule it breaks.
        change: What to change, concretely.
        exit_code: The command line's exit status for this error.

    >>> error = DeviceNameError("Got 'GPU7'.", "Names have an index.", "Use 'GPU:7'.")
    >>> print(error)
    Got 'GPU7'.
    Names have an index.
    Use 'GPU:7'.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, received: str, rule: str, change: str) -> None:
        super().__init__(received, rule, change)
        self.received = received
        self.rule = rule
        self.change = change

    def __str__(self) -> str:
        return f"{self.received}\n{self.rule}\n{self.change}"


class BackendError(MeshwrightError, ImportError):
    """Keras is already loaded with a backend other than JAX."""


class DeviceNameError(MeshwrightError, ValueError):
    """A text or value that does not spell a device."""


class UnknownDeviceError(MeshwrightError, RuntimeError):
    """A well-spelled device that this process does not have."""


class ConfigurationError(MeshwrightError, ValueError):
    """A value that `meshwright.configure` or an environment variable cannot take."""


class LateConfigurationError(MeshwrightError, RuntimeError):
    """A setting that came after the runtime had started and was in use."""


class CatalogError(MeshwrightError, ValueError):
    """An accelerator that the catalog does not know, or a catalog file with a fault."""


class MachineError(MeshwrightError, ValueError):
    """Devices, memory or a price that do not make a machine to plan for."""


class ModelFileError(MeshwrightError, ValueError):
    """`FILE.py:make_model` that cannot be read, or does not give a model to plan."""


class ObjectiveError(MeshwrightError, ValueError):
    """An objective, a deadline or a budget that no plan can be measured by."""


class DataError(MeshwrightError, ValueError):
    """Data that a model cannot be trained on, evaluated with or asked about.

    Attributes:
        index: The first sample that is wrong, from 0, where there is such a sample.
        batch: Its batch, from 0, if the data comes in batches; `index` is within it.
    """

    exit_code = 4

    def __init__(
        self,
        received: str,
        rule: str,
        change: str,
        *,
        index: int | None = None,
        batch: int | None = None,
    ) -> None:
        super().__init__(received, rule, change)
        self.index = index
        self.batch = batch


class EnsembleError(MeshwrightError, ValueError):
    """Models that cannot be members of one ensemble, or answers that do not combine."""


class MemoryLimitError(MeshwrightError, MemoryError):
    """A compiled step that needs more memory than its device may use.

    Attributes:
        needed: Bytes that the step needs on one device.
        limit: Bytes that it may use.
        by_kind: Bytes of each kind (parameters, ...); they sum to `needed`.
        largest: Paths of the largest tensors, largest first.
    """

    exit_code = 3

    def __init__(
        self,
        received: str,
        rule: str,
        change: str,
        *,
        needed: int = 0,
        limit: int = 0,
        by_kind: Mapping[str, int] | None = None,
        largest: tuple[str, ...] = (),
    ) -> None:
        super().__init__(received, rule, change)
        self.needed = needed
        self.limit = limit
        self.by_kind = dict(by_kind or {})
        self.largest = largest


class PlacementError(MeshwrightError, RuntimeError):
    """Work that cannot run with the model's layers where they were put."""


class CheckpointError(MeshwrightError, RuntimeError):
    """Checkpoints that cannot be written, read, or used for the model at hand."""

    exit_code = 5


class HangError(MeshwrightError, TimeoutError):
    """A run in which a step, or something between steps, takes too long."""

    exit_code = 7


class NumericError(MeshwrightError, ArithmeticError):
    """A loss or weights that are NaN or infinite.

    Attributes:
        step: The step that led to them, counted over the whole run.
    """

    exit_code = 8

    def __init__(self, received: str, rule: str, change: str, *, step: int = 0) -> None:
        super().__init__(received, rule, change)
        self.step = step


class PeerLostError(MeshwrightError, TimeoutError):
    """A process of the run that was waited for and did not answer."""

    exit_code = 6


class RendezvousError(MeshwrightError, ConnectionError):
    """Processes or hosts of a run that do not come together, or do not agree."""

    exit_code = 6


class RunError(MeshwrightError, RuntimeError):
    """A run folder that cannot be used, or a script that cannot be run in it."""


class PackedTrialsError(MeshwrightError, ValueError):
    """Configs or arguments of which no packed training can be made."""


class PerReplicaError(MeshwrightError, ValueError):
    """Values of replicas that cannot be split, run, reduced or gathered as asked."""


class PlanError(MeshwrightError, ValueError):
    """Degrees, devices or options that do not make a plan."""

    exit_code = 3


class ProfileError(MeshwrightError, ValueError):
    """A model that cannot be profiled, because it does not say what its shapes are."""

    exit_code = 2


class RuleError(MeshwrightError, ValueError):
    """A placement rule that matches nothing, never gets its turn, or cannot apply."""


class StrategyError(MeshwrightError, RuntimeError):
    """A strategy, scope or model used in a way that cannot run on a mesh."""


class StudyError(MeshwrightError, RuntimeError):
    """An objective, a study or its database that `mw.tune` cannot work with."""


class TrialError(MeshwrightError, RuntimeError):
    """An objective that fails in every trial, or that there is nothing to search for.

    Attributes:
        exit_code: 8 if its values are not finite, 1 otherwise.
    """

    exit_code = 1

    def __init__(
        self, received: str, rule: str, change: str, *, is_numeric: bool = False
    ) -> None:
        super().__init__(received, rule, change)
        if is_numeric:
            self.exit_code = NumericError.exit_code  # type: ignore[misc]


class WorkerError(MeshwrightError, RuntimeError):
    """A worker of an asynchronous training that failed; the cause is its own error."""

    exit_code = 1


class LearningRateError(MeshwrightError, ValueError):
    """A learning rate, scaling rule, batch size or warm-up that is none."""


class UnsupportedVersionError(MeshwrightError, RuntimeError):
    """An installed library that lacks something Meshwright stands on."""


class MeshwrightWarning(UserWarning):
    """Base of all warnings."""


class CheckpointWarning(MeshwrightWarning):
    """A checkpoint that could not be written, or is damaged; others are used."""


class CompileCacheWarning(MeshwrightWarning):
    """A folder in which compiled programs were to be kept, and cannot be."""


class PlacementWarning(MeshwrightWarning):
    """A device that is not there was replaced by one that is."""


class MonitorWarning(MeshwrightWarning):
    """A training cannot be shown any more; it goes on."""


class WorkerWarning(MeshwrightWarning):
    """A worker of an asynchronous training that died; the others go on."""


class BatchWarning(MeshwrightWarning):
    """A global batch that cannot be split over all devices of the mesh."""
