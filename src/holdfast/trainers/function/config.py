"""How a run of workers is configured, in the names of Ray Train, and the small values that its callbacks get."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast._meant import removed
from holdfast.config import Keep, check_kind, check_silence, is_int, is_number
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

ValidationFn: TypeAlias = Callable[..., Mapping[str, Any]]
"""``fn(checkpoint, **fn_kwargs) -> dict`` of metrics."""

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@removed(
    trainer_resources="the controller runs in your own process and needs none, leave it out",
    bundle_label_selector="it is called label_selector",
    accelerator_type="ask for it in resources_per_worker, as in {'accelerator_type:A100': 0.001}",
    use_tpu="TPUs are not supported, use_gpu=True asks for GPUs",
    topology="TPUs are not supported, use_gpu=True asks for GPUs",
    elastic_resize_monitor_interval_s="the cluster is looked at all the time, leave it out",
)
@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """How many workers train, and where.

    Example:
        >>> ScalingConfig(num_workers=2).engine
        'auto'

    Attributes:
        num_workers: number of worker processes; the world size. 0: the train function runs in this process, for a
            debugger. On Ray ``(least, most)`` is elastic: as many as there is room for.
        use_gpu: whether each worker gets a GPU of its own.
        resources_per_worker: amounts by name, such as ``{"CPU": 4}``, for engines that schedule; the local engine
            takes from them the number of threads of a worker only.
        engine: "local" (processes of this machine), "ray" (a Ray cluster that is there), or "auto": Ray where this
            process is connected to a cluster or RAY_ADDRESS names one, else local.
        placement_strategy: of Ray's placement groups: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        label_selector: labels that Ray nodes must have.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    engine: str = "auto"
    placement_strategy: str = field(default="PACK", kw_only=True)
    label_selector: Mapping[str, str] | None = field(default=None, kw_only=True)

    @property
    def most_workers(self) -> int:
        """The most workers that a group may have."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def reserved_per_worker(self) -> dict[str, float]:
        """What an engine that schedules reserves for each worker: a CPU unless configured otherwise, and its GPU."""
        given = {"CPU": 1.0, **({"GPU": 1.0} if self.use_gpu else {}), **(self.resources_per_worker or {})}
        return {name: amount for name, amount in given.items() if amount}

    @property
    def total_resources(self) -> dict[str, float]:
        """What all workers together reserve; of an elastic range, the most of them."""
        return {name: amount * self.most_workers for name, amount in self.reserved_per_worker.items()}

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, (tuple, list)):
            self._check_range(tuple(self.num_workers))
        elif not is_int(self.num_workers) or self.num_workers < 0:
            raise ConfigError(
                f"ScalingConfig(num_workers={self.num_workers!r}): give a whole number of at least 1, or 0 to run the "
                "train function in this process"
            )
        if not isinstance(self.use_gpu, bool):
            raise ConfigError(f"ScalingConfig(use_gpu={self.use_gpu!r}): give True or False")
        if self.engine not in ("auto", "local", "ray"):
            raise ConfigError(f"ScalingConfig(engine={self.engine!r}): use 'local', 'ray' or 'auto'")
        if self.engine == "ray" and self.num_workers == 0:
            raise ConfigError("ScalingConfig(num_workers=0, engine='ray'): 0 runs it in this process; leave engine out")
        if self.placement_strategy not in _STRATEGIES:
            names = ", ".join(map(repr, _STRATEGIES))
            raise ConfigError(f"ScalingConfig(placement_strategy={self.placement_strategy!r}): use one of {names}")
        labels = self.label_selector
        if labels is not None and not (
            isinstance(labels, Mapping) and all(isinstance(part, str) for item in labels.items() for part in item)
        ):
            raise ConfigError(f"ScalingConfig(label_selector={labels!r}): give labels by name, as in {{'zone': 'a'}}")
        self._check_resources()

    def _check_range(self, given: tuple[Any, ...]) -> None:
        shown = f"ScalingConfig(num_workers={given!r})"
        if len(given) != 2 or not all(map(is_int, given)) or not 1 <= given[0] <= given[1]:
            raise ConfigError(f"{shown}: give one number, or (least, most) with 1 <= least <= most")
        if self.engine == "local":
            raise ConfigError(f"{shown}: an elastic range needs engine='ray'; on one machine give one number")
        if given[0] < given[1] and str(self.placement_strategy).startswith("STRICT"):
            raise ConfigError(
                f"{shown}: workers of a range are placed one by one, {self.placement_strategy!r} cannot hold for all "
                "of them; use 'PACK' or 'SPREAD', or give one number"
            )
        object.__setattr__(self, "num_workers", given)

    def _check_resources(self) -> None:
        resources = self.resources_per_worker
        if resources is None:
            return
        shown = f"ScalingConfig(resources_per_worker={resources!r})"
        if not isinstance(resources, Mapping):
            raise ConfigError(f"{shown}: give amounts by name, as in {{'CPU': 4}}")
        for name, amount in resources.items():
            if not isinstance(name, str) or not is_number(amount) or amount < 0 or math.isinf(amount):
                raise ConfigError(f"{shown}: {name!r}: {amount!r} is no amount; give a number of at least 0")
        if self.use_gpu and resources.get("GPU", 1) == 0:
            raise ConfigError(f"{shown}: use_gpu=True and no GPU contradict each other, drop one of them")
        if not self.use_gpu and resources.get("GPU", 0) > 0:
            raise ConfigError(f"{shown}: GPUs are asked for with use_gpu=True, set it or drop 'GPU'")


@removed(
    checkpoint_frequency="call report(metrics, checkpoint=...) as often as you want checkpoints",
    checkpoint_at_end="report a last checkpoint at the end of train_func",
)
@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Which reported checkpoints stay. The newest always does.

    Example:
        >>> config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy")
        >>> config.retention.best, config.retention.metric, config.retention.mode
        (2, 'accuracy', 'max')

    Attributes:
        num_to_keep: how many stay: the best ones, or the newest without an attribute; None: all.
        checkpoint_score_attribute: metric that ranks them, ``/`` leading into nested ones ("val/accuracy").
        checkpoint_score_order: "max" or "min".
        keep: rules of `Keep`, for anything richer; instead of ``num_to_keep``.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"
    keep: Keep | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        number, attribute = self.num_to_keep, self.checkpoint_score_attribute
        if number is not None and (not is_int(number) or number < 1):
            raise ConfigError(
                f"CheckpointConfig(num_to_keep={number!r}): give a whole number of at least 1, or None to keep all"
            )
        _check_score("CheckpointConfig", attribute, self.checkpoint_score_order, optional=True)
        if self.keep is None:
            return
        if not isinstance(self.keep, Keep):
            raise ConfigError(f"CheckpointConfig(keep={self.keep!r}): give a holdfast.Keep, as in Keep(last=3)")
        if number is not None or attribute is not None:
            raise ConfigError(
                "CheckpointConfig(keep=...) says everything itself: leave num_to_keep and checkpoint_score_attribute "
                "out, as in keep=Keep(best=2, metric='accuracy', mode='max')"
            )

    @property
    def retention(self) -> Keep:
        """The same as rules of retention."""
        if self.keep is not None:
            return self.keep
        if self.checkpoint_score_attribute is None:
            return Keep(last=self.num_to_keep)
        metric, mode = self.checkpoint_score_attribute, self.checkpoint_score_order
        return Keep(best=self.num_to_keep, metric=metric, mode=mode)


@dataclass(frozen=True, slots=True)
class CheckpointStrategy:
    """Which checkpoints of `save_checkpoint` are written and stay: the style of Ray 1.x.

    With ``num_to_keep`` written, a checkpoint that is not strictly better than the worst of them is not written at all.

    Attributes:
        num_to_keep: how many stay on disk; None: all; 0: none, the newest stays in memory for recovery.
        checkpoint_score_attribute: key of the saved values that ranks.
        checkpoint_score_order: "max" or "min".
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str = "_timestamp"
    checkpoint_score_order: str = "max"

    def __post_init__(self) -> None:
        number = self.num_to_keep
        if number is not None and (not is_int(number) or number < 0):
            raise ConfigError(
                f"CheckpointStrategy(num_to_keep={number!r}): give a whole number, 0 to write none, or None to keep all"
            )
        _check_score("CheckpointStrategy", self.checkpoint_score_attribute, self.checkpoint_score_order, optional=False)

    @property
    def retention(self) -> Keep:
        """The same as rules of retention. What is not written at all is no matter of retention."""
        return Keep(
            best=self.num_to_keep or None, metric=self.checkpoint_score_attribute, mode=self.checkpoint_score_order
        )


