"""Every exception Holdfast raises, grouped by what a handler does about it.

::

    HoldfastError
    ├── ConfigError (ValueError)                 the call is wrong: change the script
    │   ├── NotLocalError (TypeError)            a checkpoint elsewhere was used as a path of this machine
    │   └── UnknownMetricError (RuntimeError)    no checkpoint has a number for this metric
    ├── MissingExtraError (ImportError)          install the named extra
    ├── UnsupportedStateError (TypeError)        a value cannot be saved: change the state
    ├── StorageError (OSError)                   the place where bytes live failed
    │   ├── StorageNotFoundError (FileNotFoundError)
    │   ├── StoragePermissionError (PermissionError)
    │   ├── StorageFullError
    │   ├── StorageExistsError (FileExistsError) a conditional write found an object
    │   ├── StorageConflictError                 a conditional write found another version
    │   └── StorageUnavailableError              no answer, or none but errors, until the deadline: may work later
    ├── DroppedSaveError                         the data of a save is gone: the next step is saved instead
    │   └── TornSaveError                        a tensor changed while it was copied
    ├── CheckpointError                          a checkpoint is not what was asked for
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   │   └── RunNotFoundError (RuntimeError)  no run, or a run without a checkpoint
    │   ├── CheckpointExistsError (FileExistsError)
    │   ├── IncompleteCheckpointError            files without a manifest: never committed
    │   ├── CorruptCheckpointError               bytes differ from their digest
    │   ├── FormatVersionError                   written by a newer Holdfast
    │   └── StateMismatchError (ValueError)      checkpoint and live state do not fit
    ├── RunBusyError                             another process holds the run
    ├── TrainingError                            a run of workers failed
    │   ├── TrainingFailedError
    │   ├── WorkerHangError
    │   └── ReportMismatchError
    └── SessionError (RuntimeError)              called outside of a running session

All of them pickle, so they cross process boundaries unchanged.
"""

from __future__ import annotations

from typing import Any

from ._outgoing import masked, visible

__all__ = [
    "CheckpointError", "CheckpointExistsError", "CheckpointNotFoundError", "ConfigError", "CorruptCheckpointError",
    "DroppedSaveError", "FormatVersionError", "HoldfastError", "IncompleteCheckpointError", "MissingExtraError",
    "NotLocalError", "ReportMismatchError", "RunBusyError", "RunNotFoundError", "SessionError", "StateMismatchError",
    "StorageConflictError", "StorageError", "StorageExistsError", "StorageFullError", "StorageNotFoundError",
    "StoragePermissionError", "StorageUnavailableError", "TornSaveError", "TrainingError", "TrainingFailedError",
    "UnknownMetricError", "UnsupportedStateError", "WorkerHangError",
]  # fmt: skip


class HoldfastError(Exception):
    """Root of all Holdfast errors; no message of one holds a credential, whatever it was made of."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(masked(arg) if isinstance(arg, str) else arg for arg in args))

    def __str__(self) -> str:
        # OSError's own __str__ prints "[Errno ...]" forms; the message is ours alone. Names of files and tensors may
        # hold what no terminal and no log file takes as it is: escape codes, lone surrogates.
        return visible(str(self.args[0])) if self.args else ""


class ConfigError(HoldfastError, ValueError):
    """An argument or a combination of arguments is wrong."""


class NotLocalError(ConfigError, TypeError):
    """A checkpoint that is on no local disk was used as a path."""


class UnknownMetricError(ConfigError, RuntimeError):
    """No checkpoint has a number for a metric; a RuntimeError too, as in Ray Train."""


class MissingExtraError(HoldfastError, ImportError):
    """An optional dependency is needed; the message says what to install."""


class UnsupportedStateError(HoldfastError, TypeError):
    """A value in the state cannot be saved; the message names its path and type."""


class DroppedSaveError(HoldfastError):
    """A save was dropped, because its data is gone; training goes on, and its next step is saved instead.

    It is logged; only the future of a save raises it.
    """


class TornSaveError(DroppedSaveError):
    """A tensor changed while a save copied it."""


class StorageError(HoldfastError, OSError):
    """The storage below a checkpoint failed."""


class StorageNotFoundError(StorageError, FileNotFoundError):
    """There is no object at this path."""


class StoragePermissionError(StorageError, PermissionError):
    """The storage refused access. Never reported as "not found"."""


class StorageFullError(StorageError):
    """No space (or quota) is left."""


class StorageExistsError(StorageError, FileExistsError):
    """A write that had to create its object found that it exists."""


class StorageConflictError(StorageError):
    """A conditional replacement found a version other than the expected one."""


class StorageUnavailableError(StorageError):
    """The storage was asked again until its deadline, and did not answer or answered with errors of its own."""


class CheckpointError(HoldfastError):
    """A checkpoint is not what was asked for."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at this place."""


class RunNotFoundError(CheckpointNotFoundError, RuntimeError):
    """There is no run, or it has no checkpoint; a RuntimeError too, as in Ray Train."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint is in the way; pass ``overwrite=True`` or use another name."""


class IncompleteCheckpointError(CheckpointError):
    """Files without a manifest: the save never committed."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes are not the bytes that were written.

    Attributes:
        file: file inside the checkpoint, if known.
        tensor: name of a damaged tensor, if known.
        chunk: number of the damaged chunk in the file, if known.
    """

    def __init__(
        self, message: str = "", *, file: str | None = None, tensor: str | None = None, chunk: int | None = None
    ) -> None:
        super().__init__(message)
        self.file, self.tensor, self.chunk = file, tensor, chunk

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, {"file": self.file, "tensor": self.tensor, "chunk": self.chunk})


class FormatVersionError(CheckpointError):
    """The checkpoint was written in a format version this Holdfast does not know."""


class StateMismatchError(CheckpointError, ValueError):
    """Checkpoint and live state do not fit; the live state was not touched.

    Attributes:
        problems: one line for each missing, unexpected, wrong-shape or wrong-dtype entry.
    """

    def __init__(self, message: str = "", *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, {"problems": self.problems})


class RunBusyError(HoldfastError):
    """Another live process holds the lease of this run."""


class TrainingError(HoldfastError):
    """A run of workers failed."""


class TrainingFailedError(TrainingError, RuntimeError):
    """Workers failed more often than the failure policy allows.

    Attributes:
        failures: exception of each failed rank; ``worker_failures`` is another name for it.
    """

    def __init__(self, message: str = "", *, failures: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}

    @property
    def worker_failures(self) -> dict[int, BaseException]:
        """The same as ``failures``."""
        return self.failures

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, {"failures": self.failures})


class WorkerHangError(TrainingError):
    """A worker made no progress for longer than ``hang_timeout_s``."""


class ReportMismatchError(TrainingError):
    """Ranks called ``report`` a different number of times."""


class SessionError(HoldfastError, RuntimeError):
    """A session function was called where no session runs."""


# Names of Ray Train for the same things.
WorkerGroupError = TrainingFailedError
ControllerError = TrainingError
SessionMisuseError = SessionError


def _rebuild(kind: type[HoldfastError], args: tuple[Any, ...], extra: dict[str, Any]) -> HoldfastError:
    return kind(*args, **extra)
