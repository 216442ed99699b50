"""Read pickles of other programs without running code that they name.

Two readers. `read_metadata` is for the ``.metadata`` of torch.distributed.checkpoint: an allow-list, anything else is
refused. `read_torch` is for files of ``torch.save``: torch's weights-only reader; where that refuses a file because of
a class, a lenient reader reads the rest: it looks up no foreign classes and functions, and puts `Opaque` in their
place.
"""

from __future__ import annotations

import _codecs
import datetime
import io
import os
import pathlib
import pickle
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict, defaultdict, deque
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from holdfast.errors import CorruptCheckpointError, HoldfastError, UnsupportedStateError

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_ALLOWED_IN_METADATA = {
    _METADATA: frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    # Plain data as well: Megatron-Core stores the plans of its ranks.
    _PLANNER: frozenset({"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),  # and dtypes
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath"}),  # as Python 3.13 calls them
    "collections": frozenset({"OrderedDict"}),
}
MAX_METADATA = 2 << 30
_HAS_OBJECTS = 1  # NPY_ITEM_REFCOUNT, among the flags of a dtype
_ZIP = b"PK\x03\x04"
_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")  # of a file of torch before 1.6, near its beginning
_TAR = b"ustar"  # at byte 257 of one before 0.2
_POINTER = b"version https://git-lfs"
_WINDOW = 1 << 20
_UNPACKED = 4  # an archive may unpack to so many times its size,
_SMALL = 64 << 20  # or to so many bytes if that is more


# The reader in Python: only there a subclass can decide whose state a pickle may set.
_PYTHON: Any = pickle._Unpickler


class _Crafted(pickle.UnpicklingError):
    """A pickle has instructions that no program that saves data writes."""


class _Guarded(_PYTHON):  # type: ignore[misc]
    """A reader whose pickles can set the state of few things.

    A pickle can set attributes of all objects that it gets, functions and classes among them; here only of instances of
    ``buildable``.
    """

    buildable: tuple[type, ...] = ()
    dispatch: dict[int, Any] = dict(_PYTHON.dispatch)  # noqa: RUF012

    def load_build(self) -> None:
        """Set the state of an object that was made before."""
        made = self.stack[-2]
        if isinstance(made, Opaque):
            self.stack.pop()
        elif isinstance(made, self.buildable):
            super().load_build()
        else:
            raise _Crafted(f"it sets the state of a {type(made).__name__}: refused")

    dispatch[pickle.BUILD[0]] = load_build


class _MetadataUnpickler(_Guarded):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED_IN_METADATA.get(module, ()):
            if module in ("pathlib", "pathlib._local"):
                return lambda *parts: "/".join(map(str, parts))  # paths of another machine are text here
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CorruptCheckpointError(
            f".metadata asks for {module}.{name}, which no metadata of torch.distributed.checkpoint needs: refused; "
            "nothing of it was run"
        )


@cache
def _metadata_types() -> tuple[type, ...]:
    import torch.distributed.checkpoint.metadata as theirs
    import torch.distributed.checkpoint.planner as plans
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    names = _ALLOWED_IN_METADATA[_METADATA] - {"_MEM_FORMAT_ENCODING"}
    planned = [found for name in sorted(_ALLOWED_IN_METADATA[_PLANNER]) if (found := getattr(plans, name, None))]
    return (_StorageInfo, *(getattr(theirs, name) for name in sorted(names)), *planned)


def read_metadata(data: bytes) -> Any:
    """Read the ``.metadata`` of a DCP directory.

    Raises:
        CorruptCheckpointError: it is no such metadata, or names a class or function outside of the allow-list.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    _MetadataUnpickler.buildable = _metadata_types()
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except CorruptCheckpointError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(f".metadata cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CorruptCheckpointError(".metadata holds no metadata of torch.distributed.checkpoint")
    return metadata


class Opaque:
    """Stands for an object of a class that was not looked up. It ignores all that a pickle does with it.

    Attributes:
        name: full name of that class or function.
    """

    name = "?"

    def __new__(cls, *_: Any, **__: Any) -> Opaque:  # noqa: D102 - takes the arguments of any constructor
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Opaque:  # noqa: D102
        return self

    def append(self, value: Any) -> None:
        """Ignore an item."""

    def extend(self, values: Any) -> None:
        """Ignore items."""

    def add(self, value: Any) -> None:
        """Ignore a member."""

    def __hash__(self) -> int:
        return id(self)


class _ForeignDtype(Opaque):
    """Stands for a dtype of NumPy that is structured or has a class of its own, and for its arrays and scalars."""

    name = "a dtype of NumPy that is no plain one"
    hasobject = False


class _Version(str):
    """A version of torch, read as plain text."""

    __slots__ = ()

    def __new__(cls, text: Any = "") -> Any:
        if not isinstance(text, str):  # the text of another object may be endless
            raise _Crafted(f"it makes a version of a {type(text).__name__}: refused")
        return str(text)


@cache
def _plain_globals() -> dict[str, Any]:
    """Return the classes and functions that build plain data: those of torch's own reader, and a few more."""
    known: dict[str, Any] = {
        **_get_allowed_globals(),
        "_codecs.encode": _codecs.encode,  # makes bytes; these three are new in torch 2.5
        "builtins.set": set,
        "builtins.complex": complex,
        "builtins.bytearray": _bytearray,
        "collections.deque": deque,
        "collections.defaultdict": defaultdict,
        "builtins.frozenset": frozenset,
        "builtins.list": list,
        "builtins.dict": dict,
        "builtins.int": int,
        "builtins.float": float,
        "datetime.date": datetime.date,
        "datetime.datetime": datetime.datetime,
        "datetime.timedelta": datetime.timedelta,
        "pathlib.PosixPath": pathlib.PosixPath,
        "pathlib._local.PosixPath": pathlib.PosixPath,  # as Python 3.13 calls it
        "torch.torch_version.TorchVersion": _Version,
        "numpy.ndarray": _ARRAY,
        "numpy.dtype": _dtype,
    }
    for core in ("numpy.core", "numpy._core"):
        known[f"{core}.multiarray._reconstruct"] = _new_array
        known[f"{core}.multiarray.scalar"] = _scalar
    return known


# NumPy trusts a pickle about memory: `ndarray(1, "O", b"...")` takes bytes for pointers, as does a dtype whose flags
# deny that it has objects. So arrays are made empty and filled by `__setstate__`, which counts bytes, and only dtypes
# with a name are made; a `_ForeignDtype` stands for all others.
_ARRAY = "numpy.ndarray"


def _dtype(name: Any, *_: Any) -> np.dtype[Any] | _ForeignDtype:
    if isinstance(name, type):
        return _ForeignDtype()  # numpy.record, the class of a `recarray`, or a class of another package
    made = np.dtype(name, False, True) if isinstance(name, str) else None  # a copy: a pickle may set its state
    if made is None or made.fields is not None or made.subdtype is not None:
        raise _Crafted(f"it makes the dtype {name!r} of NumPy: refused")
    return made


def _foreign_dtype(made: np.dtype[Any], state: Any) -> _ForeignDtype | None:
    """Return a stand-in for a dtype with this state; None if the state gives only byte order and unit."""
    if not isinstance(state, tuple) or len(state) not in (8, 9):
        raise _Crafted(f"it gives the dtype {made} of NumPy a malformed state: refused")
    _, _, subdtype, names, fields, size, alignment, flags = state[:8]
    if names is None and fields is None and subdtype is None:
        if flags != made.flags or size not in (-1, made.itemsize) or alignment not in (-1, made.alignment):
            raise _Crafted(f"it gives the dtype {made} of NumPy wrong flags, size or alignment: refused")
        return None
    stand_in = _ForeignDtype()
    parts = [subdtype[0]] if fields is None else [field[0] for field in fields.values()]
    stand_in.hasobject = any(getattr(part, "hasobject", False) for part in parts)
    if stand_in.hasobject and not flags & _HAS_OBJECTS:
        raise _Crafted("it makes a dtype of NumPy that denies the objects in it: refused")
    return stand_in


def _new_array(kind: Any, *_: Any) -> Any:
    return np.empty(0, np.uint8) if kind is _ARRAY else kind()


def _scalar(dtype: np.dtype[Any] | _ForeignDtype, data: bytes = b"") -> Any:
    if isinstance(dtype, Opaque):
        return dtype
    if dtype.hasobject:
        raise _Crafted("it makes a scalar of NumPy out of an object: refused")
    return np.frombuffer(data, dtype, 1)[0] if dtype.itemsize else dtype.type()


class _LenientUnpickler(_Guarded):
    dispatch: dict[int, Any] = dict(_Guarded.dispatch)  # noqa: RUF012

    def load_reduce(self) -> None:
        """Call a function or class, but not `numpy.ndarray`, which could make an array over any memory."""
        if self.stack[-2] is _ARRAY:
            raise _Crafted("it makes an array of NumPy without NumPy's own way to read one: refused")
        super().load_reduce()

    def load_build(self) -> None:
        """Set the state of an object; replace a structured dtype, or an array of it, by a stand-in."""
        made, state = self.stack[-2:]
        stand_in: Opaque | None = None
        if isinstance(made, np.dtype):
            stand_in = _foreign_dtype(made, state)
        elif isinstance(made, np.ndarray):
            stand_in = next((part for part in state if isinstance(part, Opaque)), None)
        if stand_in is None:
            super().load_build()
            return
        self.stack[-2:] = [stand_in]
        for key in reversed(self.memo):  # later references in the pickle go through the memo; the entry is a recent one
            if self.memo[key] is made:
                self.memo[key] = stand_in
                break

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))  # names of Python 2
        full = f"{module}.{name}"
        return _plain_globals().get(full) or type("Opaque", (Opaque,), {"name": full})


