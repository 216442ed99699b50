"""100 000 tensors of 1 KB in one dict: time per tensor held, durable, loaded."""

from __future__ import annotations

import contextlib
import time

import holdfast as hf

from .bench import Context, Goal, Outcome, remove, timed
from .peers import make_peers
from .states import small_state

__all__ = ["run"]

_PEERS = ("torch.save", "safetensors", "DCP save")
_ENOUGH_S = 20.0  # a peer that takes longer than this for one turn is measured once


def run(context: Context) -> Outcome:
    """Measure everybody, in turns."""
    outcome = Outcome()
    count = 2000 if context.quick else max(1000, int(100_000 * context.scale))
    state = small_state(count)
    expected = state.probe()
    slow: set[str] = set()
    with contextlib.ExitStack() as stack:
        peers = make_peers(_PEERS[:2] if context.quick else _PEERS, outcome.notes)
        for peer in peers:
            stack.callback(peer.close)
        for turn in range(context.repeat + 1):
            first = not turn
            path = context.folder("small")
            start = time.perf_counter()
            handle = hf.save_async(path, state.objects)
            held = time.perf_counter() - start
            handle.result()
            durable = time.perf_counter() - start
            if first:
                state.clear()
            load = timed(lambda path=path: hf.load(path, into=state.objects))  # type: ignore[misc]
            if first and state.probe() != expected:
                raise AssertionError("the load did not bring the state back")
            remove(path)
            outcome.add("holdfast", first=first, **_each(count, held=held, durable=durable, load=load))
            context.say(f"holdfast: held {held:.3f} s, durable {durable:.3f} s, load {load:.3f} s")
            for peer in peers:
                if peer.name in slow:
                    continue
                path = context.folder("small")
                start = time.perf_counter()
                try:
                    peer.save(path, state.tensors).wait()
                    durable = time.perf_counter() - start
                    load = timed(peer.load, path, state.tensors)
                except Exception as error:
                    outcome.notes.append(f"{peer.name}: failed ({type(error).__name__}: {str(error)[:200]})")
                    slow.add(peer.name)
                    continue
                remove(path)
                if durable + load > _ENOUGH_S:
                    slow.add(peer.name)
                    outcome.notes.append(f"{peer.name}: too slow to be repeated; its first turn is its only sample")
                    outcome.add(peer.name, **_each(count, held=durable, durable=durable, load=load))
                outcome.add(peer.name, first=first, **_each(count, held=durable, durable=durable, load=load))
                context.say(f"{peer.name}: durable {durable:.3f} s, load {load:.3f} s")
    _judge(outcome)
    return outcome


def _each(count: int, **seconds: float) -> dict[str, float]:
    """Turn seconds into microseconds per tensor."""
    return {f"{name}_us": value / count * 1e6 for name, value in seconds.items()}


def _judge(outcome: Outcome) -> None:
    bounds = {"held": 5.0, "durable": 12.0, "load": 12.0}
    for kind, bound in bounds.items():
        what = f"{kind} per tensor" + (", second save on" if kind == "held" else "")
        outcome.goals.append(Goal(what=what, value=outcome.median("holdfast", f"{kind}_us"), unit="us", at_most=bound))
    outcome.goals.append(Goal(what="FIRST held per tensor", value=outcome.first["holdfast"]["held_us"], unit="us"))
    for peer in _PEERS:
        for kind in ("durable", "load"):
            if peer in outcome.samples:
                ratio = outcome.speedup(peer, "holdfast", f"{kind}_us")
                bound = 2.0 if peer == "safetensors" else None
                outcome.goals.append(Goal(what=f"{kind}: faster than {peer}", value=ratio, at_least=bound))
