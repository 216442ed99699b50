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
from typing import Any

from ._optional import require
from .checkpoint.handle import Checkpoint
from .frameworks.tracking import Tracker, WandbArtifacts, finite, numbers
from .storage.base import Storage

__all__ = ["MLflowTracker", "TensorBoardTracker", "Tracker", "WandbArtifacts", "WandbTracker"]


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
