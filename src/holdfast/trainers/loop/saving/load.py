"""Load a checkpoint, whatever it is stored as, into a state; `save_checkpoint` and `load_checkpoint` at any path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.checkpoint.handle import locate
from holdfast.checkpointer.console import ResumeBlock, load_bar
from holdfast.checkpointer.functions import save
from holdfast.checkpointer.pending_saves import ANSWER_MARGIN_S
from holdfast.checkpointer.run_session import answer
from holdfast.errors import CheckpointNotFoundError, ConfigError, StateMismatchError
from holdfast.format.manifest import MANIFEST_NAME, Manifest
from holdfast.state.load.restore import load_state, paths
from holdfast.state.load.selection import Fit, covers
from holdfast.state.load.stored import Stored, open_stored
from holdfast.state.tree import rng
from holdfast.state.tree.objects import is_metric
from holdfast.state.tree.values import ObjectNode, PerRank, PerRankNode
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve, split_uri
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import SaveJob

from ..arguments import check_flags, check_path
from ..callbacks import Callback, Logger
from ..evaluator import metrics_of
from ..parallel import TIMEOUT_S, Ranks, is_sharded
from ..state import State
from ..time import Event
from . import layout
from .files import FileImage, lay, opened, refuse_objects
from .finder import NameTemplate, container_of, is_sharded_of_torch, look_at, names_in, run_variables
from .folder import storage_prefix
from .layout import IgnoreKeys
from .uploads import Locator, as_object_store

_LOG = get_logger("trainers.loop")
# What has to fit for training to go on; anything else that does not fit is said.
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
        saved: root and manifest of that directory.
    """

    uri: str
    full: bool
    restored: list[str] = field(default_factory=list)
    not_restored: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    generators: Mapping[str, Any] | None = None
    headline: str = ""
    checkpoint_id: str | None = None
    saved: tuple[Storage, Manifest] | None = None

    def show(self) -> None:
        """Print the block."""
        block = ResumeBlock(
            headline=self.headline or f"loaded {'everything' if self.full else 'weights'} from {self.uri}",
            notes=self.notes, restored=self.restored, not_restored=self.not_restored,
        )  # fmt: skip
        block.show()


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
            f"load_path={os.fspath(path)!r} is a folder of checkpoints ({listed(inside, 5)}): "
            f"give one of them; or give it as save_folder, with autoresume=True"
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
    with opened(storage, name, uri) as (found, mapped):
        return _load_plain(found, uri, state, options, mapped)


def _fresh(stored: Stored, ranks: Ranks, options: LoadOptions) -> dict[str, Any]:
    """Load a directory as nested dictionaries of the form that a single file has."""
    place, saved_by = stored.storage, stored.manifest.world_size
    with load_bar(place, show=options.show_bar if ranks.leads else False) as progress:
        found: dict[str, Any] = load_state(stored, progress=progress).state
    if isinstance(own := found.get("rng"), Mapping):
        generators = dict.fromkeys(range(saved_by), own)  # by rank
        if stored.resized is not None:  # as in a load of all: these ranks show which generators were in step
            sampled = sorted({0, 1, saved_by - 1} & stored.parts.keys())
            states = [load_state(open_stored(place, rank=rank), fit=Fit(only="rng")).state["rng"] for rank in sampled]
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
    globs = options.ignore_keys if isinstance(options.ignore_keys, Sequence) else ()
    found = refuse_objects(found, uri, globs=globs, weights_only=options.weights_only)
    notes: list[str] = []
    if layout.is_composers(found):
        found = layout.as_ours(found, state, notes)
    ranks, before = state.ranks, found.get("rng")
    counter: Any = found["state"].get("timestamp")
    for name in ("Timestamp", "batch"):
        counter = counter.get(name) if isinstance(counter, Mapping) else None
    batch = counter if isinstance(counter, int) else None
    found = layout.of_rank(found, ranks.rank, ranks.world_size, step=batch)
    generators = found.pop("rng", None)
    stored = lay({"state": found["state"]}, uri, mapped=mapped)
    report = _load_stored(stored, uri, state, replace(options, progress_bar=False), ranks=Ranks(), verify=False)
    report.notes += notes if report.full else []
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
    if report.checkpoint_id is not None:
        report.saved = place, stored.manifest
    skip = _ignored(stored, options.ignore_keys, report)
    if full:
        if "rng" not in stored.tree:
            live.pop("rng")
        skip += _not_wanted(live["state"], saved, report)
    elif not options.weights_only:
        report.notes.append("it holds weights only: training begins at batch 0")
    strict = _STRICT if options.strict_model_weights else _STRICT - {"state/model"}
    lenient = {"rng", *(f"state/{name}" for name in (*live["state"], *saved))} - strict
    if left_out := layout.left_out_of(saved):
        lenient.update(left_out)
        report.notes.append(f"it was saved without {', '.join(left_out)} (save_ignore_keys)")
    _mark_metrics(live["state"], saved, stored.per_rank or {})
    try:
        with load_bar(place, show=options.show_bar if ranks.leads else False) as progress:
            fit = Fit(
                only=None if full else ["state/model"], skip=skip or None, idle_names=bool(skip), lenient=lenient,
                added=lambda _: {f"state/{name}" for name in saved if full and name not in live["state"]},
            )  # fmt: skip
            loaded = load_state(
                stored, live, fit, progress=progress, verify=verify, rank=ranks.rank, world_size=ranks.world_size
            )
    except StateMismatchError as error:
        raise _in_our_words(error, place.uri, uri, options.advice) from None
    empty = {f"state/{name}" for name, value in live["state"].items() if isinstance(value, Mapping) and not value}
    empty |= layout.emptied(paths(stored), skip, loaded.restored) if skip else set()
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


