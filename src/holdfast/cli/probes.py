"""What a storage and this machine promise and keep: the probes of ``holdfast doctor``.

Of the machine: memory for the copy of the state, limits, versions. Of a storage: a local path, or a URI. No other
command needs them, nor what they import.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import mmap
import os
import platform
import shutil
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import holdfast
from holdfast._units import format_bytes, format_duration
from holdfast.copying.local import clone_file
from holdfast.errors import (
    HoldfastError,
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StoragePermissionError,
)
from holdfast.storage.base import TEMPORARY, Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.together import together
from holdfast.writer.arena import can_share_memory
from holdfast.writer.client import WriterClient
from holdfast.writer.free_memory import free_memory

from .terminal import handling

try:
    import resource
except ImportError:  # pragma: no cover - Windows
    resource = None  # type: ignore[assignment]

LEFT = f"{TEMPORARY}holdfast-doctor-"
"""First characters of the folder that the probes work in: no listing of Holdfast shows it."""

_OLD_S = 900.0
_COMMITS = 12
_REQUESTS = 5  # to a store
_PARALLEL = 4
_SLOW_COMMIT_S = 0.1
_BLOCK = 8 << 20
_SKEW_WARN_S, _SKEW_BAD_S = 2.0, 25.0  # a lease counts as stale after 30 s
_FEW_BYTES, _FEW_INODES = 1 << 30, 10_000
_FAR = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "9p", "virtiofs", "afs"}
_VOLATILE = {"tmpfs": "memory", "ramfs": "memory", "overlay": "the writable layer of a container"}
Progress = Callable[[int], object]

_FEW_SHM = 1 << 30
_FEW_FILES = 1024
_PROBED_PIN = 64 << 20
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a probe has found.

    Attributes:
        name: of the probe.
        level: "ok"; "warn": training works, slower or with less protection; "bad": to be mended before training.
        found: what was seen.
        means: what follows from it.
        todo: what to do about it; "" for nothing.
        values: the numbers behind, in the units their names say.
    """

    name: str
    level: Literal["ok", "warn", "bad"]
    found: str
    means: str
    todo: str = ""
    values: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    def to_json(self) -> dict[str, Any]:
        """Describe as JSON."""
        return {
            "name": self.name,
            "level": self.level,
            "found": self.found,
            "means": self.means,
            "do": self.todo,
            "values": dict(self.values),
        }


def good(name: str, found: str, means: str, **values: Any) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(name=name, level="ok", found=found, means=means, values=values)


def warn(name: str, found: str, means: str, todo: str, **values: Any) -> Finding:
    """Return a finding with which training works, slower or with less protection."""
    return Finding(name=name, level="warn", found=found, means=means, todo=todo, values=values)


def bad(name: str, found: str, means: str, todo: str, **values: Any) -> Finding:
    """Return a finding that has to be mended before training."""
    return Finding(name=name, level="bad", found=found, means=means, todo=todo, values=values)


class ProbeDeadline:
    """A span that probes share.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; 0 or less: it is over."""
        return self._end - time.monotonic()


def probe_machine() -> Generator[Finding]:
    """Yield the findings about this machine."""
    yield _versions()
    yield _cores()
    yield _memory()
    yield _sharing()
    yield _writer()
    yield from _shm()
    yield from _limits()
    yield from _gpus()


