"""Names with variables, ``ep{epoch}-ba{batch}``, and what lies in a folder under such names.

A `NameTemplate` makes a name of the counters, and finds them in a name again. A `FolderEntry` is a checkpoint in a
folder, directory or single file: a value that can be ordered.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from string import Formatter
from typing import Any, NamedTuple, cast

from holdfast._ranks import RankInfo
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
from holdfast.run.record import Record, read_sidecar, record_from_manifest
from holdfast.run.remains import is_remains
from holdfast.storage.base import Storage
from holdfast.storage.wrapped import InputStream

from ..time import COUNTERS, Timestamp
from .files import read_note
from .layout import is_composers

RUN_VARIABLES = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
TIME_VARIABLES = (*(name for name in COUNTERS if name != "iteration"), "total_wct", "epoch_wct", "batch_wct")
# The totals first: two counters within an epoch say nothing without the epoch.
_TOTALS = ("batch", "sample", "token", "epoch")
_WITHIN = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
# Far into a training; no two counters are the same.
_LATE = Timestamp(
    **{name: 1_234_567_890 + number for number, name in enumerate(COUNTERS)},
    **dict.fromkeys(TIME_VARIABLES[-3:], 12_345_678.9),
)


class NameTemplate:
    """A folder, file, latest or remote name as the user wrote it.

    Args:
        text: the template.
        what: the argument it came from, for messages.
        times: whether variables of progress (epoch, batch, ...) are allowed.
        read_back: whether the counters have to be found in the name again, see `pattern`.

    Raises:
        ConfigError: a variable is unknown, the braces do not match, or names could not be read back.
    """

    def __init__(self, text: str, *, what: str, times: bool = True, read_back: bool = False) -> None:
        self.text, self.what = text, what
        allowed = (*RUN_VARIABLES, *(TIME_VARIABLES if times else ()))
        try:
            self._parts = [(before, name, spec or "") for before, name, spec, _ in Formatter().parse(text)]
        except ValueError as error:
            raise ConfigError(f"{what}={text!r}: {error}; write {{{{ and }}}} for braces themselves") from None
        self.variables = tuple(name for _, name, _ in self._parts if name is not None)
        unknown = sorted({name for name in self.variables if name not in allowed})
        if unknown:
            raise ConfigError(f"{what}={text!r}: unknown variable {', '.join(unknown)}; there are {', '.join(allowed)}")
        if any("{" in spec for _, _, spec in self._parts):
            raise ConfigError(f"{what}={text!r}: a variable in the format of another; write that format out")
        self._check_formats(read_back=read_back)

    @property
    def has_times(self) -> bool:
        """Whether each moment has a name of its own."""
        return not set(TIME_VARIABLES).isdisjoint(self.variables)

    def _check_formats(self, *, read_back: bool) -> None:
        """Refuse now what `format` would fail at when training has gone on for hours, or a later life at reading."""
        run: dict[str, Any] = {name: "r" if name == "run_name" else 0 for name in RUN_VARIABLES}
        for timestamp in (Timestamp(), _LATE):
            try:
                name = self.format(run, timestamp)
            except (ValueError, KeyError, IndexError) as error:
                raise ConfigError(
                    f"{self.what}={self.text!r}: {error}; variables take formats such as {{epoch:04d}} or none"
                ) from None
            if read_back and not self._is_readable(name, run, timestamp):
                raise ConfigError(
                    f"{self.what}={self.text!r}: no later start could tell the counters in {name!r}; use formats such "
                    "as {epoch:04d} or none, and something between two variables"
                )

    def _is_readable(self, name: str, run: Mapping[str, Any], timestamp: Timestamp) -> bool:
        found = self.pattern(run).fullmatch(name)
        groups = {} if found is None else found.groupdict()
        counters = {counter: text for counter, text in groups.items() if not counter.endswith("wct")}
        return found is not None and all(int(text) == timestamp.count(counter) for counter, text in counters.items())

    def format(self, run: Mapping[str, Any], timestamp: Timestamp | None = None) -> str:
        """Fill the variables in.

        Args:
            run: from `run_variables`.
            timestamp: where training is.
        """
        values = dict(run)
        if timestamp is not None:
            found = timestamp.state_dict()
            values.update({name: found[name] for name in TIME_VARIABLES})
        return self.text.format(**values)

    def shape(self, run: Mapping[str, Any]) -> str:
        """Return the name in this run with all counters alike: two that give the same may write over each other."""
        parts = []
        for before, name, spec in self._parts:
            parts.append(before)
            if name is not None:
                parts.append("*" if name in TIME_VARIABLES else format(run[name], spec))
        return "".join(parts)

    def pattern(self, run: Mapping[str, Any]) -> re.Pattern[str]:
        """Return a pattern that matches every name this template gives in this run, counters as groups."""
        pieces, seen = [], set()
        for before, name, spec in self._parts:
            pieces.append(re.escape(before))
            if name is None:
                continue
            if name not in TIME_VARIABLES:
                pieces.append(re.escape(format(run[name], spec)))
            elif name in seen:
                pieces.append(f"(?P={name})")
            else:
                seen.add(name)
                pieces.append(f"(?P<{name}>{r'[0-9.e+-]+' if name.endswith('wct') else '[0-9]+'})")
        return re.compile("".join(pieces))


class Destinations(NamedTuple):
    """Further names of a checkpoint; None for those it does not get.

    Attributes:
        latest: the link to it in its folder.
        remote: of its upload.
        remote_latest: of the pointer to its upload.
    """

    latest: str | None
    remote: str | None
    remote_latest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverNames:
    """The names that one saver gives in one run.

    Attributes:
        variables: of the run, from `run_variables`.
        file: of a checkpoint in its folder.
        latest: of the link to the newest; None for none.
        remote: of an upload; None if nothing is uploaded.
        remote_latest: of the pointer to the newest upload; None for none.
    """

    variables: Mapping[str, Any]
    file: NameTemplate
    latest: NameTemplate | None
    remote: NameTemplate | None
    remote_latest: NameTemplate | None

    @property
    def shape(self) -> str:
        """The name of a checkpoint, its counters left open."""
        return self.file.shape(self.variables)

    @property
    def nested(self) -> bool:
        """True when checkpoints lie in sub-folders, be it by the name of the run."""
        return "/" in self.shape

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches every name of a checkpoint in this run, counters as groups."""
        return self.file.pattern(self.variables)

    def at(self, now: Timestamp) -> str:
        """Return the name of the checkpoint of a moment."""
        return self.file.format(self.variables, now)

    @property
    def fixed_latest(self) -> str | None:
        """Name of the link to the newest; None if there is none, or each moment has its own."""
        return _fixed(self.latest, self.variables)

    @property
    def fixed_remote_latest(self) -> str | None:
        """Name of the pointer to the newest upload; None if there is none, or each moment has its own."""
        return _fixed(self.remote_latest, self.variables)

    def destinations(self, now: Timestamp) -> Destinations:
        """Return the names, apart from its own, that the checkpoint of a moment gets."""
        templates = (self.latest, self.remote, self.remote_latest)
        return Destinations(
            *(None if template is None else template.format(self.variables, now) for template in templates)
        )


