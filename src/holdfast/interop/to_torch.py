"""Export the whole state as one file for ``torch.load(weights_only=True)``."""

from __future__ import annotations

from holdfast.state.save.torch_file import TorchFileWriter

from .sink import ExportFolder
from .source import OpenedCheckpoint

__all__ = ["write_torch"]


def write_torch(folder: ExportFolder, name: str, source: OpenedCheckpoint) -> int:
    """Write the file; returns the number of tensors in it."""
    writer = TorchFileWriter(source.plain())
    with folder.create(name, writer.size) as sink:
        writer.write(sink, (source.blob(tensor).parts() for tensor in writer.tensors))
    return len(writer.tensors)
