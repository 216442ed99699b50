"""A run of several ranks in which one thing goes wrong at the save of step 4."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.checkpointer import rank_group
from holdfast.testing import FaultyStorage

TIMEOUT_S = 8.0
ENDLESS_S = 900.0  # where a death has to be noticed by itself
PATIENT_S = 60.0  # where nobody is waited for in vain: a writer starts slowly on a busy machine
SIGNS = ("SIGKILL", "SIGSTOP")


class Trap:
    """An object of the user's whose state_dict is where it happens."""

    def __init__(self) -> None:
        self.spring: Any = None

    def state_dict(self) -> dict[str, Any]:
        if self.spring is not None:
            self.spring()
        return {"calls": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"calls": 1}


def run(root: str, notes: str, fault: dict[str, Any] | None = None, until: int = 6) -> dict[str, Any]:
    """Train to ``until``; how it went on, with what this rank has seen.

    ``fault``: rank, phase ("before copy", "while writing", "part", "commit", "between saves"), what ("exception", the
    name of an errno, or a signal to "trainer", "writer" or "both").
    """
    patient = fault is None or fault.get("what") in ("SIGKILL writer", "writer")
    rank_group.BEAT_S, rank_group.ANSWER_MARGIN_S = 0.2, 4.0
    timeout_s, silence_s = (PATIENT_S, PATIENT_S / 2) if patient else (TIMEOUT_S, 4.0)
    if fault is not None and fault.get("what") == "SIGKILL both":
        silence_s = timeout_s = ENDLESS_S
    rank = dist.get_rank()
    Path(notes, f"trainer-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(3)
    model, trap = torch.nn.Linear(4, 3), Trap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "trap": trap, "mine": hf.PerRank(rank)}
    storage = FaultyStorage(root, **_events(notes, fault or {}, rank))
    start = -1
    try:
        with hf.Checkpointer(storage, state, every=2, keep=None, timeout_s=timeout_s, silence_s=silence_s) as ck:
            start = ck.global_step
            Path(notes, f"writer-{rank}").write_text(str(ck._session.client.process_id))
            while ck.global_step < until:
                optimizer.zero_grad()
                model(torch.full((2, 4), float(ck.global_step))).square().mean().backward()
                optimizer.step()
                if fault is not None and ck.global_step == 3 and fault["rank"] == rank:
                    _prepare(fault, trap, notes)
                ck.step()
                ck.wait()
    except (hf.HoldfastError, ValueError) as error:
        Path(notes, "over").touch()
        return {
            "start": start,
            "error": str(error),
            "type": type(error).__name__,
            "durable": ck.stats.last_durable_step,
        }
    return {"start": start, "error": None, "weights": model.weight.sum().item()}


def train_apart(root: str) -> None:
    """Rank 1 is killed long before any save; rank 0 does not need it for anything else."""
    with hf.Checkpointer(root, {"w": torch.zeros(3)}, every=10_000_000) as ck:
        while ck.global_step < 1_000_000:
            time.sleep(0.001)
            ck.step()
            if dist.get_rank() == 1 and ck.global_step == 20:
                os.kill(os.getpid(), signal.SIGKILL)


def _events(notes: str, fault: dict[str, Any], rank: int) -> dict[str, Any]:
    """What goes wrong in a writer. A signal at the commit comes from the process that commits, whoever it is for."""
    phase, what = fault.get("phase"), fault.get("what", "")
    if phase == "trace":
        return {"trace": f"{notes}/trace-{rank}"}
    if phase == "crash" and fault["rank"] == rank:
        more = {"crash_with": f"{notes}/trainer-{rank}"} if what == "rank" else {}
        return {"crash_at": fault["at"], "crash_once": f"{notes}/happened", **more}
    acts = {"while writing": "pwrite:step_00000004/", "commit": "link:step_00000004/manifest.json"}
    acts["part"] = f"rename:step_00000004/part-{rank:05d}"
    if phase not in acts or rank != (0 if phase == "commit" else fault["rank"]):
        return {}
    sign = what if what.startswith("E") else f"{what.split()[0]}:{notes}/{what.split()[1]}-{fault['rank']}"
    return {"events": {acts[phase]: sign}, "crash_once": f"{notes}/happened"}


def _leave_a_child(notes: str) -> None:
    """Fork a process that outlives us for a while, as a worker of a data loader does."""
    if os.fork() == 0:
        until = time.monotonic() + PATIENT_S
        while time.monotonic() < until and not Path(notes, "over").exists():
            time.sleep(0.02)
        os._exit(0)


def _prepare(fault: dict[str, Any], trap: Trap, notes: str) -> None:
    what = fault.get("what")
    if fault["phase"] not in ("before copy", "between saves"):
        return

    def spring() -> None:
        if what == "exception":
            raise ValueError("boom")
        sign, whom = what.split()
        trap.spring = None
        if whom == "both":
            _leave_a_child(notes)
        victims = ("writer", "trainer") if whom == "both" else (whom,)
        # Read first: between two kills our own thread would start another writer.
        for pid in [int(Path(notes, f"{one}-{fault['rank']}").read_text()) for one in victims]:
            os.kill(pid, getattr(signal, sign))

    if fault["phase"] == "between saves":
        spring()
    else:
        trap.spring = spring
