"""Load a checkpoint, whatever it is stored as, into a state."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Protocol, runtime_checkable

import torch

from holdfast._log import get_logger
from holdfast.checkpoint.handle import locate
from holdfast.checkpointer.console import ResumeBlock, load_bar
from holdfast.copying.transfer import copy_file
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StateMismatchError,
    StorageNotFoundError,
    UnsupportedStateError,
)
from holdfast.format.codec import dumps
from holdfast.format.index import Piece, TensorEntry
from holdfast.format.manifest import MANIFEST_NAME, Manifest
from holdfast.format.tensor_file import DTYPES, read_header
from holdfast.interop.gathered import forget, mapped_ranges
from holdfast.interop.unpickle import Opaque, read_plain, read_torch
from holdfast.state.load.restore import load_state, paths
from holdfast.state.load.selection import covers
from holdfast.state.load.stored import Stored, decode_tree, open_stored
from holdfast.state.save.plan import signature
from holdfast.state.save.torch_file import from_plain
from holdfast.state.tree import rng
from holdfast.state.tree.arrays import dtype_name, dtype_of, move
from holdfast.state.tree.flatten import flatten
from holdfast.state.tree.objects import is_metric
from holdfast.state.tree.values import ObjectNode, PerRank, PerRankNode
from holdfast.storage.base import FileReader, FileWriter, ObjectInfo, Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.resolve import split_uri

from ..parallel import Ranks
from ..state import State
from .files import IgnoreKeys, emptied, from_torch_file, left_out_of, of_rank, read_note
from .finder import is_sharded_of_torch, look_at, names_in
from .folder import storage_prefix
from .of_composer import as_ours, is_composers

__all__ = ["LoadOptions", "LoadReport", "Locator", "lay", "load_from", "load_path", "place_of"]


_LOG = get_logger("trainers.loop")
# What has to fit for training to go on; anything else that does not fit is said.
_WEIGHTS = "torch.save({'state': {'model': model.state_dict()}}, path), for load_weights_only=True"
_INSTEAD = f"where it was made, save tensors and plain data instead, {_WEIGHTS}"
_STRICT = frozenset({"state/model", "state/optimizers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load.

    Attributes:
        weights_only: nothing but the weights.
        strict_model_weights: refuse weights that are missing, left over or of another shape.
        ignore_keys: what is not loaded.
        progress_bar: show how far it is, where that takes long and somebody watches.
        advice: what to do about a checkpoint that does not fit.
    """

    weights_only: bool = False
    strict_model_weights: bool = True
    ignore_keys: IgnoreKeys = None
    progress_bar: bool = True
    advice: str = (
        "load_weights_only=True takes the weights alone, load_strict_model_weights=False those that fit, and "
        "load_ignore_keys=['state/optimizers', ...] leaves parts out"
    )

    @property
    def show_bar(self) -> bool | None:
        """As `load_bar` takes it."""
        return None if self.progress_bar else False


@dataclass(slots=True)
class LoadReport:
    """What was loaded.

    Attributes:
        uri: where it lay.
        full: everything was in it, not only weights.
        restored, not_restored: as in `holdfast.state.load.restore.Loaded`.
        notes: one line each.
        generators: states of random generators that it held, to be put back when training begins.
        checkpoint_id: of a directory; None for a single file.
    """

    uri: str
    full: bool
    restored: list[str] = field(default_factory=list)
    not_restored: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    generators: Mapping[str, Any] | None = None
    headline: str = ""
    checkpoint_id: str | None = None

    def show(self) -> None:
        """Print the block."""
        block = ResumeBlock(
            headline=self.headline or f"loaded {'everything' if self.full else 'weights'} from {self.uri}",
            notes=self.notes, restored=self.restored, not_restored=self.not_restored,
        )  # fmt: skip
        block.show()


@runtime_checkable
class Locator(Protocol):
    """Finds checkpoints by names of its own, such as those of artifacts."""

    def locate(self, path: str) -> tuple[Storage, str]:
        """Return the storage that holds what ``path`` names, and its name there."""


