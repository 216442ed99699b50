"""Reports with data: a directory, a file, a state, values, a checkpoint stored elsewhere; their arguments, checked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint, without_prefix
from holdfast.checkpointer.first_step import first_step_checks
from holdfast.errors import CheckpointError, ConfigError, HoldfastError, SessionError
from holdfast.model_files import Content, ModelFiles, model_files_of
from holdfast.run.names import LATEST, RUN_NAMES, is_checkpoint_name
from holdfast.run.record import kind_name, metric_value, number_of, plain_metrics
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage.base import Storage, check_path
from holdfast.storage.together import SerialExecutor
from holdfast.writer.client import WriterClient
from holdfast.writer.frames import Message
from holdfast.writer.ingest.sources import put_incoming, remove_incoming
from holdfast.writer.messages import IngestSource, SaveJob

from ..config import TIMESTAMP, CheckpointUploadMode, ValidationTaskConfig
from ..handoff import HandoffArea, Staging, Taken, check_source, left_directory, name_in_run, remove_local, take
from ..transit import checkpoint_at, describe_location, open_root, pack_checkpoint
from .link import ControllerLink

_LOG = get_logger("trainers.function")
UploadFn = Callable[[Checkpoint, str], Checkpoint]
_ASYNC = CheckpointUploadMode.ASYNC
_MAX_SENDING = 4
_UPLOAD_S = 3600.0
_VALUES_STAGING = 64 << 20  # `save_checkpoint` waits anyway, so it streams through a small arena
Finish = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The checked arguments of `report`."""

    metrics: dict[str, Any]
    checkpoint: Checkpoint | None
    state: Mapping[Any, Any] | None
    model_files: ModelFiles | None
    name: str | None
    mode: CheckpointUploadMode
    delete: bool | None
    upload: UploadFn | None
    validation: bool | dict[str, Any]


def check_request(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    *,
    state: Mapping[Any, Any] | None = None,
    model_files: ModelFiles | Mapping[str, Content] | str | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: UploadFn | None = None,
    validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
) -> Request:
    """Check the arguments of `report`, without looking at any file.

    Raises:
        ConfigError: an argument, or their combination, is wrong.
    """
    mode, delete = checkpoint_upload_mode, delete_local_checkpoint_after_upload
    name, upload = checkpoint_dir_name, checkpoint_upload_fn
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"report(checkpoint={_show(checkpoint)}): give a Checkpoint, as in Checkpoint.from_directory(path); "
            "a live state goes into state="
        )
    if state is not None and not isinstance(state, Mapping):
        raise ConfigError(f"report(state={_show(state)}): give a mapping such as {{'model': model}}")
    if model_files is not None and state is None:
        raise ConfigError(
            "report(model_files=...) goes with state=, whose tensors they describe; into a directory that you report "
            "put the files yourself"
        )
    if state is not None and checkpoint is not None:
        raise ConfigError(
            "report() got both checkpoint= and state=: a report makes a single checkpoint; use one of them"
        )
    if not isinstance(mode, CheckpointUploadMode):
        raise ConfigError(
            f"checkpoint_upload_mode={mode!r}: use CheckpointUploadMode.SYNC, ASYNC or NO_UPLOAD (of holdfast)"
        )
    if upload is not None and not callable(upload):
        raise ConfigError(f"checkpoint_upload_fn={_show(upload)}: give a function (checkpoint, dir_name) -> Checkpoint")
    if delete is not None and not isinstance(delete, bool):
        raise ConfigError(f"delete_local_checkpoint_after_upload={delete!r}: use True, False or None")
    if upload is not None and mode is CheckpointUploadMode.NO_UPLOAD:
        raise ConfigError("checkpoint_upload_fn with CheckpointUploadMode.NO_UPLOAD: use SYNC or ASYNC to upload")
    if state is not None and (upload is not None or mode is CheckpointUploadMode.NO_UPLOAD):
        raise ConfigError("report(state=...) stores the state itself: checkpoint_upload_fn and NO_UPLOAD do not apply")
    wanted = _validation(validation)
    if wanted and checkpoint is None and state is None:
        raise ConfigError("report(validation=...) without a checkpoint: there is nothing to validate")
    return Request(
        metrics=plain_metrics(metrics),
        checkpoint=checkpoint,
        state=state,
        model_files=model_files_of(model_files, state or {}),
        name=None if name is None else _check_name(name),
        mode=mode,
        delete=delete,
        upload=upload,
        validation=wanted,
    )


