"""How much memory this process may still take: what the machine has, its own limit, every control group that bounds it.

A kernel that finds a group over its limit kills, without a word. So whoever is about to take as much as the state has
asks first. A limit holds for all groups below it, so the own group and each above it are looked at (versions 1 and 2 of
control groups; in a container the topmost one visible is usually the container's).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 where there is none


@dataclass(frozen=True, slots=True, order=True)
class FreeMemory:
    """Bytes that may still be taken, what bounds them, in words, and the part that this process takes now and then.

    That part is what it has had at its peak beyond what it has now: what a step has taken the next one takes again.
    """

    bytes: int
    bound: str
    now_and_then: int = 0


def free_memory(root: Path | str = "/") -> FreeMemory | None:
    """Return what may still be taken; None where the system does not tell. Cached files count as free.

    Args:
        root: directory that has ``proc`` and ``sys``.
    """
    found = min([*_of_machine(Path(root)), *_of_groups(Path(root))], default=None)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path(root, "proc/self/status")
        peak_kib = max(0, _number(status, "VmHWM", 1) - _number(status, "VmRSS", 1))
        return found and replace(found, now_and_then=peak_kib * 1024)
    return found


def _of_machine(root: Path) -> Iterator[FreeMemory]:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        yield FreeMemory(_number(root / "proc/meminfo", "MemAvailable", 1) * 1024, "the machine")
        limit = _number(root / "proc/self/limits", "Max address space", 3)
        yield FreeMemory(limit - _number(root / "proc/self/status", "VmSize", 1) * 1024, "`ulimit -v`")


def _number(file: Path, name: str, at: int) -> int:
    return next(int(line.split()[at]) for line in file.read_text().splitlines() if line.startswith(name))


def _of_groups(root: Path) -> Iterator[FreeMemory]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            kind = "cgroup" if controllers else "cgroup2"
            for fields in mounts:
                # ... root, mount point, options, [optional fields], "-", type, source, options of the super block
                end = fields.index("-")
                if fields[end + 1] == kind and (kind == "cgroup2" or "memory" in fields[end + 3].split(",")):
                    yield from _upwards(root, _unescaped(fields[4]), _below(path, _unescaped(fields[3])), kind)


def _below(path: str, mounted: str) -> PurePosixPath:
    """Return a group relative to the group that is mounted; that one itself where the group lies outside of it."""
    group, top = PurePosixPath(path), PurePosixPath(mounted)
    if ".." in group.parts or not group.is_relative_to(top):
        return PurePosixPath()
    return group.relative_to(top)


def _upwards(root: Path, mount: str, group: PurePosixPath, kind: str) -> Iterator[FreeMemory]:
    for part in (group, *group.parents):
        folder = root / mount.lstrip("/") / part
        with contextlib.suppress(OSError, ValueError):
            yield _of_group(folder, f"the control group {PurePosixPath(mount) / part}", is_first=kind == "cgroup")


def _of_group(folder: Path, name: str, *, is_first: bool) -> FreeMemory:
    """Read one group; raises ValueError if it has no limit."""
    limits = ("memory.limit_in_bytes",) if is_first else ("memory.max", "memory.high")
    read = [(folder / file).read_text().strip() for file in limits if (folder / file).exists()]
    limit = min(int(text) for text in read if text != "max")
    if limit >= _NO_LIMIT:
        raise ValueError("no limit")
    used = int((folder / ("memory.usage_in_bytes" if is_first else "memory.current")).read_text())
    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    stat = {name: int(value) for name, value in rows}
    prefix = "total_" if is_first else ""
    # Cached files go when memory is needed, unless they wait to be written. Shared memory is no cached file here.
    cached = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    unwritten = ("total_dirty", "total_writeback") if is_first else ("file_dirty", "file_writeback")
    return FreeMemory(limit - used + max(0, cached - sum(stat.get(kind, 0) for kind in unwritten)), name)


def _unescaped(path: str) -> str:
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