def load_path(
    path: str | os.PathLike[str],
    state: State,
    *,
    options: LoadOptions,
    object_store: Storage | Locator | None = None,
) -> LoadReport:
    """Load what is at ``path`` into ``state``.

    Raises:
        CheckpointNotFoundError: there is nothing.
        StateMismatchError: it does not fit; nothing was changed.
        CorruptCheckpointError: it is damaged.
    """
    found: list[LoadReport] = []

    def load() -> None:
        storage, name = place_of(path, state, object_store)
        found.append(load_from(storage, name, state, options=options))

    state.ranks.agree("load", load)
    return found[0]


def place_of(path: str | os.PathLike[str], state: State, object_store: Storage | Locator | None) -> tuple[Storage, str]:
    """Return where a checkpoint lies; links are followed."""
    text = os.fspath(path)
    for variable, value in (("run_name", state.run_name), ("rank", 0), ("local_rank", 0), ("node_rank", 0)):
        text = text.replace("{" + variable + "}", str(value))
    if isinstance(object_store, Locator):
        storage, name = object_store.locate(text)
        object_store = None
    elif object_store is not None:
        # Of a whole URI the path counts: the store is the bucket.
        storage, name = object_store, (text.partition("://")[2].partition("/")[2] or text).strip("/")
    else:
        storage, name = locate(text, None)
    if not _is_there(storage, name):
        pointer = name if name.endswith(".symlink") else f"{name}.symlink"
        if not storage.exists(pointer):
            raise CheckpointNotFoundError(
                f"load_path={os.fspath(path)!r}: there is no checkpoint at {storage.uri}/{name}, complete or not, and "
                "no link of this name"
            )
        name = pointer
    if name.endswith(".symlink"):
        key = storage.read(name).decode().strip()
        storage, name = _follow(storage, key, object_store)
        if not _is_there(storage, name):
            raise CheckpointNotFoundError(
                f"load_path={os.fspath(path)!r} is a link to {key!r}, and there is no checkpoint of that name"
            )
    if inside := _checkpoints_in(storage, name):
        raise CheckpointNotFoundError(
            f"load_path={os.fspath(path)!r} is a folder of checkpoints ({', '.join(inside[:5])}"
            f"{' ...' if len(inside) > 5 else ''}): give one of them; or give it as save_folder, with autoresume=True"
        )
    return storage, name


def _checkpoints_in(storage: Storage, name: str) -> list[str]:
    """Return the names of the checkpoints in a directory that is no checkpoint itself."""
    if storage.exists(name) or storage.exists(f"{name}/{MANIFEST_NAME}"):
        return []
    place = storage.child(name)
    return [inner for inner in names_in(place, nested=False) if look_at(place, inner) is not None]


def _follow(storage: Storage, key: str, object_store: Storage | None) -> tuple[Storage, str]:
    prefix = storage_prefix(storage)
    if not prefix or key.startswith(prefix):
        name = key.removeprefix(prefix)
        inside = key.partition("/")[2]  # pointers of earlier versions to libcloud begin with the container
        if split_uri(storage.uri)[0] == "libcloud" and inside and not _is_there(storage, name):
            return storage, inside
        return storage, name
    # The pointer lies beside or below what it points at: begin at the bucket.
    uri = storage.uri[: len(storage.uri.rstrip("/")) - len(prefix.rstrip("/"))].rstrip("/")
    return locate(f"{uri}/{key}", object_store)


def _is_there(storage: Storage, name: str) -> bool:
    if storage.exists(name) or storage.exists(f"{name}/{MANIFEST_NAME}"):
        return True
    return next(iter(storage.list(name)), None) is not None


def load_from(storage: Storage, name: str, state: State, *, options: LoadOptions) -> LoadReport:
    """Load the checkpoint ``name`` of ``storage``; see `load_path`."""
    uri = f"{storage.uri.rstrip('/')}/{name}"
    if is_sharded_of_torch(storage, name):
        source = uri if storage.local_root is None else storage.local_root / name
        raise ConfigError(
            f"{uri} is a directory of torch.distributed.checkpoint, such as Composer saves of a sharded model: run "
            f"`holdfast import {source} NEW` once and load NEW, or load it with dcp.load"
        )
    if not storage.exists(name):
        stored = open_stored(storage.child(name), rank=state.ranks.rank, world_size=state.ranks.world_size)
        if callable(options.ignore_keys):
            return _load_plain(_fresh(stored, state.ranks, options), uri, state, options)
        return _load_stored(stored, uri, state, options)
    with _local_copy(storage, name) as path:
        found = (_read_weights if name.endswith(".safetensors") else _read_torch)(path, uri)
        return _load_plain(found, uri, state, options, mapped_ranges(path))


