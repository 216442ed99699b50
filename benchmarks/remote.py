"""Upload and download of a 1 GiB state to an S3 server on this machine: the raw client, Holdfast, and others.

Everybody moves the same files, from the page cache, and what lands on the disk is fsynced; the raw client moves objects
of the same sizes from memory, and drops what it gets. `save_async` and `load` take the state from and into live
tensors. The server keeps its objects on the disk and shares the cores.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import holdfast as hf
from holdfast.copying.transfer import copy_checkpoint
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.resolve import resolve

from .bench import Context, Goal, Outcome, fsync_tree, median, remove, timed
from .limits import Limits
from .remote_clients import BUCKET, RawClient, Server, make_peers, run_server
from .states import TrainState, gpt2_state

__all__ = ["run"]

_MIB = 1 << 20
_SETTINGS = ((8, 12), (8, 24), (16, 12), (32, 8))  # MiB a part or range, how many at once
_SMALL = 0.25  # of the width: what moto holds in its memory


def run(context: Context) -> Outcome:
    """Measure everybody, in turns."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        folder = context.folder("server")
        stack.callback(remove, folder)
        server = stack.enter_context(run_server(folder, outcome.notes, quick=context.quick))
        stack.enter_context(_environment(server))
        scale = context.scale * (_SMALL if server.name == "moto" else 0.85)
        state = gpt2_state(scale=scale, quick=context.quick)
        outcome.notes.append(f"{server.name}, state of {state.nbytes / 2**30:.2f} GiB")
        files = context.folder("files") / "c"
        hf.save(files, state.objects)
        stack.callback(remove, files.parent)
        raw = RawClient(server, [path.stat().st_size for path in files.iterdir()])
        stack.callback(raw.close)
        best = _best_settings(context, outcome, raw)
        limits = Limits(context, state.nbytes)
        stack.callback(limits.close)
        _Rounds(context, outcome, server, state, raw, best, limits, files).run()
        outcome.limits = limits.to_json()
    _judge(outcome)
    return outcome


@contextlib.contextmanager
def _environment(server: Server) -> Iterator[None]:
    """Set what finds the server, and put everything back."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        del os.environ[name]
    os.environ.update(server.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _best_settings(context: Context, outcome: Outcome, raw: RawClient) -> dict[str, tuple[int, int]]:
    """Try the settings of the raw client once each; the best of them is the limit of all turns."""
    best = {}
    for kind, move in (("upload", raw.upload), ("download", raw.download)):
        times = {}
        for chunk, parallel in _SETTINGS[:1] if context.quick else _SETTINGS:
            times[chunk * _MIB, parallel] = timed(move, chunk * _MIB, parallel)
            context.say(f"raw {kind}, {parallel} x {chunk} MiB: {times[chunk * _MIB, parallel]:.2f} s")
        best[kind] = min(times, key=lambda setting: times[setting])
        chosen = best[kind]
        outcome.notes.append(f"raw {kind} at its best with {chosen[1]} x {chosen[0] // _MIB} MiB")
    return best


class _Rounds:
    """The methods, and the turns in which they are measured."""

    def __init__(
        self,
        context: Context,
        outcome: Outcome,
        server: Server,
        state: TrainState,
        raw: RawClient,
        best: dict[str, tuple[int, int]],
        limits: Limits,
        files: Path,
    ) -> None:
        self._context, self._outcome, self._state, self._limits = context, outcome, state, limits
        self._remote = resolve(f"s3://{BUCKET}")
        self._local, self._files = LocalStorage(files.parent), files
        self._uploads: dict[str, Callable[[], object]] = {"limit": lambda: raw.upload(*best["upload"])}
        self._downloads: dict[str, Callable[[Path], object]] = {"limit": lambda _: raw.download(*best["download"])}
        self._uploads["push"] = lambda: copy_checkpoint(self._local, "c", self._remote, "push")
        self._downloads["pull"] = lambda path: copy_checkpoint(
            self._remote, "push", LocalStorage(path.parent), path.name
        )
        self._downloads["load"] = lambda _: hf.load(f"s3://{BUCKET}/push", into=state.objects)
        for peer in make_peers(server, outcome.notes):
            self._uploads[peer.name] = lambda peer=peer: peer.upload(self._files, peer.name[:4])  # type: ignore[misc]
            self._downloads[peer.name] = lambda path, peer=peer: _fsynced(peer.download, peer.name[:4], path)  # type: ignore[misc]

    def run(self) -> None:
        """Measure all, ``repeat`` times and once before, in another order every time.

        What a method has brought is deleted before the next one begins: whoever comes later would find less memory
        that this machine has not given back to its host, and touching new memory costs the server most of its time.
        """
        names = [*self._uploads, "save_async"]
        for turn in range(self._context.repeat + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if name == "save_async":
                    self._saves(first=not turn, remote_first=turn % 2 == 0)
                elif name in self._uploads:
                    self._measure("upload", name, first=not turn)
                for download in {"push": ("pull", "load")}.get(name, (name,)):
                    if download in self._downloads:
                        self._measure("download", download, first=not turn)
                self._remote.delete_tree("")
        self._memory()

    def _saves(self, *, first: bool, remote_first: bool) -> None:
        """Save to the remote and to the disk, in turns; the trainer is to be held the same."""
        self._limits.memcpy()
        places: list[tuple[str, str | Path]] = [
            ("save_async", f"s3://{BUCKET}/async"),
            ("save_async to disk", self._context.folder("s")),
        ]
        for method, place in places if remote_first else places[::-1]:
            self._state.touch()
            start = time.perf_counter()
            with _RssOfChildren() as rss:
                handle = hf.save_async(place, self._state.objects, overwrite=True)
                held = time.perf_counter() - start
                handle.result()
            durable = time.perf_counter() - start
            self._outcome.add(method, first=first, held=held, upload=durable, writer_mb=rss.grown / 1e6)
            self._context.say(f"{method}: held {held:.3f} s, durable {durable:.2f} s")
            if isinstance(place, Path):
                remove(place)
            else:
                self._remote.delete_tree("async")

    def _measure(self, kind: str, name: str, *, first: bool) -> None:
        methods: dict[str, Callable[..., object]] = self._uploads if kind == "upload" else self._downloads  # type: ignore[assignment]
        path = self._context.folder("download")
        try:
            seconds = timed(methods[name], *([path] if kind == "download" else []))
        except Exception as error:
            self._outcome.notes.append(f"{name}: {kind} failed ({type(error).__name__}: {str(error)[:200]})")
            del methods[name]
            return
        finally:
            if path.exists():
                remove(path)
        self._outcome.add(name, first=first, **{kind: seconds})
        self._context.say(f"{kind}, {name}: {seconds:.2f} s")

    def _memory(self) -> None:
        """Push and pull in processes of their own, and look at the memory that is nobody else's."""
        back = self._context.folder("back")
        for name, arguments in (
            ("push", ["push", str(self._files), f"s3://{BUCKET}/memory"]),
            ("pull", ["pull", f"s3://{BUCKET}/memory/c", str(back)]),
        ):
            command = [sys.executable, "-c", "from holdfast.cli.main import main; main()", *arguments]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            peak = 0
            while process.poll() is None:
                peak = max(peak, _anonymous(process.pid))
                time.sleep(0.002)
            if process.returncode:
                raise RuntimeError(f"holdfast {name} ended with {process.returncode}")
            self._outcome.add(f"{name} process", whole_mb=peak / 1e6)
        remove(back)