def _fixed(template: NameTemplate | None, variables: Mapping[str, Any]) -> str | None:
    if template is None or template.has_times:
        return None
    return template.format(variables)


def run_variables(run_name: str, ranks: RankInfo) -> dict[str, Any]:
    """Return the variables that do not change in a run. One joint checkpoint is named after rank 0."""
    return {
        "run_name": run_name,
        "rank": 0,
        "local_rank": 0,
        "node_rank": 0,
        "world_size": ranks.world_size,
        "local_world_size": ranks.local_world_size,
    }


def is_later(found: re.Match[str], now: Timestamp) -> bool | None:
    """Tell whether the counters in a name lie after ``now``; None if it has none that say."""
    groups = {name: int(value) for name, value in found.groupdict().items() if not name.endswith("wct")}
    if not groups:
        return None
    if any(groups[name] > now.count(name) for name in _TOTALS if name in groups):
        return True
    within = [name for name in _WITHIN if name in groups]
    if not within:
        return False
    if "epoch" not in groups and not any(name in groups for name in _TOTALS):
        return None
    same_epoch = groups.get("epoch", now.count("epoch")) == now.count("epoch")
    return same_epoch and any(groups[name] > now.count(name) for name in within)


CONTAINERS = {"": "directory", ".pt": "torch", ".safetensors": "safetensors"}
_REFUSED = (
    *(".tar", ".tgz", ".gz", ".bz2", ".lzma", ".lz4", ".lzo", ".xz", ".zst", ".zip"),
    *(".pth", ".pkl", ".bin", ".ckpt"),
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
    record = record_from_manifest(name, manifest, read_sidecar(storage, name))
    is_copy = manifest.name not in ("", name)
    return FolderEntry(
        name=name, container="directory", attempt=record.attempt, step=record.step, metrics=dict(record.metrics),
        weights_only=manifest.extra.get("content") == "weights", created=record.created, epoch=record.epoch,
        training=str(manifest.extra.get("training", "")), run_id="" if is_copy else manifest.run_id or "",
        checkpoint_id="" if is_copy else record.checkpoint_id,
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