def _versions() -> Finding:
    versions = {"python": platform.python_version(), "holdfast": holdfast.__version__}
    for name in ("torch", "numpy", "obstore", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    text = ", ".join(f"{name} {number}" for name, number in versions.items())
    if "torch" not in versions:
        return bad("versions", text, "nothing can be saved or loaded without torch", "pip install torch", **versions)
    return good("versions", f"{text}; {platform.system()} {platform.release()}", "", **versions)


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < 2:
        return warn("cores", f"{count}", "writing a checkpoint and training take turns on it",
                    "give the process two cores or more", count=count)  # fmt: skip
    return good("cores", f"{count}", "a checkpoint is written beside the training", count=count)


def _memory() -> Finding:
    found = free_memory()
    if found is None:
        return good("memory", "unknown on this platform", "a save needs memory for one copy of the state")
    free = found.bytes
    text = f"{format_bytes(max(free, 0))} free ({found.bound})"
    if free < _FEW_BYTES:
        return warn("memory", text, "a save takes one copy of the state; a larger state goes through windows, and "
                    "holds training meanwhile", "give the process more memory", free_bytes=free)  # fmt: skip
    means = "a copy of the state up to this size fits, less what training itself takes"
    return good("memory", text, means, free_bytes=free)


def _sharing() -> Finding:
    if can_share_memory():
        return good("memfd", "works", "the copy is shared with the writer process, without /dev/shm")
    return warn("memfd", "not here", "the writer is a thread of the training process: saving takes time from training",
                "use Linux 3.17 or newer, and a container whose seccomp profile allows memfd_create")  # fmt: skip


def _writer() -> Finding:
    start = time.perf_counter()
    try:
        client = WriterClient.start()
        try:
            process = client.process_id
        finally:
            client.close()
    except (HoldfastError, OSError) as error:
        return bad("writer", f"does not start: {error}", "nothing can be saved", "see the message")
    took = time.perf_counter() - start
    kind = "thread" if process is None else "process"
    return good("writer", f"a {kind}, started and ended in {format_duration(took)}", "", kind=kind, seconds=took)


def _shm() -> Generator[Finding]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return
    free = found.f_bavail * found.f_frsize
    text = f"{format_bytes(free)} free"
    if free < _FEW_SHM:
        yield warn("/dev/shm", text, "Holdfast does not use it, but workers of a DataLoader die with a bus error",
                   "docker run --shm-size=8g, or an emptyDir of medium Memory", free_bytes=free)  # fmt: skip
    else:
        yield good("/dev/shm", text, "for the workers of a DataLoader; Holdfast does not use it", free_bytes=free)


def _limits() -> Generator[Finding]:
    if resource is None:
        return
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        yield warn("open files", f"at most {files}", "many ranks or loader workers may run out of them",
                   "ulimit -n 65536", limit=files)  # fmt: skip
    else:
        yield good(
            "open files", f"at most {'unlimited' if files == resource.RLIM_INFINITY else files}", "enough", limit=files
        )
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        yield bad("file size", f"at most {format_bytes(size)}", "a save of larger files is killed by SIGXFSZ",
                  "ulimit -f unlimited", limit_bytes=size)  # fmt: skip
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked)
    yield good("locked memory", text, "pinning for a GPU goes through its driver and is not bound by it", limit=locked)


def _gpus() -> Generator[Finding]:
    if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")):
        return
    from holdfast.state.save.device_copies import try_pinning

    try:
        devices, seconds = try_pinning(_PROBED_PIN)
    except (RuntimeError, OSError, ImportError) as error:
        yield warn("GPU", f"there is one, and torch cannot use it: {str(error).splitlines()[0]}",
                   "training runs on the CPU", "nvidia-smi shows the driver; install a torch that fits it")  # fmt: skip
        return
    rate = _PROBED_PIN / max(seconds, 1e-9)
    yield good(
        "GPU", f"{', '.join(devices)}; memory is pinned at {format_bytes(int(rate))}/s",
        "the copy of the state is pinned once, and copied beside the training", pinned_bytes_per_s=rate,
    )  # fmt: skip


# ---- of a local path


@contextlib.contextmanager
def _folder_in(place: Path) -> Iterator[Path]:
    """Give a folder of our own in a directory; removed at the end, also on Ctrl-C and within `ends_in_order`.

    Raises:
        OSError: the folder cannot be made.
    """
    for old in place.glob(f"{LEFT}*"):  # of a probe that SIGKILL ended
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_S:
                shutil.rmtree(old)

    folder = Path(tempfile.mkdtemp(prefix=LEFT, dir=place))
    try:
        yield folder
    finally:
        with _undisturbed():
            shutil.rmtree(folder, ignore_errors=True)


def _undisturbed() -> contextlib.AbstractContextManager[None]:
    """Let no second Ctrl-C or SIGTERM end the body half-way."""
    return handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)


