"""`save_checkpoint`, `load_checkpoint`, `LoadCheckpoint`: a checkpoint of a `State`, at any path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.checkpointer.functions import save
from holdfast.checkpointer.rank_group import ANSWER_MARGIN_S
from holdfast.checkpointer.run_session import answer
from holdfast.errors import ConfigError
from holdfast.storage.resolve import resolve
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import SaveJob

from ..arguments import check_flags, check_path
from ..callbacks import Callback, Logger
from ..evaluator import metrics_of
from ..parallel import TIMEOUT_S, is_sharded
from ..state import State
from ..time import Event
from .files import FileImage, IgnoreKeys, check_ignore_keys, expand, gathered, ignored
from .finder import NameTemplate, container_of, run_variables
from .load import LoadOptions, load_path
from .uploads import as_object_store

__all__ = ["LoadCheckpoint", "load_checkpoint", "save_checkpoint"]

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
    ignore = check_ignore_keys(ignore_keys, "ignore_keys")
    container = container_of(path, what="name")
    if container != "directory" and is_sharded(state.model):
        raise ConfigError(
            f"save_checkpoint({os.fspath(filename)!r}): a sharded model is no single file: use a name without suffix"
        )
    step, bare = state.timestamp.count("batch"), weights_only or container == "safetensors"
    # Within an evaluation the weights alone are saved as they are evaluated: training does not go on from them.
    with contextlib.nullcontext() if bare else state.as_in_training():
        live = ignored(state.live(weights_only=weights_only), ignore, what="ignore_keys", looked=set())
        if container == "directory":
            save(path, live, step=step, metrics=metrics_of(state), overwrite=True)
            return path
        found = gathered(expand(live), state.ranks)
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
        ignore_keys=check_ignore_keys(ignore_keys, "ignore_keys"),
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
        self.ignore_keys = check_ignore_keys(ignore_keys, "LoadCheckpoint(ignore_keys)")
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