def _fsynced(download: Callable[[str, Path], object], prefix: str, path: Path) -> None:
    download(prefix, path)
    fsync_tree(path)


class _RssOfChildren:
    """How much the memory of this process's children grows that they share with nobody; the arena is shared."""

    def __enter__(self) -> _RssOfChildren:
        self.grown = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        base: dict[int, int] = {}
        while not self._ended.wait(0.005):
            now = {pid: _anonymous(pid) for pid in _children()}
            self.grown = max([self.grown, *(size - base.setdefault(pid, size) for pid, size in now.items())])


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def _anonymous(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _judge(outcome: Outcome) -> None:
    goals = outcome.goals
    for kind, methods in (("upload", ("save_async", "push")), ("download", ("pull", "load"))):
        limit = outcome.median("limit", kind)
        for method in outcome.samples:
            if kind in outcome.samples[method]:
                outcome.ratios[f"{method}: raw client / {kind}"] = limit / outcome.median(method, kind)
        for method in methods:
            value = outcome.ratios[f"{method}: raw client / {kind}"]
            goals.append(Goal(what=f"{kind}: {method}, share of the raw client's best", value=value, at_least=0.9))
        ours = methods[0]
        for peer in ("boto3 transfer", "s3fs", "pyarrow"):
            if kind in outcome.samples.get(peer, {}):
                goals.append(Goal(what=f"{kind}: {ours} faster than {peer}", value=outcome.speedup(peer, ours, kind)))
    held = outcome.median("save_async", "held") / outcome.median("save_async to disk", "held")
    goals.append(Goal(what="held: remote / local disk", value=held, at_most=1.1))
    grown = max(outcome.samples["save_async"]["writer_mb"], default=median(()))
    goals.append(Goal(what="writer beyond the arena, remote", value=grown, unit="MB", at_most=268))
    for name in ("push process", "pull process"):
        value = outcome.median(name, "whole_mb")
        goals.append(Goal(what=f"memory of a {name}, all of it", value=value, unit="MB", at_most=268 + 50))
