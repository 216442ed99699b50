"""`export`: a Holdfast checkpoint in the format of another library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast._units import parse_bytes
from holdfast.checkpoint.handle import Checkpoint, newest_of_run
from holdfast.errors import ConfigError
from holdfast.state.save.torch_file import TorchFileWriter

from .sink import ExportFolder
from .source import OpenedCheckpoint

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "Exported", "export", "watched_export"]

FORMATS = ("safetensors", "torch", "dcp", "hf")
_HF_SHARD = 5_000_000_000  # bytes; the default of transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export.

    Attributes:
        destination: URI of what was written.
        format: one of `FORMATS`.
        files: names relative to the destination (its own name if it is one file), and their bytes.
        num_tensors: number of tensors stored; a tied tensor counts as often as it is stored.
        left_out: (path in the state, why) of what the destination lacks.
        too_large: names of tensors with finite values beyond what ``dtype`` holds; they are infinite there, or the
            largest value that it has.
    """

    destination: str
    format: str
    files: tuple[tuple[str, int], ...]
    num_tensors: int
    left_out: tuple[tuple[str, str], ...] = ()
    too_large: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)


def export(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    to: str,
    only: str | Iterable[str] | None = None,
    item: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> Exported:
    """Write a checkpoint in another format, tensor by tensor: needs about 50 MB of memory, no model and no accelerator.

    The checkpoint may be of any number of ranks; parts of a tensor are put together. The files are durable on return,
    and a file has its name only when it is whole.

    Args:
        checkpoint: path, URI or `Checkpoint`; for a run, its newest checkpoint is taken.
        destination: path or URI: a file for "torch" and (if it ends with ".safetensors") "safetensors", else a
            directory.
        to: "safetensors" (weights of one item under their names), "hf" (the same in the layout of Hugging Face
            Transformers: shards of 5 GB, tied tensors once), "torch" (everything, for
            ``torch.load(weights_only=True)``), "dcp" (everything, for ``torch.distributed.checkpoint.load``).
        only: names or globs over "/"-joined paths; None takes everything.
        item: for safetensors and hf, the item of the state whose tensors are written; None: "model", or the only item
            with tensors.
        dtype: floating tensors are converted to it; ``too_large`` of the result names those it cannot hold.
        max_shard_size: for safetensors and hf, bytes or text such as "2GB"; larger weights make several files and an
            index.
        overwrite: replace existing files.
        verify: check every byte that is read against its digest.

    Raises:
        ConfigError: the arguments contradict each other, or the format cannot hold the values to write.
        CheckpointExistsError: the destination exists, and ``overwrite`` is false.
        CorruptCheckpointError: stored bytes are damaged.

    Example:
        >>> import tempfile, torch, holdfast
        >>> folder = tempfile.mkdtemp()
        >>> saved = holdfast.save(f"{folder}/mine", {"model": {"weight": torch.ones(3)}, "step": 5})
        >>> export(saved, f"{folder}/mine.pt", to="torch").num_tensors
        1
        >>> torch.load(f"{folder}/mine.pt", weights_only=True)
        {'model': {'weight': tensor([1., 1., 1.])}, 'step': 5}
    """
    return watched_export(
        checkpoint, destination, to=to, only=only, item=item, dtype=dtype, max_shard_size=max_shard_size,
        overwrite=overwrite, verify=verify,
    )  # fmt: skip


def watched_export(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    to: str,
    only: str | Iterable[str] | None = None,
    item: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Callable[[int | None, int], object] = lambda total, done: None,
) -> Exported:
    """Do what `export` does; ``progress`` gets (bytes to be read, 0), then (None, bytes just read)."""
    if to not in FORMATS:
        raise ConfigError(f"cannot export to {to!r}: use one of {', '.join(FORMATS)}")
    if to in ("torch", "dcp") and (item is not None or max_shard_size is not None):
        raise ConfigError(f"item and max_shard_size are for safetensors and hf, not for {to}: use only=... (--only)")
    of = newest_of_run(checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint))
    target = Checkpoint(destination)
    text = os.fspath(destination)
    is_file = to == "torch" or (to == "safetensors" and text.endswith(".safetensors"))
    if is_file:
        folder = ExportFolder(target.storage, target.directory.rpartition("/")[0], overwrite=overwrite)
        folder.check_free(target.name)
    else:
        folder = ExportFolder(target.storage, target.directory, overwrite=overwrite)
    storage = of.storage.child(of.directory)
    report = partial(progress, None)
    with OpenedCheckpoint(storage, only=only, dtype=_dtype(dtype), verify=verify, progress=report) as source:
        left_out = _ranks_left_out(source)
        if to == "torch":
            progress(source.nbytes, 0)
            count = _write_torch(folder, target.name, source)
        elif to == "dcp":
            from .to_dcp import write_dcp

            progress(source.nbytes, 0)
            count = write_dcp(folder, source)
        else:
            from .to_safetensors import WEIGHTS_NAME, weights, write_safetensors

            tensors, without = weights(source, item, keep_ties=to == "safetensors")
            progress(sum(source.named(blob.name).nbytes for blob in tensors.values()), 0)
            limit = _bytes(max_shard_size) if max_shard_size is not None else (_HF_SHARD if to == "hf" else None)
            name = target.name if is_file else WEIGHTS_NAME
            write_safetensors(folder, tensors, name=name, max_shard_bytes=limit)
            count, left_out = len(tensors), without
    return Exported(
        destination=target.uri,
        format=to,
        files=tuple(folder.written),
        num_tensors=count,
        left_out=tuple(left_out),
        too_large=tuple(sorted(source.too_large)),
    )


def _write_torch(folder: ExportFolder, name: str, source: OpenedCheckpoint) -> int:
    """Write everything as one file for ``torch.load(weights_only=True)``; returns the number of tensors."""
    writer = TorchFileWriter(source.plain())
    with folder.create(name, writer.size) as sink:
        writer.write(sink, (source.blob(tensor).parts() for tensor in writer.tensors))
    return len(writer.tensors)


def _ranks_left_out(source: OpenedCheckpoint) -> list[tuple[str, str]]:
    """Return (path, why) of values of single ranks: only those of rank 0 are written."""
    ranks = sum(entry.role == "rank" for entry in source.stored.manifest.files)
    if ranks < 2:
        return []
    return [
        (key, f"the values of {ranks - 1} other ranks: only that of rank 0 is written")
        for key in source.stored.per_rank or ()
    ]


def _dtype(dtype: torch.dtype | str | None) -> Any:
    if dtype is None:
        return None
    import torch

    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ConfigError(f"dtype={dtype!r}: give a floating dtype of torch, such as 'bfloat16' or 'float16'")
    return resolved


def _bytes(size: int | str) -> int:
    found = parse_bytes(size) if isinstance(size, str) else size
    if not isinstance(found, int) or found <= 0:
        raise ConfigError(f"max_shard_size={size!r}: give bytes, or a text such as '500MB' or '5GB'")
    return found
