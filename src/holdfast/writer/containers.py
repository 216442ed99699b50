"""What a save becomes: a directory with a manifest, or one file whose image lies in the arena.

The trainer lays the whole file out in the arena, from its first byte on. What follows from the bytes of the tensors,
digest and checksums, is left open: the writer fills it in at the places that these values name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError

__all__ = [
    "DIGEST_DIGITS",
    "DIRECTORY",
    "Container",
    "Directory",
    "SafetensorsFile",
    "TorchFile",
    "container_from_json",
]

DIGEST_DIGITS = 32
"""Length of a digest as it stands in a file: 128 bits in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A checkpoint directory; the job says what is in it."""

    def to_json(self) -> dict[str, Any]:
        """Describe this value for the wire."""
        return {"kind": "directory"}


DIRECTORY = Directory()


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """One file of safetensors.

    Attributes:
        size: bytes of the file: ``arena[:size]``.
        lease: the lease of its name, which the writer holds (`WriterClient.take_name`); None: the name needs none.
        data_at: where the tensors begin; the digest is of the bytes from there on.
        digest_at: where its digits go.
    """

    size: int
    lease: str | None
    data_at: int
    digest_at: int

    def to_json(self) -> dict[str, Any]:
        """Describe this value for the wire."""
        return {"kind": "safetensors", **{name: getattr(self, name) for name in self.__slots__}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """One file for ``torch.load``: a zip of stored records.

    Attributes:
        size: bytes of the file: ``arena[:size]``.
        lease: the lease of its name, which the writer holds (`WriterClient.take_name`); None: the name needs none.
        num_records: of the zip.
        records_at: where in the arena, behind the file, a table of them begins: start, size and entry of each in the
            order of the file, as unsigned numbers of 64 bits. They say where its content lies, and where its CRC-32
            (four bytes, little endian) goes in the zip's directory. It goes behind the content too, 4 bytes after it.
        digested: the digest is of the bytes before this offset, with their checksums.
        digest_at: where its digits go, behind ``digested``.
    """

    size: int
    lease: str | None
    num_records: int
    records_at: int
    digested: int
    digest_at: int

    def to_json(self) -> dict[str, Any]:
        """Describe this value for the wire."""
        return {"kind": "torch", **{name: getattr(self, name) for name in self.__slots__}}


Container = Directory | SafetensorsFile | TorchFile


def container_from_json(data: dict[str, Any]) -> Container:
    """Rebuild what ``to_json`` described.

    Raises:
        HoldfastError: it is of no kind that this version knows.
    """
    fields = {name: value for name, value in data.items() if name != "kind"}
    if data["kind"] == "directory":
        return DIRECTORY
    if data["kind"] == "safetensors":
        return SafetensorsFile(**fields)
    if data["kind"] == "torch":
        return TorchFile(**fields)
    raise HoldfastError(
        f"a save into a container {data['kind']!r}: this writer knows directories, .pt and .safetensors"
    )