def probe_disk(path: Path, max_bytes: int, deadline: ProbeDeadline, progress: Progress) -> Generator[Finding]:
    """Yield the findings about a local directory; writes and reads at most ``max_bytes`` each way, twice."""
    place = path  # or the nearest directory above it that is there
    while not os.path.isdir(place):  # also where a part of the path may not be looked at
        place = place.parent
    kind, device, options = _file_system(place)
    where = str(place) + ("" if place == path else f" (nearest directory above {path}, which is not there yet)")
    yield _kind(kind, device, options, where)
    yield from _room(place)
    try:
        with _folder_in(place) as folder:
            storage = LocalStorage(folder)
            yield from _promises(storage)
            for probe in (_locks, _direct, _links, _clones, _case):
                yield probe(folder)
            yield _disk_clock(folder)
            yield _commits(storage)
            if max_bytes:
                free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
                size = min(max_bytes, free // 10) // _BLOCK * _BLOCK
                if size:
                    yield from _disk_speed(storage, folder, size, deadline, progress)
    except OSError as error:
        if isinstance(error, HoldfastError) or error.filename is None:
            raise
        yield bad(
            "write",
            f"a file cannot be made in {place}: {error.strerror}",
            "no checkpoint can be saved here",
            "give this user the right to write (chmod, chown), or another path",
        )


def _file_system(place: Path) -> tuple[str, str, str]:
    """Return type, device and mount options of the file system that a directory lies in."""
    best = ("", "unknown", "", "")
    with contextlib.suppress(OSError):
        real = os.path.realpath(place)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            device, mount, kind, options = line.split()[:4]
            mount = mount.replace("\\040", " ")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best[0]):
                best = (mount, kind, device, options)
    return best[1], best[2], best[3]


def _kind(kind: str, device: str, options: str, where: str) -> Finding:
    found, values = f"{kind} on {device}, {where}", {"type": kind, "device": device, "options": options}
    if "ro" in options.split(","):
        return bad("file system", f"{found}, mounted read-only", "nothing can be saved here", "mount it read-write")
    if kind in _VOLATILE:
        return warn(
            "file system",
            found,
            f"this is {_VOLATILE[kind]}: checkpoints are gone when that ends, whatever fsync says",
            "for what has to last, give a path on a disk or a mounted volume, or a bucket",
            **values,
        )
    if kind in _FAR or kind.startswith("fuse"):
        return good("file system", found, "shared by machines: the probes below say what it keeps", **values)
    return good("file system", found, "a disk of this machine", **values)


def _room(place: Path) -> Generator[Finding]:
    found = os.statvfs(place)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text, values = f"{format_bytes(free)} of {format_bytes(total)} free", {"free_bytes": free, "total_bytes": total}
    if free < _FEW_BYTES:
        yield bad(
            "free space", text, "a save of a model of any size meets a full disk",
            "free some, `holdfast prune RUN --keep last=3`, or give another path", **values,
        )  # fmt: skip
    elif free < total // 20:
        yield warn(
            "free space", text, "less than 5 % are free, where many file systems become slow",
            "`holdfast prune RUN --keep last=3` removes old checkpoints", **values,
        )  # fmt: skip
    else:
        yield good("free space", text, "quotas of a user are not seen here", **values)
    if found.f_files:
        text = f"{found.f_favail} of {found.f_files} free"
        values = {"free": found.f_favail, "total": found.f_files}
        if found.f_favail < _FEW_INODES:
            yield bad("inodes", text, "files cannot be made although there is space", "remove small files", **values)
        else:
            yield good("inodes", text, "a checkpoint takes about ten files for each rank", **values)


def _promises(storage: Storage) -> Generator[Finding]:
    """Try what every storage promises: writes with a condition, listings, copies, deletions."""
    stale = storage.put("probe/object", b"1")
    storage.put("probe/object", b"22")
    tries: list[tuple[str, dict[str, Any]]] = [("if absent", {"if_absent": True})]
    tries += [("if unchanged", {"if_match": stale})] if stale is not None else []
    broken = []
    for name, options in tries:
        try:
            storage.put("probe/object", b"333", **options)
        except (StorageExistsError, StorageConflictError):
            continue
        broken.append(name)
    if broken or not storage.conditional:
        yield warn(
            "conditional writes",
            f"not enforced ({', '.join(broken) or 'the store ignores the headers'})",
            "Holdfast looks before it writes instead: two trainers that start one run in one moment could both take it",
            "start one trainer for each run, or use a store that has conditional writes",
        )
    else:
        yield good("conditional writes", "kept", "of two trainers that start one run, one wins")
    names = sorted(info.path for info in storage.list("probe"))
    if names != ["probe/object"] or len(storage.read("probe/object")) < 2:
        yield bad(
            "listing", f"{names} right after a write of probe/object", "the newest checkpoint may not be found",
            "use a storage that shows what was written at once",
        )  # fmt: skip
    else:
        yield good("listing", "shows what was just written", "a resume finds the newest checkpoint")


