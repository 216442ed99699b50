"""Read files of other programs: which of them may be read, and how to do so with little memory.

Symbolic links in a foreign folder are not followed, because they could lead anywhere. The exception is the cache of the
Hugging Face hub: it keeps each file once, as ``<repository>/blobs/<digest>``, and a snapshot,
``<repository>/snapshots/<revision>/...``, links there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence

import torch

from holdfast.format.names import check_links
from holdfast.state.save.torch_file import tensor_bytes
from holdfast.storage.base import FileReader
from holdfast.storage.local.local_storage import LocalStorage

from .blobs import WINDOW

__all__ = ["forget", "mapped_ranges", "own_file", "ranges", "streamed"]

_MADV_DONTNEED = 4


def own_file(folder: str, name: str) -> str:
    """Return the path at which to read a file (or directory) of a foreign folder.

    Raises:
        CorruptCheckpointError: the file is a link, or its path has a link in it.
    """
    path = os.path.join(folder, name)
    if os.path.islink(path):
        snapshots, revision = os.path.split(os.path.abspath(folder))
        repository, kind = os.path.split(snapshots)
        real = os.path.realpath(path)
        if revision and kind == "snapshots" and os.path.dirname(real) == os.path.realpath(f"{repository}/blobs"):
            return real
    check_links(LocalStorage(folder), "", (name,))
    return path


def ranges(reader: FileReader, offset: int, size: int) -> Iterator[memoryview]:
    """Yield a range of a file, window by window."""
    buffer = memoryview(bytearray(min(WINDOW, size)))
    for start in range(0, size, WINDOW):
        view = buffer[: min(WINDOW, size - start)]
        reader.read_into(offset + start, view)
        yield view


def mapped_ranges(path: str) -> list[tuple[int, int]]:
    """Return the address ranges at which this process has mapped a file; an empty list where /proc is missing."""
    real = os.path.realpath(path)
    try:
        with open("/proc/self/maps") as file:
            lines = [line.split(maxsplit=5) for line in file]
    except OSError:
        return []
    spans = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5].rstrip("\n") == real]
    return [(int(low, 16), int(high, 16)) for low, high in spans]


def streamed(tensor: torch.Tensor, mapped: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
    """Yield the bytes of a tensor; pages mapped from a file are given back once read, or they would add up."""
    address = tensor.data_ptr()
    whole = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    memory = tensor.untyped_storage()
    first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    is_mapped = any(low <= first and last <= high for low, high in mapped)
    for view in tensor_bytes(tensor):
        for start in range(0, len(view), WINDOW):
            part = view[start : start + WINDOW]
            yield part
            if is_mapped and whole:
                forget(address + start, len(part))
    if is_mapped:
        forget(first, last - first)


def forget(address: int, size: int) -> None:
    """Give back clean pages of a private file mapping; the next access reads them from the file again."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_DONTNEED)
