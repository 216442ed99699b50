"""What ``holdfast verify`` has found out about the checkpoints of a run: when, how deep, and whether all was well.

A small file beside run.json, ``.verified.json``, which nothing depends on: without it nothing counts as verified. Each
entry has a fingerprint of the files as they were then (names, sizes, times of change), so that a checkpoint whose files
were written or exchanged since is not taken for a verified one. What rots without a change of time is not seen.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from xxhash import xxh3_128_hexdigest

from holdfast._log import get_logger
from holdfast.errors import StorageError
from holdfast.format.digest import check_object, close_object
from holdfast.format.names import METADATA_FILE
from holdfast.storage.base import Storage

from .names import RUN_FILE, VERIFIED_FILE
from .record import METRICS_FILE

__all__ = ["Verified", "fingerprint", "known_damaged", "note_verified", "read_verified"]

_MAX_BYTES = 16 << 20
_LONGEST = 300
_LATER = {METRICS_FILE, METADATA_FILE}  # may change at any time, and no resume depends on them
_LOG = get_logger("catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of a check.

    Attributes:
        time: when it ended, in seconds since 1970.
        deep: every byte was compared with its digest, not only manifest and sizes.
        ok: nothing was wrong.
        problem: the first that was found, or "".
        files: `fingerprint` of the files that were checked.
    """

    time: float
    deep: bool
    ok: bool
    problem: str = ""
    files: str = ""

    def describe(self, storage: Storage, name: str) -> dict[str, Any]:
        """Describe as JSON, with "unchanged": whether the files are those that were checked; "words" for a reader."""
        row = asdict(self)
        row["unchanged"] = row.pop("files") == fingerprint(storage, name)
        what = "every byte" if self.deep else "manifest and sizes"
        found = "right" if self.ok else f"damaged: {self.problem}"
        when = datetime.fromtimestamp(self.time, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        since = "" if row["unchanged"] else "; its files have changed since"
        return {**row, "words": f"{when}: {what}, {found}{since}"}


def fingerprint(storage: Storage, name: str) -> str:
    """Return a digest of names, sizes and times of the files of a checkpoint; "" if they cannot be listed."""
    try:
        rows = [(info.path, info.size, info.modified) for info in storage.list(name)]
    except StorageError:
        return ""
    files = sorted(row for row in rows if row[0].rpartition("/")[2] not in _LATER)
    return xxh3_128_hexdigest(json.dumps(files).encode()) if files else ""


def read_verified(storage: Storage, found: Collection[str] = ()) -> dict[str, Verified]:
    """Return what is known of the checkpoints of a run by name; {} if nothing is, or what is stored is damaged.

    Args:
        storage: the run.
        found: names that a listing of the run has, if there was one: it may save a request.
    """
    if found and VERIFIED_FILE not in found:
        return {}
    try:
        data = storage.read(VERIFIED_FILE)
        if len(data) > _MAX_BYTES or not check_object(data):
            raise ValueError("it differs from its digest")
        rows = json.loads(data)["checkpoints"]
        return {name: _entry(row) for name, row in rows.items()}
    except FileNotFoundError:
        return {}
    except (StorageError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _LOG.warning("%s/%s is left out: %s", storage.uri, VERIFIED_FILE, error)
        return {}


def known_damaged(storage: Storage, names: Collection[str], found: Collection[str] = ()) -> dict[str, str]:
    """Return which of ``names`` were found damaged, and have the same files since, with the first problem of each.

    ``found`` is as in `read_verified`.
    """
    return {
        name: entry.problem or "no reason is known"
        for name, entry in read_verified(storage, found).items()
        if not entry.ok and name in names and entry.files == fingerprint(storage, name)
    }


def note_verified(storage: Storage, found: Mapping[str, Verified], present: Collection[str]) -> None:
    """Record results in the run at ``storage``, if it is one and can be written to; entries of names that are gone go.

    A look at sizes alone that finds nothing wrong does not replace a look at every byte of the same files, which saw
    more, damage too.

    Args:
        storage: the run.
        found: results by name.
        present: all names that are there.
    """
    with contextlib.suppress(StorageError):  # of somebody else, or read-only: nothing depends on it
        if not found or not storage.exists(RUN_FILE):
            return
        known = {name: entry for name, entry in read_verified(storage).items() if name in present or name in found}
        for name, entry in found.items():
            before = known.get(name)
            saw_more = before is not None and before.deep and entry.ok and not entry.deep
            if before is None or not saw_more or before.files != entry.files:
                known[name] = entry
        body = {
            "checkpoints": {
                name: asdict(replace(entry, problem=entry.problem[:_LONGEST])) for name, entry in sorted(known.items())
            }
        }
        storage.put(VERIFIED_FILE, close_object(json.dumps(body).encode()))


def _entry(row: Mapping[str, Any]) -> Verified:
    entry = Verified(**{name: row[name] for name in ("time", "deep", "ok", "problem", "files")})
    kinds = (type(entry.deep), type(entry.ok), type(entry.problem), type(entry.files))
    if kinds != (bool, bool, str, str) or type(entry.time) not in (int, float) or not 0 <= entry.time < 1e11:
        raise ValueError("an entry is not what was written")
    return entry