@removed(
    fail_fast="max_failures=0 (the default) gives up at the first failure",
    controller_failure_limit="the controller is your own process: start the script again and it resumes",
    max_preemption_failures="it is called max_preemptions here",
    relax_collectives_on_preemption="no collective is needed: what all ranks had reported is committed in any case",
    preemption_grace_s="what all ranks had reported is finished before the others are stopped: leave it out",
)
@dataclass(frozen=True, slots=True)
class FailureConfig:
    """How often training may fail and go on from the newest checkpoint.

    Attributes:
        max_failures: number of failures to recover from; -1: no limit.
        max_preemptions: the same for workers that had to go (SIGTERM), which do not count as failures.
        hang_timeout_s: a worker that shows no sign of life for so long has failed; longer than a
            ``checkpoint_upload_fn`` takes. None: never.
    """

    max_failures: int = 0
    max_preemptions: int = field(default=-1, kw_only=True)
    hang_timeout_s: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in (("max_failures", self.max_failures), ("max_preemptions", self.max_preemptions)):
            if not is_int(value) or value < -1:
                raise ConfigError(f"FailureConfig({name}={value!r}): give a number of at least 0, or -1 for no limit")
        limit = self.hang_timeout_s
        if limit is not None and (not is_number(limit) or not 0 < limit < math.inf):
            raise ConfigError(f"FailureConfig(hang_timeout_s={limit!r}): give a positive number of seconds, or None")