REPORT_OPTIONS = frozenset(check_request.__kwdefaults__ or ())
"""Names of what `report` takes besides metrics and checkpoint."""


def _validation(given: Any) -> bool | dict[str, Any]:
    """Return what the message holds: a bool, or the fields of a `ValidationTaskConfig`."""
    if isinstance(given, bool):
        return given
    if isinstance(given, Mapping):
        given = ValidationTaskConfig.of(given)
    if not isinstance(given, ValidationTaskConfig):
        raise ConfigError(
            f"validation={_show(given)}: use True, False, a ValidationTaskConfig, or a dict of arguments for the "
            "function"
        )
    try:
        arguments = plain_metrics(given.fn_kwargs or {})
    except ConfigError as error:
        raise ConfigError(
            f"validation: the arguments of the function are stored with the checkpoint, as metrics are: {error}"
        ) from error
    return {"fn_kwargs": arguments, "timeout_s": given.timeout_s}


def _check_name(name: str) -> str:
    try:
        fine = is_checkpoint_name(check_path(name))
    except ConfigError:
        fine = False
    if not fine:
        raise ConfigError(
            f"checkpoint_dir_name={name!r}: give the name of one directory below the run, without '/', not starting "
            f"with '.', and none of {', '.join((*RUN_NAMES, LATEST))}"
        )
    return name


def check_score(metrics: Mapping[str, Any], attribute: str) -> None:
    """Refuse a score that cannot rank. A missing score and NaN are fine: they rank below everything.

    Raises:
        ConfigError: the value is neither a number nor missing.
    """
    value = metric_value(metrics, attribute)
    if value is not None and not isinstance(value, (int, float)):
        raise ConfigError(
            f"metric {attribute!r} is {_show(value)} ({kind_name(value)}), but "
            f"checkpoint_score_attribute={attribute!r} ranks checkpoints by it: report a number, or name another metric"
        )