def _fresh(stored: Stored, ranks: Ranks, options: LoadOptions) -> dict[str, Any]:
    """Load a directory as nested dictionaries of the form that a single file has."""
    place, saved_by = stored.storage, stored.manifest.world_size
    with load_bar(place, show=options.show_bar if ranks.leads else False) as progress:
        found: dict[str, Any] = load_state(stored, progress=progress).state
    if isinstance(own := found.get("rng"), Mapping):
        generators = dict.fromkeys(range(saved_by), own)  # by rank
        if stored.resized is not None:  # as in a load of all: these ranks show which generators were in step
            sampled = sorted({0, 1, saved_by - 1} & stored.parts.keys())
            states = [load_state(open_stored(place, rank=rank), only="rng").state["rng"] for rank in sampled]
            generators = {**dict.fromkeys(range(saved_by), states[-1]), **dict(zip(sampled, states, strict=True))}
        found["rng"] = [generators[rank] for rank in range(saved_by)]
    return found


def _load_plain(
    found: dict[str, Any], uri: str, state: State, options: LoadOptions, mapped: Sequence[tuple[int, int]] = ()
) -> LoadReport:
    """Load nested dictionaries, by the rules for a directory; ``mapped`` is as `lay` takes it."""
    if callable(options.ignore_keys):
        mapped = ()
        options.ignore_keys(found)
        found.setdefault("state", {})
        options = replace(options, ignore_keys=None)
    found = _refuse_objects(found, uri, options)
    notes: list[str] = []
    if is_composers(found):
        found = as_ours(found, state, notes)
    ranks, before = state.ranks, found.get("rng")
    counter: Any = found["state"].get("timestamp")
    for name in ("Timestamp", "batch"):
        counter = counter.get(name) if isinstance(counter, Mapping) else None
    batch = counter if isinstance(counter, int) else None
    found = of_rank(found, ranks.rank, ranks.world_size, step=batch)
    generators = found.pop("rng", None)
    stored = lay({"state": found["state"]}, uri, mapped=mapped)
    report = _load_stored(stored, uri, state, replace(options, progress_bar=False), ranks=Ranks(), verify=False)
    report.notes += notes if report.full else []
    globs = options.ignore_keys if isinstance(options.ignore_keys, Sequence) else ()
    if report.full and isinstance(generators, Mapping) and not covers(globs, "rng"):
        report.generators = generators
        report.restored.append("rng")
        if isinstance(before, list) and len(before) != ranks.world_size:
            report.notes.append(
                f"random generators: derived for {ranks.world_size} rank(s) (the checkpoint has {len(before)})"
            )
    return report