@removed(
    sync_config="checkpoints go straight to storage_path, nothing is synced: leave it out",
    verbose="use the logger 'holdfast' (logging.getLogger('holdfast').setLevel(...))",
    stop="return from train_func when training is to end",
    progress_reporter="read the metrics from the Result, or log them in train_func",
    log_to_file="the output of workers is always kept in <run>/logs",
    logging_config="use the logger 'holdfast' (logging.getLogger('holdfast').setLevel(...))",
    worker_runtime_env="workers inherit the environment of this process: set os.environ before fit()",
)
@dataclass(frozen=True, slots=True)
class RunConfig:
    """Where a run lives and how it is looked after.

    Attributes:
        name: directory of the run under ``storage_path`` ("/" leads into directories); the same name again resumes.
            Default: made of the name of train_func, the date and a short id.
        storage_path: a directory or URI; default ``~/holdfast_results``.
        storage_filesystem: a `holdfast.storage.Storage` in which ``storage_path`` is a path.
        failure_config: which failures are recovered from.
        checkpoint_config: which checkpoints stay.
        callbacks: objects with ``after_report(run_context, metrics, checkpoint)`` or
            ``after_exception(run_context, worker_exceptions)``.
        local_dir: with a remote ``storage_path``, a directory on a disk of each node: what a rank stores of
            ``report(state=...)`` goes there first and is uploaded behind, two saves at most, so that training does not
            wait for a slow store. It counts when all of it is uploaded.
        silence_s: on a Ray cluster, seconds after which a node that says nothing is given up; None: 20.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | CheckpointStrategy | None = None
    callbacks: Sequence[Any] | None = ()
    local_dir: str | os.PathLike[str] | None = None
    silence_s: float | None = None

    def __post_init__(self) -> None:
        if self.silence_s is not None:
            check_silence(self.silence_s, "RunConfig(silence_s={!r})")
        if self.callbacks is None:
            object.__setattr__(self, "callbacks", ())
        name, path = self.name, self.storage_path
        if name is not None and not _is_name(name):
            raise ConfigError(
                f"RunConfig(name={name!r}): it becomes a directory below storage_path, give a plain name; '/' leads "
                "into directories, as in 'sweep/lr-0.1'"
            )
        if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.fspath(path)):
            raise ConfigError(f"RunConfig(storage_path={path!r}): give a directory or a URI")
        local = self.local_dir
        if local is not None and (not isinstance(local, (str, os.PathLike)) or not os.fspath(local)):
            raise ConfigError(f"RunConfig(local_dir={local!r}): give a directory of each node's own disk")
        if local is not None and self.storage_filesystem is None and "://" not in os.fspath(path or ""):
            raise ConfigError(
                f"RunConfig(local_dir={os.fspath(local)!r}): where a run lives is called storage_path; local_dir is a "
                "disk of each node in front of a remote one, as in RunConfig(storage_path='s3://bucket/runs', "
                "local_dir='/scratch')"
            )
        check_kind(self, "checkpoint_config", CheckpointConfig, CheckpointStrategy)
        check_kind(self, "failure_config", FailureConfig)
        if isinstance(self.callbacks, (str, bytes)) or not isinstance(self.callbacks, Sequence):
            raise ConfigError(f"RunConfig(callbacks={self.callbacks!r}): give a list of callbacks")
        from holdfast._optional import tracker

        named = [tracker(callback, what="RunConfig(callbacks=...)") for callback in self.callbacks]
        object.__setattr__(self, "callbacks", named)
        for callback in self.callbacks:
            if not any(callable(getattr(callback, hook, None)) for hook in ("after_report", "after_exception")):
                raise ConfigError(
                    f"RunConfig(callbacks=...): {callback!r} has neither after_report(run_context, metrics, "
                    "checkpoint) nor after_exception(run_context, worker_exceptions), so nothing would ever call it"
                )
        object.__setattr__(self, "callbacks", tuple(self.callbacks))


@dataclass(frozen=True, slots=True)
class ValidationTaskConfig:
    """How one checkpoint is validated: for ``report(validation=...)``, or the default of a `ValidationConfig`.

    Attributes:
        fn_kwargs: arguments of the validation function besides the checkpoint; they are stored with the checkpoint, so
            they are what JSON holds.
        timeout_s: the validation is stopped after so many seconds; None: that of the `ValidationConfig`, or an hour.
    """

    fn_kwargs: Mapping[str, Any] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        given, limit = self.fn_kwargs, self.timeout_s
        if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
            raise ConfigError(f"ValidationTaskConfig(fn_kwargs={given!r}): give arguments by name, as in {{'top': 5}}")
        if limit is not None and (not is_number(limit) or not 0 < limit < math.inf):
            raise ConfigError(f"ValidationTaskConfig(timeout_s={limit!r}): give a positive number of seconds, or None")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ValidationTaskConfig:
        """Make a configuration of a dict: arguments of the function, or the fields of this class.

        Raises:
            ConfigError: it mixes both, which is ambiguous.
        """
        fields = given.keys() & {"fn_kwargs", "timeout_s"}
        if not fields:
            return cls(fn_kwargs=given)
        others = sorted(map(str, given.keys() - fields))
        if others:
            raise ConfigError(
                f"validation={dict(given)!r}: {', '.join(sorted(fields))} beside {', '.join(others)} can be meant in "
                "two ways; give validation=ValidationTaskConfig(fn_kwargs={...}, timeout_s=...)"
            )
        return cls(**given)


@removed(ray_remote_kwargs="validations run in a process of this machine: leave it out")
@dataclass(frozen=True, slots=True)
class ValidationConfig:
    """The function that validates reported checkpoints, and how it is called.

    Attributes:
        fn: ``fn(checkpoint, **fn_kwargs) -> dict`` of metrics.
        task_config: what holds for each validation, unless its `report` says otherwise.
    """

    fn: ValidationFn
    task_config: ValidationTaskConfig | None = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ConfigError(f"ValidationConfig(fn={self.fn!r}): give a function (checkpoint) -> dict")
        check_kind(self, "task_config", ValidationTaskConfig)


def _is_name(name: Any) -> bool:
    parts = name.split("/") if isinstance(name, str) and name.isprintable() else [""]
    return not {"", ".", ".."} & {*parts}


def _check_score(owner: str, attribute: Any, order: Any, *, optional: bool) -> None:
    if not (optional and attribute is None) and (not isinstance(attribute, str) or not attribute):
        raise ConfigError(f"{owner}(checkpoint_score_attribute={attribute!r}): give the name of a metric")
    if order not in ("max", "min"):
        raise ConfigError(f"{owner}(checkpoint_score_order={order!r}): use 'max' (larger is better) or 'min'")


TIMESTAMP = "_timestamp"
"""Score attribute that means the time of the save."""
VALIDATED = "_validated"
"""Late metric that says how a validation ended: true, "failed" or "timeout"."""


def without_marks(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without what Holdfast notes among them for itself."""
    return {name: value for name, value in metrics.items() if name != VALIDATED}


