"""Peak extra memory of one save and of one load, each in a fresh process.

The proportional set sizes (PSS) of the process and of all its descendants are added up and sampled every few
milliseconds from outside. PSS counts a page that trainer and writer share once, whoever maps it, memfd pages
included; the page cache is not counted, except for pages mapped by a process. Baseline = imports done, state built.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path

from .bench import Context, Goal, Outcome, remove
from .peers import Peer, make_peers, saving
from .states import TrainState, gpt2_state

__all__ = ["run"]

_ROOT = Path(__file__).resolve().parents[1]
_LOADS = ("torch.save", "torch.load(mmap)", "safetensors", "DCP save", "torch_checkpointing")
_SAVES = ("holdfast.save_async", "holdfast.save", *saving)
_QUICK = ("holdfast.save_async", "holdfast.load")


def run(context: Context) -> Outcome:
    """Measure Holdfast and every peer."""
    outcome = Outcome()
    for kind, methods in (("save", _SAVES), ("load", ("holdfast.load", *_LOADS))):
        for method in methods:
            if context.quick and method not in _QUICK:
                continue
            for _ in range(1 if context.quick else 3):
                try:
                    _measure(context, outcome, kind, method)
                except RuntimeError as error:
                    outcome.notes.append(f"{kind} {method}: {error}")
                    break
    _judge(outcome)
    return outcome


def _measure(context: Context, outcome: Outcome, kind: str, method: str) -> None:
    path = context.folder("memory")
    if kind == "load":
        # Saved by this process, so that nothing of the saving is left in the one that is measured.
        _save(gpt2_state(scale=context.scale, quick=context.quick), method, path)
    arguments = [kind, method, str(path), str(context.scale), "quick" if context.quick else "full"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.memory", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if context.quick else None,
        text=True,
        cwd=_ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        nbytes = _expect(process, "ready")
        baseline = _usage(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        peak = {"pss": 0, "own": 0}
        started = time.perf_counter()
        while not _said_done(process):
            now = _usage(process.pid)
            peak = {name: max(value, now[name]) for name, value in peak.items()}
            time.sleep(0.002)
            if time.perf_counter() - started > 300:
                raise RuntimeError("took more than 300 s")
        if process.wait() != 0:
            raise RuntimeError(f"failed with exit status {process.returncode}")
    finally:
        process.kill()
        process.wait()
        if path.exists():
            remove(path)
    extra = {name: peak[name] - baseline[name] for name in peak}
    outcome.add(
        f"{kind}: {method}",
        extra_mb=extra["pss"] / 1e6,
        extra_anonymous_mb=extra["own"] / 1e6,
        state_mb=nbytes / 1e6,
        over_state=extra["pss"] / nbytes,
    )
    context.say(f"{kind} {method}: {extra['pss'] / 1e6:.0f} MB for a state of {nbytes / 1e6:.0f} MB")


def _expect(process: subprocess.Popen[str], word: str) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return int(line.split()[1])
    raise RuntimeError("ended before it was ready")


def _said_done(process: subprocess.Popen[str]) -> bool:
    """Tell whether the child has said "done" or is gone."""
    assert process.stdout is not None
    told = select.poll()  # `select.select` takes no descriptor above 1023, and peers leave some open
    told.register(process.stdout, select.POLLIN)
    return bool(told.poll(0)) or process.poll() is not None


def _usage(pid: int) -> dict[str, int]:
    """Add up the PSS of a process and its descendants: in all, and of memory that is no file's.

    While a descendant maps shared pages, the share of the process shrinks: read once before and once after the
    descendants, its mean keeps pages from being counted twice.
    """
    before, children = _one(pid)
    total = {"pss": 0, "own": 0}
    while children:
        usage, more = _one(children.pop())
        children += more
        total = {name: total[name] + usage[name] for name in total}
    after, _ = _one(pid)
    return {name: total[name] + (before[name] + after[name]) // 2 for name in total}


def _one(pid: int) -> tuple[dict[str, int], list[int]]:
    """Read the usage of one process and who its children are; nothing if it has just ended."""
    children: list[int] = []
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except OSError:
        return {"pss": 0, "own": 0}, []
    fields = {line.split()[0]: int(line.split()[1]) * 1024 for line in rollup.splitlines()[1:]}
    return {"pss": fields["Pss:"], "own": fields["Pss:"] - fields.get("Pss_File:", 0)}, children


def _judge(outcome: Outcome) -> None:
    ours = outcome.median("save: holdfast.save_async", "over_state")
    outcome.goals.append(Goal(what="extra memory of save_async / state", value=ours, at_most=1.05))
    load = outcome.median("load: holdfast.load", "extra_mb")
    outcome.goals.append(Goal(what="extra memory of a load", value=load, unit="MB", at_most=80.0))
    for method in outcome.samples:
        unit, kind = ("x state", "over_state") if method.startswith("save") else ("MB", "extra_mb")
        outcome.goals.append(Goal(what=method, value=outcome.median(method, kind), unit=unit))


def child(kind: str, method: str, path: str, scale: str, size: str) -> None:
    """Build a state, say so, wait for the word, save or load once, say so."""
    import holdfast as hf

    notes: list[str] = []
    peers = [] if method.startswith("holdfast") else make_peers((method,), notes)
    if not peers and not method.startswith("holdfast"):
        raise SystemExit(f"{notes}")
    state = gpt2_state(scale=float(scale), quick=size == "quick")
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    hf.load  # noqa: B018 - imports what a load needs besides torch
    hf.save  # noqa: B018
    print("ready", state.nbytes, flush=True)
    sys.stdin.readline()
    if kind == "load" and peers:
        peers[0].load(where, state.tensors)
    elif kind == "load":
        hf.load(where, into=state.objects)
    else:
        _save(state, method, where, peers)
    print("done", flush=True)
    for peer in peers:
        peer.close()


def _save(state: TrainState, method: str, where: Path, peers: list[Peer] | None = None) -> None:
    import holdfast as hf

    if peers is None:
        peers = [] if method.startswith("holdfast") else make_peers((method,), [])
    if peers:
        pending = peers[0].save(where, state.tensors)
        pending.free()
        pending.wait()
        peers[0].close()
    elif method in ("holdfast.save", "holdfast.load"):
        hf.save(where, state.objects)
    else:
        hf.save_async(where, state.objects).result()


if __name__ == "__main__":
    child(*sys.argv[1:])