def _load_stored(
    stored: Stored, uri: str, state: State, options: LoadOptions, *, ranks: Ranks | None = None, verify: bool = True
) -> LoadReport:
    ranks, place = state.ranks if ranks is None else ranks, stored.storage
    saved = _contents(stored, uri)
    full = not options.weights_only and "timestamp" in saved
    live: dict[str, Any] = state.live() if full else {"state": {"model": state.model}}
    report = LoadReport(uri, full, checkpoint_id=stored.manifest.checkpoint_id or None)
    skip = _ignored(stored, options.ignore_keys, report)
    if full:
        if "rng" not in stored.tree:
            live.pop("rng")
        skip += _not_wanted(live["state"], saved, report)
    elif not options.weights_only:
        report.notes.append("it holds weights only: training begins at batch 0")
    strict = _STRICT if options.strict_model_weights else _STRICT - {"state/model"}
    lenient = {"rng", *(f"state/{name}" for name in (*live["state"], *saved))} - strict
    if left_out := left_out_of(saved):
        lenient.update(left_out)
        report.notes.append(f"it was saved without {', '.join(left_out)} (save_ignore_keys)")
    _mark_metrics(live["state"], saved, stored.per_rank or {})
    try:
        with load_bar(place, show=options.show_bar if ranks.leads else False) as progress:
            only = None if full else ["state/model"]
            loaded = load_state(
                stored, live, only=only, skip=skip or None, idle_names=bool(skip), lenient=lenient, progress=progress,
                verify=verify, rank=ranks.rank, world_size=ranks.world_size,
                added=lambda _: {f"state/{name}" for name in saved if full and name not in live["state"]},
            )  # fmt: skip
    except StateMismatchError as error:
        raise _in_our_words(error, place.uri, uri, options.advice) from None
    empty = {f"state/{name}" for name, value in live["state"].items() if isinstance(value, Mapping) and not value}
    empty |= emptied(paths(stored), skip, loaded.restored) if skip else set()
    report.restored += [path for path in loaded.restored if path not in empty]
    report.not_restored += loaded.not_restored
    report.notes += loaded.notes
    if full:
        late = "state.serialized_attributes does not name it: if it does by then, it comes back when fit() begins"
        report.not_restored += [(f"state/{name}", late) for name in state.take(loaded.state["state"])]
        report.notes += state.dataset_state.notes()
        if "rng" in loaded.restored:
            report.generators = rng.capture()
        here = f"batch {int(state.timestamp.batch)}, epoch {int(state.timestamp.epoch)}"
        report.headline = f"resumed from {uri} at {here}"
    return report


def _mark_metrics(live: Any, saved: Any, per_rank: dict[str, Any]) -> Any:
    """Make what torchmetrics objects have gathered theirs again: a single file holds it as plain dictionaries."""
    if isinstance(live, PerRank) and isinstance(saved, PerRankNode):
        if saved.key in per_rank:
            per_rank[saved.key] = _mark_metrics(live.value, per_rank[saved.key], per_rank)
    elif is_metric(live) and isinstance(saved, dict):
        return ObjectNode(type(live).__name__, "metric", saved)
    elif isinstance(live, Mapping) and isinstance(saved, dict):
        for key in [key for key in live if key in saved]:
            saved[key] = _mark_metrics(live[key], saved[key], per_rank)
    return saved


def _in_our_words(error: StateMismatchError, place: str, uri: str, advice: str) -> StateMismatchError:
    """Say where the checkpoint really lies, and which arguments of a trainer help."""
    problem, _, _ = str(error).replace(place, uri).partition("\n  what to do:")
    return StateMismatchError(f"{problem}\n  what to do: {advice}", problems=error.problems)