def _locks(folder: Path) -> Finding:
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows
        return warn("locks", "this platform has none", "two trainers of one run are told apart later", "")
    path = folder / "lock"
    with path.open("w") as first, path.open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return good("locks", "flock works", "a second trainer of a run on this machine is refused at once")
        except OSError as error:
            what = f"flock fails: {error.strerror}"
        else:
            what = "flock lets two have the same lock"
    return warn("locks", what, "the lease of a run goes by its heartbeat alone: a dead trainer is known after 30 s",
                "mount the file system with locks, if it has any")  # fmt: skip


def _direct(folder: Path) -> Finding:
    with (folder / "direct").open("wb") as file:
        try:
            fd = os.open(file.name, os.O_WRONLY | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = -1
        if fd >= 0 and hasattr(os, "O_DIRECT"):
            try:
                os.write(fd, mmap.mmap(-1, 4096))
            except OSError:
                pass
            else:
                return good("O_DIRECT", "works", "large files go to the disk without filling the page cache")
            finally:
                os.close(fd)
    return good("O_DIRECT", "not here", "large files go through the page cache, which takes memory and some time")


def _links(folder: Path) -> Finding:
    (folder / "file").write_bytes(b"x")
    try:
        os.link(folder / "file", folder / "linked")
    except OSError as error:
        return warn("hard links", f"not here: {error.strerror}",
                    "files that did not change are written again by every save", "")  # fmt: skip
    return good("hard links", "work", "files that did not change take no further space")


def _clones(folder: Path) -> Finding:
    (folder / "original").write_bytes(b"x" * 4096)
    try:
        clone_file(str(folder / "original"), str(folder / "clone"))
    except OSError:
        return good("reflinks", "not here", "directories of a user are taken over by a copy")
    return good("reflinks", "work", "directories of a user are taken over without a copy")


def _case(folder: Path) -> Finding:
    (folder / "Case").write_bytes(b"x")
    if (folder / "case").exists():
        return warn("names", "upper and lower case are the same", "runs whose names differ in case alone clash",
                    "give runs names that differ in more")  # fmt: skip
    return good("names", "upper and lower case differ", "every name of a run or item is its own")


def _disk_clock(folder: Path) -> Finding:
    before = time.time()
    (folder / "clock").write_bytes(b"x")
    skew = (folder / "clock").stat().st_mtime - (before + time.time()) / 2
    return skew_of(skew, "the file system")


def skew_of(skew: float, whose: str) -> Finding:
    """Judge ``skew``: by how many seconds the clock of a storage is ahead of this machine's."""
    text = f"{whose} is {abs(skew):.2f} s {'ahead' if skew > 0 else 'behind'}"
    if abs(skew) < _SKEW_WARN_S:
        return good("clock", text, "ages and leases are right", skew_s=skew)
    if abs(skew) < _SKEW_BAD_S:
        return warn("clock", text, "ages are wrong by as much", "set the clocks by NTP (chrony)", skew_s=skew)
    return bad("clock", text, "the lease of a living trainer on another machine may look stale after 30 s",
               "set the clocks by NTP (chrony) on all machines", skew_s=skew)  # fmt: skip


def _put_times(storage: Storage, paths: Iterable[str], nbytes: int) -> tuple[float, float]:
    """Put small objects one after the other; return the median time of one and the longest, in seconds."""
    times = []
    for path in paths:
        start = time.perf_counter()
        storage.put(path, b"x" * nbytes)
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times)


