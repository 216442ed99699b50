"""`TorchTrainer`: runs one function on several workers, keeps its checkpoints, and starts it again when it fails."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeAlias

from holdfast._log import get_logger
from holdfast._optional import install_command
from holdfast._version import __version__
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.verify import verify
from holdfast.config import Keep
from holdfast.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import as_given
from holdfast.storage.resolve import resolve

from . import transit
from .config import (
    TIMESTAMP,
    CheckpointConfig,
    CheckpointStrategy,
    FailureConfig,
    RunConfig,
    RunContext,
    ScalingConfig,
    ValidationConfig,
)
from .control.drive import Driver, DriverOptions, Stops, say
from .control.plan import FailurePolicy, RunSpec, WaitLimits
from .control.result import Result
from .engines import ray_api
from .engines.process_engine import ClusterEngine, LocalEngine
from .engines.ray_nodes import RayNodes, Wanted

_LOG = get_logger("trainers.function")
_SPARES = "HOLDFAST_SPARE_NODES"
_MOST_SPARES = "2"

TrainFunc: TypeAlias = Callable[[], Any] | Callable[[dict[str, Any]], Any]
Resumable: TypeAlias = Checkpoint | str | os.PathLike[str] | Mapping[str, Any]

_HOME = "~/holdfast_results"
_REPORT_TIMEOUT = "HOLDFAST_REPORT_TIMEOUT_S"
_PLACEMENT_TIMEOUT = "HOLDFAST_PLACEMENT_TIMEOUT_S"
_GROW_AFTER = "HOLDFAST_GROW_AFTER_S"
_NOT_TAKEN = {
    "backend_config": "the process group is gloo on CPUs and nccl on GPUs; start another one in train_func",
    "dataset_config": "use prepare_data_loader in train_func",
    "datasets": "use prepare_data_loader in train_func",
    "guard": "it watches a loop over batches: give it to the holdfast.Checkpointer, or holdfast.Trainer, in train_func",
    "metadata": "put it into train_loop_config, or into the checkpoints with Checkpoint.set_metadata",
    "rescue": "snapshots are those of a loop: give it to the holdfast.Checkpointer, or holdfast.Trainer, in train_func",
    "torch_config": "the process group is gloo on CPUs and nccl on GPUs; start another one in train_func",
}


class TorchTrainer:
    """Runs ``train_func`` on ``num_workers`` workers: of this machine, or on the nodes of a Ray cluster.

    Workers are processes of their own with a process group (gloo, or nccl with GPUs) among them. Nothing needs an
    ``if __name__ == "__main__"``: a closure or lambda, a script or a notebook will do. When a worker fails, all are
    started again from the newest checkpoint, as often as `FailureConfig` allows. The same name again resumes.

    Args:
        train_func: called on every worker, with the config if it takes an argument. ``train_loop_per_worker`` is
            another name for it.
        train_loop_config: what ``train_func`` gets; {} if left out.
        scaling_config: how many workers.
        run_config: name and place of the run, which checkpoints stay, which failures are recovered from.
        resume_from_checkpoint: what a run without checkpoints of its own starts from: a `Checkpoint`, its path, or a
            dictionary.
        validation: ``fn(checkpoint) -> dict``, or a `ValidationConfig` with arguments for it, that is run in the
            background on checkpoints reported with ``validation=``; its metrics join those of the checkpoint.
            ``validation_config`` is another name for it.

    Raises:
        ConfigError: an argument is wrong.
        CheckpointNotFoundError: there is nothing at ``resume_from_checkpoint``.

    Example:
        >>> trainer = TorchTrainer(  # doctest: +SKIP
        ...     train_func,
        ...     scaling_config=holdfast.ScalingConfig(num_workers=2),
        ...     run_config=holdfast.RunConfig(name="digits", failure_config=holdfast.FailureConfig(max_failures=3)),
        ... )
        >>> trainer.fit().checkpoint  # doctest: +SKIP
    """

    def __init__(
        self,
        train_func: TrainFunc | None = None,
        *,
        train_loop_per_worker: TrainFunc | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        resume_from_checkpoint: Resumable | None = None,
        validation: Callable[..., Mapping[str, Any]] | ValidationConfig | None = None,
        validation_config: Callable[..., Mapping[str, Any]] | ValidationConfig | None = None,
        **others: Any,
    ) -> None:
        _refuse(others)
        if (train_func is None) == (train_loop_per_worker is None):
            raise ConfigError("TorchTrainer() takes one function: train_func (or train_loop_per_worker, its Ray name)")
        function: Any = train_func or train_loop_per_worker
        transit.takes_config(function)
        _check("train_loop_config", train_loop_config, Mapping, "a dict")
        _check("scaling_config", scaling_config, ScalingConfig, "a holdfast.ScalingConfig")
        _check("run_config", run_config, RunConfig, "a holdfast.RunConfig")
        self._function, self._config = function, train_loop_config
        self._scaling = scaling_config or ScalingConfig()
        self._run = run_config or RunConfig()
        self._first = _first_checkpoint(resume_from_checkpoint)
        self._validation = _validation_of(validation, validation_config)
        self._local_dir(self._root(self._run.name or "run"))  # raises for a place that cannot work

    @classmethod
    def restore(cls, path: str | os.PathLike[str], *_: Any, **__: Any) -> TorchTrainer:
        """Say how to go on with a run; there is nothing to restore but the checkpoints.

        Raises:
            ConfigError: always.
        """
        place, _slash, name = os.fspath(path).rstrip("/").rpartition("/")
        raise ConfigError(
            f"TorchTrainer.restore({os.fspath(path)!r}): make the trainer as before, with "
            f"RunConfig(name={name!r}, storage_path={place or '.'!r}): the same name in the same place goes on from "
            "its newest checkpoint"
        )

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> bool:
        """Tell whether a run is at ``path``; a trainer with its name and storage_path goes on from there."""
        try:
            Result.from_path(path, storage_filesystem)
        except CheckpointNotFoundError:
            return False
        return True

    def fit(self) -> Result:
        """Train to the end; blocks. Everything reported is durable when it returns.

        Ctrl-C commits what is complete, stops the workers and raises KeyboardInterrupt; SIGTERM the same with
        SystemExit(143). A second signal ends it without waiting.

        Raises:
            TrainingFailedError: workers failed more often than allowed; ``failures`` has the exception of each rank.
            RunBusyError: a live process trains the run of this name.
            CorruptCheckpointError: the run has checkpoints and none of them is good.
            ConfigError: something cannot be sent to the workers, or they cannot reach the storage.
        """
        name = self._run.name or _default_name(self._function)
        storage = self._root(name)
        failure = self._run.failure_config or FailureConfig()
        if self._scaling.num_workers == 0:
            return self._fit_here(name)
        # It loads torch while we go on.
        engine = _make_engine(self._scaling, storage, max_failures=failure.max_failures, silence_s=self._run.silence_s)
        driver, keep = self._driver(name, storage, engine)
        with Stops(driver.stop) as stops:
            try:
                end = driver.run()
            finally:
                driver.close()
        say(driver.last_words())
        if end.error is not None:
            raise end.error
        stops.raise_again()
        return self._result(driver, keep, transit.unpack_result(driver.controller.returned))

    def _driver(self, name: str, storage: Storage, engine: Any, *, launched: int = 1) -> tuple[Driver, Keep]:
        """Make the driver of a run; the engine is closed if that fails."""
        try:
            options = self._options(name, storage)
            return Driver(self._plan(name, storage, launched=launched), options, storage, engine), options.keep
        except BaseException:
            engine.close()
            raise

    def _result(self, driver: Driver, keep: Keep, value: Any) -> Result:
        memory, newest = driver.controller.reports.known.memory, driver.controller.reports.known.newest()
        values = None
        if memory is not None and (newest is None or memory.order > newest.order[:2]):
            values = transit.unpack_checkpoint(memory.values).to_dict()
        return Result(driver.storage, keep=keep, memory=values, return_value=value)

    def _fit_here(self, name: str) -> Result:
        """Train in this process; under torchrun together with the others that it has started."""
        from .local_mode import InlineEngine, Launched, drive_here, ranks_of_launcher, work_here  # load torch
        from .worker.main import launched_group
        from .worker.session import in_session

        # A worker of ours has the variables of a launcher, too: what it starts is its own.
        info = None if in_session() else ranks_of_launcher()
        if info is None:
            engine = InlineEngine()
            driver, keep = self._driver(name, self._root(name), engine)
            value = drive_here(driver, engine, self._function, self._config)
            return self._result(driver, keep, value)
        with launched_group(info, use_gpu=self._scaling.use_gpu):
            launched = Launched.meet(info, name=name, named=self._run.name is not None, place=self._root("").uri)
            storage = self._root(launched.name)
            try:
                if info.rank:
                    packed = work_here(launched, self._function, self._config)
                    return Result(
                        storage, keep=_keep(self._run.checkpoint_config), return_value=transit.unpack_result(packed)
                    )
                engine = InlineEngine(launched.workers)
                driver, keep = self._driver(launched.name, storage, engine, launched=info.world_size)
                value = drive_here(driver, engine, self._function, self._config)
                launched.tell_end(None, transit.pack_result(value) or b"")
                return self._result(driver, keep, value)
            except BaseException as error:
                launched.tell_end(error, b"")
                raise
            finally:
                launched.close()

    def _root(self, name: str) -> Storage:
        """Return the root of the run of this name.

        Raises:
            ConfigError: workers cannot reach it, or it is a file.
        """
        path = self._run.storage_path
        if self._run.storage_filesystem is not None:
            base = resolve("" if path is None else path, self._run.storage_filesystem)
        else:
            base = resolve(os.path.expanduser(_HOME) if path is None else path)
        storage = as_given(base.child(name))
        if storage.describe() is None:
            if base.uri.startswith(("memory://", "fsspec+memory://")):
                raise ConfigError(
                    f"storage_path: {base.uri} lives in the memory of this process: workers are processes of their own "
                    "and can neither read nor write it; give a directory"
                )
            raise ConfigError(
                f"storage_path: {base.uri}: workers are processes of their own, and {type(base).__qualname__} does not "
                "say how another process makes it: let its describe() return {'kind': 'module:Class', ...} "
                "(docs/storage.md)"
            )
        root = storage.local_root
        if root is not None and root.exists() and not root.is_dir():
            raise ConfigError(f"{root} is a file; a run needs a directory: give another name or storage_path")
        return storage

    def _plan(self, name: str, storage: Storage, *, launched: int = 1) -> RunSpec:
        failure = self._run.failure_config or FailureConfig()
        score, strategy = _scores(self._run.checkpoint_config)
        location, memory, _ = self._first
        count, on_ray = self._scaling.num_workers, _runs_on_ray(self._scaling)
        return RunSpec(
            run_name=name,
            storage=storage.describe() or {},
            uri=storage.uri,
            local_dir=self._local_dir(storage),
            num_workers=self._scaling.most_workers or launched,
            min_workers=count[0] if isinstance(count, tuple) else None,
            finds_places=on_ray,
            where="on the Ray cluster" if on_ray else "on this machine",
            inline=count == 0,
            # Processes that torchrun has started are started again by it, not by us.
            policy=FailurePolicy(max_failures=failure.max_failures, max_preemptions=failure.max_preemptions)
            if launched == 1
            else FailurePolicy(max_failures=0, max_preemptions=0, max_rollbacks=0),
            limits=self._limits(failure),
            score=score,
            strategy=strategy,
            validates=self._validation is not None,
            has_callbacks=bool(self._run.callbacks),
            first_checkpoint=location,
            first_memory=memory,
            versions=_versions(),
        )

    def _local_dir(self, storage: Storage) -> str | None:
        """Return the disk in front of a run on a store; None without ``local_dir``.

        Raises:
            ConfigError: the run is on a disk itself.
        """
        folder = self._run.local_dir
        if folder is None:
            return None
        if storage.local_root is not None:
            raise ConfigError(
                f"RunConfig(local_dir={os.fspath(folder)!r}): it stands in front of a remote storage_path, and "
                f"{storage.uri} is a directory: leave it out, or give a storage_path such as s3://bucket/runs"
            )
        return os.path.abspath(os.path.expanduser(folder))

    def _limits(self, failure: FailureConfig) -> WaitLimits:
        limits = WaitLimits(
            report_s=_seconds(_REPORT_TIMEOUT),
            place_s=_seconds(_PLACEMENT_TIMEOUT),
            grow_after_s=_seconds(_GROW_AFTER) if os.environ.get(_GROW_AFTER) else None,
            hang_s=failure.hang_timeout_s,
        )
        task = None if self._validation is None else self._validation.task_config
        return limits if task is None or task.timeout_s is None else replace(limits, validation_s=task.timeout_s)

    def _options(self, name: str, storage: Storage) -> DriverOptions:
        if self._validation is not None:
            transit.pack_value(self._validation.fn, "validation")  # refused now, not after the first checkpoint
        return DriverOptions(
            blob=b"" if self._scaling.num_workers == 0 else transit.pack_call(self._function, self._config),
            keep=_keep(self._run.checkpoint_config),
            use_gpu=self._scaling.use_gpu,
            environment=_threads(self._scaling),
            secrets=transit.pack_secrets(storage, *self._first[2]),
            validation=self._validation,
            callbacks=self._run.callbacks or (),
            context=RunContext(
                name=name,
                path=storage.uri,
                run_config=self._run,
                scaling_config=self._scaling,
                train_loop_config=self._config,
            ),
        )


def _refuse(others: Mapping[str, Any]) -> None:
    known = sorted(name for name in others if name in _NOT_TAKEN)
    if known:
        lines = "; ".join(f"{name}: {_NOT_TAKEN[name]}" for name in known)
        raise ConfigError(f"TorchTrainer has no such argument: {lines}")
    if others:
        raise TypeError(f"TorchTrainer() got an unexpected keyword argument {sorted(others)[0]!r}")


def _check(name: str, value: Any, kind: type[Any], wanted: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"TorchTrainer({name}={value!r}): give {wanted}")


def _validation_of(given: Any, config: Any) -> ValidationConfig | None:
    if given is not None and config is not None:
        raise ConfigError("TorchTrainer() got validation= and validation_config=: they mean the same, give one")
    found = config if given is None else given
    if found is None or isinstance(found, ValidationConfig):
        return found
    if not callable(found):
        raise ConfigError(
            f"TorchTrainer(validation={found!r}): give a function (checkpoint) -> dict, or a holdfast.ValidationConfig"
        )
    return ValidationConfig(found)


def _first_checkpoint(given: Any) -> tuple[dict[str, Any] | None, bytes | None, tuple[Storage, ...]]:
    """Turn ``resume_from_checkpoint`` into what workers can open: a place and its storage, or packed files.

    Raises:
        ConfigError: it is of another type.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    if given is None:
        return None, None, ()
    if isinstance(given, Mapping):
        given = Checkpoint.from_dict(given)
    elif isinstance(given, (str, os.PathLike)) and not isinstance(given, Checkpoint):  # a handle is a PathLike too
        given = Checkpoint(given)
    if not isinstance(given, Checkpoint):
        raise ConfigError(
            f"TorchTrainer(resume_from_checkpoint={given!r}): give a holdfast.Checkpoint, its path, or a dict"
        )
    root = given.storage.local_root
    if root is not None and not (root / given.directory).exists():
        raise CheckpointNotFoundError(f"resume_from_checkpoint: there is nothing at {given.uri}; check the path")
    manifest = given.manifest  # a damaged or uncommitted checkpoint is refused here
    if root is not None and manifest is not None and manifest.with_role("user"):  # nobody compares them later
        found = verify(given.storage, given.directory, deep=("user",), beside=False)
        if not found.ok:
            raise CorruptCheckpointError(f"resume_from_checkpoint: {given.uri} is damaged: {'; '.join(found.problems)}")
    if given.storage.describe() is None:
        return None, transit.pack_checkpoint(given), ()
    return transit.describe_location(given.storage, given.directory), None, (given.storage,)


