"""What travels between a trainer and its writer: frozen values with a JSON form.

Bulk never travels: tensors stay in the shared arena, small files ride behind the JSON header as attachments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast import errors
from holdfast.config import Mirror
from holdfast.run.names import INCOMING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "DIGEST_DIGITS", "SPARE_BYTES", "BlobPlan", "FilePlan", "IngestJob", "IngestSource", "MirrorLimits", "PartsJob",
    "RunOpened", "SafetensorsFile", "SaveJob", "SaveResult", "TorchFile", "WireValue", "error_from_json",
    "error_to_json", "error_to_ranks", "is_incoming", "limits_of",
]  # fmt: skip

DIGEST_DIGITS = 32
"""Length of a digest as it stands in a file: 128 bits in hexadecimal."""
SPARE_BYTES = 16 << 20
"""Free space that a start asks for beside that of one checkpoint."""


class WireValue:
    """A frozen dataclass with slots that has a JSON form: a value of a message, or part of one (`frames.encode`)."""

    __slots__: tuple[str, ...] = ()
    _DECODED: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # fields that JSON has in another form, or as null
    _ATTACHED: ClassVar[tuple[str, ...]] = ()  # bytes, which ride behind the message

    def to_json(self) -> dict[str, Any]:
        """Return its fields; those that are such values themselves are described in turn."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in self._ATTACHED}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *attached: bytes) -> Self:
        """Rebuild what `to_json` described, and what rode behind it."""
        decoded = {name: decode(data[name]) for name, decode in cls._DECODED.items() if data[name] is not None}
        return cls(**{**data, **decoded, **dict(zip(cls._ATTACHED, attached, strict=True))})

    @classmethod
    def several(cls, rows: list[Any]) -> tuple[Self, ...]:
        """Rebuild a tuple of them."""
        return tuple(map(cls.from_json, rows))