def _contents(stored: Stored, uri: str) -> dict[str, Any]:
    tree = stored.tree
    saved = tree.get("state") if isinstance(tree, dict) else None
    if not isinstance(saved, dict):
        content = ", ".join(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
        raise ConfigError(
            f"{uri} was not saved by a trainer: it holds {content}, not 'state' with 'model' in it; load it with "
            "holdfast.load"
        )
    return saved


def _not_wanted(live: Mapping[str, Any], saved: Mapping[str, Any], report: LoadReport) -> list[str]:
    """Return what is left out because one side has nothing of it, and say so."""
    skip = []
    for name in ("optimizers", "schedulers", "scaler"):
        mine, theirs = live.get(name, {}), saved.get(name, {})
        has_mine = bool(mine) if isinstance(mine, Mapping) else True
        has_theirs = isinstance(theirs, ObjectNode) or bool(theirs)
        if has_mine is not has_theirs:
            skip.append(f"state/{name}")
            why = "not in the checkpoint" if has_mine else "this trainer has none"
            report.not_restored.append((f"state/{name}", why))
    return skip


def _ignored(stored: Stored, ignore: IgnoreKeys, report: LoadReport) -> list[str]:
    globs = [glob.rstrip("/") for glob in ignore] if ignore is not None and not callable(ignore) else []
    every = [*paths(stored), *["rng"] * report.full] if globs else []  # a file's generators are taken apart before
    idle = [glob for glob in globs if not any(covers((glob,), path) for path in every)]
    if idle:
        _LOG.warning("load_ignore_keys: nothing in %s matches %s", report.uri, ", ".join(idle))
    report.notes += [f"load_ignore_keys leaves out {glob}" for glob in globs if glob not in idle]
    return globs


# ---- single files


@contextlib.contextmanager
def _local_copy(storage: Storage, name: str) -> Iterator[str]:
    """Give a file a path of this machine; it is fetched if it lies elsewhere."""
    if (root := storage.local_root) is not None:
        yield str(root / name)
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
        own = f"checkpoint{PurePosixPath(name).suffix}"
        copy_file(storage, name, LocalStorage(scratch), own)
        yield f"{scratch}/{own}"


def _verify(path: str, uri: str) -> None:
    try:
        read_note(LocalStorage(os.path.dirname(path) or "."), os.path.basename(path), verify=True)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(str(error).replace(f"file://{path}", uri), file=uri) from None


def _read_torch(path: str, uri: str) -> dict[str, Any]:
    """Open a torch file; its tensors are mapped, so that nothing is read before it is wanted."""
    is_zip = zipfile.is_zipfile(path)
    if not is_zip and path.endswith(".pt"):
        raise CorruptCheckpointError(f"{uri} is no complete torch file", file=uri)
    if is_zip:
        _verify(path, uri)
    try:
        found = _without_objects(path, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if not is_zip and not _is_pickle(path):
            raise CorruptCheckpointError(
                f"{uri} cannot be read as a file of torch.save: it is none", file=uri
            ) from error
        raise ConfigError(f"{uri} holds pickled objects, which loading would execute: {_INSTEAD}") from error
    except UnsupportedStateError:  # a program
        raise
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        # Of what is no torch file at all its reader says all kinds of things.
        raise CorruptCheckpointError(
            f"{uri} cannot be read as a file of torch.save: {type(error).__name__}: {error}", file=uri
        ) from error
    found = from_plain(found)
    if not isinstance(found, dict) or not isinstance(found.get("state"), dict):
        raise ConfigError(
            f"{uri} was not saved by a trainer: it has no 'state' with 'model' in it; save it as {_WEIGHTS}"
        )
    return from_torch_file(found)


def _without_objects(path: str, *, mmap: bool) -> Any:
    """Read a file of torch; objects of classes that are more than data are `Opaque`, see `_refuse_objects`."""
    try:
        return read_plain(path, mmap=mmap)
    except pickle.UnpicklingError as error:
        try:
            return read_torch(path)
        except UnsupportedStateError:
            raise error from None


def _refuse_objects(found: dict[str, Any], uri: str, options: LoadOptions) -> dict[str, Any]:
    """Leave out objects of foreign classes where nobody wants them, and refuse them anywhere else.

    Raises:
        ConfigError: naming them.
    """
    objects = dict(_objects(found))
    if not objects:
        return found
    globs = options.ignore_keys if isinstance(options.ignore_keys, Sequence) else ()

    def unwanted(path: str) -> bool:
        return covers(globs, path) or (options.weights_only and not path.startswith("state/model"))

    if wanted := [f"{path} ({name})" for path, name in objects.items() if not unwanted(path)]:
        raise ConfigError(
            f"{uri} holds pickled objects, which loading would execute: {', '.join(wanted[:8])}"
            f"{' ...' if len(wanted) > 8 else ''}: load_ignore_keys leaves them out, load_weights_only=True all but "
            f"the weights; or {_INSTEAD}"
        )
    kept: dict[str, Any] = _pruned(found)
    return kept


def _objects(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Opaque):
        yield path, value.name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _objects(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for number, item in enumerate(value):
            yield from _objects(item, f"{path}/{number}")


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _pruned(item) for key, item in value.items() if not isinstance(item, Opaque)}
    if isinstance(value, (list, tuple)):
        return [_pruned(item) for item in value if not isinstance(item, Opaque)]
    return value


def _is_pickle(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == pickle.PROTO


def _read_weights(path: str, uri: str) -> dict[str, Any]:
    """Open a safetensors file; its tensors are mapped."""
    _verify(path, uri)
    with LocalStorage(os.path.dirname(path) or ".").open(os.path.basename(path)) as reader:
        _, entries = read_header(reader, uri)
    whole = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    model = {}
    for key, entry in entries.items():
        known = _OF_SAFETENSORS.get(entry.dtype)
        if known is None:
            raise ConfigError(f"{uri}: tensor {key!r} has the type {entry.dtype}, which cannot be loaded here")
        dtype = dtype_of(known)
        data = whole[entry.offset : entry.offset + entry.nbytes]
        # Somebody else's header may end anywhere: torch wants a tensor to begin at a multiple of its element size.
        data = data if entry.offset % dtype.itemsize == 0 else data.clone()
        model[key] = data.view(dtype).view(entry.shape)
    return {"state": {"model": model}}


_OF_SAFETENSORS = {code: name for name, (code, _) in DTYPES.items()}


_STEP = 4 << 20  # mapped bytes that are copied before their pages are given back
_AROUND = 2 << 20


def lay(state: Mapping[str, Any], uri: str, *, mapped: Sequence[tuple[int, int]] = ()) -> Stored:
    """Return ``state`` as an opened checkpoint; its tensors stay where they are.

    Args:
        state: nested plain data and tensors.
        uri: what it is called in messages.
        mapped: memory that is mapped from a file and that nobody has written to: its pages are given back once read.
    """
    flat = flatten(state)
    ties = signature(flat).aliases
    memory = _Memory(uri, mapped)
    stored = Stored(memory, Manifest(versions={}))
    stored.tree = decode_tree(dumps(flat.tree), uri, stored.refs)
    if flat.per_rank:
        stored.per_rank = decode_tree(dumps(flat.per_rank), uri, stored.refs)
    order = sorted(range(len(flat.tensors)), key=lambda number: flat.tensors[number].data_ptr())
    for place, number in enumerate(order):
        name, tensor = flat.names[number], flat.tensors[number]
        if number in ties:
            stored.aliases[name] = flat.names[ties[number]]
            continue
        file = f"{place:09d}"  # files are read in the order of their names: so a mapped one is from front to back
        memory.tensors[file] = tensor
        piece = Piece(file, 0, tensor.numel() * tensor.itemsize)
        stored.entries[name] = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), (piece,))
    return stored


class _Memory(Storage):
    """Tensors as files, to be read only."""

    def __init__(self, uri: str, mapped: Sequence[tuple[int, int]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._uri, self._mapped = uri, mapped

    @property
    def uri(self) -> str:
        return self._uri

    def open(self, path: str) -> FileReader:
        if path not in self.tensors:
            raise StorageNotFoundError(f"{self._uri} holds no tensor {path!r}")
        return _TensorReader(self.tensors[path], self._mapped)

    def stat(self, path: str) -> ObjectInfo:
        with self.open(path) as reader:
            return ObjectInfo(path=path, size=reader.size)

    def list(self, prefix: str = "", *, recursive: bool = True) -> Iterator[ObjectInfo]:
        yield from (self.stat(name) for name in self.tensors)

    def put(
        self, path: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def copy(self, source: str, target: str) -> None:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def create(self, path: str, size: int) -> FileWriter:
        raise UnsupportedStateError(f"{self._uri} is only read")

    def delete(self, path: str) -> None:
        raise UnsupportedStateError(f"{self._uri} is only read")


class _TensorReader(FileReader):
    def __init__(self, tensor: torch.Tensor, mapped: Sequence[tuple[int, int]]) -> None:
        self.size = tensor.numel() * tensor.itemsize
        # A tensor of other strides is brought into order first: a copy of this one, for as long as it is read.
        self._tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        first, own = self._tensor.data_ptr(), self._tensor.data_ptr() == tensor.data_ptr()
        begins = (low for low, high in mapped if own and low <= first and first + self.size <= high)
        self._mapped_from: int | None = next(begins, None)  # where the file begins in memory

    def read_into(self, offset: int, view: memoryview) -> None:
        source, target = self._tensor.data_ptr() + offset, _address(view.cast("B"))
        step = max(1, view.nbytes) if self._mapped_from is None else _STEP
        for start in range(0, view.nbytes, step):
            size = min(step, view.nbytes - start)
            move(target + start, source + start, size)
            if self._mapped_from is not None:
                forget(source + start, size)

    def close(self) -> None:
        if self._mapped_from is not None:
            # The kernel maps pages around each fault, among them some that were given back before.
            first = self._tensor.data_ptr()
            begin = max(self._mapped_from, first - _AROUND)
            forget(begin, first + self.size - begin)


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr() if len(view) else 0
