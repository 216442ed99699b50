"""Export the whole state as one file for ``torch.load(weights_only=True)``."""

from __future__ import annotations

from ..state.torch_file import TorchFileWriter
from .sink import Folder
from .source import Source

__all__ = ["write_torch"]


def write_torch(folder: Folder, name: str, source: Source) -> int:
    """Write the file; returns the number of tensors in it."""
    writer = TorchFileWriter(source.plain())
    with folder.create(name, writer.size) as sink:
        writer.write(sink, (source.blob(tensor).parts() for tensor in writer.tensors))
    return len(writer.tensors)