_SAVE_S = TIMEOUT_S + ANSWER_MARGIN_S


def save_checkpoint(
    state: State,
    filename: str | os.PathLike[str] = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
) -> str:
    """Save a state once; durable on return. Every rank calls it.

    Args:
        state: of a trainer.
        filename: path or URI; variables are filled in, the suffix says how it is stored.
        weights_only: nothing but the weights.
        ignore_keys: globs over "/"-joined paths that are not saved, or a function that changes the dictionary.

    Returns:
        Where it is.
    """
    variables = run_variables(state.run_name, state.ranks.info)
    path = NameTemplate(check_path(filename, "name"), what="name").format(variables, state.timestamp)
    ignore = layout.check_ignore_keys(ignore_keys, "ignore_keys")
    container = container_of(path, what="name")
    if container != "directory" and is_sharded(state.model):
        raise ConfigError(
            f"save_checkpoint({os.fspath(filename)!r}): a sharded model is no single file: use a name without suffix"
        )
    step, bare = state.timestamp.count("batch"), weights_only or container == "safetensors"
    # Within an evaluation the weights alone are saved as they are evaluated: training does not go on from them.
    with contextlib.nullcontext() if bare else state.as_in_training():
        live = layout.ignored(state.live(weights_only=weights_only), ignore, what="ignore_keys", looked=set())
        if container == "directory":
            save(path, live, step=step, metrics=metrics_of(state), overwrite=True)
            return path
        found = layout.gathered(layout.expand(live), state.ranks)
        note = {"step": step, "weights_only": bare, "metrics": metrics_of(state)}
        state.ranks.lead("save", lambda: _store(path, container, found or {}, note), work_s=_SAVE_S)
    return path


def _store(path: str, container: str, found: dict[str, Any], note: dict[str, Any]) -> None:
    head, _, tail = path.rpartition("/")
    image = FileImage()
    try:
        image.take(found, container, note)
        storage = resolve(head or ("/" if path.startswith("/") else "."))
        client = WriterClient.start(storage)
        try:
            job = SaveJob(directory=tail, save_id="", container=image.container(lease=None))
            answer(client.submit(storage, job, arena=image.arena), storage, TIMEOUT_S, bound="")
        finally:
            client.close(TIMEOUT_S)
    finally:
        image.close()


def load_checkpoint(
    path: str | os.PathLike[str],
    state: State,
    logger: Any = None,
    object_store: Any = None,
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,
    ignore_keys: IgnoreKeys = None,
) -> Mapping[str, Any] | None:
    """Load a checkpoint into a state, as ``load_path`` of a trainer does it. Every rank calls it.

    Args:
        path: path or URI, or a path inside ``object_store``.
        state: of a trainer.
        logger: not needed.
        object_store: where ``path`` lies, if that is no path and no URI.
        load_weights_only: take the weights alone.
        strict_model_weights: refuse weights that are missing, left over or of another shape.
        progress_bar: show how far it is, on a terminal.
        ignore_keys: globs over "/"-joined paths, or a function that changes the loaded dictionary.

    Returns:
        States of random generators for `holdfast.state.tree.rng.restore`, None if it has none.

    Raises:
        CheckpointError: there is nothing, or it is damaged, or does not fit.
    """
    check_flags(
        load_weights_only=load_weights_only, strict_model_weights=strict_model_weights, progress_bar=progress_bar
    )
    options = LoadOptions(
        weights_only=load_weights_only, strict_model_weights=strict_model_weights, progress_bar=progress_bar,
        ignore_keys=layout.check_ignore_keys(ignore_keys, "ignore_keys"),
    )  # fmt: skip
    store = None if object_store is None else as_object_store(object_store)
    report = load_path(check_path(path, "path"), state, options=options, object_store=store)
    if state.ranks.leads:
        report.show()
    return report.generators


class LoadCheckpoint(Callback):
    """Loads another checkpoint at an event: weights in layers, a base under an adapter.

    Args:
        load_path: path or URI.
        load_weights_only: only the weights.
        strict_model_weights: every weight has to be there and none may be left over.
        ignore_keys: globs over "/"-joined paths, or a function that changes the loaded dictionary.
        event: when; "BEFORE_LOAD" comes before ``load_path`` of the trainer.
    """

    def __init__(
        self,
        load_path: str | os.PathLike[str],
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: Sequence[str] | Any = None,
        event: str | Event = Event.BEFORE_LOAD,
    ) -> None:
        self.load_path = check_path(load_path, "LoadCheckpoint(load_path)")
        check_flags(load_weights_only=load_weights_only, strict_model_weights=strict_model_weights)
        self.load_weights_only, self.strict_model_weights = load_weights_only, strict_model_weights
        self.ignore_keys = layout.check_ignore_keys(ignore_keys, "LoadCheckpoint(ignore_keys)")
        try:
            self.event = Event.of(event)
        except (AttributeError, ValueError):
            names = ", ".join(known.name for known in Event)
            raise ConfigError(f"LoadCheckpoint(event={event!r}): there is no such event; use one of {names}") from None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Load when the event has come."""
        if event is not self.event:
            return
        options = LoadOptions(
            weights_only=self.load_weights_only, strict_model_weights=self.strict_model_weights,
            ignore_keys=self.ignore_keys,
        )  # fmt: skip
        report = load_path(self.load_path, state, options=options)
        if state.ranks.leads:
            report.show()