class _Container(WireValue):
    __slots__ = ()
    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **WireValue.to_json(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile(_Container):
    """One file of safetensors.

    Attributes:
        size: bytes of the file: ``arena[:size]``.
        lease: the lease of its name, which the writer holds (`WriterClient.take_name`); None: the name needs none.
        data_at: where the tensors begin; the digest is of the bytes from there on.
        digest_at: where its digits go.
    """

    kind: ClassVar[str] = "safetensors"
    size: int
    lease: str | None
    data_at: int
    digest_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile(_Container):
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

    kind: ClassVar[str] = "torch"
    size: int
    lease: str | None
    num_records: int
    records_at: int
    digested: int
    digest_at: int


def _container_from_json(data: dict[str, Any]) -> SafetensorsFile | TorchFile:
    fields = {name: value for name, value in data.items() if name != "kind"}
    for known in (SafetensorsFile, TorchFile):
        if data["kind"] == known.kind:
            return known(**fields)
    raise errors.HoldfastError(
        f"a save into a container {data['kind']!r}: this writer knows directories, .pt and .safetensors"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan(WireValue):
    """One big file whose bytes are ``arena[arena_offset : arena_offset + size]``.

    Attributes:
        path: name inside the checkpoint directory.
        size: length in bytes.
        role: role in the manifest, usually "tensors".
        arena_offset: start in the arena, a multiple of 4096; bytes up to the next such multiple after the end are
            zero. Not used by windowed jobs.
        stable: the content is expected to be that of the previous checkpoint (frozen parameters).
    """

    path: str
    size: int
    role: str = "tensors"
    arena_offset: int = 0
    stable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobPlan(WireValue):
    """One small file sent with the job: index, state, rank entries."""

    path: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob(WireValue):
    """One checkpoint to write.

    Attributes:
        directory: checkpoint directory inside the storage; the path of a checkpoint that is one file.
        save_id: "<start id>-<counter hex>", part of every file name so that two lives never share a file.
        writer: number of the writing rank.
        files: big files, in the order of their numbers (`window` names a file by its position here).
        blobs: small files; their bytes are given to `WriterClient.submit` in the same order.
        manifest: fields of the manifest (run_id, checkpoint_id, parent, attempt, step, epoch, metrics, ...).
        overwrite: replace a committed checkpoint of this name.
        reuse: files equal to those of the previous checkpoint may be linked instead of written.
        windowed: the data arrives through `WriterClient.window`; a job without it is sealed by `submit`.
        run: record the commit in the open run and apply its retention.
        want_unchanged: report which ranges equal the previous save.
        part: write this writer's part only; the commit is made by whoever has all parts.
        division: how the ranks divided the state (`holdfast.format.division.Division` as JSON); None for one that
            saves alone.
        joint: the part belongs to a save that all ranks joined by `WriterClient.join` make; the answer is the outcome
            of the whole, and the writer of rank 0 commits it.
        container: one file, which takes its name in one step, and for which no other fields than ``directory`` and
            ``save_id`` count; None: a directory.
    """

    _DECODED: ClassVar[Any] = {"files": FilePlan.several, "blobs": BlobPlan.several, "container": _container_from_json}
    directory: str
    save_id: str
    writer: int = 0
    files: tuple[FilePlan, ...] = ()
    blobs: tuple[BlobPlan, ...] = ()
    manifest: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    reuse: bool = False
    windowed: bool = False
    run: bool = False
    want_unchanged: bool = False
    part: bool = False
    division: dict[str, Any] | None = None
    joint: bool = False
    container: SafetensorsFile | TorchFile | None = None

    @property
    def may_be_resumed(self) -> bool:
        """Whether a start of the open run may go on from it, which weights alone do not allow."""
        return self.run and self.manifest.get("extra", {}).get("content") != "weights"


def is_incoming(path: str) -> bool:
    """Tell whether the path of a reported directory is one in the storage of the run, not of this machine."""
    return path.startswith(INCOMING)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSource(WireValue):
    """What one rank reported: a directory or a file of this machine, or files that the rank has put into the storage.

    Attributes:
        rank: whose it is.
        path: absolute; in the storage: relative to its root, where `holdfast.writer.ingest.sources` has put it.
        owned: the writer may move its files and removes it after the commit. Otherwise it is only read.
    """

    rank: int
    path: str
    owned: bool = False

    def __post_init__(self) -> None:
        if not os.path.isabs(self.path) and not self.is_incoming:
            raise errors.ConfigError(f"the directory of rank {self.rank}, {self.path!r}: give an absolute path")

    @property
    def is_incoming(self) -> bool:
        """Whether the rank has put it into the storage."""
        return is_incoming(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestJob(WireValue):
    """One checkpoint to make of directories of files.

    Attributes:
        directory: checkpoint directory inside the storage; no checkpoint may be there.
        save_id: "<start id>-<counter hex>".
        sources: what the ranks reported, at most one each. None at all: the files are in ``directory`` already and are
            committed where they are; nothing is moved or removed.
        manifest: fields of the manifest.
        run: record the commit in the open run and apply its retention.
    """

    _DECODED: ClassVar[Any] = {"sources": IngestSource.several}
    directory: str
    save_id: str
    sources: tuple[IngestSource, ...] = ()
    manifest: dict[str, Any] = field(default_factory=dict)
    run: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsJob(WireValue):
    """One checkpoint to commit whose parts (`SaveJob.part`) other writers have stored.

    Attributes:
        directory: checkpoint directory inside the storage.
        save_id: the save id of all parts.
        writers: ranks that must have stored one.
        manifest: fields of the manifest.
        wait_s: how long parts are waited for: where a worker died whose writer may still be at it, or where another
            machine's files may show up late.
        run: record the commit in the open run and apply its retention.
        overwrite: replace a committed checkpoint of this name.
        stored: all of them have said that their part is stored.
    """

    _DECODED: ClassVar[Any] = {"writers": tuple}
    directory: str
    save_id: str
    writers: tuple[int, ...]
    manifest: dict[str, Any] = field(default_factory=dict)
    wait_s: float = 0.0
    run: bool = True
    overwrite: bool = False
    stored: bool = False


def _rows(rows: list[list[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult(WireValue):
    """A committed checkpoint, or one part of it.

    Attributes:
        directory: checkpoint directory inside the storage.
        manifest: bytes of its manifest (`holdfast.format.manifest.Manifest.from_bytes` reads them); b"" for a part.
        bytes_total: size of all its files.
        bytes_written: bytes that went to the storage.
        bytes_reused: bytes linked or copied from the previous checkpoint.
        seconds: "digest", "write", "commit" and "total" (job start to commit); other jobs than saves have "scan" or
            "wait" instead of some.
        deleted: (name, why) of checkpoints that retention removed.
        unchanged: [file number, offset, nbytes] of 64 KiB-chunk runs equal to the previous save, for files that
            changed in part; only when the job asked.
        warnings: what the user should hear, one sentence each.
    """

    _DECODED: ClassVar[Any] = {"deleted": _rows, "unchanged": _rows, "warnings": tuple}
    _ATTACHED: ClassVar[Any] = ("manifest",)
    directory: str
    manifest: bytes
    bytes_total: int
    bytes_written: int
    bytes_reused: int
    seconds: dict[str, float]
    deleted: tuple[tuple[str, str], ...] = ()
    unchanged: tuple[tuple[int, int, int], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Last component of the directory."""
        return self.directory.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorLimits(WireValue):
    """How far the remote side may be behind, and what happens then.

    Attributes:
        max_behind: checkpoints that may wait for their upload.
        when_behind: "skip", "wait" or "raise"; the trainer does the latter two.
        delete_after_upload: the local side keeps nothing that the remote has.
        warn_after_s: seconds without an arrival, while something waits, after which that is said.
    """

    max_behind: int = 2
    when_behind: str = "skip"
    delete_after_upload: bool = False
    warn_after_s: float = 1800.0


def limits_of(mirror: Mirror) -> MirrorLimits:
    """Give the limits that a user's `Mirror` asks for."""
    return MirrorLimits(
        max_behind=mirror.max_behind,
        when_behind=mirror.when_behind,
        delete_after_upload=mirror.delete_after_upload,
        warn_after_s=mirror.warn_after_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened(WireValue):
    """What `WriterClient.open_run` found and registered.

    Attributes:
        run_id: identity of the run.
        attempt: number of this attempt, 1 for a fresh run.
        start_id: start id of the owner.
        records: packed rows of the committed checkpoints, newest first: name, attempt, step, and what
            `holdfast.run.record.unpack` reads of one.
        quarantined: reason by checkpoint name.
        finished: what an earlier attempt recorded at its end, or None.
        waited_s: time spent waiting for the lease.
        swept: directories of unfinished saves that were removed.
        copies: names of copied or renamed checkpoints, which are left alone, for a reader.
        notes: what `run_op("note", ...)` has kept in this run.
        taken: names under the root that are no usable checkpoints of the run, in order: quarantined, damaged, foreign.
        incomplete: those among them with files of a save that was never committed.
        strangers: those among them of checkpoints that are of another run, or of none.
        dead: names at which an owner that was taken over may still be at work; among those of ``taken``.
        remote: of a mirrored run "places" (for each checkpoint of ``records``, which are those of both sides, "local",
            "remote" or "both") and "waiting" (names that the remote has yet to get); None for others.
    """

    _DECODED: ClassVar[Any] = dict.fromkeys(("records", "swept", "taken", "incomplete", "strangers", "dead"), tuple)
    run_id: str
    attempt: int
    start_id: str
    records: tuple[list[Any], ...] = ()
    quarantined: dict[str, str] = field(default_factory=dict)
    finished: dict[str, Any] | None = None
    waited_s: float = 0.0
    swept: tuple[str, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)
    taken: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    remote: dict[str, Any] | None = None
    copies: str = ""


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the wire: class name, message, and the attributes Holdfast's own classes carry."""
    extra = {}
    if isinstance(error, errors.HoldfastError):  # those of others may be anything, and must not stop the answer
        extra = {name: getattr(error, name) for name in ("file", "tensor", "chunk", "problems") if hasattr(error, name)}
    return {"type": type(error).__name__, "message": str(error), "extra": extra}


def error_to_ranks(error: BaseException) -> dict[str, Any]:
    """Describe an error of a trainer for the other ranks: an error of another package keeps its name in the message."""
    described = error_to_json(error)
    if isinstance(error, errors.HoldfastError):
        return described
    return {**described, "type": "HoldfastError", "message": f"{described['type']}: {described['message']}"}


def error_from_json(data: dict[str, Any]) -> errors.HoldfastError:
    """Rebuild an exception by the name of its class; a class that is not Holdfast's becomes a `HoldfastError`."""
    kind = getattr(errors, data["type"], None)
    if not (isinstance(kind, type) and issubclass(kind, errors.HoldfastError)):
        return errors.HoldfastError(f"the writer failed: {data['type']}: {data['message']}")
    extra = data.get("extra") or {}
    if issubclass(kind, errors.CorruptCheckpointError):
        return kind(data["message"], **{name: extra.get(name) for name in ("file", "tensor", "chunk")})
    if issubclass(kind, errors.StateMismatchError):
        return kind(data["message"], problems=tuple(extra.get("problems", ())))
    return kind(data["message"])
