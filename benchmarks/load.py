"""Load into live tensors, from a warm and from a cold page cache; Holdfast checks every digest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import holdfast as hf

from .bench import Context, Goal, Outcome, drop_cache, fsync_tree, remove, timed
from .limits import Limits
from .peers import make_peers
from .states import gpt2_state

__all__ = ["read_all", "run"]

_PEERS = ("torch.save", "torch.load(mmap)", "safetensors", "DCP save", "torch_checkpointing", "torchsnapshot take")


def run(context: Context) -> Outcome:
    """Measure everybody, in turns."""
    outcome = Outcome()
    state = gpt2_state(scale=context.scale, quick=context.quick)
    limits = Limits(context, state.nbytes)
    limits.memcpy()
    with contextlib.ExitStack() as stack:
        stack.callback(limits.close)
        raw = context.folder("raw")
        limits.write(raw)
        stack.callback(remove, raw)
        ours = context.folder("holdfast")
        hf.save(ours, state.objects)
        stack.callback(remove, ours)
        ways: dict[str, tuple[Path, Callable[[], object]]] = {
            "holdfast": (ours, lambda: hf.load(ours, into=state.objects)),
            "holdfast (verify=False)": (ours, lambda: hf.load(ours, into=state.objects, verify=False)),
        }
        for peer in make_peers(_PEERS[:3] if context.quick else _PEERS, outcome.notes):
            stack.callback(peer.close)
            path = context.folder("peer")
            try:
                peer.save(path, state.tensors).wait()
            except Exception as error:
                outcome.notes.append(f"{peer.name}: cannot save here ({type(error).__name__}: {str(error)[:200]})")
                continue
            fsync_tree(path)
            stack.callback(remove, path)
            ways[peer.name] = (path, lambda peer=peer, path=path: peer.load(path, state.tensors))  # type: ignore[misc]
        expected = state.probe()
        for turn in range(context.repeat + 1):
            for cold in (False, True):
                kind = "cold" if cold else "warm"
                if not cold:
                    read_all(raw)
                outcome.add("limit", first=not turn, **{kind: limits.read(raw, cold=cold)})
                if turn and not cold:
                    outcome.add("limit, hashed", warm=limits.read_hashed(raw, state.tensors.values()))
                    hf.load(ours, into=state.objects)  # that wrote other bytes into the state
                for name in list(ways):
                    path, load = ways[name]
                    if cold:
                        drop_cache(path)
                    else:
                        read_all(path)
                    if not turn:
                        state.clear()
                    try:
                        seconds = timed(load)
                    except Exception as error:
                        outcome.notes.append(f"{name}: failed ({type(error).__name__}: {str(error)[:200]})")
                        del ways[name]
                        continue
                    if not turn and state.probe() != expected:
                        raise AssertionError(f"{name} did not bring the state back")
                    outcome.add(name, first=not turn, **{kind: seconds})
                    context.say(f"{name}, {kind}: {seconds:.3f} s")
    outcome.limits = limits.to_json()
    _judge(outcome)
    return outcome


def read_all(path: Path) -> None:
    """Bring files into the page cache."""
    buffer = memoryview(bytearray(8 << 20))
    for one in [path] if path.is_file() else path.rglob("*"):
        if one.is_file():
            with one.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _judge(outcome: Outcome) -> None:
    hashed = outcome.median("holdfast", "warm") / outcome.median("limit, hashed", "warm")
    outcome.goals.append(Goal(what="warm: of the limit that hashes, into the same tensors", value=hashed, at_most=1.1))
    for kind in ("warm", "cold"):
        limit = outcome.median("limit", kind)
        for method in outcome.samples.keys() - {"limit, hashed"}:
            outcome.ratios[f"{method}: limit / {kind}"] = limit / outcome.median(method, kind)
        share = outcome.ratios[f"holdfast: limit / {kind}"]
        outcome.goals.append(Goal(what=f"{kind}: share of the read limit, digests on", value=share, at_least=0.85))
        peers = [name for name in outcome.samples if not name.startswith(("limit", "holdfast"))]
        if peers:
            best = min(peers, key=lambda name: outcome.median(name, kind))
            ratio = outcome.speedup(best, "holdfast", kind)
            outcome.goals.append(Goal(what=f"{kind}: faster than the best peer, {best}", value=ratio, at_least=0.95))
        for peer in peers:
            ratio = outcome.speedup(peer, "holdfast", kind)
            outcome.goals.append(Goal(what=f"{kind}: faster than {peer}", value=ratio))
