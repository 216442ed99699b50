"""The manifest: what a checkpoint consists of. Its presence and validity are the commit.

One JSON object, one line for each field, closed by a line with the digest of every byte before it. That closing line
is the same in all versions of the format, so a reader can tell a damaged manifest from one of a newer version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from holdfast._outgoing import brief
from holdfast.errors import ConfigError, CorruptCheckpointError, FormatVersionError

from .codec import decode, encode
from .digest import bytes_digest, table_bytes
from .names import MANIFEST_NAME, UNLISTED, check_path
from .strict_json import dumps, loads

__all__ = [
    "EMPTY_DIRECTORIES", "FORMAT", "FORMAT_VERSION", "MANIFEST_NAME", "MAX_FOLDERS", "MAX_MANIFEST_BYTES", "ROLES",
    "FileEntry", "Manifest", "body_digest",
]  # fmt: skip

FORMAT = "holdfast-checkpoint"
FORMAT_VERSION = "1.0"
MAX_MANIFEST_BYTES = 64 << 20
EMPTY_DIRECTORIES = "empty_directories"
"""Key in ``extra`` of the directories that hold no file: a list of paths, without parents of listed directories."""
MAX_FOLDERS = 200_000
"""The most directories without a file that a checkpoint may have, their parents included."""
ROLES = ("tensors", "index", "state", "digests", "user", "rank")

_CLOSING = re.compile(rb',\n"body_digest": "(xxh3:[0-9a-f]{32})"\n}\n')
_CLOSING_BYTES = len(b',\n"body_digest": "xxh3:"\n}\n') + 32
_DIGEST = re.compile(r"xxh3:[0-9a-f]{32}")
_MAX_SIZE = 1 << 62
_ROWS, _LINES = b'},{"path":', b'},\n{"path":'


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        path: relative to the checkpoint.
        size: bytes.
        digest: `digest.file_digest` of its chunk digests.
        role: one of `ROLES`; a reader ignores roles it does not know.
        writer: rank that wrote it.
        reused_from: name of the checkpoint whose bytes it shares, if it was not written anew.
        chunks: (digest file, offset of its chunk digests therein); None where the file digest is all there is.
    """

    path: str
    size: int
    digest: str
    role: str = "user"
    writer: int = 0
    reused_from: str | None = None
    chunks: tuple[str, int] | None = None

    @classmethod
    def of_small(cls, path: str, data: bytes, *, role: str, writer: int) -> FileEntry:
        """Describe a small file by its content; its digest is all there is."""
        return cls(path=path, size=len(data), digest=bytes_digest(data), role=role, writer=writer)

    def to_json(self) -> dict[str, Any]:
        """Describe this file; fields that say nothing are left out."""
        row: dict[str, Any] = {"path": self.path, "size": self.size, "digest": self.digest, "role": self.role}
        if self.writer:
            row["writer"] = self.writer
        if self.reused_from is not None:
            row["reused_from"] = self.reused_from
        if self.chunks is not None:
            row["chunks"] = list(self.chunks)
        return row

    @classmethod
    def from_json(cls, row: Any, *, where: str = MANIFEST_NAME) -> FileEntry:
        """Rebuild what `to_json` described.

        Raises:
            CorruptCheckpointError: malformed, or a path that leaves the checkpoint.
        """
        if not isinstance(row, dict):
            raise _corrupt(where, f"malformed file entry {brief(row, 120)}")
        path = check_path(row.get("path"), where=where)
        size, digest, role = row.get("size"), row.get("digest"), row.get("role")
        writer, reused, chunks = row.get("writer", 0), row.get("reused_from"), row.get("chunks")
        fine = (
            _is_count(size)
            and isinstance(digest, str)
            and _DIGEST.fullmatch(digest)
            and isinstance(role, str)
            and _is_count(writer)
            and (reused is None or isinstance(reused, str))
            and (chunks is None or (isinstance(chunks, list) and len(chunks) == 2 and _is_count(chunks[1])))
        )
        if not fine:
            raise _corrupt(where, f"malformed file entry {brief(row, 120)}")
        place = None if chunks is None else (check_path(chunks[0], where=where), chunks[1])
        return cls(path=path, size=size, digest=digest, role=role, writer=writer, reused_from=reused, chunks=place)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed checkpoint.

    Attributes:
        run_id: run it belongs to; None for a checkpoint saved on its own.
        name: directory in the run that it was committed as, by which copies under other names are known. "" for a
            checkpoint saved on its own, and of early versions.
        checkpoint_id: unique id of this very checkpoint.
        parent: checkpoint id of this training's newest checkpoint when this one was begun: saved before it, or resumed
            from.
        attempt: number of the attempt within the run; (attempt, step) orders the checkpoints of a run.
        step: optimizer steps trained.
        epoch: epoch, possibly with a fraction.
        created: UTC, ISO 8601.
        metrics: plain data; NaN and infinities survive.
        world_size: ranks that trained.
        writers: ranks that wrote files.
        versions: of libraries, for people.
        total_bytes: of all listed files.
        reused_bytes: of the files shared with an earlier checkpoint.
        files: all files but the manifest itself and the sidecars.
        extra: anything else, plain data.
    """

    run_id: str | None = None
    name: str = ""
    checkpoint_id: str = ""
    parent: str | None = None
    attempt: int = 0
    step: int | None = None
    epoch: float | None = None
    created: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    writers: tuple[int, ...] = (0,)
    versions: Mapping[str, str] = field(default_factory=dict)
    total_bytes: int = 0
    reused_bytes: int = 0
    files: tuple[FileEntry, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Write this manifest.

        Raises:
            ConfigError: a file has a name, or a field a value, that no reader would accept.
        """
        malformed = [name for name, check in _CHECKS.items() if not check(getattr(self, name))]
        if malformed:
            values = ", ".join(f"{name}={brief(getattr(self, name), 120)}" for name in malformed)
            raise ConfigError(f"this checkpoint cannot be committed, nobody could read it: {values}")
        lines = [f'"format": "{FORMAT}"'.encode(), f'"format_version": "{FORMAT_VERSION}"'.encode()]
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "name" and not value:
                continue
            if item.name == "files":
                # One call for all rows; the replaced bytes cannot occur inside a string, whose quotes are escaped.
                rows = dumps([entry.to_json() for entry in self.files])[1:-1].replace(_ROWS, _LINES)
                lines.append(b'"files": [\n' + rows + b"\n]")
            else:
                if item.name in ("metrics", "extra"):
                    value = encode(dict(value), path=item.name)
                lines.append(f'"{item.name}": '.encode() + dumps(dict(value) if item.name == "versions" else value))
        body = b"{\n" + b",\n".join(lines)
        try:
            _check_listed(self.files, self.extra, MANIFEST_NAME)
            for entry in self.files:
                check_path(entry.path, where=MANIFEST_NAME)
        except CorruptCheckpointError as error:
            raise ConfigError(f"this checkpoint cannot be committed: {error}") from error
        return body + f',\n"body_digest": "{bytes_digest(body)}"\n}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str = MANIFEST_NAME) -> Manifest:
        """Read a manifest. Unknown fields are ignored.

        Raises:
            CorruptCheckpointError: its digest or its fields are wrong, or a path leaves the checkpoint.
            FormatVersionError: written in a major version that this Holdfast does not know.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise _corrupt(where, f"{len(data)} bytes are more than a manifest may have")
        closing = _CLOSING.fullmatch(data, max(0, len(data) - _CLOSING_BYTES))
        if closing is None:
            raise _corrupt(where, "it does not end as a manifest does (cut short, or not written by Holdfast)")
        if bytes_digest(memoryview(data)[: closing.start()]) != closing[1].decode():
            raise _corrupt(where, "its bytes are not what was written (digest differs)")
        tree = loads(data, max_bytes=MAX_MANIFEST_BYTES, where=where)
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise _corrupt(where, f"not a manifest of the format {FORMAT!r}")
        _check_version(tree, where)
        rows = tree.get("files")
        if not isinstance(rows, list):
            raise _corrupt(where, "it lists no files")
        files = tuple(FileEntry.from_json(row, where=where) for row in rows)
        values: dict[str, Any] = {item.name: tree[item.name] for item in fields(cls) if item.name in tree}
        values["files"] = files
        for name in ("metrics", "extra"):
            values[name] = decode(values.get(name, {}), where=where)
        if isinstance(values.get("writers"), list):
            values["writers"] = tuple(values["writers"])
        for name, check in _CHECKS.items():
            if name in values and not check(values[name]):
                raise _corrupt(where, f"malformed field {name!r}: {brief(values[name], 120)}")
        _check_listed(files, values["extra"], where)
        return cls(**values)

    def file(self, path: str) -> FileEntry | None:
        """Return the entry of a file, None if it is not part of the checkpoint."""
        return next((entry for entry in self.files if entry.path == path), None)

    @property
    def empty_directories(self) -> tuple[str, ...]:
        """Directories that hold no file, relative to the checkpoint."""
        return tuple(self.extra.get(EMPTY_DIRECTORIES, ()))

    def with_role(self, role: str) -> tuple[FileEntry, ...]:
        """Return the files of one role."""
        return tuple(entry for entry in self.files if entry.role == role)


def body_digest(data: bytes) -> str:
    """Return the digest in the closing line of a manifest that was checked."""
    closing = _CLOSING.fullmatch(data, max(0, len(data) - _CLOSING_BYTES))
    return "" if closing is None else closing[1].decode()


def _check_version(tree: dict[str, Any], where: str) -> None:
    version = tree.get("format_version")
    major = re.fullmatch(r"([0-9]{1,6})\.[0-9]{1,6}", version) if isinstance(version, str) else None
    if major is None:
        raise _corrupt(where, f"{brief(version, 40)!r} is no format version")
    if major[1] != FORMAT_VERSION.partition(".")[0]:
        versions = tree.get("versions")
        writer = versions.get("holdfast") if isinstance(versions, dict) else None
        needed = writer if isinstance(writer, str) and re.fullmatch(r"[0-9a-z.+]+", writer) else None
        from holdfast._optional import upgrade_command  # not above: of this error only

        raise FormatVersionError(
            f"{where} is of format version {version}, this Holdfast reads {FORMAT_VERSION[0]}.x: "
            f"{upgrade_command(needed)}"
        )


def _check_listed(files: tuple[FileEntry, ...], extra: Mapping[str, Any], where: str) -> None:
    """Refuse files that are listed twice, or whose digests are nowhere, and directories that cannot be."""
    by_path = {entry.path: entry for entry in files}
    if len(by_path) != len(files) or not UNLISTED.isdisjoint(by_path):
        raise _corrupt(where, "it lists a file twice, or a file that may change after the commit")
    for entry in files:
        if entry.chunks is not None:
            path, offset = entry.chunks
            table = by_path.get(path)
            if table is None or table.role != "digests" or offset + table_bytes(entry.size) > table.size:
                raise _corrupt(where, f"the chunk digests of {entry.path} are not where it says ({path}, {offset})")
    folders = extra.get(EMPTY_DIRECTORIES, [])
    if not folders and isinstance(folders, (list, tuple)):
        return
    if not isinstance(folders, (list, tuple)) or not all(isinstance(folder, str) for folder in folders):
        raise _corrupt(where, f"malformed field {EMPTY_DIRECTORIES!r}: {brief(folders, 120)}")
    if sum(folder.count("/") + 1 for folder in folders) > MAX_FOLDERS:
        raise _corrupt(where, f"it lists more than {MAX_FOLDERS} directories without a file")
    taken = UNLISTED | by_path.keys()  # where no directory can be
    for folder in folders:
        head = check_path(folder, where=where)
        while head and head not in taken:
            head = head.rpartition("/")[0]
        if head:
            raise _corrupt(where, f"the directory {folder[:200]!r} would be where the file {head[:200]!r} is")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


_CHECKS = {
    "run_id": _is_text_or_none,
    "name": _is_text,
    "checkpoint_id": _is_text,
    "parent": _is_text_or_none,
    "attempt": _is_count,
    "step": lambda value: value is None or _is_count(value),
    "epoch": lambda value: value is None or type(value) in (int, float),
    "created": _is_text,
    "metrics": _is_mapping,
    "world_size": _is_count,
    "writers": lambda value: isinstance(value, tuple) and all(map(_is_count, value)),
    "versions": lambda value: _is_mapping(value) and all(map(_is_text, value.values())),
    "total_bytes": _is_count,
    "reused_bytes": _is_count,
    "extra": _is_mapping,
}


def _corrupt(where: str, flaw: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{where}: {flaw}: this checkpoint is damaged; use another one", file=MANIFEST_NAME)
