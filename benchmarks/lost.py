"""Total time lost per save: training steps with a save until its drain ends, minus as many steps without one."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import holdfast as hf

from .bench import Context, Goal, Outcome, remove
from .limits import Limits
from .peers import make_peers, saving
from .states import TrainState, gpt2_state

__all__ = ["run"]

# Starts a save; gives what to call before the state changes, what tells that it is durable, and what cleans up.
Start = Callable[[], tuple[Callable[[], None], Callable[[], bool], Callable[[], Any]]]
_RESAMPLES = 2000


def run(context: Context) -> Outcome:
    """Measure with one and with two threads of computation."""
    outcome = Outcome()
    state = gpt2_state(scale=context.scale, quick=context.quick)
    limits = Limits(context, state.nbytes)
    limits.measure()
    before = torch.get_num_threads()
    names = ("torch.save", "DCP async_save") if context.quick else saving
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        stack.callback(limits.close)
        peers = make_peers(names, outcome.notes)
        for peer in peers:
            stack.callback(peer.close)
        starts: dict[str, Start] = {"holdfast": lambda: _holdfast(context, state)}
        for peer in peers:
            starts[peer.name] = lambda peer=peer: _peer(context, peer, state)  # type: ignore[misc]
        for threads in (1,) if context.quick else (1, 2):
            torch.set_num_threads(threads)
            _rounds(context, outcome, starts, threads)
    outcome.limits = limits.to_json()
    _judge(outcome, limits.best_memcpy)
    return outcome


class _Training:
    """A fixed, matmul-heavy model that trains for real."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width) for _ in range(3)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(256, width)

    def step(self, before_update: Callable[[], None] | None = None) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        if before_update is not None:
            before_update()
        self.optimizer.step()


def _holdfast(context: Context, state: TrainState) -> Any:
    path = context.folder("lost")
    handle = hf.save_async(path, state.objects)

    def clean() -> None:
        handle.result()
        remove(path)

    return (lambda: None), handle.done, clean


def _peer(context: Context, peer: Any, state: TrainState) -> Any:
    path = context.folder("lost")
    pending = peer.save(path, state.tensors)
    return pending.free, pending.drain().is_set, lambda: remove(path)


def _rounds(context: Context, outcome: Outcome, starts: dict[str, Start], threads: int) -> None:
    training = _Training(256 if context.quick else 1024)
    for _ in range(5):
        training.step()
    least = 5 if context.quick else 20
    for turn in range(context.repeat + 1):
        # Random order: what one method leaves behind (dirty pages, discards) must not always hit the same one.
        for name in random.sample(list(starts), len(starts)):
            steps_before, seconds_before, _ = _plain(training, least)
            start = time.perf_counter()
            try:
                free, done, clean = starts[name]()
            except Exception as error:
                outcome.notes.append(f"{name}: failed ({type(error).__name__}: {str(error)[:200]})")
                del starts[name]
                continue
            steps = 0
            slowest = 0.0
            while steps < least or not done():
                began = time.perf_counter()
                training.step(free if not steps else None)
                slowest = max(slowest, time.perf_counter() - began)
                steps += 1
            seconds = time.perf_counter() - start
            steps_after, seconds_after, _ = _plain(training, least)
            clean()
            usual = (seconds_before + seconds_after) / (steps_before + steps_after)
            lost = seconds - steps * usual
            outcome.add(f"{name} ({threads} threads)", first=not turn, lost=lost, steps=steps, slowest_step=slowest)
            context.say(f"{name}, {threads} threads: lost {lost:.3f} s over {steps} steps of {usual * 1000:.1f} ms")


def _plain(training: _Training, steps: int) -> tuple[int, float, None]:
    start = time.perf_counter()
    for _ in range(steps):
        training.step()
    return steps, time.perf_counter() - start, None


def bootstrap(values: list[float]) -> tuple[float, float]:
    """Return a 90 % interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[_RESAMPLES // 20], medians[-_RESAMPLES // 20]


def _judge(outcome: Outcome, memcpy: float) -> None:
    for threads in (1, 2):
        ours = outcome.median(f"holdfast ({threads} threads)", "lost")
        if math.isnan(ours):
            continue
        peers = {}
        for method, values in outcome.samples.items():
            low, high = bootstrap(values["lost"])
            outcome.ratios[f"{method}: lost, 90 % interval low"] = low
            outcome.ratios[f"{method}: lost, 90 % interval high"] = high
            outcome.ratios[f"{method}: lost / memcpy"] = outcome.median(method, "lost") / memcpy
            if method.endswith(f"({threads} threads)") and not method.startswith("holdfast"):
                peers[method] = outcome.median(method, "lost")
        what = f"lost per save / memcpy, {threads} compute threads"
        outcome.goals.append(Goal(what=what, value=ours / memcpy, at_most=1.5))
        if peers:
            best = min(peers, key=peers.__getitem__)
            what = f"lost / the least lost of a peer, {best}"
            outcome.goals.append(Goal(what=what, value=ours / peers[best], at_most=1.0))