def score_of(values: Mapping[str, Any], attribute: str, *, required: bool) -> float | None:
    """Return the number in ``values`` that ranks a dictionary checkpoint.

    Args:
        values: what `save_checkpoint` got.
        attribute: which of them.
        required: refuse values without it.

    Raises:
        ConfigError: it is missing, or no number.
    """
    if attribute not in values:
        if not required:
            return None
        raise ConfigError(
            f"save_checkpoint() got no {attribute!r}, which checkpoint_score_attribute ranks by; it got "
            f"{sorted(map(str, values))}: add it, or name another attribute in CheckpointStrategy"
        )
    value = values[attribute]
    if type(value) not in (int, float):
        value = number_of(value)
    if value is None:
        raise ConfigError(
            f"save_checkpoint({attribute}={_show(values[attribute])}): checkpoint_score_attribute={attribute!r} ranks "
            f"by it, so it has to be a number, not {kind_name(values[attribute])}"
        )
    return float(value)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Delivery:
    """Carries out the reports with data of a rank. Callers make sure that reports follow one another.

    A directory is taken over at once if the driver sees it. What takes time (an upload, a copy of what is no local
    directory) happens in the call, or in the background: then the report is entered at once as one that is coming, and
    the message "part" says where its files are. States and values go through a writer of this rank's own (`Shares`).

    Args:
        link: to the controller.
        begin: the controller's "begin" message.
        area: where directories are put until they are taken in.
    """

    def __init__(self, link: ControllerLink, begin: Mapping[str, Any], area: HandoffArea) -> None:
        self._link, self._begin, self._area = link, begin, area
        self._shares: dict[str, Shares] = {}
        self._sender: SerialExecutor | None = None
        self._sending: deque[Future[None]] = deque()
        self._closed = False
        self._checks: list[Callable[[], str]] | None = None  # of the training between the first two states

    def enter(self, request: Request, index: int) -> Finish | None:
        """Enter report ``index``; return a function that waits for its end, None if nothing has to wait."""
        checkpoint, area, asynchronous = request.checkpoint, self._area, request.mode is _ASYNC
        if checkpoint is None:
            self._state(request, index)
            return None
        local = checkpoint.storage.local_root is not None
        if local and request.upload is None:  # an upload function may wait for a writer of the files
            check_source(checkpoint.path, area)
        in_run = checkpoint.uri.startswith(f"{area.uri.rstrip('/')}/")
        if request.upload is not None or request.mode is CheckpointUploadMode.NO_UPLOAD or (in_run and not local):
            header = self._header(request, index, "uploaded")
            if asynchronous:
                self._later(header, partial(self._uploaded, request, index, checkpoint))
                return None
            header |= self._uploaded(request, index, checkpoint)
            return partial(self._link.answer, self._link.call(header), f"report {index}")
        if not local:
            find = partial(_download, checkpoint, None if area.is_sent else area.incoming(index))
            return self._directory(request, index, find, later=asynchronous)
        taken = take(checkpoint, area, index, delete=request.delete, asynchronous=asynchronous)
        return self._directory(request, index, lambda: taken, later=asynchronous and taken.safe, on_disk=taken)

    def save_values(self, values: dict[str, Any], index: int) -> Finish | None:
        """Enter report ``index`` of `save_checkpoint` on rank 0; return a function that waits for its end, or None."""
        header, stripped = self._values_header(values, index), without_prefix(values)
        answer = self._link.answer(self._link.call(header), f"report {index}").header["value"]
        if answer.get("memory"):
            try:
                packed = pack_checkpoint(Checkpoint.from_dict(stripped))
            except BaseException as error:
                self._link.part_failed(index, error)  # so that the controller does not wait for them
                raise
            self._link.send({"on": "memory", "index": index}, (packed,))
        if not answer.get("go"):
            return None
        self._submit("values", stripped, answer["go"], index)
        return partial(self._link.committed, index)

    def drain(self) -> None:
        """Wait until what was brought and is committed is removed here: this process ends next, its threads with it."""
        if self._sender is not None:
            wait([self._sender.run(lambda: None)], timeout=self._begin["report_timeout_s"])

    def abandon(self, timeout_s: float) -> None:
        """Finish uploads in the background, as far as ``timeout_s`` allows; put the files of the others back."""
        deadline = time.monotonic() + timeout_s
        wait(list(self._sending), timeout=timeout_s)
        for shares in self._shares.values():
            shares.wait_for_staged(max(0.0, deadline - time.monotonic()))
        if not all(future.done() for future in self._sending):
            _LOG.warning("uploads in the background were given up: train_func has failed")
            self._link.undo_all()

    def close(self) -> None:
        """Leave the writers to finish what they have, and begin no more uploads; idempotent."""
        self._closed = True
        for shares in self._shares.values():
            shares.close()
        if self._sender is not None:
            self._sender.close(wait=False)
            self._sender = None

    # -- directories ---------------------------------------------------------------------------------------------

    def _directory(
        self, request: Request, index: int, find: Callable[[], Taken], *, later: bool, on_disk: Taken | None = None
    ) -> Finish | None:
        """Enter a report of files that the driver's writer takes in; return a function that waits for it, or None.

        Args:
            request: of the report.
            index: of the report.
            find: returns the files; may take time.
            later: what takes time happens in the background, and so does the commit.
            on_disk: the same files, if they are known now.
        """
        if self._area.is_sent:
            return self._send(request, index, find, later=later, on_disk=on_disk)
        header = self._header(request, index, "directory")
        if later and on_disk is None:
            self._later(header, lambda: {"source": _source(find())})
            return None
        taken = find()
        header["source"] = _source(taken)
        if later:
            self._link.tell(header, undo=taken.failed)
            return None
        return partial(self._finish, self._link.call(header), index, taken)

    def _send(
        self, request: Request, index: int, find: Callable[[], Taken], *, later: bool, on_disk: Taken | None
    ) -> Finish | None:
        """Do so where the driver's writer is on another machine and takes the files from the store.

        If they are known now, this node uploads them if this worker dies.
        """
        rank, home = self._area.rank, self._area.incoming_object(index)
        header = self._header(request, index, "directory") | {"source": {"path": home, "owned": True}}
        undo = None
        if on_disk is not None:
            undo = on_disk.failed
            header["unfinished"] = left_directory(home=home, path=on_disk.path, rank=rank, owned=on_disk.owned)
        brought: list[Taken] = []

        def bring() -> dict[str, Any]:
            taken = find()
            put_incoming(self._root(), home, IngestSource(rank=rank, path=taken.path))
            brought.append(taken)
            return {}

        if later:

            def committed() -> None:
                # On the sending thread. Until now the files stayed here: there was no other copy that lasts.
                if (sender := self._sender) is not None:
                    sender.run(lambda: _remove_owned(brought))

            self._later(header, bring, undo=undo, done=committed)
            return None
        self._link.begin_part(index)
        future = self._link.call(header | {"coming": True})

        def finish() -> None:
            try:
                bring()
            except BaseException as error:
                if undo is not None:
                    undo()
                self._link.part_failed(index, error)
                raise
            self._link.part_ended(index, None)
            self._finish(future, index, brought[0], home)
            _remove_owned(brought)

        return finish

    def _later(
        self,
        header: dict[str, Any],
        work: Callable[[], dict[str, Any]],
        *,
        undo: Callable[[], object] | None = None,
        done: Callable[[], object] | None = None,
    ) -> None:
        """Enter a report; ``work`` says on the sending thread where its files are. Waits while four others wait."""
        index = header["index"]
        if self._sender is None:
            self._sender = SerialExecutor("holdfast-send")
        while len(self._sending) >= _MAX_SENDING:
            wait([self._sending.popleft()])
        if header["kind"] == "directory":  # a function of the user that uploads may hang, as anything in train_func
            self._link.begin_part(index)
        self._link.tell(header | {"coming": True}, undo=undo, done=done)

        def run() -> None:
            error: BaseException | None = None
            where: dict[str, Any] = {}
            if self._closed or not self._link.is_expected(index):
                # It has failed meanwhile, and its files are back in their place.
                error = CheckpointError(f"report {index} failed before its files were brought")
            else:
                try:
                    where = work()
                except BaseException as failure:  # noqa: BLE001 - a thread edge: the next call raises it
                    error = failure
            self._link.part_ended(index, error, **where)

        self._sending.append(self._sender.run(run))

    def _finish(self, future: Future[Message], index: int, taken: Taken, home: str | None = None) -> None:
        try:
            self._link.answer(future, f"report {index}")
        except SessionError:
            raise  # the driver is gone: its writer may still be at work on these files
        except Exception:
            taken.failed()
            if home is not None:
                remove_incoming(self._root(), home)
            raise
        taken.committed()

    def _uploaded(self, request: Request, index: int, checkpoint: Checkpoint) -> dict[str, Any]:
        """Let the caller's function upload, if there is one; return where the checkpoint is."""
        rank, placed = self._area.rank, checkpoint
        if request.upload is not None:
            name = request.name or f"checkpoint_{index:06d}-{self._area.start_id}"
            upload = partial(request.upload, checkpoint, name)
            placed = self._in_time(upload, index) if request.mode is _ASYNC else upload()
            if not isinstance(placed, Checkpoint):
                raise ConfigError(
                    f"rank {rank}: checkpoint_upload_fn returned {placed!r}, not a Checkpoint: it has to say where it "
                    "has put the files, as in Checkpoint(path)"
                )
        name = name_in_run(placed, self._area)
        wanted = request.mode is _ASYNC if request.delete is None else request.delete
        if wanted and placed != checkpoint and checkpoint.storage.local_root is not None:
            remove_local(checkpoint.path)
        return {"location": describe_location(self._root(), name)}

    def _in_time(self, upload: Callable[[], Checkpoint], index: int) -> Checkpoint:
        """Call the caller's function on a thread of its own: if it hangs, only its report is lost.

        Raises:
            HoldfastError: it has not returned within an hour, or the limit of reports if that is longer.
        """
        limit_s = max(_UPLOAD_S, self._begin["report_timeout_s"])
        thread = SerialExecutor("holdfast-upload")
        called = thread.run(upload)
        thread.close(wait=False)
        if not wait([called], timeout=limit_s).done:
            raise HoldfastError(
                f"rank {self._area.rank}: checkpoint_upload_fn has not returned within {limit_s:g} s: report {index} "
                "is given up; give its requests a time limit. If an upload takes longer, set HOLDFAST_REPORT_TIMEOUT_S"
            )
        return called.result()

    # -- states and values ---------------------------------------------------------------------------------------

    def _state(self, request: Request, index: int) -> None:
        assert request.state is not None
        if self._area.rank == 0:
            self._look_at(request.state)
        self._root()  # before the report is entered: opening it may fail
        header = self._header(request, index, "state")
        go = self._link.answer(self._link.call(header), f"report {index}").header["value"]["go"]
        self._submit("state", request.state, go, index, request.model_files)

    def _look_at(self, state: Mapping[Any, Any]) -> None:
        """Say once what training has shown of a resume, when a second state is reported."""
        if self._checks is None:
            location, saved, manifest = self._begin["checkpoint"], None, None
            if location is not None:
                begun = checkpoint_at(location)
                if begun.uri.startswith(f"{self._area.uri.rstrip('/')}/"):  # of this very run
                    with suppress(HoldfastError):  # it is a hint only
                        saved, manifest = begun.storage.child(begun.directory), begun.manifest
            self._checks = first_step_checks(state, saved, manifest)
            return
        while self._checks:
            if found := self._checks.pop(0)():
                _LOG.warning(found)

    def _submit(
        self,
        kind: str,
        state: Mapping[Any, Any],
        go: Mapping[str, Any],
        index: int,
        model_files: ModelFiles | None = None,
    ) -> None:
        link = self._link
        link.expect(index)

        def handed_over(header: dict[str, Any]) -> None:
            link.begin_part(index)  # not before: to make the state may hang, as anything in train_func
            link.send({**header, "index": index})

        try:
            self._get_shares(kind).submit(
                state,
                go,
                model_files=model_files,
                sealed=lambda: handed_over({"on": "sealed"}),
                staged=lambda left: handed_over({"on": "staged", "unfinished": dict(left)}),
                ended=partial(link.part_ended, index),
            )
        except BaseException as error:
            link.part_failed(index, error)
            raise

    def _values_header(self, values: Mapping[str, Any], index: int) -> dict[str, Any]:
        strategy, now = self._begin["strategy"], time.time()
        ranked = strategy or self._begin["score"]
        attribute = TIMESTAMP if ranked is None else ranked["attribute"]
        metrics, score = {TIMESTAMP: now}, now
        if attribute != TIMESTAMP or TIMESTAMP in values:
            found = score_of(values, attribute, required=strategy is not None)
            score = found  # type: ignore[assignment]
            if found is not None:
                metrics[attribute] = found
        header = {"on": "report", "index": index, "kind": "values", "score": score, "metrics": metrics, "time": now}
        return {**header, "name": None, "validation": False}

    def _get_shares(self, kind: str) -> Shares:
        found = self._shares.get(kind)
        if found is None:
            root, area, staging = self._root(), self._area, None
            if kind == "state":
                snapshotter = Snapshotter(rank=area.rank, world_size=self._begin["world_size"])
                if (folder := self._begin.get("local_dir")) is not None:
                    first = self._begin["local_rank"] == 0
                    staging = Staging(folder, root, rank=area.rank, start_id=area.start_id, sweeps=first)
            else:
                snapshotter = Snapshotter(max_staging_bytes=_VALUES_STAGING)
            snapshotter.max_file_bytes = root.traits.max_file_bytes
            timeout_s: float = self._begin["report_timeout_s"]
            found = self._shares[kind] = Shares(root, snapshotter, timeout_s=timeout_s, staging=staging)
        return found

    # -- inside --------------------------------------------------------------------------------------------------

    def _root(self) -> Storage:
        return self._area.root if self._area.root is not None else open_root(self._begin["run_root"])

    def _header(self, request: Request, index: int, kind: str) -> dict[str, Any]:
        return {
            "on": "report",
            "index": index,
            "kind": kind,
            "call": None,
            "metrics": request.metrics if self._area.rank == 0 or self._begin.get("all_metrics") else None,
            "time": time.time(),
            "name": request.name,
            "validation": request.validation,
            **({"agreed": True} if self._link.agreement.reached else {}),
            **({"asks": True} if self._link.agreement.is_used else {}),
        }


