"""What lies in a save folder: directories and single files alike, as values that can be ordered."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

from holdfast._log import get_logger
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageNotFoundError,
)
from holdfast.format.commit import read_manifest
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.interop.unpickle import read_torch_stream
from holdfast.run.record import Record, read_sidecar, timestamp
from holdfast.run.remains import is_remains
from holdfast.storage.base import Storage
from holdfast.storage.stream import InputStream

from ..times.timestamp import Timestamp
from .files import read_note
from .naming import is_later
from .of_composer import is_composers

__all__ = [
    "CONTAINERS",
    "FolderEntry",
    "container_of",
    "is_foreign",
    "is_in_the_way",
    "is_sharded_of_torch",
    "look",
    "look_at",
    "names_in",
]

_LOG = get_logger("trainers.loop")
CONTAINERS = {"": "directory", ".pt": "torch", ".safetensors": "safetensors"}
_REFUSED = (
    ".tar",
    ".tgz",
    ".gz",
    ".bz2",
    ".lzma",
    ".lz4",
    ".lzo",
    ".xz",
    ".zst",
    ".zip",
    ".pth",
    ".pkl",
    ".bin",
    ".ckpt",
)


def container_of(name: str, *, what: str) -> str:
    """Return how a checkpoint of this name is stored: "directory", "torch" or "safetensors".

    Raises:
        ConfigError: the suffix is that of a container there is none of.
    """
    suffix = PurePosixPath(name).suffix
    if suffix.lower() in _REFUSED or (suffix not in CONTAINERS and suffix.lower() in CONTAINERS):
        raise ConfigError(
            f"{what}={name!r}: there is no container {suffix!r}; use no suffix (a Holdfast directory), '.pt' (one file "
            "for torch.load) or '.safetensors' (weights)"
        )
    return CONTAINERS.get(suffix, "directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """One checkpoint in a folder.

    Attributes:
        name: path inside the folder.
        container: "directory", "torch" or "safetensors".
        attempt, step: what orders the checkpoints of a folder.
        run_id, checkpoint_id: of a directory that was saved under this name; "" of any other.
        weights_only: it holds nothing but weights.
        problem: why it cannot be used; None if it seems fine.
        created: seconds since 1970.
        metrics: recorded with it.
        training: which training saved it, over all its lives; "" if it does not say.
        of_composer: Composer wrote it: it is resumed from, and never deleted.
    """

    name: str
    container: str
    attempt: int = 0
    step: int = 0
    weights_only: bool = False
    problem: str | None = None
    created: float = 0.0
    epoch: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    training: str = ""
    of_composer: bool = False
    run_id: str = ""
    checkpoint_id: str = ""

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: the highest is the newest."""
        return self.attempt, self.step, self.name

    def record(self, storage: Storage) -> Record:
        """Return what retention decides by."""
        pinned = self.of_composer or (self.container == "directory" and read_sidecar(storage, self.name).pinned)
        return Record(
            name=self.name, attempt=self.attempt, step=self.step, epoch=self.epoch, created=self.created,
            metrics=self.metrics, pinned=pinned,
        )  # fmt: skip


def names_in(storage: Storage, *, nested: bool) -> list[str]:
    """Return the names of everything in a folder that may be a checkpoint: directories, and files by their suffix.

    Args:
        storage: the folder.
        nested: look into sub-folders too.
    """
    names = set()
    for info in storage.list("", recursive=nested):
        path = info.path
        if path.endswith("/"):
            names.add(path[:-1])
        elif path.endswith(f"/{MANIFEST_NAME}"):
            names.add(path[: -len(MANIFEST_NAME) - 1])
        elif PurePosixPath(path).suffix in CONTAINERS and PurePosixPath(path).suffix and not _is_alias(storage, path):
            names.add(path)
    # Files of a directory (model-....safetensors) are no checkpoints of their own.
    return sorted(name for name in names if not any(str(above) in names for above in PurePosixPath(name).parents))


def _is_alias(storage: Storage, path: str) -> bool:
    """Tell whether a file is a link to another name of this folder, as that to the newest is: that one is listed too.

    A link that leads out of the folder is no alias: opening it is refused, so that nothing is passed over silently.
    """
    root = storage.local_root
    if root is None or not (link := root / path).is_symlink():
        return False
    return link.resolve().is_relative_to(root.resolve())


