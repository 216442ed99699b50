"""torch.distributed.checkpoint and Holdfast: convert directories, or let DCP itself save and load our checkpoints.

Code that calls ``dcp.save(state, storage_writer=HoldfastWriter(path))`` gets a committed, digest-checked checkpoint that
`holdfast.load` reads; ``dcp.load(state, storage_reader=HoldfastReader(path))`` reads any checkpoint of Holdfast into any
layout. `export` and `import_` convert whole directories without a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from .checkpoint.handle import Checkpoint
from .interop.dcp_reader import HoldfastReader
from .interop.dcp_writer import HoldfastWriter
from .interop.export import Exported
from .interop.export import export as _export

__all__ = ["HoldfastReader", "HoldfastWriter", "export"]


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
