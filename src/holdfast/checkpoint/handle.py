"""`Checkpoint`: a reference to a directory of files, ours or anybody's, wherever it lives."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import tempfile
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    HoldfastError,
    IncompleteCheckpointError,
    NotLocalError,
    StorageNotFoundError,
)
from holdfast.format.commit import make_folders, read_manifest, read_manifest_bytes, remove
from holdfast.format.contents import ContentsReader
from holdfast.format.digest import close_by_blanks
from holdfast.format.manifest import MANIFEST_NAME, Manifest, body_digest
from holdfast.format.names import METADATA_FILE
from holdfast.run.external import change, held
from holdfast.run.index import RUN_FILE
from holdfast.run.lease import files_of
from holdfast.run.names import LATEST, refuse_run
from holdfast.run.record import Sidecar, change_sidecar, plain_metrics, read_sidecar, timestamp
from holdfast.run.remains import holds_remains
from holdfast.run.view import RunView
from holdfast.storage.base import Storage, check_path
from holdfast.storage.local.local_storage import LocalStorage, absolute, drop_link, link_at
from holdfast.storage.memory import MemoryStorage
from holdfast.storage.resolve import check_slashes, from_description, resolve, split_uri
from holdfast.storage.wrapped import InputStream

from .summary import state_tree, top_names

if TYPE_CHECKING:
    from .verify import Verification

__all__ = [
    "Checkpoint", "CommittedCheckpoint", "DictStore", "file_system", "locate", "newest_of_run",
    "without_prefix",
]  # fmt: skip

_LOG = get_logger("checkpoint")


class Checkpoint:
    """A reference to a checkpoint: a directory (or one file) in a storage. Making one reads nothing.

    Any directory can be a checkpoint. A directory without a manifest of ours is *foreign*: usable, but never picked by
    itself, and `verify` says so. Two handles are equal when they mean the same location.

    Args:
        path: a path, a URI such as "memory://name/dir", or, with ``filesystem``, a path inside it.
        filesystem: the `holdfast.storage.Storage` that holds ``path``.

    Raises:
        ConfigError: the path names no directory below a storage's root, or its scheme is not known.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "mine"
        >>> folder.mkdir(); _ = (folder / "weights.bin").write_bytes(b"1234")
        >>> checkpoint = Checkpoint(folder)
        >>> checkpoint.set_metadata({"note": "first"}); checkpoint.get_metadata()
        {'note': 'first'}
        >>> with checkpoint.as_directory() as path:
        ...     sorted(os.listdir(path))
        ['.metadata.json', 'weights.bin']
    """

    __slots__ = ("__weakref__", "_name", "_owned", "_storage")

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        self._storage, self._name = locate(path, filesystem)
        self._owned = DictStore.of(self._storage)

    @classmethod
    def at(cls, storage: Storage, name: str) -> Checkpoint:
        """Refer to the directory ``name`` of ``storage``, without looking at anything."""
        self = cls.__new__(cls)
        self._storage, self._name = storage, check_path(name)
        self._owned = DictStore.of(storage)
        return self

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Refer to a local directory; a FILE is a one-file checkpoint. Neither has to be there yet."""
        return cls(Path(path) if isinstance(path, (str, os.PathLike)) else path)

    @classmethod
    def from_uri(cls, uri: str) -> Checkpoint:
        """Refer to a URI."""
        return cls(uri)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Save a dictionary into memory; it lives as long as some handle in this process refers to it.

        Takes what a state takes. State dicts whose names all start with ``module.`` (made by a wrapped model) lose
        that prefix. The time goes to the metadata, so `to_dict` gives back just what came in.

        Raises:
            ConfigError: ``data`` is no dictionary.
            UnsupportedStateError: a value cannot be saved.
        """
        from holdfast.checkpointer.functions import save

        if not isinstance(data, Mapping):
            raise ConfigError(f"Checkpoint.from_dict({type(data).__name__}(...)): give a dictionary")
        store = DictStore(os.urandom(8).hex())
        save(f"{store.uri}/checkpoint", without_prefix(dict(data)), ranks="this")
        self = cls(f"{store.uri}/checkpoint")
        self.set_metadata({"_timestamp": time.time(), "id": store.name})
        return self

    def to_dict(self) -> dict[str, Any]:
        """Load the whole state as a nested dictionary, tensors on the CPU."""
        return cast("dict[str, Any]", self.load())

    # -- where ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self._name.rsplit("/", 1)[-1]

    @property
    def filesystem(self) -> Any:
        """What holds it: ``Checkpoint(c.path, c.filesystem) == c``.

        A `pyarrow.fs.FileSystem` in which `path` is a path, as in Ray Train, where pyarrow is installed; without it
        `storage`.
        """
        return file_system(self._storage)

    @property
    def storage(self) -> Storage:
        """The storage that `directory` is relative to."""
        return self._storage

    @property
    def directory(self) -> str:
        """Path of the checkpoint inside `storage`."""
        return self._name

    @property
    def uri(self) -> str:
        """The absolute path of a local checkpoint, else its URI."""
        return f"{self._storage.uri.rstrip('/')}/{self._name}"

    @property
    def path(self) -> str:
        """The absolute path, without a scheme."""
        root = self._storage.local_root
        return str(root / self._name) if root is not None else split_uri(self.uri)[1]

    def __eq__(self, other: object) -> bool:
        return self.uri == other.uri if isinstance(other, Checkpoint) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"Checkpoint({self.uri!r})"

    def __fspath__(self) -> str:
        if self._storage.local_root is None:
            raise NotLocalError(f"{self.uri} is not on a local disk: use as_directory() or to_directory()")
        return self.path

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._storage.describe(), self._storage.uri, self._name)

    # -- files ---------------------------------------------------------------------------------------------------

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files to a local directory (a new temporary one by default) and return it; durable on return.

        Files of the same names that are there already are replaced if they differ, each in one step; of a checkpoint
        that was brought there before, only those that were changed since are read. Processes of a machine that do so at
        the same time share one download of a remote checkpoint; those that give the same path share the directory as
        well.

        Raises:
            CheckpointExistsError: there is a run at ``path``.
        """
        from holdfast.copying.downloads import own_download, take_turns  # not above: a training copies nothing
        from holdfast.copying.transfer import copy_checkpoint, copy_file

        directory = os.path.abspath(
            os.path.expanduser(path) if path is not None else tempfile.mkdtemp(prefix="holdfast-")
        )
        target = LocalStorage(directory)
        is_file = self._is_file()
        if self._storage.local_root is not None and _is_same(
            self.path, os.path.join(directory, self.name) if is_file else directory
        ):
            return directory  # it lies there
        refuse_run(target, "")
        if is_file:
            copy_file(self._storage, self._name, target, self.name)
        elif self._storage.local_root is not None:
            self._require()
            if not _copy_folders(self.path, directory):
                copy_checkpoint(self._storage, self._name, target, "", overwrite=True)
        elif path is None:
            own_download(self._storage, self._name, Path(directory))
        else:
            with take_turns(self._storage, self._name, Path(directory)) as is_there:
                if not is_there:
                    copy_checkpoint(self._storage, self._name, target, "", overwrite=True)
        return directory

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Give a local directory with the files, to be read only.

        Local: the real path, nothing is copied; directories without files are made if they are missing. Remote:
        downloaded once per machine, shared by all processes on it, removed after the last of them. A one-file
        checkpoint: a directory that holds it under its own name.
        """
        if self._storage.local_root is None:
            if self._is_file():
                with tempfile.TemporaryDirectory(prefix="holdfast-") as directory:
                    yield self.to_directory(directory)
            else:
                from holdfast.copying.downloads import shared_download

                with shared_download(self._storage, self._name) as folder:
                    yield str(folder)
        elif self._is_file():
            with tempfile.TemporaryDirectory(prefix="holdfast-") as directory:
                os.symlink(self.path, os.path.join(directory, self.name))
                yield directory
        else:
            self._require()
            with contextlib.suppress(CheckpointError):
                # A copy made with other tools, or a process that ended right after the commit, may have lost them.
                make_folders(self._storage, self._name, read_manifest(self._storage, self._name))
            yield self.path

    def open(self, name: str) -> BinaryIO:
        """Open a file of the checkpoint for reading.

        Raises:
            StorageNotFoundError: there is no such file.
        """
        path = self._name if self._is_file() and name == self.name else f"{self._name}/{check_path(name)}"
        return io.BufferedReader(InputStream(self._storage.open(path)), 1 << 20)

    def delete(self) -> None:
        """Delete it, manifest first. Nothing asks whether it is pinned.

        Raises:
            CheckpointNotFoundError: there is nothing, or this is a run, or a folder of checkpoints or runs.
        """
        if self._is_file():
            self._storage.delete(self._metadata_path())
            self._storage.delete(self._name)
            return
        self._require()
        if (several := self._several()) is not None:
            raise CheckpointNotFoundError(
                f"{self.uri} is {several}, not one checkpoint, and nothing was deleted: delete those that you mean, as "
                f"in Checkpoint({self.uri + '/NAME'!r}).delete(), or remove the whole directory by other means"
            )
        if link_at(self._storage, LATEST) == self._name:
            drop_link(self._storage, LATEST)
        remove(self._storage, self._name)
        # Files of a user, or of a directory that never was ours.
        self._storage.delete_tree(self._name)

    # -- what it says about itself -------------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, read anew; None for a foreign directory or file.

        Raises:
            CheckpointNotFoundError: there is nothing.
            IncompleteCheckpointError: there are files of a save that never committed.
            CorruptCheckpointError: the manifest is damaged.
        """
        if self._is_file():
            return None
        try:
            return read_manifest(self._storage, self._name)
        except IncompleteCheckpointError:
            if holds_remains(self._storage, self._name):
                raise
            return None

    @property
    def digest(self) -> str | None:
        """Digest of the manifest, which holds those of all files; None for a foreign checkpoint."""
        return None if self.manifest is None else body_digest(read_manifest_bytes(self._storage, self._name))

    @property
    def step(self) -> int | None:
        """The step it was saved at; None if it does not say."""
        manifest = self.manifest
        return None if manifest is None else manifest.step

    @property
    def metrics(self) -> dict[str, Any]:
        """Its metrics, late ones included."""
        manifest = self.manifest
        if manifest is None:
            return {}
        return {**manifest.metrics, **read_sidecar(self._storage, self._name).metrics}

    @property
    def created(self) -> datetime | None:
        """When it was saved, in UTC."""
        manifest = self.manifest
        return None if manifest is None else datetime.fromtimestamp(timestamp(manifest.created), timezone.utc)

    @property
    def size_bytes(self) -> int:
        """The bytes of its files."""
        if self._is_file():
            return self._storage.stat(self._name).size
        manifest = self.manifest
        if manifest is not None:
            return manifest.total_bytes
        return sum(info.size for _, info in files_of(self._storage, self._name))

    @property
    def is_pinned(self) -> bool:
        """Whether retention must leave it alone."""
        return read_sidecar(self._storage, self._name).pinned

    def keys(self) -> list[str]:
        """The names in its state (``model``, ``optimizer``...); empty for a foreign checkpoint."""
        manifest = self.manifest
        if manifest is None:
            return []
        return top_names(state_tree(ContentsReader(self._storage.child(self._name), manifest)))

    def verify(self, deep: bool = True) -> Verification:
        """Check it: manifest and sizes, and with ``deep`` every byte against its digest.

        Never raises for damage: that is what the result is for.
        """
        from .verify import Verification, verify  # not above: every handle comes past here

        if self._is_file():
            why = "foreign: a single file has no manifest, so there is nothing to check against"
            return Verification(ok=False, problems=(why,), state="foreign")
        return verify(self._storage, self._name, deep=deep)

    def load(self, into: Any = None, **options: Any) -> Any:
        """Load the state; the same as `holdfast.load` of this checkpoint."""
        from holdfast.checkpointer.functions import load

        return load(self, into, **options)

    def pin(self) -> None:
        """Keep it whatever the retention rules say. Works from any process; durable on return."""
        self._set_pin(on=True)

    def unpin(self) -> None:
        """Leave it to the retention rules again."""
        self._set_pin(on=False)

    def _set_pin(self, *, on: bool) -> None:
        self._change(lambda sidecar: sidecar.with_pin(on), "no retention rule ever touches it")

    def report(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Add metrics to this checkpoint, from any process; they win over those it has. Durable on return.

        The index of its run and its retention (`Keep(best=..., metric=...)`) count them, as they count late metrics of
        the training process itself.

        Raises:
            CheckpointNotFoundError: it is gone, or its deletion has begun.
            ConfigError: a value is no JSON.
        """
        given = plain_metrics({**(metrics or {}), **more})
        self._change(lambda sidecar: sidecar.with_metrics(given), "use set_metadata() to note things beside it")

    def _change(self, how: Callable[[Sidecar], Sidecar], otherwise: str) -> None:
        manifest = self.manifest
        if manifest is None:
            raise CheckpointNotFoundError(f"{self.uri} has no manifest of Holdfast: {otherwise}")
        if manifest.run_id:
            change(self._storage, self._name, how)
        else:
            change_sidecar(self._storage, self._name, how)

    @contextlib.contextmanager
    def hold(self, *, at_most_s: float = 3600.0) -> Iterator[Checkpoint]:
        """Keep the retention of its run away from it while the body runs: for a process that evaluates or serves it.

        The trainer is not held up: it deletes the checkpoint later. A holder that dies holds no more: known at once on
        the same machine, after ``at_most_s`` elsewhere. `delete` does not ask.

        Args:
            at_most_s: how long retention waits for the body to end, from when it first wants to delete.

        Raises:
            CheckpointNotFoundError: it is gone, or its deletion has begun: take a newer checkpoint.

        Example:
            >>> import tempfile, holdfast
            >>> saved = holdfast.save(f"{tempfile.mkdtemp()}/first", {"step": 5})
            >>> with saved.hold():
            ...     saved.load()
            {'step': 5}
        """
        manifest = self.manifest
        if manifest is None or not manifest.run_id:
            yield self  # no retention rule ever touches it
            return
        with held(self._storage, self._name, at_most_s=at_most_s):
            yield self

    # -- metadata of the user ------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        """Read the user's metadata; {} if there is none.

        Raises:
            CorruptCheckpointError: it is damaged, or no JSON object.
        """
        from .verify import read_metadata

        return read_metadata(self._storage, self._metadata_path())

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the user's metadata (JSON) atomically. The file ends with blanks, which are its digest.

        Raises:
            ConfigError: it is no dictionary, or holds what JSON has not.
        """
        if not isinstance(metadata, Mapping):
            raise ConfigError(f"metadata of {self.uri}: give a dictionary, not {type(metadata).__name__}")
        try:
            data = json.dumps(dict(metadata)).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"metadata of {self.uri} must be JSON: {error}") from error
        self._storage.put(self._metadata_path(), close_by_blanks(data))

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Merge into the user's metadata. Two processes at once: the later write wins.

        Raises:
            ConfigError: as `set_metadata`.
        """
        self.set_metadata({**self.get_metadata(), **metadata} if isinstance(metadata, Mapping) else metadata)

    # -- inside --------------------------------------------------------------------------------------------------

    def _is_file(self) -> bool:
        return self._storage.exists(self._name)

    def _require(self) -> None:
        root = self._storage.local_root
        exists = (root / self._name).is_dir() if root is not None else next(self._storage.list(self._name), None)
        if not exists:
            raise CheckpointNotFoundError(f"there is no checkpoint {self.uri}: nothing is at this place")

    def _several(self) -> str | None:
        """Return what is here instead of one checkpoint: a run, or a folder that holds one or a checkpoint."""
        inside = [info.path.removeprefix(f"{self._name}/") for info in self._storage.list(self._name, recursive=False)]
        if MANIFEST_NAME in inside:
            return None
        if RUN_FILE in inside:
            return "a run"
        for name in (name for name in inside if name.endswith("/")):
            if self._storage.exists(f"{self._name}/{name}{RUN_FILE}"):
                return f"a folder with the run {name[:-1]}"
            try:
                read_manifest(self._storage, f"{self._name}/{name[:-1]}")
            except HoldfastError:
                continue  # no checkpoint of ours
            return f"a folder with the checkpoint {name[:-1]}"
        return None

    def _metadata_path(self) -> str:
        if not self._is_file():
            return f"{self._name}/{METADATA_FILE}"
        head, slash, last = self._name.rpartition("/")
        return f"{head}{slash}.{last}{METADATA_FILE}"


class CommittedCheckpoint(Checkpoint):
    """A checkpoint as it was committed: it knows its step, metrics and digest, and reads nothing to say them.

    Listeners get it: by the time that one hears of a checkpoint, retention may have deleted it.
    """

    __slots__ = ("_digest", "_metrics", "_step")
    _digest: str | None
    _metrics: dict[str, Any]
    _step: int

    @classmethod
    def told(
        cls, storage: Storage, name: str, *, step: int, metrics: Mapping[str, Any], manifest: bytes = b""
    ) -> CommittedCheckpoint:
        """Refer to the directory or file ``name`` of ``storage``.

        Args:
            storage: what holds it.
            name: path in ``storage``.
            step: of the training.
            metrics: those that it was committed with.
            manifest: its bytes; b"" of a single file, and where they are known elsewhere only.
        """
        self = cls.__new__(cls)
        self._storage, self._name = storage, check_path(name)
        self._owned = DictStore.of(storage)
        self._step, self._metrics, self._digest = step, dict(metrics), body_digest(manifest) or None
        return self

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self._step

    @property
    def metrics(self) -> dict[str, Any]:
        """Its metrics when it was committed."""
        return dict(self._metrics)

    @property
    def digest(self) -> str | None:
        """Digest of the manifest; None of a single file."""
        if self._digest is None:
            with contextlib.suppress(CheckpointError, StorageNotFoundError):
                self._digest = super().digest
        return self._digest


def _rebuild(description: dict[str, Any] | None, uri: str, name: str) -> Checkpoint:
    return Checkpoint.at(from_description(description) if description is not None else resolve(uri), name)


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _copy_folders(path: str, directory: str) -> bool:
    """Make the folders of a local directory that hold nothing; tell whether there is no file to copy at all."""
    is_empty = True
    for place, folders, files in os.walk(path):
        is_empty = is_empty and not files and not any(os.path.islink(os.path.join(place, name)) for name in folders)
        if not folders and not files:
            os.makedirs(os.path.join(directory, os.path.relpath(place, path)), exist_ok=True)
    return is_empty


def without_prefix(value: Any) -> Any:
    """Strip ``module.`` from every state dict in which all names have it."""
    if type(value) not in (dict, OrderedDict):
        return value
    items = [(key, without_prefix(inner)) for key, inner in value.items()]
    uniform = bool(items) and all(isinstance(key, str) and key.startswith("module.") for key, _ in items)
    if uniform and any(hasattr(inner, "dtype") and hasattr(inner, "shape") for _, inner in items):
        items = [(key.removeprefix("module."), inner) for key, inner in items]
    return type(value)(items)


def newest_of_run(given: Checkpoint) -> Checkpoint:
    """Return the newest committed checkpoint of the run at ``given``; ``given`` itself if it is no run.

    The name of the checkpoint taken is logged as a warning, for callers who meant another.

    Raises:
        StorageError: the storage cannot be read.
        CheckpointNotFoundError: the run has no checkpoint, or its guard has found a bad step in each of them.
        IncompleteCheckpointError: it is a folder of runs or of checkpoints.
    """
    try:
        if given.manifest is not None:
            return given
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        pass  # no checkpoint there: perhaps a run
    except HoldfastError:
        return given  # the caller's read raises what is wrong
    root = given.storage.child(given.directory)
    if not root.exists(RUN_FILE):
        children = [info.path.rstrip("/") for info in islice(root.list("", recursive=False), 50)]
        inside = [name for name in children if any(root.exists(f"{name}/{one}") for one in (RUN_FILE, MANIFEST_NAME))]
        if inside:
            raise IncompleteCheckpointError(
                f"{root.uri} is neither a checkpoint nor a run; it has {listed(sorted(inside))}: give one of them"
            )
        return given
    view = RunView(root)
    record = view.latest()
    newer = view.passed_over(None if record is None else record.name)
    if record is None:
        if not newer:
            raise CheckpointNotFoundError(
                f"{root.uri} is a run without a good checkpoint: `holdfast ls {root.uri}` shows what there is"
            )
        raise CheckpointNotFoundError(
            f"the run {root.uri} has no checkpoint that its guard would go on from: {newer}; name one to have it anyway"
        )
    newer = newer and f"; newer, but no start takes them, for its guard: {newer}"
    _LOG.warning("%s is a run: its newest checkpoint, %s, is taken%s", root.uri, record.name, newer)
    return Checkpoint.at(root, record.name)


def locate(path: str | os.PathLike[str], filesystem: Any) -> tuple[Storage, str]:
    """Split a location into the storage of its parent and its name."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ConfigError(f"Checkpoint({path!r}): give a path or a URI")
    text = os.fspath(path)
    if filesystem is not None:
        if not isinstance(filesystem, Storage):
            # A file system of pyarrow or fsspec: the path follows its rules, and local ones know the current directory.
            head, slash, name = text.rstrip("/").rpartition("/")
            return resolve(head or slash, filesystem), check_path(name)
        storage = filesystem
        base = split_uri(storage.uri)[1].rstrip("/") + "/"
        if text.startswith("/") and not text.startswith(base):
            raise ConfigError(f"Checkpoint({text!r}): the path is outside of {storage!r}")
        head, _, name = text.removeprefix(base).rstrip("/").rpartition("/")
        return storage.child(head), check_path(name)
    scheme, rest = ("file", check_slashes(text)) if isinstance(path, os.PathLike) else split_uri(text)
    if scheme == "file":
        full = absolute(os.path.expanduser(rest))
        # A link such as `latest` moves on while we read: what it means now is what this handle means.
        head, name = os.path.split(os.path.realpath(full) if os.path.islink(full) else full)
        if not name:
            raise ConfigError(f"Checkpoint({text!r}): the root of the file system cannot be a checkpoint")
        return LocalStorage(head), name
    rest, settings = _without_settings(scheme, rest)
    head, slash, name = rest.rstrip("/").rpartition("/")
    if not slash:
        raise ConfigError(f"Checkpoint({text!r}): give a directory inside of it, as in {text}/checkpoint")
    return resolve(f"{scheme}://{head}{settings}"), check_path(name)


