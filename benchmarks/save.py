"""Time held and time to durable of one save of a GPT-2-small-like state; also with one core kept busy."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import holdfast as hf

from .bench import Context, Goal, Outcome, busy_core, remove
from .limits import Limits
from .peers import Peer, make_peers, saving
from .states import TrainState, gpt2_state

__all__ = ["run", "run_loaded"]

Sample = Callable[[], tuple[float, float]]
_ASYNC = ("DCP async_save", "DCP async_save (process)", "torch_checkpointing", "torchsnapshot async_take")
_QUICK = ("torch.save", "safetensors", "DCP save", "DCP async_save")  # the others start processes that import torch


def run(context: Context) -> Outcome:
    """Measure everybody, in turns."""
    return _measure(context, _QUICK if context.quick else saving, loaded=False)


def run_loaded(context: Context) -> Outcome:
    """Measure the asynchronous ones again while another process keeps one core busy."""
    return _measure(context, _QUICK[-1:] if context.quick else _ASYNC, loaded=True)


def peer_sample(context: Context, peer: Peer, state: TrainState) -> tuple[float, float]:
    """Save once with a peer; give seconds held and seconds to durable."""
    path = context.folder("peer")
    start = time.perf_counter()
    pending = peer.save(path, state.tensors)
    pending.free()
    held = time.perf_counter() - start
    pending.wait()
    durable = time.perf_counter() - start
    remove(path)
    return held, durable


def async_sample(context: Context, state: TrainState) -> tuple[float, float]:
    """Save once with `holdfast.save_async`."""
    path = context.folder("async")
    start = time.perf_counter()
    handle = hf.save_async(path, state.objects)
    held = time.perf_counter() - start
    handle.result()
    durable = time.perf_counter() - start
    remove(path)
    return held, durable


def sync_sample(context: Context, state: TrainState) -> tuple[float, float]:
    """Save once with `holdfast.save`."""
    path = context.folder("sync")
    start = time.perf_counter()
    hf.save(path, state.objects)
    durable = time.perf_counter() - start
    remove(path)
    return durable, durable


class LoopSaves:
    """Saves of a `Checkpointer`, due at every second step, the first one well after step 1."""

    def __init__(self, context: Context, state: TrainState, stack: contextlib.ExitStack) -> None:
        self._root = context.folder("run")
        stack.callback(remove, self._root)
        # Retention deletes in the writer before a save counts as ended: it is measured in `catalog`, not here.
        self._ck = stack.enter_context(hf.Checkpointer(self._root, state.objects, every=2, keep=None))
        self._ck.step()
        time.sleep(0.3 if context.quick else 12.0)

    def sample(self) -> tuple[float, float]:
        """Take the step that saves."""
        ck = self._ck
        if ck.global_step % 2 == 0:
            ck.step()
        start = time.perf_counter()
        ck.step()
        held = time.perf_counter() - start
        ck.wait()
        durable = time.perf_counter() - start
        for old in sorted(Path(self._root).glob("step_*"))[:-1]:
            remove(old)
        return held, durable


def _measure(context: Context, names: tuple[str, ...], *, loaded: bool) -> Outcome:
    outcome = Outcome()
    state = gpt2_state(scale=context.scale, quick=context.quick)
    limits = Limits(context, state.nbytes)
    limits.measure()
    with contextlib.ExitStack() as stack:
        stack.callback(limits.close)
        peers = make_peers(names, outcome.notes)
        for peer in peers:
            stack.callback(peer.close)
        load = stack.enter_context(contextlib.ExitStack())
        samples: dict[str, Sample] = {"save_async": lambda: async_sample(context, state)}
        samples["Checkpointer"] = LoopSaves(context, state, stack).sample
        if not loaded:
            samples["save"] = lambda: sync_sample(context, state)
        for peer in peers:
            samples[peer.name] = lambda peer=peer: peer_sample(context, peer, state)  # type: ignore[misc]
        if loaded:
            load.enter_context(busy_core())
        for turn in range(context.repeat + 1):
            outcome.add("limit", first=not turn, memcpy=limits.memcpy(), write=limits.write())
            for method in list(samples):
                state.touch()
                try:
                    held, durable = samples[method]()
                except Exception as error:
                    outcome.notes.append(
                        f"{method}: failed in turn {turn} ({type(error).__name__}: {str(error)[:200]})"
                    )
                    del samples[method]
                    continue
                outcome.add(method, first=not turn, held=held, durable=durable)
                context.say(f"{method}: held {held:.3f} s, durable {durable:.3f} s")
    outcome.limits = limits.to_json()
    _judge(outcome, limits, state, loaded=loaded)
    return outcome


def _judge(outcome: Outcome, limits: Limits, state: TrainState, *, loaded: bool) -> None:
    memcpy = min(outcome.samples["limit"]["memcpy"]) if loaded else limits.best_memcpy
    write = outcome.median("limit", "write")
    goals, ratios = outcome.goals, outcome.ratios
    beside = "memcpy with one core busy" if loaded else "memcpy"
    for method in outcome.samples:
        if method != "limit":
            ratios[f"{method}: held / memcpy"] = outcome.median(method, "held") / memcpy
            ratios[f"{method}: raw write / durable"] = write / outcome.median(method, "durable")
    for method in ("save_async", "Checkpointer"):
        goals.append(Goal(what=f"{method}: held / {beside}", value=ratios[f"{method}: held / memcpy"], at_most=1.25))
    if loaded:
        for name in ("memcpy_1", "memcpy_2"):
            ratios[f"{name} idle, best s"] = min(
                limits.samples[name][: -2 * (len(limits.samples[name]) // 3)] or [math.nan]
            )
        return
    first = {name: values["held"] for name, values in outcome.first.items() if "held" in values}
    goals.append(
        Goal(what="Checkpointer: FIRST held / memcpy", value=first.get("Checkpointer", math.nan) / memcpy, at_most=3.0)
    )
    for method in ("save_async", "Checkpointer", "save"):
        value = ratios[f"{method}: raw write / durable"]
        goals.append(Goal(what=f"{method}: share of the raw write limit", value=value, at_least=0.85))
    fast = state.nbytes / write >= 2 << 30
    for peer in saving:
        if peer in outcome.samples:
            ratio = outcome.speedup(peer, "save_async", "durable")
            bound = {"DCP save": 3.0, "torch.save": 2.5}.get(peer) if fast else None
            goals.append(Goal(what=f"durable: save_async faster than {peer}", value=ratio, at_least=bound))
    for peer in _ASYNC:
        if peer in outcome.samples:
            ratio = outcome.speedup(peer, "save_async", "held")
            goals.append(Goal(what=f"held: save_async shorter than {peer}", value=ratio))