_LenientUnpickler.buildable = (np.ndarray, np.dtype, torch.Tensor, OrderedDict)


def _lenient_load(file: Any, **options: Any) -> Any:
    # torch reads the head of a file before 1.6 with this function: `pickle.load` would run code that the file names.
    return _LenientUnpickler(file, **options).load()


_LENIENT = SimpleNamespace(Unpickler=_LenientUnpickler, load=_lenient_load, __name__="holdfast lenient reader")


def read_torch(path: str, *, trusted: bool = False) -> Any:
    """Read a file of ``torch.save``; its tensors are mapped from the file where it is a zip.

    Args:
        path: path of a local file.
        trusted: make every object in the file, which runs code that the file names.

    Returns:
        The content, with `Opaque` in place of foreign objects.

    Raises:
        UnsupportedStateError: it is no file of torch, or cannot be read without running code that it names.
        CorruptCheckpointError: it is damaged, empty or cut off, or would unpack to far more than its size.
    """
    refuse_pointer(path)
    mmap = is_zip(path)
    if mmap:
        _check_sums(path)
    else:
        _check_beginning(path)
    try:
        if trusted:
            return torch.load(path, map_location="cpu", weights_only=False, mmap=mmap)
        return read_plain(path, mmap=mmap)
    except pickle.UnpicklingError as error:
        refused = error
    except HoldfastError:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        raise UnsupportedStateError(
            f"{path}: torch cannot read it ({type(error).__name__}: {_first_line(error)})"
        ) from error
    if not mmap:
        # Files before torch 1.6, and plain pickles: their tensors are inside the pickle.
        raise UnsupportedStateError(
            f"{path}: torch's weights-only reader refuses it ({_first_line(refused)}): if you trust who wrote it, "
            "import it with trusted=True (--trusted)"
        ) from refused
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True, pickle_module=_LENIENT)
    except _Crafted as error:
        raise UnsupportedStateError(
            f"{path}: {error}. No program that saves data writes this, and --trusted would believe it: have the file "
            "written anew from its source"
        ) from error
    except Exception as error:  # a pickle that misses its classes fails in its own way
        raise UnsupportedStateError(
            f"{path}: torch's weights-only reader refuses it ({_first_line(refused)}), and without the classes in it "
            f"it makes no sense ({type(error).__name__}: {_first_line(error)}): if you trust who wrote it, import it "
            "with trusted=True (--trusted)"
        ) from error