def _commits(storage: Storage) -> Finding:
    middle, worst = _put_times(storage, [f"commit/{number % 2}" for number in range(_COMMITS)], 4096)
    text = f"{format_duration(middle)}, at worst {format_duration(worst)}"
    values = {"median_s": middle, "worst_s": worst}
    if middle > _SLOW_COMMIT_S:
        return warn(
            "fsync and rename", text, "a save takes some of these one after the other, outside of training",
            "save less often than every few seconds, or give a faster disk", **values,
        )  # fmt: skip
    if middle < 2e-5:
        return warn("fsync and rename", text, "fsync does not wait for a disk: a power cut may lose what was saved",
                    "do not disable barriers or fsync (eatmydata, libeatmydata, nobarrier)", **values)  # fmt: skip
    return good("fsync and rename", text, "what a commit of a small file takes", **values)


def _disk_speed(
    storage: Storage, folder: Path, size: int, deadline: ProbeDeadline, progress: Progress
) -> Generator[Finding]:
    """Compare what Holdfast reaches with plain direct writes and reads of the same bytes."""
    buffer = mmap.mmap(-1, _BLOCK)
    buffer.write(os.urandom(1 << 16) * (_BLOCK >> 16))
    raw = folder / "raw"

    def raw_write() -> int:
        done = 0
        fd = _open(raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            while done < size and (done == 0 or deadline.left_s > 0):
                done += os.write(fd, buffer)
                progress(_BLOCK)
            os.fsync(fd)
        finally:
            os.close(fd)
        return done

    def raw_read() -> int:
        done = 0
        fd = _open(raw, os.O_RDONLY)
        try:
            while deadline.left_s > 0 and (count := os.preadv(fd, [buffer], done)):
                done += count
                progress(count)
        finally:
            os.close(fd)
        return done

    limit = _rates(raw_write)
    written = limit[0]
    if written:
        yield _judged("write", _rates(lambda: _write(storage, written, buffer, deadline, progress)), limit)
        limit = _rates(raw_read)
        with contextlib.suppress(OSError, AttributeError), (folder / "bulk").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield _judged("read", _rates(lambda: _read(storage, deadline, progress)), limit)


def _write(storage: Storage, size: int, buffer: mmap.mmap, deadline: ProbeDeadline, progress: Progress) -> int:
    """Write an object of about ``size`` bytes as a save does; durable on return. Returns its bytes."""
    with storage.create("bulk", size) as writer:
        done = 0
        while done < size:
            writer.write(memoryview(buffer)[: min(_BLOCK, size - done)])
            done += min(_BLOCK, size - done)
            progress(_BLOCK)
            if deadline.left_s < -5:
                break
    return done


def _read(storage: Storage, deadline: ProbeDeadline, progress: Progress) -> int:
    """Read the object that `write` made as a load does; return the bytes read."""
    view = memoryview(bytearray(_BLOCK))
    with storage.open("bulk") as reader:
        done = 0
        while done < reader.size and (done == 0 or deadline.left_s > 0):
            part = view[: min(_BLOCK, reader.size - done)]
            reader.will_read(done, min(reader.ahead_bytes, reader.size - done))
            reader.read_into(done, part)
            done += len(part)
            progress(len(part))
    return done


def _rates(work: Callable[[], int]) -> tuple[int, float]:
    """Return how many bytes ``work`` has processed, and bytes per second."""
    start = time.perf_counter()
    done = work()
    return done, done / max(time.perf_counter() - start, 1e-9)


def _judged(name: str, ours: tuple[int, float], limit: tuple[int, float]) -> Finding:
    """Judge a speed by that of plain calls; both are (bytes, bytes per second)."""
    share = ours[1] / max(limit[1], 1.0)
    text = f"{format_bytes(int(ours[1]))}/s, {share:.0%} of plain calls ({format_bytes(int(limit[1]))}/s)"
    text += f", {format_bytes(ours[0])}"
    values: dict[str, Any] = {"bytes_per_s": ours[1], "limit_bytes_per_s": limit[1], "bytes": ours[0]}
    means = f"10 GB take {format_duration(10e9 / max(ours[1], 1.0))}"
    if share < 0.5:
        return warn(f"{name} speed", text, f"{means}, and the disk could do more",
                    "probe again while nothing else uses the disk; where it stays so, report it", **values)  # fmt: skip
    return good(f"{name} speed", text, means, **values)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600)