class CheckpointUploadMode(Enum):
    """How `report` brings a checkpoint's directory to storage."""

    SYNC = "SYNC"
    """``report`` returns when the checkpoint is committed."""

    ASYNC = "ASYNC"
    """``report`` returns once the directory has been taken over; it may be written again or deleted then."""

    NO_UPLOAD = "NO_UPLOAD"
    """The directory lies in the run's storage already and is committed where it is."""


class CheckpointConsistencyMode(Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Commits of what was reported before."""

    VALIDATED = "VALIDATED"
    """Their validations as well."""


class ReportedCheckpointStatus(Enum):
    """How far a reported checkpoint has come."""

    COMMITTED = "COMMITTED"
    """Safe; no validation was requested."""

    PENDING_VALIDATION = "PENDING_VALIDATION"
    """Safe; its validation waits or runs."""

    VALIDATED = "VALIDATED"
    """Safe; the metrics of the validation are among its metrics."""

    VALIDATION_FAILED = "VALIDATION_FAILED"
    """Safe; its validation raised or returned no metrics."""

    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    """Safe; its validation took too long and was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCheckpoint:
    """One checkpoint of the run that still exists.

    Attributes:
        metrics: what was reported with it, and what its validation added.
        status: how far it has come.
    """

    checkpoint: Checkpoint
    metrics: Mapping[str, Any] = field(default_factory=dict)
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """First argument of the methods of callbacks: ``after_report(context, metrics, checkpoint)`` and the others.

    Attributes:
        name: of the run.
        path: of the run's directory, or its URI.
        train_loop_config: what train_func gets.
    """

    name: str
    path: str
    run_config: RunConfig
    scaling_config: ScalingConfig
    train_loop_config: Mapping[str, Any] | None = None

    def get_run_config(self) -> RunConfig:
        """The same as ``run_config``."""
        return self.run_config


class UserCallback:
    """What `RunConfig` takes as ``callbacks``, doing nothing; a callback may be any object with one of the methods.

    All are called in the driver. What they raise is logged and stops nothing.
    """

    def before_run(self, run_context: RunContext) -> None:
        """Called once, when the run has been opened and before its first workers are started."""

    def after_run(self, run_context: RunContext) -> None:
        """Called once, when the run has ended, well or not; what was reported is committed."""

    def after_report(
        self, run_context: RunContext, metrics: Sequence[Mapping[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """Called after a report that all ranks have made; if it has a checkpoint, once that is committed.

        Calls come in the order of the reports: those after a checkpoint wait for its commit.

        Args:
            run_context: of the run.
            metrics: what each rank reported, in the order of the ranks.
            checkpoint: None if no rank reported a checkpoint.
        """

    def after_exception(self, run_context: RunContext, worker_exceptions: Mapping[int, BaseException]) -> None:
        """Called after a failure, with the exceptions by rank."""