def _remove_owned(brought: list[Taken]) -> None:
    for taken in brought:
        if taken.owned:
            remove_local(taken.path)


def _download(checkpoint: Checkpoint, path: str | None) -> Taken:
    """Copy what is no local directory (a dictionary, another storage) into a directory: at ``path``, or anywhere."""
    path = checkpoint.to_directory(path)
    return Taken(path=path, owned=True, safe=True, caller=path)


def _source(taken: Taken) -> dict[str, Any]:
    return {"path": taken.path, "owned": taken.owned}


class Shares:
    """Copies states and hands them to the writer, one after another. The writer starts with the first state.

    Args:
        storage: root of the run.
        snapshotter: splits the work among ranks; owned and closed by this object.
        timeout_s: how long a share may wait for the share before.
        staging: shares are stored there first, and then uploaded to the storage.
    """

    def __init__(
        self, storage: Storage, snapshotter: Snapshotter, *, timeout_s: float, staging: Staging | None = None
    ) -> None:
        self._storage, self._snapshotter, self._timeout_s = storage, snapshotter, timeout_s
        self._staging = staging
        self._target = storage if staging is None else staging.local  # of the writer
        self._client: WriterClient | None = None
        self._pending: Future[Any] | None = None
        self._busy = False

    def submit(
        self,
        state: Mapping[Any, Any],
        go: Mapping[str, Any],
        *,
        model_files: ModelFiles | None,
        sealed: Callable[[], None],
        staged: Callable[[Mapping[str, Any]], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """Copy this rank's share and hand it over; the caller may change the state when this returns.

        Args:
            state: the whole state.
            go: "directory", "save_id" and "manifest" of the checkpoint.
            model_files: what rank 0 commits beside the tensors.
            sealed: called when the writer has everything and will finish even if this process dies; never, where the
                share is stored on this node first.
            staged: called instead there, with what the node needs to finish the share if this process dies.
            ended: called, on another thread, with None when the share is durable, else with the error.

        Raises:
            UnsupportedStateError: the state cannot be saved.
            HoldfastError: the share before is stuck.
        """
        if self._busy:
            # Only a signal handler gets here: a second copy would tear the copy it interrupted.
            raise SessionError(
                "report(state=...) was called in the middle of another: not from a signal handler, please"
            )
        self._busy = True
        try:
            self._wait()
            if self._client is None or self._client.closed:
                self._client = WriterClient.start(self._target)
            self._snapshotter.model_files = model_files
            saved = self._snapshotter.submit(
                state,
                self._client,
                self._target,
                SaveJob(
                    directory=go["directory"],
                    save_id=go["save_id"],
                    manifest=go["manifest"],
                    reuse=self._staging is None and self._snapshotter.max_staging_bytes is None,
                    part=True,
                ),
            )
        except BaseException:
            # Interrupted after the hand-over, the job may still read the arena: the arena is never used again.
            self._snapshotter.close()
            raise
        finally:
            self._busy = False
        self._pending = saved
        if self._staging is None:
            sealed()
            saved.add_done_callback(lambda done: ended(done.exception()))
        else:
            staged(self._staging.left(go))
            self._staging.bring(saved, go, ended)

    def wait_for_staged(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until the shares stored on this node are uploaded."""
        if self._staging is not None:
            self._staging.wait(timeout_s, at_most=0)

    def close(self) -> None:
        """Leave the writer to finish what it has; idempotent."""
        if self._client is not None:
            self._client.close(0.0)
        if self._staging is not None:
            self._staging.close()
        self._snapshotter.close()

    def _wait(self) -> None:
        """Wait for the arena, and for room to stage; their callbacks say how those saves ended."""
        stuck = self._pending is not None and not wait([self._pending], timeout=self._timeout_s).done
        if stuck or (self._staging is not None and not self._staging.wait(self._timeout_s)):
            raise HoldfastError(
                f"the state reported before is not durable after {self._timeout_s:.0f} s: {self._storage.uri} is stuck "
                "or very slow"
            )
        self._pending = None