def _without_settings(scheme: str, rest: str) -> tuple[str, str]:
    """Split off settings of the storage, such as ``?endpoint_override=...``, which stand behind the whole path.

    Whatever stands there is a matter of the storage: no part of the name of a checkpoint, which is shown.
    """
    if scheme not in ("s3", "s3a") or "?" not in rest:
        rest, mark, settings = rest.partition("?") if scheme != "memory" else (rest, "", "")
        return rest, mark + settings
    from holdfast.storage.object.bucket import split_settings

    whole = f"{scheme}://{rest}"
    place, _ = split_settings(whole)
    if place == whole:  # nothing that is known: the storage refuses it
        place = whole.partition("?")[0]
    return place[len(scheme) + 3 :], whole[len(place) :]


def file_system(storage: Storage) -> Any:
    """Return the file system of pyarrow that shows a storage; the storage itself where pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        return storage
    from holdfast.storage.adapters.for_pyarrow import as_pyarrow

    return as_pyarrow(storage)


class DictStore:
    """Owns the memory behind `Checkpoint.from_dict`; handles hold it, and it empties itself after the last."""

    def __init__(self, name: str) -> None:
        storage = MemoryStorage(f"holdfast-dict-{name}")
        self.name = name
        self.uri = storage.uri
        _dict_stores[self.uri] = self
        weakref.finalize(self, storage.delete_tree, "")

    @staticmethod
    def of(storage: Storage) -> DictStore | None:
        """Return the owner of a storage that a dictionary lives in, None for all others."""
        return _dict_stores.get(storage.uri)


_dict_stores: weakref.WeakValueDictionary[str, DictStore] = weakref.WeakValueDictionary()
