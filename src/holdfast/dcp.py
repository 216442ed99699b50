"""torch.distributed.checkpoint and Holdfast: convert directories, or let DCP itself save and load our checkpoints.

Code that calls ``dcp.save(state, storage_writer=HoldfastWriter(path))`` gets a committed, digest-checked checkpoint
that `holdfast.load` reads; ``dcp.load(state, storage_reader=HoldfastReader(path))`` reads any checkpoint of Holdfast
into any layout. `export` and `import_` convert whole directories without a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from .checkpoint.handle import Checkpoint
from .interop.dcp_storage import HoldfastReader, HoldfastWriter
from .interop.export import Exported
from .interop.export import export as _export
from .interop.import_ import Imported, import_checkpoint

__all__ = ["HoldfastReader", "HoldfastWriter", "export", "import_"]


def export(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    path: str | os.PathLike[str],
    *,
    only: str | Iterable[str] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a checkpoint as a directory that plain ``torch.distributed.checkpoint.load`` reads; see `holdfast.export`.

    Args:
        checkpoint: path, URI or `Checkpoint`, saved by any number of ranks.
        path: directory to write.
        only: names or globs over "/"-joined paths.
        overwrite: replace a directory of DCP that is there.
    """
    return _export(checkpoint, path, to="dcp", only=only, overwrite=overwrite)


def import_(path: str | os.PathLike[str], destination: str | os.PathLike[str], *, overwrite: bool = False) -> Imported:
    """Make a checkpoint of a directory of ``torch.distributed.checkpoint``; see `holdfast.import_checkpoint`.

    ``.metadata`` is read by an allow-list: a hostile file is refused, and nothing in it is run.

    Args:
        path: the directory.
        destination: path or URI of the new checkpoint.
        overwrite: replace a committed checkpoint there.
    """
    return import_checkpoint(path, destination, format="dcp", overwrite=overwrite)
