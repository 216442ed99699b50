"""Lightning: what a `Trainer` is given beside callbacks: where it saves, and who its processes are.

`HoldfastCheckpointIO` is the plugin through which a plain `Trainer` saves and loads its checkpoints. On `Saves`:
dictionaries that a framework saves, loads and removes by path, in the background. Strategies and the environment tell
Lightning of the workers of the function trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import torch

from holdfast._log import get_logger
from holdfast._optional import Grafted
from holdfast._ranks import current_ranks
from holdfast._units import listed
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.functions import SaveHandle, begin_save, load
from holdfast.checkpointer.meeting import Alone, Meeting, meet
from holdfast.checkpointer.pending_saves import TRANSIENT_ERRORS, LostSaves, state_of
from holdfast.config import check_timeout
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    HoldfastError,
    IncompleteCheckpointError,
    UnsupportedStateError,
)
from holdfast.format.manifest import Manifest
from holdfast.format.names import save_id_of
from holdfast.model_files import Content, ModelFiles, maker_of
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve
from holdfast.trainers.function.worker.session import get_context
from holdfast.trainers.torch_helpers import get_device

from .keepers import newest_sound
from .reporting import drop_link, followed, is_marker, mark, move_aside, same_as_parent, scalars, unmark

_LOG = get_logger("frameworks")
_LOOK_S = 0.1
_QUIET_S = 5.0  # without a change: nobody writes there any more
_TRAINING = "training"  # in a manifest's ``extra``
_downloads = contextlib.ExitStack()  # the path is all that the user keeps
atexit.register(_downloads.close)


class Saves:
    """Checkpoints of one process, each on its own, under the paths that a framework gives them.

    A checkpoint is removed only when every save that was started before the removal is durable: the framework asks for
    the removal of the old checkpoint as soon as it has handed over the new one.

    Args:
        root: where they go, under the last part of their paths; None: to the paths themselves, which may be URIs.
        unsupported: "raise" or "drop", as in `holdfast.save`.
        timeout_s: bound of every wait.
        advice: what the user can do about a value that cannot be saved.
        model_files: small files committed with each checkpoint, for other libraries, or the name under which a package
            makes them of what is saved; no checkpoint then replaces another.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        unsupported: str,
        timeout_s: float,
        advice: str = "",
        model_files: ModelFiles | Mapping[str, Content] | str | None = None,
    ) -> None:
        if unsupported not in ("raise", "drop"):
            raise ConfigError(f"unsupported={unsupported!r}: use 'raise' or 'drop'")
        check_timeout(timeout_s)
        self._given = root if root is None or "://" in os.fspath(root) else os.path.abspath(root)
        self._root: Storage | None = None if self._given is None else resolve(self._given)
        self._unsupported, self._timeout_s, self._advice = unsupported, timeout_s, advice
        self._model_files, self._makes_files = model_files, maker_of(model_files)
        self._handles: dict[str, SaveHandle] = {}
        self._marks: dict[str, Callable[[], None]] = {}
        self._given_as: dict[str, str] = {}  # target -> the path that this training has for it
        self._removals: dict[str, Future[None]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._lost = LostSaves()
        self._training, self._attempt = uuid.uuid4().hex, 1  # which training this saves, and which life of it this is

    def __reduce__(self) -> Any:
        """In another process, nothing is under way."""
        options: dict[str, Any] = {
            "unsupported": self._unsupported,
            "timeout_s": self._timeout_s,
            "advice": self._advice,
            "model_files": self._model_files,
        }
        return partial(Saves, **options), (self._given,)

    def save(
        self, path: str | os.PathLike[str], state: Mapping[Any, Any], *, step: int | None, metrics: Mapping[str, Any]
    ) -> None:
        """Save ``state``, replacing what is there; returns when it is copied.

        An earlier save that was lost because the storage was full or did not answer is said, and training goes on.

        Raises:
            UnsupportedStateError: a value cannot be saved.
            ConfigError: another path that is in use has the same last part, and so the same place in the root.
            CheckpointExistsError: with ``model_files``, there is a checkpoint at this path.
            HoldfastError: an earlier save or removal failed otherwise, or it was the tenth in a row that was lost.
        """
        drop_link(path)
        target = self._at(path)
        self._settle_ended()
        self._refuse_another(path, target)
        state = self._plain(state, target)
        if (removal := self._removals.pop(target.uri, None)) is not None:
            removal.result(self._timeout_s)
        if (handle := self._handles.pop(target.uri, None)) is not None:
            self._settle(target.uri, handle, self._timeout_s)
        _move_file_aside(target)
        self._marks[target.uri] = unmark_it = mark(path, target)
        try:
            self._handles[target.uri] = begin_save(
                target, state, step=step, metrics=metrics, overwrite=self._makes_files is None, ranks="this",
                unsupported=self._unsupported,
                model_files=None if self._makes_files is None else self._makes_files(state),
                fields={"attempt": self._attempt, "extra": {_TRAINING: self._training}},
            )  # fmt: skip
        except BaseException as error:
            unmark_it()
            if isinstance(error, CheckpointExistsError):
                raise CheckpointExistsError(
                    f"{target.uri} is a checkpoint already, and files of model_files keep their names, so none can "
                    "replace another: give every checkpoint a name of its own (ModelCheckpoint: {step} in filename, "
                    'save_last="link")'
                ) from error
            if isinstance(error, UnsupportedStateError):
                raise UnsupportedStateError(f"{error} ({self._advice})") from error
            raise

    def load(self, path: str | os.PathLike[str], *, device: Any = None, trusted: bool = False) -> dict[str, Any]:
        """Load what was saved. A file, which is the framework's own, is read by torch.

        Args:
            path: as it was given to `save`.
            device: where tensors go.
            trusted: torch may unpickle whatever a file holds; else its weights-only reader refuses it.
        """
        path = followed(path)
        target = self._at(path)
        if os.path.exists(path) and target.uri not in self._handles and not is_marker(path):
            target = Checkpoint(path)  # what `latest` gave, or a file of the framework
        if target.uri in self._handles:
            self._handles[target.uri].result(self._timeout_s)
        if (manifest := target.manifest) is not None:
            found = load(target, map_location=device)
            # What is saved from now on is of a later life of that training.
            self._attempt = max(self._attempt, manifest.attempt + 1)
            self._training = str(manifest.extra.get(_TRAINING, self._training))
        else:
            found = torch.load(os.fspath(path), map_location=device or "cpu", weights_only=not trusted)
        return cast("dict[str, Any]", found)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint in the background, once everything started before is durable; of a link only itself."""
        if drop_link(path):
            return
        target = self._at(path)
        self._given_as.pop(target.uri, None)
        if is_marker(path):
            unmark(path)
        elif os.path.exists(path):
            target = Checkpoint(path)
        before = list(self._handles.values())
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-removals")
        self._removals[target.uri] = self._thread.submit(_remove, target, before, self._timeout_s)

    def latest(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        is_part: Callable[[Checkpoint], bool] = lambda checkpoint: False,
    ) -> str | None:
        """Return the newest sound checkpoint of a directory (default: the root) as a local path; None if there is none.

        Every byte is checked. A remote checkpoint is downloaded, and stays until this process ends. Damaged
        checkpoints are named in the log and passed over. With several ranks all call this, and all get the same. What
        is being written on a disk is waited for: the writer of a process that was killed finishes its saves.

        Args:
            directory: where to look.
            is_part: tells of a checkpoint that a training cannot go on from it; such ones are passed over, and named.

        Raises:
            CorruptCheckpointError: there are checkpoints and none of them is good.
        """
        storage = self._root if directory is None else resolve(directory)
        if storage is None:
            raise ConfigError("latest() needs the directory of the checkpoints, unless they all go to one root")
        self.wait()
        meeting = _meeting(self._timeout_s)

        def candidates() -> tuple[list[str], dict[str, str]]:
            _wait_for_the_dead(storage, self._timeout_s)
            return _newest_first(storage, is_part)

        names, bad = meeting.agree(
            "candidates", lambda: same_as_parent(storage.uri, candidates), work_s=self._timeout_s
        )
        found = newest_sound(
            storage, candidates=names, quarantined=bad, quarantine=lambda name, reason: _say_bad(storage, name, reason),
            meeting=meeting, downloads=_downloads, what_else="or name one yourself",
        )  # fmt: skip
        return None if found is None else found[1]

    def wait(self) -> None:
        """Wait until everything saved is durable and everything removed is gone.

        Raises:
            HoldfastError: something failed, or takes longer than the bound.
        """
        self._given_as.clear()  # another training may have another folder
        self._finish(self._handles, lambda uri, handle: self._take_in(uri, handle, self._timeout_s))
        self._finish(self._removals, lambda _, removal: removal.result(self._timeout_s))

    def _at(self, path: str | os.PathLike[str]) -> Checkpoint:
        text = os.fspath(path)
        if self._root is None or "://" in text:
            return Checkpoint(text)
        return Checkpoint.at(self._root, os.path.basename(text))

    def _refuse_another(self, path: str | os.PathLike[str], target: Checkpoint) -> None:
        """Refuse to put two checkpoints of a training into the same place: the second would replace the first."""
        text = os.fspath(path)
        if self._root is None or "://" in text or not os.path.dirname(text):
            return
        known = self._given_as.setdefault(target.uri, os.path.realpath(text))
        if known != os.path.realpath(text):
            raise ConfigError(
                f"{text} would replace {known}: with a root both are {target.uri}. Give what saves them (every "
                "ModelCheckpoint) other file names, or leave out the root"
            )

    def _plain(self, state: Mapping[Any, Any], target: Checkpoint) -> Mapping[Any, Any]:
        """Refuse, or leave out, live objects: a state dict would come back in their place."""
        objects: list[str] = []
        plain = _without_objects(state, "", objects)
        if objects and self._unsupported == "raise":
            raise UnsupportedStateError(
                f"{', '.join(objects)}: a live object comes back as its state dict only, so it does not belong into a "
                f"checkpoint of plain data ({self._advice})"
            )
        if objects:
            _LOG.warning("%s is saved without %s", target.uri, ", ".join(objects))
        return cast("Mapping[Any, Any]", plain)

    def _settle_ended(self) -> None:
        """Take in what has ended."""
        ended = {uri: handle for uri, handle in self._handles.items() if handle.done()}
        gone = {uri: removal for uri, removal in self._removals.items() if removal.done()}
        for uri in ended:
            del self._handles[uri]
        for uri in gone:
            del self._removals[uri]
        for uri, handle in ended.items():
            self._settle(uri, handle, 0)
        for uri, removal in gone.items():
            try:
                removal.result(0)
            except TRANSIENT_ERRORS as error:
                _LOG.warning("%s stays, %s (%s)", uri, state_of(error), error)

    def _settle(self, uri: str, handle: SaveHandle, timeout_s: float) -> None:
        """Take in a save in the middle of training; a lost save does not end the training."""
        try:
            self._take_in(uri, handle, timeout_s)
        except TRANSIENT_ERRORS as error:
            self._lost.add(error)
            _LOG.warning("%s was NOT saved, %s (%s); training goes on", uri, state_of(error), error)

    def _take_in(self, uri: str, handle: SaveHandle, timeout_s: float) -> None:
        """Wait for a save; the name of a failed save is free again."""
        unmark_it = self._marks.pop(uri, None)
        try:
            handle.result(timeout_s)
        except HoldfastError:
            if unmark_it is not None:
                unmark_it()
            raise
        self._lost.durable()

    def _finish(self, pending: dict[str, Any], result: Callable[[str, Any], object]) -> None:
        while pending:
            uri, waiting = next(iter(pending.items()))
            try:
                result(uri, waiting)
            except (TimeoutError, futures.TimeoutError) as error:  # two of them in Python 3.10
                raise HoldfastError(f"{uri}: not done after {self._timeout_s:.0f} s (timeout_s)") from error
            finally:
                del pending[uri]


def _without_objects(value: Any, path: str, objects: list[str]) -> Any:
    """Return ``value``, or a copy without what has a state dict; such things are named in ``objects``."""
    if type(value) is dict:
        kept = {}
        for key, inner in value.items():
            at = f"{path}[{key!r}]"
            if callable(getattr(inner, "state_dict", None)):
                objects.append(f"{at} ({type(inner).__name__})")
            else:
                kept[key] = _without_objects(inner, at, objects)
        changed = len(kept) != len(value) or any(kept[key] is not inner for key, inner in value.items())
        return kept if changed else value
    return value


def _remove(target: Checkpoint, before: list[SaveHandle], timeout_s: float) -> None:
    for handle in before:
        try:
            handle.result(timeout_s)
        except (HoldfastError, TimeoutError):
            _LOG.warning("%s stays: a save that was to replace it is not durable", target.uri)
            return
    with contextlib.suppress(CheckpointNotFoundError):
        target.delete()


def _wait_for_the_dead(storage: Storage, timeout_s: float) -> None:
    """Wait while files of a save that has not committed are changing, if the storage is a disk."""
    deadline, has_said = time.monotonic() + timeout_s, False
    while storage.local_root is not None and time.monotonic() < deadline and (names := _being_written(storage)):
        if not has_said:
            has_said = True
            _LOG.warning("%s: waiting for what is still being written there: %s", storage.uri, listed(names, 3))
        time.sleep(_LOOK_S)


def _being_written(storage: Storage) -> list[str]:
    """Name the checkpoints with a file that was changed just now, and is in no manifest."""
    found = []
    for folder in storage.list("", recursive=False):
        name = folder.path.rstrip("/")
        if name == folder.path or name.startswith("."):
            continue
        infos = [info for info in storage.list(name, recursive=False) if abs(time.time() - info.modified) < _QUIET_S]
        recent = {info.path.removeprefix(f"{name}/") for info in infos}
        if not any(map(save_id_of, recent)):
            continue
        try:
            manifest = Checkpoint.at(storage, name).manifest
        except (IncompleteCheckpointError, CheckpointNotFoundError):
            found.append(name)
        except CheckpointError:
            continue
        else:
            done = set() if manifest is None else {entry.path for entry in manifest.files}
            found += [name] if any(map(save_id_of, recent - done)) else []
    return sorted(found)


def _newest_first(storage: Storage, is_part: Callable[[Checkpoint], bool]) -> tuple[list[str], dict[str, str]]:
    """Name the committed checkpoints of a directory, and what is damaged; a save that never committed is neither."""
    found: list[tuple[str, Manifest]] = []
    bad: dict[str, str] = {}
    for info in storage.list("", recursive=False):
        name = info.path.rstrip("/")
        if name == info.path or name.startswith("."):
            continue
        try:
            manifest = Checkpoint.at(storage, name).manifest
        except (IncompleteCheckpointError, CheckpointNotFoundError):
            continue
        except CheckpointError as error:
            _say_bad(storage, name, str(error))
            bad[name] = str(error)
            continue
        if manifest is not None:
            found.append((name, manifest))
    names = _in_order(found)
    parts = [name for name in names if is_part(Checkpoint.at(storage, name))]
    if parts and names[0] in parts:
        _LOG.warning("%s: passed over, since they hold weights only: %s", storage.uri, ", ".join(sorted(parts)))
    return [name for name in names if name not in parts], bad


def _in_order(found: Sequence[tuple[str, Manifest]]) -> list[str]:
    """Order checkpoints, newest first.

    A process numbers what it saves, and each life of a training knows that it comes after the one that it has loaded
    from. Clocks, which differ between machines and may be set back, decide between the rest: two trainings, or two
    lives that have loaded the same checkpoint.
    """
    newest: dict[tuple[Any, ...], str] = {}  # time of the newest checkpoint of each training, and of each life
    rows = []
    for name, manifest in found:
        start, _, number = _save_id(manifest).rpartition("-")
        training = (str(manifest.extra.get(_TRAINING, "")),)
        life = (*training, manifest.attempt, start)
        for group in (training, life):
            newest[group] = max(manifest.created, newest.get(group, ""))
        rows.append((training, life, int(number or "0", 16), manifest.step or 0, name))

    def order(row: tuple[Any, ...]) -> tuple[Any, ...]:
        training, life, *of_life = row
        return newest[training], training, life[1], newest[life], life, *of_life

    return [row[-1] for row in sorted(rows, key=order, reverse=True)]


def _save_id(manifest: Manifest) -> str:
    """Return the id of the save that has made a checkpoint, "" if no file tells."""
    return next(filter(None, (save_id_of(entry.path) for entry in manifest.files)), "")


def _say_bad(storage: Storage, name: str, reason: str) -> None:
    _LOG.warning("%s/%s is damaged and passed over: %s", storage.uri, name, reason)


def _meeting(timeout_s: float) -> Meeting:
    try:
        return meet(current_ranks(), name="latest", timeout_s=timeout_s, otherwise="")
    except ConfigError:  # several ranks and no way to talk yet: they look at the same storage
        return Alone()


def _move_file_aside(target: Checkpoint) -> None:
    """What the framework itself wrote under this name before is a file, and ours a directory; it is never deleted."""
    root = target.storage.local_root
    path = None if root is None else root / target.directory
    if path is not None and path.is_file():
        move_aside(path)


# ---- the plugin


_ADVICE = "save_hyperparameters(ignore=[name]) leaves a value out; unsupported='drop' all that cannot be stored"


class HoldfastCheckpointIO(Grafted):
    """For a plain ``Trainer(plugins=[HoldfastCheckpointIO()])``: checkpoints are copied aside, and written meanwhile.

    Each is a directory, committed atomically and checked when it is loaded, without pickle, under the path that
    Lightning gives it. What ``ModelCheckpoint`` removes goes when what replaces it is durable.

    Args:
        root: where all checkpoints go, under the last part of their paths, which markers keep taken: a directory or a
            URI such as ``s3://bucket/run``. None: to the paths themselves.
        unsupported: what to do with values that cannot be stored without pickle, such as an ``nn.Module`` among the
            hyper-parameters: "raise", or "drop" to leave them out and name them in the log.
        timeout_s: bound of every wait.
        model_files: small files committed with each checkpoint, so that its directory is what another library loads:
            ``{name: bytes, text or a function}``, ``holdfast.transformers.model_files(module.lm,
            item="state_dict/lm")``, or the name under which an installed package makes them of what Lightning saves
            (a dict with "state_dict"). Then every checkpoint needs a name of its own. See docs/model-directory.md.
    """

    BASES = ("lightning.fabric.plugins:CheckpointIO", "lightning_fabric.plugins:CheckpointIO")
    EXTRA = "lightning"

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        unsupported: str = "raise",
        timeout_s: float = 600.0,
        model_files: ModelFiles | Mapping[str, Content] | str | None = None,
    ) -> None:
        super().__init__()
        self._saves = Saves(
            root, unsupported=unsupported, timeout_s=timeout_s, advice=_ADVICE, model_files=model_files
        )  # fmt: skip

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy the checkpoint aside and write it in the background; raises what failed before. Rank 0 calls it."""
        if storage_options is not None:
            raise ConfigError("HoldfastCheckpointIO takes no storage_options: say where with root=, or in the path")
        self._saves.save(path, checkpoint, step=checkpoint.get("global_step"), metrics=_monitored(checkpoint, path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, checked; torch's weights-only reader reads files that Lightning itself wrote."""
        device = None if callable(map_location) or isinstance(map_location, dict) else map_location
        return self._saves.load(path, device=device, trusted=weights_only is False)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, once every save started before is durable."""
        self._saves.remove(path)

    def latest(self, directory: str | os.PathLike[str] | None = None) -> str | None:
        """Return the newest sound checkpoint in ``directory`` (default: ``root``), None if there is none; see docs.

        What was saved with ``save_weights_only=True`` is passed over: `fit` cannot go on from it.
        """
        return self._saves.latest(directory, is_part=_is_weights_only)

    def teardown(self) -> None:
        """Wait until everything is durable; Lightning calls it at the end."""
        self._saves.wait()


def _is_weights_only(checkpoint: Checkpoint) -> bool:
    """Tell whether a `Trainer` has saved this without the state of its training, which has an entry for schedulers."""
    try:
        return _has(checkpoint, "pytorch-lightning_version") and not _has(checkpoint, "lr_schedulers")
    except CheckpointError:
        return False  # found out where every byte is read


def _has(checkpoint: Checkpoint, name: str) -> bool:
    try:
        load(checkpoint, only=name)
    except ConfigError:
        return False
    return True


def _monitored(checkpoint: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """What ``ModelCheckpoint`` ranks this very path by; its ``current_score`` may be that of an older checkpoint."""
    callbacks = checkpoint.get("callbacks", {}).values()
    states = [state for state in callbacks if isinstance(state, Mapping) and "monitor" in state]
    return scalars(*({state["monitor"]: state.get("best_k_models", {}).get(os.fspath(path))} for state in states))


class _Strategy(Grafted):
    """The workers' ranks and devices; for the first of Lightning's names that is imported."""

    EXTRA = "lightning"
    ALONE = True

    @property
    def root_device(self) -> Any:
        """The device of this worker."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the data this worker has."""
        context = get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}


class RayDDPStrategy(_Strategy):
    """`DDPStrategy` of Lightning over the workers of the function trainer; takes its arguments."""

    BASES = ("lightning.pytorch.strategies:DDPStrategy", "pytorch_lightning.strategies:DDPStrategy")


class RayFSDPStrategy(_Strategy):
    """`FSDPStrategy` of Lightning over the workers of the function trainer; takes its arguments."""

    BASES = ("lightning.pytorch.strategies:FSDPStrategy", "pytorch_lightning.strategies:FSDPStrategy")


class RayDeepSpeedStrategy(_Strategy):
    """`DeepSpeedStrategy` of Lightning over the workers of the function trainer; takes its arguments."""

    BASES = ("lightning.pytorch.strategies:DeepSpeedStrategy", "pytorch_lightning.strategies:DeepSpeedStrategy")


class RayLightningEnvironment(Grafted):
    """Tells Lightning who this worker is; processes are started by the function trainer.

    Lightning counts its processes by ``devices`` and ``num_nodes``. This takes ranks, device and world size from
    `holdfast.get_context` instead, so that ``devices="auto"`` is right on every worker.
    """

    BASES = (
        "lightning.pytorch.plugins.environments:LightningEnvironment",
        "pytorch_lightning.plugins.environments:LightningEnvironment",
    )
    EXTRA = "lightning"
    ALONE = True

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning is to start none."""
        return True

    def world_size(self) -> int:
        """Return the number of workers."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """Take no notice of what Lightning counts."""

    def global_rank(self) -> int:
        """Return the rank among all workers."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """Take no notice of what Lightning counts."""

    def local_rank(self) -> int:
        """Return the rank among the workers of this machine."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Return the number of this machine."""
        return get_context().get_node_rank()

    def teardown(self) -> None:
        """Leave the variables of the environment alone: they are the worker's."""


def prepare_trainer(trainer: Any) -> Any:
    """Return a trainer of Lightning if its processes are the workers of the function trainer.

    Raises:
        ConfigError: it counts other processes than there are workers.
        SessionError: called outside of train_func.
    """
    there, counted = get_context().get_world_size(), trainer.world_size
    if there != counted:
        raise ConfigError(
            f"prepare_trainer: there are {there} workers, and this trainer counts {counted}: make it with "
            "strategy=RayDDPStrategy() and plugins=[RayLightningEnvironment()] of holdfast.lightning, or with "
            f"devices={there} and strategy='ddp'"
        )
    return trainer
