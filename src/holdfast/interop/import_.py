"""`import_checkpoint`: a checkpoint of another program, written as a Holdfast checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError, CorruptCheckpointError, UnsupportedStateError
from holdfast.format.names import MANIFEST_NAME
from holdfast.run.names import RUN_FILE, check_free

from .blobs import METADATA_NAME, write_alone
from .from_files import from_hf, from_lightning, from_safetensors, from_torch, is_hf, shard_of
from .from_shards import from_dcp, from_deepspeed, is_deepspeed
from .gathered import Gathered

_NAMED = 5
SOURCES = ("auto", "safetensors", "torch", "dcp", "hf", "lightning", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import.

    Attributes:
        checkpoint: the committed checkpoint.
        source: URI of the source.
        format: one of `SOURCES`, never "auto".
        taken: (name in the state, description) of each item.
        not_taken: (path or file, why) of what the source has and the checkpoint lacks.
    """

    checkpoint: Checkpoint
    source: str
    format: str
    taken: tuple[tuple[str, str], ...]
    not_taken: tuple[tuple[str, str], ...]


def import_checkpoint(
    source: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - the word that people use
    trusted: bool = False,
    overwrite: bool = False,
) -> Imported:
    """Write a checkpoint of another program as a Holdfast checkpoint, tensor by tensor; durable on return.

    `holdfast.load` then reads it into live objects: weights by name, the state of optimizers by parameter name where
    the names are certain, else by position. No code in a pickle is run: objects of unknown classes are left out and
    listed in ``not_taken``.

    Args:
        source: path, URI or `Checkpoint`: a file of ``torch.save`` (``.pt``, ``.bin``, Lightning's ``.ckpt``), a
            safetensors file, or a directory of safetensors, of torch.distributed.checkpoint (also of Megatron-Core),
            Transformers, Accelerate or DeepSpeed.
        destination: path or URI of the new checkpoint.
        format: "safetensors", "torch", "dcp", "hf" (Transformers and Accelerate), "lightning",
            "deepspeed"; "auto" finds out.
        trusted: for torch files before 1.6, or with objects of other classes: make these objects, which runs code that
            the file names. Only for files from people you trust.
        overwrite: replace a committed checkpoint at the destination.

    Raises:
        ConfigError: the format of the source is not recognised.
        UnsupportedStateError: the source cannot be read without running code in it, or holds nothing to take.
        CorruptCheckpointError: the source is damaged, or refused.
        CheckpointExistsError: there is a checkpoint at the destination.

    Example:
        >>> import tempfile, torch, holdfast
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"model": {"weight": torch.ones(3)}, "epoch": 5}, f"{folder}/old.pt")
        >>> import_checkpoint(f"{folder}/old.pt", f"{folder}/new").checkpoint.keys()
        ['model', 'epoch']
    """
    return watched_import(source, destination, format=format, trusted=trusted, overwrite=overwrite)


def watched_import(
    source: str | os.PathLike[str] | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    format: str = "auto",  # noqa: A002 - the word that people use
    trusted: bool = False,
    overwrite: bool = False,
    progress: Callable[[int | None, int], object] = lambda total, done: None,
) -> Imported:
    """Do what `import_checkpoint` does; ``progress`` gets (bytes to write, 0), then (None, bytes just written)."""
    if format not in SOURCES:
        raise ConfigError(f"cannot import from {format!r}: use one of {', '.join(SOURCES)}")
    target = Checkpoint(destination)
    check_free(target.storage, target.directory, overwrite=overwrite, where=" (--overwrite)")
    with ExitStack() as stack:
        of = source if isinstance(source, Checkpoint) else Checkpoint(source)
        is_file = of.storage.exists(of.directory)
        if is_file and of.storage.local_root is not None:
            path = of.path
        else:
            # `as_directory` brings a file of another storage in a directory, under its own name.
            folder = stack.enter_context(of.as_directory())
            path = os.path.join(folder, of.name) if is_file else folder
        kind = _kind(path) if format == "auto" else format
        try:
            gathered = _gather(path, kind, stack, trusted=trusted)
        except RecursionError as error:
            raise CorruptCheckpointError(f"{of.uri}: values in it are nested too deeply, or hold themselves") from error
        if not gathered.tree:
            reasons = "; ".join(f"{path}: {why}" for path, why in gathered.not_taken[:_NAMED]) or "it is empty"
            raise UnsupportedStateError(f"{of.uri} holds nothing that an import takes ({reasons})")
        if is_file and (total := shard_of(of.name)) > 1:
            gathered.not_taken.append((of.name, f"one of {total} files, by its name: import their folder for all"))
        gathered.tie_equal()
        tree = gathered.tree
        if "$" in tree:  # escaped: it would be taken for a tag
            tree = {"$": "dict", "v": [[key, item] for key, item in tree.items()]}
        progress(sum(row.blob.nbytes for row in gathered.rows), 0)
        write_alone(
            target,
            gathered.rows,
            gathered.aliases,
            tree,
            step=gathered.step,
            epoch=gathered.epoch,
            overwrite=overwrite,
            progress=partial(progress, None),
        )
    return Imported(
        checkpoint=target, source=of.uri, format=kind, taken=tuple(gathered.taken), not_taken=tuple(gathered.not_taken)
    )


def _kind(path: str) -> str:
    """Return the format of a file or directory."""
    if os.path.isdir(path):
        names = os.listdir(path)
        if is_deepspeed(path):
            return "deepspeed"  # this and DCP before the manifest: a reported directory has a manifest, too
        if METADATA_NAME in names:
            return "dcp"
        if MANIFEST_NAME in names:
            raise ConfigError(f"{path} is a checkpoint of Holdfast already: nothing to import")
        if RUN_FILE in names:
            raise ConfigError(f"{path} is a run of Holdfast already: nothing to import (`holdfast cp` copies it)")
        if is_hf(path):
            return "hf"
        if any(name.endswith(".safetensors") for name in names):
            return "safetensors"
        inside = [name for name in sorted(names) if _is_one(os.path.join(path, name))]
        advice = f"name what is in it, as {inside[-1]!r}" if inside else "say which it is with format=... (--from)"
        raise ConfigError(
            f"{path}: no format is recognised (neither .metadata of torch.distributed.checkpoint nor *.safetensors nor "
            f"pytorch_model.bin): {advice}"
        )
    if path.endswith(".safetensors"):
        return "safetensors"
    return "lightning" if path.endswith(".ckpt") else "torch"


def _is_one(path: str) -> bool:
    """Tell whether something in a directory looks like a checkpoint itself."""
    if not os.path.isdir(path):
        return path.endswith((".pt", ".pth", ".ckpt", ".bin"))
    with suppress(OSError):
        return METADATA_NAME in os.listdir(path) or is_hf(path) or is_deepspeed(path)
    return False


def _gather(path: str, kind: str, stack: ExitStack, *, trusted: bool) -> Gathered:
    if kind in ("dcp", "deepspeed", "hf") and not os.path.isdir(path):
        raise ConfigError(f"{path} is a file: {kind} is a directory")
    if kind in ("torch", "lightning") and os.path.isdir(path):
        raise ConfigError(f"{path} is a directory: {kind} is one file")
    if kind == "dcp":
        return from_dcp(path, stack)
    if kind == "hf":
        return from_hf(path, stack, trusted=trusted)
    if kind == "deepspeed":
        return from_deepspeed(path, trusted=trusted)
    if kind == "safetensors":
        return from_safetensors(path, stack)
    return (from_lightning if kind == "lightning" else from_torch)(path, trusted=trusted)
