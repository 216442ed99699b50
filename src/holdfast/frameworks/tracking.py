"""Experiment trackers: how they hear of committed checkpoints, metrics as they take them, artifacts of W&B to load."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast._optional import require
from holdfast._units import listed
from holdfast.checkpoint.handle import Checkpoint, locate
from holdfast.checkpointer.announce import Announcer
from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.trainers.loop.callbacks import Callback


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
            f"the artifact {name} of W&B holds {listed(names) or 'nothing'}: give one of them, as in "
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


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in (nested) metrics, by names joined with "/"."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{name}"] = float(value)
    return found


def finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return (nested) metrics for JSON, which knows neither NaN nor infinity: these become text."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found[name] = finite(value)
        else:
            found[name] = repr(value) if isinstance(value, float) and not math.isfinite(value) else value
    return found