def look(
    storage: Storage,
    *,
    nested: bool,
    wanted: Callable[[str], object] | None = None,
    named: Iterable[str] = (),
) -> list[FolderEntry]:
    """Return the checkpoints of a folder, newest first; damaged ones come with their problem.

    Args:
        storage: the folder.
        nested: look into sub-folders too.
        wanted: tells which names matter.
        named: names to ask for although no listing may show them yet.

    Raises:
        StorageError: the folder cannot be read. An unreadable folder never counts as empty.
    """
    found = []
    for name in sorted({*names_in(storage, nested=nested), *named}):
        if wanted is None or wanted(name):
            entry = look_at(storage, name)
            if entry is not None:
                found.append(entry)
    return sorted(found, key=lambda entry: entry.order, reverse=True)


def look_at(storage: Storage, name: str) -> FolderEntry | None:
    """Describe a checkpoint; None for a name that neither Holdfast nor Composer made, or that is not complete."""
    container = CONTAINERS.get(PurePosixPath(name).suffix, "directory")
    try:
        if container == "directory":
            return _directory(storage, name)
        note = read_note(storage, name)
        if note is None:
            return _of_composer(storage, name) if container == "torch" else None
    except (IncompleteCheckpointError, CheckpointNotFoundError, StorageNotFoundError):
        return None
    except (CorruptCheckpointError, CheckpointError, ConfigError) as error:
        return FolderEntry(name=name, container=container, problem=str(error))
    return FolderEntry(
        name=name, container=container, attempt=int(note.get("attempt", 0)), step=int(note.get("step", 0)),
        weights_only=bool(note.get("weights_only")), created=float(note.get("created", 0.0)),
        epoch=note.get("epoch"), metrics=dict(note.get("metrics") or {}), training=str(note.get("training", "")),
    )  # fmt: skip


def is_sharded_of_torch(storage: Storage, name: str) -> bool:
    """Tell whether a directory is one of torch.distributed.checkpoint, such as Composer saves of a sharded model."""
    return storage.exists(f"{name}/.metadata") and not storage.exists(f"{name}/{MANIFEST_NAME}")


def is_foreign(storage: Storage, name: str) -> bool:
    """Tell whether a name holds files that are neither a checkpoint nor what is left of a checkpoint of ours."""
    if storage.exists(name):
        return True
    files = [info.path for info in storage.list(name, recursive=False)]
    return bool(files) and not is_remains(files)


def is_in_the_way(storage: Storage, name: str, match: re.Match[str] | None, now: Timestamp) -> bool:
    """Tell whether what has this name is a checkpoint of a later moment, or somebody else's."""
    after = False if match is None else is_later(match, now)
    if after is False:
        return False
    entry = look_at(storage, name)
    if entry is None:
        return is_foreign(storage, name)  # a name is all there is to go by
    if entry.problem is not None:
        # Damage that a resume has set aside is written anew; where nothing was resumed it may be the user's own file.
        return now.count("batch") == 0
    # A name without counters does not tell the moment; the checkpoint itself does.
    return bool(after) or entry.step > now.count("batch") or now.count("batch") == 0


def _directory(storage: Storage, name: str) -> FolderEntry:
    manifest = read_manifest(storage, name)
    metrics = {**manifest.metrics, **read_sidecar(storage, name).metrics}
    is_copy = manifest.name not in ("", name)
    return FolderEntry(
        name=name, container="directory", attempt=manifest.attempt, step=manifest.step or 0, metrics=metrics,
        weights_only=manifest.extra.get("content") == "weights", created=timestamp(manifest.created),
        epoch=manifest.epoch, training=str(manifest.extra.get("training", "")),
        run_id="" if is_copy else manifest.run_id or "", checkpoint_id="" if is_copy else manifest.checkpoint_id,
    )  # fmt: skip


def _of_composer(storage: Storage, name: str) -> FolderEntry | None:
    """Describe a file of Composer; None for one of another program.

    Raises:
        CorruptCheckpointError: the file is damaged.
    """
    with storage.open(name) as reader:
        stream = cast("io.BufferedReader", io.BufferedReader(InputStream(reader), 1 << 20))
        found = read_torch_stream(stream, f"{storage.uri}/{name}", map_location="meta")  # no tensor is read
    if not isinstance(found, Mapping) or not is_composers(found):
        return None
    stamp = found["state"].get("timestamp", {}).get("Timestamp")
    counters = stamp if isinstance(stamp, Mapping) else {}
    return FolderEntry(
        name=name, container="torch", step=int(counters.get("batch", 0)), epoch=counters.get("epoch"),
        weights_only=not counters, created=storage.stat(name).modified, of_composer=True,
    )  # fmt: skip