def _default_name(function: Any) -> str:
    called: str = getattr(getattr(function, "func", function), "__name__", "")
    plain = "".join(letter if letter.isalnum() or letter in "_-" else "" for letter in called).strip("-")
    plain = "train" if plain in ("", "lambda") else plain
    return f"{plain}-{datetime.now().astimezone():%Y-%m-%d}-{secrets.token_hex(3)}"


def _seconds(name: str) -> float:
    text = os.environ.get(name, "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}={text!r}: give a positive number of seconds")
    return seconds


def _keep(config: CheckpointConfig | CheckpointStrategy | None) -> Keep:
    if config is None:
        return Keep()
    if (
        isinstance(config, CheckpointStrategy)
        and config.checkpoint_score_attribute == TIMESTAMP
        and config.checkpoint_score_order == "max"
    ):
        return Keep(last=config.num_to_keep or None)  # the order of saves, whatever clocks say
    return config.retention


def _scores(
    config: CheckpointConfig | CheckpointStrategy | None,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the score of a CheckpointConfig, and the strategy of a CheckpointStrategy, for the wire."""
    if isinstance(config, CheckpointStrategy):
        score = {"attribute": config.checkpoint_score_attribute, "order": config.checkpoint_score_order}
        return None, {"num_to_keep": config.num_to_keep, **score}
    keep = _keep(config)
    return (None if keep.metric is None else {"attribute": keep.metric, "order": keep.mode}), None


def _versions() -> dict[str, str]:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "unknown"
    return {"holdfast": __version__, "torch": torch, "python": platform.python_version()}


def _runs_on_ray(scaling: ScalingConfig) -> bool:
    """Whether this is a run on a Ray cluster.

    Raises:
        ConfigError: what is asked for needs Ray, which is not there.
    """
    if scaling.engine == "ray":
        return True
    if scaling.engine == "auto" and scaling.num_workers != 0 and ray_api.is_wanted():
        return True
    if isinstance(scaling.num_workers, tuple):
        raise ConfigError(
            f"ScalingConfig(num_workers={scaling.num_workers!r}): an elastic range needs a Ray cluster, and there is "
            "none: connect with ray.init(), set RAY_ADDRESS, or give one number"
        )
    return False


def _make_engine(
    scaling: ScalingConfig, storage: Storage, *, max_failures: int, silence_s: float | None = None
) -> LocalEngine | ClusterEngine:
    """Make the engine; it begins to load what workers need while its caller goes on.

    Args:
        scaling: what was asked for.
        storage: root of the run.
        max_failures: failures after which the run ends; with 0 nothing is kept ready on spare nodes.
        silence_s: a node that says nothing for so long is given up; None: the engine's own limit.

    Raises:
        ConfigError: there is no cluster, or it cannot do this.
    """
    if not _runs_on_ray(scaling):
        if scaling.label_selector is not None or scaling.placement_strategy != "PACK":
            _LOG.warning(
                "placement_strategy and label_selector choose nodes of a Ray cluster; this run has one machine"
            )
        if scaling.engine == "auto" and ray_api.is_missed():
            _LOG.warning(
                "RAY_ADDRESS names a cluster, and Ray is not installed here: this run stays on this machine; for the "
                "cluster %s, else say ScalingConfig(engine='local')",
                install_command("ray"),
            )
        return LocalEngine(num_workers=scaling.most_workers, storage=storage)
    resources = _resources(scaling)
    count = scaling.num_workers
    wanted = Wanted(
        least=count[0] if isinstance(count, tuple) else count,
        most=scaling.most_workers,
        resources=resources,
        strategy=scaling.placement_strategy,
        labels=scaling.label_selector,
        spares=_spares() if max_failures else 0,
    )
    nodes = RayNodes(ray_api.connect(), wanted, silence_s=silence_s or 0.0)
    return ClusterEngine(nodes, storage=storage, silence_s=silence_s)


def _threads(scaling: ScalingConfig) -> dict[str, str]:
    """Return the variable that sizes thread pools of workers; {} where their number of cores is not known."""
    cores: Any = (scaling.resources_per_worker or {}).get("CPU")
    if not cores and _runs_on_ray(scaling) and "OMP_NUM_THREADS" not in os.environ:
        cores = _resources(scaling).get("CPU")  # what is reserved
    return {} if not cores else {"OMP_NUM_THREADS": str(max(1, int(cores)))}


def _spares() -> int:
    """Return on how many nodes without workers an interpreter is kept ready.

    Raises:
        ConfigError: HOLDFAST_SPARE_NODES is no number.
    """
    text = os.environ.get(_SPARES, _MOST_SPARES)
    if not text.isdecimal():
        raise ConfigError(
            f"{_SPARES}={text!r}: give the number of nodes that an interpreter is kept ready on, 0 for none"
        )
    return int(text)


def _resources(scaling: ScalingConfig) -> dict[str, float]:
    """Return the amounts of each worker, by resource: one CPU unless configured otherwise, and its GPU.

    Raises:
        ConfigError: more than one GPU, or nothing at all.
    """
    found = scaling.reserved_per_worker
    if scaling.use_gpu and found["GPU"] != 1:
        raise ConfigError(
            f"ScalingConfig(resources_per_worker={dict(scaling.resources_per_worker or {})!r}): on Ray each worker "
            "gets one GPU, other amounts are not built yet; start more workers, or leave 'GPU' out"
        )
    if not found:
        raise ConfigError(
            f"ScalingConfig(resources_per_worker={dict(scaling.resources_per_worker or {})!r}): on Ray a worker has to "
            "reserve something; give a CPU, or a custom resource"
        )
    return found
