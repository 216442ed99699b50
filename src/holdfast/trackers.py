"""Experiment trackers: log every committed checkpoint in them: where it is, its metrics, its digest.

No bytes are uploaded unless asked for. What a tracker does happens on a thread of its own; if it fails, the log says so
and training goes on. One object works in all three places::

    Checkpointer(path, state, on_commit=MLflowTracker())
    TorchTrainer(..., run_config=RunConfig(callbacks=[MLflowTracker()]))
    Trainer(..., callbacks=[MLflowTracker()])
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from ._log import get_logger
from ._optional import require
from .checkpoint._location import locate
from .checkpoint.handle import Checkpoint
from .checkpointer.announce import Announcer
from .errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from .format.manifest import MANIFEST_NAME
from .frameworks.reporting import finite, numbers
from .storage.base import Storage
from .storage.local.local_storage import LocalStorage
from .trainers.loop.callbacks import Callback

__all__ = ["MLflowTracker", "TensorBoardTracker", "Tracker", "WandbArtifacts", "WandbTracker"]

_LOG = get_logger("trackers")


class Tracker(Callback):
    """Override `record`; it is called with each committed checkpoint, one after the other, on another thread.

    For ``Checkpointer(on_commit=...)``, for ``RunConfig(callbacks=[...])`` of the function trainer (it works in the
    process that calls `fit`), and for ``callbacks`` of the loop trainer.
    """

    def __init__(self) -> None:
        self._announcer = Announcer([self.record])

    def record(self, checkpoint: Checkpoint) -> None:
        """Take note of a checkpoint. What this raises is logged, and training goes on."""
        raise NotImplementedError

    def wait(self, timeout_s: float = 60.0) -> None:
        """Wait until everything has been recorded."""
        self._announcer.wait(timeout_s)

    def __call__(self, checkpoint: Checkpoint) -> None:
        """Hear of a checkpoint of a `Checkpointer`."""
        self._announcer.tell(checkpoint)

    def after_report(self, context: Any, metrics: Any, checkpoint: Checkpoint | None) -> None:
        """Hear of a report in the function trainer."""
        if checkpoint is not None:
            self._announcer.tell(checkpoint)

    def checkpoint_committed(self, checkpoint: Checkpoint) -> None:
        """Hear of a checkpoint of the loop trainer."""
        self._announcer.tell(checkpoint)

    def post_close(self) -> None:
        """Wait, when the loop trainer is closed."""
        self.wait()


class WandbArtifacts:
    """The checkpoints among the artifacts of a W&B project, as ``load_object_store`` of the loop trainer.

    In ``Trainer(..., load_object_store=WandbArtifacts("team", "project"), load_path="checkpoint-ab12cd:latest")`` the
    ``load_path`` is NAME, NAME:VERSION or NAME:VERSION/FILE (of an artifact with several files). Without a version the
    newest is meant; characters that W&B does not take in a name become ".". What `WandbTracker` logged as a reference
    is read where it lies, if it is still the checkpoint that was logged; any other artifact is downloaded first, by
    each process into a directory of its own that goes with the process.

    Args:
        entity: user or team; default: the entity W&B is set up with.
        project: of the artifacts; default: the project W&B is set up with.
        api: a ``wandb.Api``; default: one that is made when something is loaded.
    """

    def __init__(self, entity: str | None = None, project: str | None = None, *, api: Any = None) -> None:
        self._entity, self._project, self._api = entity, project, api

    def locate(self, path: str) -> tuple[Storage, str]:
        """Return the storage that holds what ``path`` names, and its name there.

        Raises:
            CheckpointNotFoundError: there is no such artifact, or what it refers to is gone.
            CorruptCheckpointError: another checkpoint lies where it refers to by now.
            StorageError: W&B does not answer, or the download failed.
        """
        name, inside = self._split(path)
        artifact = self._artifact(name)
        facts = dict(artifact.metadata or {})
        uri = _reference(artifact, facts)
        if uri is not None:
            storage, found = locate(uri, None)
            _check(Checkpoint.at(storage, found), facts, name)
            return (storage.child(found), inside) if inside else (storage, found)
        return self._downloaded(artifact, name, inside)

    def _split(self, path: str) -> tuple[str, str]:
        head, colon, tail = path.strip("/").partition(":")
        version, _, inside = tail.partition("/")
        return f"{re.sub(r'[^A-Za-z0-9_.-]', '.', head)}:{version if colon else 'latest'}", inside

    def _artifact(self, name: str) -> Any:
        wandb = require("wandb", extra="wandb", purpose="holdfast.trackers.WandbArtifacts")
        whole = "/".join(part for part in (self._entity, self._project, name) if part)
        try:
            self._api = self._api or wandb.Api()
            return self._api.artifact(whole)
        except ValueError as error:
            raise CheckpointNotFoundError(f"load_path={whole!r} is no artifact of W&B: {error}") from error
        except wandb.errors.Error as error:
            if any(words in str(error).lower() for words in ("not found", "does not exist")):
                raise CheckpointNotFoundError(f"W&B has no artifact {whole!r}: {error}") from error
            raise StorageError(f"the artifact {whole!r} could not be looked up at W&B: {error}") from error

    def _downloaded(self, artifact: Any, name: str, inside: str) -> tuple[Storage, str]:
        made = tempfile.mkdtemp(prefix="holdfast-artifact-")
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)  # at the latest at the end of the process
        folder = Path(made) / "artifact"
        try:
            artifact.download(root=str(folder))
        except (OSError, ValueError) as error:
            raise StorageError(f"the artifact {name} of W&B could not be downloaded: {error}") from error
        if inside:
            return LocalStorage(folder), inside
        if (folder / MANIFEST_NAME).exists():
            return LocalStorage(folder.parent), folder.name
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        if len(names) == 1:
            return LocalStorage(folder), names[0]
        raise CheckpointNotFoundError(
            f"the artifact {name} of W&B holds {', '.join(names[:8]) or 'nothing'}: give one of them, as in "
            f"load_path={name + '/' + (names[0] if names else 'FILE')!r}"
        )


def _reference(artifact: Any, facts: dict[str, Any]) -> str | None:
    """Return where the checkpoint lies that an artifact refers to; None if it holds the files themselves."""
    refs = [getattr(entry, "ref", None) for entry in artifact.manifest.entries.values()]
    if not refs or not all(refs):
        return None
    uri = facts.get("uri")  # a directory of this machine is one reference for each of its files
    return uri if isinstance(uri, str) and uri else str(refs[0]) if len(refs) == 1 else None


def _check(checkpoint: Checkpoint, facts: dict[str, Any], name: str) -> None:
    digest = facts.get("digest")
    if not isinstance(digest, str) or not digest:
        return
    try:
        now = checkpoint.digest
    except (CheckpointNotFoundError, FileNotFoundError) as error:
        raise CheckpointNotFoundError(
            f"the artifact {name} of W&B refers to {checkpoint.uri}, which is not there any more: retention of its run "
            "may have deleted it (pin what others refer to, or use WandbTracker(upload=True))"
        ) from error
    if now is None:
        raise CheckpointNotFoundError(
            f"the artifact {name} of W&B refers to {checkpoint.uri}, which is not there any more"
        )
    if now != digest:
        raise CorruptCheckpointError(
            f"the artifact {name} of W&B refers to {checkpoint.uri}, where another checkpoint lies by now (digest "
            f"{now}, logged was {digest}): give its path itself if that is the one you want"
        )


class MLflowTracker(Tracker):
    """Tags of an MLflow run name the checkpoints, metrics are logged at their steps.

    The newest is in the tags ``holdfast.uri``, ``holdfast.digest`` and ``holdfast.step``; each has a tag
    ``holdfast.checkpoint.STEP`` as well. Characters that MLflow does not take in the name of a metric become "_".

    Args:
        run_id: of the run; default: the active run of the thread that makes this, else a new run that begins with the
            first checkpoint, and ends with the process.
        prefix: before the names of metrics.
        upload: store the files as artifacts of the run too, under ``checkpoints/NAME``.
    """

    def __init__(self, run_id: str | None = None, *, prefix: str = "checkpoint/", upload: bool = False) -> None:
        super().__init__()
        self._mlflow = require("mlflow", extra="mlflow", purpose="holdfast.trackers.MLflowTracker")
        self._client = self._mlflow.MlflowClient()
        active = self._mlflow.active_run()
        self.run_id: str | None = run_id or (active and active.info.run_id)
        self._prefix, self._upload = prefix, upload

    def record(self, checkpoint: Checkpoint) -> None:
        """Log it."""
        if self.run_id is None:  # not before: ranks that commit nothing need none
            self.run_id = self._mlflow.start_run().info.run_id
            atexit.register(self._client.set_terminated, self.run_id)
        step, digest = checkpoint.step or 0, checkpoint.digest or ""
        tags = {"uri": checkpoint.uri, "digest": digest, "step": str(step)}
        tags[f"checkpoint.{step}"] = f"{checkpoint.uri} {digest}"
        for name, text in tags.items():  # first of all: they hold whatever becomes of the rest
            self._client.set_tag(self.run_id, f"holdfast.{name}", text)
        for name, value in numbers(checkpoint.metrics).items():
            allowed = re.sub(r"[^\w\-. :/]", "_", self._prefix + name)
            self._client.log_metric(self.run_id, allowed, value, step=step)
        if self._upload:
            with checkpoint.as_directory() as directory:
                self._client.log_artifacts(self.run_id, directory, f"checkpoints/{checkpoint.name}")


class WandbTracker(Tracker):
    """Each checkpoint is a version of one artifact of type "checkpoint": a reference.

    Metrics and digest are in its metadata; the newest is in the summary of the run too, under ``holdfast/``. Works
    offline. Nothing is logged to the history of the run, so its steps are left alone. As ``load_object_store`` of the
    loop trainer it stands for the artifacts of its run's project (`WandbArtifacts`).

    Args:
        run: default: wandb's current run when a checkpoint comes.
        name: of the artifact; default: ``checkpoint-RUN``.
        upload: store the files in the artifact instead of a reference.
    """

    def __init__(self, run: Any = None, *, name: str | None = None, upload: bool = False) -> None:
        super().__init__()
        self._wandb = require("wandb", extra="wandb", purpose="holdfast.trackers.WandbTracker")
        self._run, self._name, self._upload = run, name, upload
        self._artifacts: WandbArtifacts | None = None  # it holds what was downloaded

    def locate(self, path: str) -> tuple[Storage, str]:
        """Return where an artifact of this project lies (`WandbArtifacts.locate`)."""
        run = self._active()
        if self._artifacts is None:
            self._artifacts = WandbArtifacts(run.entity or None, run.project or None)
        return self._artifacts.locate(path)

    def _active(self) -> Any:
        run = self._run or self._wandb.run
        if run is None:
            raise RuntimeError("there is no run of wandb: call wandb.init() first, or give WandbTracker(run)")
        return run

    def record(self, checkpoint: Checkpoint) -> None:
        """Log it."""
        run = self._active()
        notes = {"uri": checkpoint.uri, "digest": checkpoint.digest or "", "step": checkpoint.step or 0}
        artifact = self._wandb.Artifact(
            self._name or f"checkpoint-{run.id}",
            type="checkpoint",
            metadata={**notes, "metrics": finite(checkpoint.metrics)},
        )
        if self._upload:
            with checkpoint.as_directory() as directory:
                artifact.add_dir(directory)
        else:
            _refer(artifact, checkpoint.uri, checkpoint.name)
        run.log_artifact(artifact, aliases=["latest", f"step-{notes['step']}"])
        run.summary.update({f"holdfast/{name}": value for name, value in notes.items()})


class TensorBoardTracker(Tracker):
    """Writes a line of text for each checkpoint, and its metrics, into an event file.

    Args:
        log_dir: where to; or a ``SummaryWriter`` that is there already.
        prefix: before the names of metrics.
    """

    def __init__(self, log_dir: Any, *, prefix: str = "checkpoint/") -> None:
        super().__init__()
        if hasattr(log_dir, "add_text"):
            self._writer = log_dir
        else:
            purpose = "holdfast.trackers.TensorBoardTracker"
            board = require("torch.utils.tensorboard", extra="tensorboard", purpose=purpose)
            self._writer = board.SummaryWriter(log_dir)
        self._prefix = prefix

    def record(self, checkpoint: Checkpoint) -> None:
        """Write it."""
        step = checkpoint.step or 0
        self._writer.add_text("holdfast/checkpoint", f"`{checkpoint.uri}` {checkpoint.digest or ''}", step)
        for name, value in numbers(checkpoint.metrics).items():
            self._writer.add_scalar(self._prefix + name, value, step)
        self._writer.flush()


def _refer(artifact: Any, uri: str, name: str) -> None:
    """Let an artifact refer to a checkpoint, wherever it is."""
    if "://" not in uri:
        try:
            artifact.add_reference(f"file://{uri}", name=name, checksum=False)
        except (OSError, ValueError):  # retention was faster: the reference still says where it was, and what
            uri = f"file://{uri}"
        else:
            return
    # What `add_reference` comes to for s3://, gs:// and https:// too, which wants boto3 and the like to be installed.
    entries = require("wandb.sdk.artifacts.artifact_manifest_entry", extra="wandb", purpose="a reference of wandb")
    artifact.manifest.add_entry(entries.ArtifactManifestEntry(path=name, ref=uri, digest=uri))
