"""``holdfast doctor``: what a storage (`probe_storage`) and this machine promise and keep.

Of the machine: memory for the copy of the state, limits, versions.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import click

import holdfast
from holdfast._progress import progress_bar
from holdfast._units import format_bytes, format_duration, parse_bytes
from holdfast.errors import ConfigError, HoldfastError

from .targets import PATH, reach
from .terminal import console, json_option, print_json, printable

__all__ = ["Finding", "ProbeDeadline", "bad", "doctor", "good", "probe_machine", "warn"]

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


try:
    import resource
except ImportError:  # pragma: no cover - Windows
    resource = None  # type: ignore[assignment]

_FEW_BYTES = 1 << 30
_FEW_SHM = 1 << 30
_FEW_FILES = 1024
_PROBED_PIN = 64 << 20


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
    import importlib.metadata  # here and below: no other command needs these
    import platform

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
    from holdfast.writer.free_memory import free_memory

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
    from holdfast.writer.arena import can_share_memory

    if can_share_memory():
        return good("memfd", "works", "the copy is shared with the writer process, without /dev/shm")
    return warn("memfd", "not here", "the writer is a thread of the training process: saving takes time from training",
                "use Linux 3.17 or newer, and a container whose seccomp profile allows memfd_create")  # fmt: skip


def _writer() -> Finding:
    from holdfast.writer.client import WriterClient

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


_LEVELS = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command()
@click.argument("path", type=PATH)
@click.option("--bytes", "max_bytes", default="128MiB", show_default=True, help="To write and read for speed; 0: none.")
@click.option("--seconds", default=20.0, show_default=True, help="No transfer for speed begins after so long.")
@json_option
def doctor(path: str, max_bytes: str, seconds: float, as_json: bool) -> None:
    """Probe the storage at PATH and this machine, and say what was found, what it means and what to do.

    Writes to a folder of its own and removes it again; no existing file is touched. Status 1 if something has to be
    mended before training; warnings do not count.
    """
    from .probe_storage import ended_by_sigterm, probe_disk, probe_store  # here: no other command needs them

    size = parse_bytes(max_bytes)
    if size is None:
        raise ConfigError(f"--bytes {max_bytes}: give a size such as 128MiB or 1GB, or 0")
    storage = reach(path)
    deadline = ProbeDeadline(seconds)
    rows: list[tuple[str, Finding]] = []
    out = None if as_json else console()
    root = storage.local_root
    uri = storage.uri
    with progress_bar("speed", 4 * size if root is not None else None, after_s=1.0) as progress:
        probes: dict[str, Generator[Finding]] = {
            "storage": (
                probe_store(storage, size, deadline, progress)
                if root is None
                else probe_disk(Path(root), size, deadline, progress)
            ),
            "machine": probe_machine(),
        }
        for part, findings in probes.items():
            with contextlib.closing(findings), ended_by_sigterm():
                rows += [(part, finding) for finding in findings]
    counts = {level: sum(finding.level == level for _, finding in rows) for level in _LEVELS}
    if out is None:
        listed = [{"part": part, **finding.to_json()} for part, finding in rows]
        print_json({"path": uri, "ok": not counts["bad"], "findings": listed})
    else:
        _print(uri, rows)
        summary = f"{counts['ok']} fine, {counts['warn']} to know, {counts['bad']} to mend"
        out.print(summary, style="bold")
    if counts["bad"]:
        raise click.exceptions.Exit(1)


def _print(uri: str, rows: list[tuple[str, Finding]]) -> None:
    from rich.text import Text

    out = console()
    width = max(len(finding.name) for _, finding in rows)
    shown = ""
    for part, finding in rows:
        if part != shown:
            shown = part
            title = printable(uri) if part == "storage" else "this machine"
            out.print(Text(f"{title}", style="bold"), soft_wrap=True)
        line = Text(f"  {finding.level:<5}", style=_LEVELS[finding.level]) + Text(f"{finding.name:<{width}}  ")
        line += Text(printable(finding.found))
        line += Text(printable(f"; {finding.means}") if finding.means else "", style="dim")
        out.print(line, soft_wrap=True)
        if finding.todo:
            out.print(Text(f"{'':7}{'':{width}}  to do: {printable(finding.todo)}", style="yellow"), soft_wrap=True)
