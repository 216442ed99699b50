"""The arguments of a `report`, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError
from holdfast.model_files import Content, ModelFiles, model_files_of
from holdfast.run.names import LATEST, RUN_NAMES, is_checkpoint_name
from holdfast.storage.base import check_path

from ..config import ValidationTaskConfig
from ..types import CheckpointUploadMode
from ..values import plain_metrics

__all__ = ["Request", "UploadFn", "check_request"]

UploadFn = Callable[[Checkpoint, str], Checkpoint]


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
    checkpoint: Checkpoint | None,
    *,
    state: Mapping[Any, Any] | None,
    model_files: ModelFiles | Mapping[str, Content] | str | None,
    name: str | None,
    mode: CheckpointUploadMode,
    delete: bool | None,
    upload: UploadFn | None,
    validation: bool | Mapping[str, Any] | ValidationTaskConfig,
) -> Request:
    """Check the arguments of `report`, without looking at any file.

    Raises:
        ConfigError: an argument, or their combination, is wrong.
    """
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


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