# ---- at a store


def probe_store(storage: Storage, max_bytes: int, deadline: ProbeDeadline, progress: Progress) -> Generator[Finding]:
    """Yield the findings about a storage that is not a local disk; removes all that it writes."""
    name = f"holdfast-doctor-{uuid.uuid4().hex[:12]}"
    own = storage.child(name)
    try:
        yield _requests(own)
        yield from _promises(own)
        yield _store_clock(own)
        yield _copies(own)
        if max_bytes:
            yield from _store_speed(own, max_bytes // _BLOCK * _BLOCK, deadline, progress)
    except StoragePermissionError as error:
        yield bad("access", str(error), "no checkpoint can be saved here",
                  "give these credentials the right to write, read, list and delete below this place")  # fmt: skip
        return
    except StorageError as error:
        yield bad("access", str(error), "no checkpoint can be saved here",
                  "check the address, the network and the credentials")  # fmt: skip
        return
    finally:
        left = _clean(own)
    if left:
        yield bad("delete", f"{left}; {storage.uri}/{name} is left", "old checkpoints stay for ever, and are paid for",
                  "give these credentials the right to delete; remove that folder by hand")  # fmt: skip
    else:
        yield good("delete", "works; nothing is left of this probe", "retention can remove old checkpoints")


def _clean(own: Storage) -> str:
    """Remove all of the probe, whatever Ctrl-C says; returns why that did not work."""
    with _undisturbed():
        try:
            own.delete_tree("")
        except HoldfastError as error:
            return str(error)
    return ""


def _requests(own: Storage) -> Finding:
    middle, worst = _put_times(own, [f"small/{number}" for number in range(_REQUESTS)], 1024)
    text = f"{format_duration(middle)} for a small object, at worst {format_duration(worst)}"
    values = {"median_s": middle, "worst_s": worst}
    if middle > 1.0:
        return warn("requests", text, "a save takes some of these, outside of training",
                    "train in the region of the bucket", **values)  # fmt: skip
    return good("requests", text, "what a commit takes at least", **values)


def _store_clock(own: Storage) -> Finding:
    before = time.time()
    own.put("clock", b"x")
    middle = (before + time.time()) / 2
    modified = own.stat("clock").modified
    if not modified:
        return good("clock", "the store does not tell", "ages go by the clock of this machine")
    skew = modified - middle
    # Stores tell whole seconds.
    return skew_of(0.0 if -1.0 < skew < 0.0 else skew, "the store")


def _copies(own: Storage) -> Finding:
    if not own.traits.copies_itself:
        return good("copies", "would come here and go back", "files that did not change are sent again by every save")
    own.copy("small/0", "small/copied")
    return good("copies", "made by the store itself", "files that did not change are not sent again")


def _store_speed(own: Storage, size: int, deadline: ProbeDeadline, progress: Progress) -> Generator[Finding]:
    """Measure one transfer alone, and several at once: only these together fill the network."""
    buffer = mmap.mmap(-1, _BLOCK)
    buffer.write(os.urandom(1 << 16) * (_BLOCK >> 16))
    each = max(_BLOCK, size // 2 // _PARALLEL // _BLOCK * _BLOCK)
    count = _PARALLEL if own.traits.num_parallel > 1 else 1
    places = [own.child(f"part{number}") for number in range(count)]
    work = {
        "write": lambda place: _write(place, each, buffer, deadline, progress),
        "read": lambda place: _read(place, deadline, progress),
    }
    for name, do in work.items():
        alone = _rates(partial(do, places[0]))
        many = alone
        if count > 1 and deadline.left_s > 0:
            many = _rates(lambda do=do: sum(together(own, [partial(do, place) for place in places])))  # type: ignore[misc]
        best = max(alone[1], many[1])
        text = f"{format_bytes(int(alone[1]))}/s alone, {format_bytes(int(many[1]))}/s {count} at once"
        yield good(
            f"{name} speed", text, f"10 GB take {format_duration(10e9 / max(best, 1.0))}",
            bytes_per_s=alone[1], parallel_bytes_per_s=many[1], parallel=count, bytes=alone[0] + many[0],
        )  # fmt: skip
        if deadline.left_s <= 0:
            return