def read_plain(path: str, *, mmap: bool) -> Any:
    """Read a file of ``torch.save`` without foreign objects; what is no such file fails in torch's own ways.

    Args:
        path: path of a local file.
        mmap: map its tensors from the file.

    Raises:
        UnsupportedStateError: it is a program.
        CorruptCheckpointError: it would unpack to far more than its size.
        pickle.UnpicklingError: torch's reader refuses it, or must not read it; `read_torch` may.
    """
    with open(path, "rb") as file:
        _refuse_code(file, path)
    if is_zip(path) and _refuse_bomb(path):
        raise pickle.UnpicklingError("it makes a bytearray")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def read_torch_stream(stream: io.BufferedReader, name: str, *, map_location: str = "cpu") -> Any:
    """Read a small file of ``torch.save`` from a stream; foreign objects become `Opaque`.

    Raises:
        CorruptCheckpointError: the stream is no such file.
    """
    try:
        _refuse_code(stream, name)
        try:
            return torch.load(stream, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError:
            stream.seek(0)
            return torch.load(stream, map_location=map_location, weights_only=False, pickle_module=_LENIENT)
    except Exception as error:
        raise CorruptCheckpointError(
            f"{name}: cannot be read ({type(error).__name__}: {_first_line(error)})"
        ) from error


def refuse_pointer(path: str) -> None:
    """Refuse what Git keeps in place of a big file, where that was not fetched.

    Raises:
        CorruptCheckpointError: it is such a pointer.
    """
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise CorruptCheckpointError(
                    f"{path} is a pointer of Git LFS, not the file itself: fetch that with `git lfs pull`"
                )


def _check_beginning(path: str) -> None:
    """Refuse what torch's readers would take for an old file of theirs, and fail with any error, or run."""
    with open(path, "rb") as file:
        head = file.read(512)
    if not head:
        raise CorruptCheckpointError(f"{path} is empty: fetch it again")
    if head.startswith(b"\x80") and _MAGIC not in head:
        raise UnsupportedStateError(
            f"{path} is a pickle that torch.save has not written, and to load it is to run what it says: where you "
            "trust it, load it by pickle.load, and write what is in it by torch.save"
        )
    if _MAGIC not in head and head[257:262] != _TAR:
        raise UnsupportedStateError(f"{path} is no file of torch.save: it begins with {head[:24]!r}")


def _check_sums(path: str) -> None:
    """Compare the records of an archive with their checksums, which torch writes and does not read.

    Raises:
        CorruptCheckpointError: a record is damaged, the archive is cut off, or it unpacks to far more than its size.
    """
    try:
        _refuse_bomb(path)
        with zipfile.ZipFile(path) as archive:
            for record in [record for record in archive.infolist() if record.CRC]:  # see _refuse_bomb
                with archive.open(record) as file:
                    while file.read(_WINDOW):
                        pass
    except zipfile.BadZipFile as error:
        raise CorruptCheckpointError(f"{path} is damaged or cut off ({error}): fetch it again") from error


def _refuse_code(stream: Any, name: str) -> None:
    """Refuse an archive of TorchScript: `torch.load` would pass it to `torch.jit.load`, which runs code in it."""
    start = stream.tell()
    is_archive = stream.read(4) == _ZIP
    stream.seek(start)
    if is_archive and "constants.pkl" in torch._C.PyTorchFileReader(stream).get_all_records():
        raise UnsupportedStateError(
            f"{name} is a program of TorchScript: it is not loaded. Save its weights (torch.save(module.state_dict(), "
            "...)), or, if you trust who wrote it, import it with trusted=True (--trusted)"
        )
    stream.seek(start)


def _refuse_bomb(path: str) -> bool:
    """Refuse an archive that unpacks to far more than its size.

    Returns:
        Whether its pickle makes a bytearray. Torch's own reader makes it of any size that the pickle names, so the
        lenient reader has to read such a file.

    Raises:
        CorruptCheckpointError: it unpacks to far more than its size.
    """
    size = os.path.getsize(path)
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        # `torch.save` compresses nothing, so its files unpack to less than their size.
        if (total := sum(record.file_size for record in records)) > max(_UNPACKED * size, _SMALL):
            raise CorruptCheckpointError(
                f"{path} has {size} bytes and would unpack to {total}: no program that saves tensors writes this"
            )
        pickled = [record for record in records if record.filename.endswith("data.pkl")]
        for record in pickled:
            if not record.CRC:  # saved after torch.serialization.set_crc32_options(False)
                del record.CRC  # so zipfile compares none
        return any(b"bytearray" in archive.read(record) for record in pickled)


def _bytearray(data: Any = b"", *how: Any) -> bytearray:
    if not isinstance(data, (bytes, bytearray, str, list)):
        raise _Crafted(f"it makes a bytearray of {str(data)[:40]} bytes without their content: refused")
    return bytearray(data, *how)


def is_zip(path: str) -> bool:
    """Tell whether a file is a zip, as ``torch.save`` writes since torch 1.6."""
    with open(path, "rb") as file:
        return file.read(4) == _ZIP


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line]
    return (lines or str(error).splitlines() or [""])[0][:300]
