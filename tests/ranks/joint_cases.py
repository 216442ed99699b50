"""What the tests of many ranks run on each of them."""

from __future__ import annotations

import errno
import logging.handlers
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast as hf
from holdfast.checkpointer import boundaries, functions, run_session
from holdfast.testing import FaultyStorage


def make_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "rank": hf.PerRank(dist.get_rank()),
    }


def save_twice(root: str) -> dict[str, Any]:
    """One save that waits and one that does not."""
    state = make_state()
    first = hf.save(Path(root, "first"), state, step=1)
    handle = hf.save_async(Path(root, "second"), state, step=2)
    second = handle.result(30)
    loaded = hf.load(second)
    if dist.get_rank() == 0:  # as scripts do that know of no joint saves; the others go on meanwhile
        hf.save(Path(root, "alone"), state, ranks="this")
    return {"paths": [first.path, second.path], "rank": loaded["rank"], "pid": os.getpid()}


def ddp_state(seed: int = 0) -> tuple[dict[str, Any], Any]:
    state = make_state(seed)
    state.pop("rank")
    wrapped = torch.nn.parallel.DistributedDataParallel(state["model"])
    return {**state, "model": wrapped}, wrapped


def one_step(state: dict[str, Any], number: int) -> torch.Tensor:
    """A step that depends on the rank's own batch and on its own random numbers."""
    state["optimizer"].zero_grad()
    batch = torch.randn(4, 6) + number + dist.get_rank()
    loss = state["model"](batch).square().mean()
    loss.backward()
    state["optimizer"].step()
    return loss.detach()


def train(root: str, until: int, *, every: Any = 2, crash_at: int = -1, **options: Any) -> dict[str, Any]:
    """A DDP run up to ``until`` steps, in which all ranks die after step ``crash_at``."""
    torch.manual_seed(100 + dist.get_rank())
    state, model = ddp_state()
    torch.manual_seed(100 + dist.get_rank())
    options.setdefault("keep", None)
    with hf.Checkpointer(root, state, every=every, **options) as ck:
        begun = ck.global_step
        while ck.global_step < until:
            ck.step(loss=one_step(state, ck.global_step))
            if ck.global_step == crash_at:
                ck.wait()
                os._exit(9)
    tensors = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    return {"start": begun, "random": torch.rand(1).item(), "tensors": tensors, "saves": ck.stats.saves}


def jitter(root: str, until: int, seed: int) -> dict[str, Any]:
    """Ranks that do not wait for each other, at uneven speed, with saves by time; each tells what it saved when."""
    pace = random.Random(seed * 100 + dist.get_rank())
    made: list[int] = []
    with hf.Checkpointer(
        root, {"w": torch.ones(100), "note": Note(made)}, every=timedelta(milliseconds=40), keep=None
    ) as ck:
        made_by = ck
        while ck.global_step < until:
            time.sleep(pace.random() * 0.004)
            Note.step = ck.global_step + 1
            ck.step()
    return {"saved": sorted(set(made) - {1}), "saves": made_by.stats.saves}  # the first state is taken to prepare


def uneven(root: str, until: int) -> dict[str, Any]:
    """Ranks whose batches are of different length, with saves by samples; each tells what it saved when."""
    made: list[int] = []
    with hf.Checkpointer(root, {"w": torch.ones(100), "note": Note(made)}, every="24sp", keep=None) as ck:
        for _ in ck.epochs(1):
            for _ in ck.batches([torch.ones(2 + dist.get_rank())] * until):
                time.sleep(0.001)
                Note.step = ck.global_step + 1
                ck.step()
    return {"saved": sorted(set(made) - {1})}


class Note:
    """Notes each step whose state is taken."""

    step = 0

    def __init__(self, made: list[int]) -> None:
        self.made = made

    def state_dict(self) -> dict[str, Any]:
        if Note.step:
            self.made.append(Note.step)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def stop_one(root: str, which: int, sign: int) -> dict[str, Any]:
    """DDP, in which one rank gets a signal in step 3; the exit status tells whether it left as it should."""
    state, _ = ddp_state()
    options: dict[str, Any] = {"deadline": 6.0} if sign == 0 else {}
    with hf.Checkpointer(root, state, every=None, keep=None, **options) as ck:
        while ck.global_step < 100_000:
            one_step(state, ck.global_step)
            if sign and ck.global_step == 3 and dist.get_rank() == which:
                os.kill(os.getpid(), sign)
            ck.step()
    return {"step": ck.global_step}


def count_collectives(root: str) -> dict[str, Any]:
    """Every collective of torch.distributed between the start and the end of a run, and of saves without one."""
    calls: list[str] = []
    names = [
        name
        for name in dir(dist)
        if name.split("_")[0]
        in (
            "all",
            "reduce",
            "broadcast",
            "gather",
            "scatter",
            "barrier",
            "send",
            "recv",
            "isend",
            "irecv",
            "monitored",
            "batch",
        )
    ]
    store = dist.distributed_c10d._get_default_store()
    hf.save(Path(root, "warm"), {"w": torch.ones(10)})
    spread = DTensor.from_local(torch.ones(8, 4), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    with hf.Checkpointer(
        Path(root, "run"),
        {"w": torch.ones(1000), "spread": spread},
        every=[3, timedelta(milliseconds=50)],
        keep=hf.Keep(last=2),
        when_busy="skip",
    ) as ck:
        for name in names:
            plain = getattr(dist, name)
            if callable(plain):
                setattr(
                    dist,
                    name,
                    lambda *args, name=name, plain=plain, **more: (calls.append(name), plain(*args, **more))[1],
                )
        groups = [dist.distributed_c10d._get_default_group(), spread.device_mesh.get_group()]
        before = [group._get_sequence_number_for_group() for group in groups]
        keys = store.num_keys()
        for number in range(40):
            time.sleep(0.005)
            ck.step(loss=0.5)
            if number % 10 == 0:
                ck.save()
                ck.report(val=1.0)
        hf.save(Path(root, "one"), {"w": torch.ones(10)})
        hf.save_async(Path(root, "two"), {"w": torch.ones(10)}).result(30)
        after, keys_after = [group._get_sequence_number_for_group() for group in groups], store.num_keys()
        ck.wait()
    during = list(calls)
    dist.barrier()
    seen = calls[-1] == "barrier" and groups[0]._get_sequence_number_for_group() > after[0]
    found = {"calls": during, "sequence": sum(after) - sum(before), "keys": keys_after - keys}
    return {**found, "saves": ck.stats.saves, "seen": seen}


def two_steps_a_batch(root: str) -> dict[str, Any]:
    """Two steps in each body, and rank 0 alone waits between them, as a script does that copies what is durable."""
    state = {"w": torch.zeros(4)}
    with hf.Checkpointer(root, state, every=3, keep=None, timeout_s=20.0) as ck:
        for _ in ck.batches([torch.ones(4)] * 6):
            ck.step()
            if dist.get_rank() == 0:
                ck.wait()
            state["w"] += 1
            ck.step()
    return {"steps": ck.global_step, "saves": ck.stats.saves}


def odd_calls(root: str) -> dict[str, Any]:
    """What `save` says to ranks that do not do the same."""
    functions._TIMEOUT_S = 3.0
    rank = dist.get_rank()
    found = {}
    for name, call in {
        "paths": lambda: hf.save(Path(root, f"own-{rank}"), {"n": 1}),
        "one unsupported": lambda: hf.save(Path(root, "u"), {"n": object() if rank else 1}),
        "differing": lambda: hf.save(Path(root, "d"), {"m": torch.nn.Linear(2, 2).requires_grad_(True)}),
        "missing": lambda: rank and hf.save(Path(root, "m"), {"n": 1}),
    }.items():
        torch.manual_seed(rank)
        try:
            call()
            found[name] = "fine"
        except hf.HoldfastError as error:
            found[name] = f"{type(error).__name__}: {error}"
    dist.barrier()  # until rank 1 has given up what rank 0 did not come to
    if rank == 0:
        found["late"] = hf.save(Path(root, "alone"), {"n": 1}, ranks="this").name
    return found


def one_fails_early(root: str) -> dict[str, Any]:
    """Calls that fail on rank 1 before anything is written, each followed by one that works; then its writer dies."""
    rank = dist.get_rank()
    found = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
            found[name] = "fine"
        except hf.HoldfastError as error:
            found[name] = f"{type(error).__name__}: {error}"

    def interrupted() -> None:
        functions._copying = rank == 1
        try:
            hf.save_async(Path(root, "b"), {"n": 1}).result(30)
        finally:
            functions._copying = False

    note("path", lambda: hf.save("nonsense://x" if rank else Path(root, "a"), {"n": 1}))
    note("after path", lambda: hf.save(Path(root, "c"), {"n": hf.PerRank(rank)}))
    note("interrupted", interrupted)
    note("after interrupted", lambda: hf.save_async(Path(root, "d"), {"n": 1}).result(30))
    client = next(iter(functions._rank_groups.values()))[0].client
    for _ in range(2 if rank else 0):
        os.kill(client.process_id, signal.SIGKILL)
        known = client.process_id
        while client.process_id == known and not client.closed:
            time.sleep(0.01)
    begun = time.monotonic()
    note("dead writer", lambda: hf.save(Path(root, "e"), {"n": 1}))
    return {**found, "quick": time.monotonic() - begun < 30}


def full_and_signal(root: str) -> None:
    """``on_full="wait"``: rank 1 never has space, and gets a signal while all are held."""
    boundaries._FULL_RETRY_S = 0.05
    rank = dist.get_rank()
    storage = FaultyStorage(root, **({"fail_on": {"pwrite": errno.ENOSPC}} if rank else {}))
    with hf.Checkpointer(storage, {"w": torch.ones(10)}, every=1, on_full="wait", timeout_s=40.0) as ck:
        if rank:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        ck.step()


def busy(root: str) -> dict[str, Any]:
    """``when_busy="skip"`` with a slow rank: which steps are saved is the same on all."""
    storage = FaultyStorage(root, **({"short_write": 4096} if dist.get_rank() else {}))
    made: list[int] = []
    with hf.Checkpointer(
        storage, {"w": hf.PerRank(torch.ones(300_000)), "n": Note(made)}, every=1, keep=None, when_busy="skip"
    ) as ck:
        for _ in range(30):
            Note.step = ck.global_step + 1
            ck.step()
    return {"saved": sorted(set(made)), "skipped": ck.stats.skipped}  # the first state is taken to prepare, too


def start_fails(root: str, how: str) -> str:
    """A start that cannot work on one rank."""
    rank = dist.get_rank()
    run_session._VISIBLE_S = 0.5
    storage: Any = Path(root, str(rank)) if how == "own disks" else Path(root)
    state = {
        "m": torch.nn.Linear(2, 3 if how == "mismatch" and rank else 2),
        "x": object() if how == "unsupported" and rank else 1,
    }
    try:
        with hf.Checkpointer(storage, state, every=2 + rank * (how == "options"), keep=None) as ck:
            ck.step()
    except hf.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def resume_with_damage(root: str) -> dict[str, Any]:
    """Only rank 1 finds the newest checkpoint damaged."""
    from holdfast.state.load import restore

    plain = restore.load_state

    def load(home: Any, *args: Any, **more: Any) -> Any:
        if dist.get_rank() == 1 and home.uri.endswith("step_00000004"):
            more["swap"]("fits", None)  # as `load_state` does where it fails before it reads
            raise hf.CorruptCheckpointError("bytes differ")
        return plain(home, *args, **more)

    restore.load_state = load
    with hf.Checkpointer(root, {"m": torch.nn.Linear(2, 2)}, every=None, keep=None) as ck:
        begun = ck.global_step
        ck.step()
    return {"start": begun, "from": ck.resumed_from.name}


def plain_run(root: str, until: int) -> int:
    with hf.Checkpointer(root, {"m": torch.nn.Linear(2, 2)}, every=2, keep=None) as ck:
        while ck.global_step < until:
            ck.step()
    return ck.stats.saves


def whole_tensors(root: str) -> dict[str, Any]:
    """FSDP2 trains, and `model_files` asks for whole tensors: a run of two saves, and one with tied and named ones."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.Linear(17, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    files = hf.ModelFiles(files={"about.txt": "x"}, indexes={"model.safetensors.index.json": "model"})
    expected, said = {}, logging.handlers.BufferingHandler(100)
    logging.getLogger("holdfast").addHandler(said)
    with hf.Checkpointer(
        f"{root}/run", {"model": model, "optimizer": optimizer}, every=1, keep=None, model_files=files
    ) as ck:
        for step in (1, 2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected[step] = {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}
            ck.step()
    tied = torch.nn.Linear(4, 5, bias=False)
    fully_shard(tied, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    named = hf.ModelFiles(named={"one.safetensors": {"a/weight": "w"}})
    hf.save(f"{root}/named", {"a": tied, "b": tied}, model_files=named)
    return {
        "expected": expected,
        "named": tied.weight.full_tensor().tolist(),
        "said": [record.getMessage() for record in said.buffer if "put" in record.getMessage()],
    }


class Wrapped:
    """Gives a tensor that is spread over ranks."""

    def __init__(self, spread: torch.Tensor) -> None:
        self.spread = spread

    def state_dict(self) -> dict[str, Any]:
        return {"spread": self.spread}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spread = state["spread"]


def change_after_the_last_save(root: str) -> list[str]:
    """Lives whose last step is saved change weights, nothing, and what only all ranks can ask; returns what is said."""
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("holdfast").addHandler(said)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for life in ("weights", "nothing", "wrapped"):
        state, model = ddp_state()
        spread = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
        state["spread"] = Wrapped(spread) if life == "wrapped" else spread
        with hf.Checkpointer(f"{root}/{life}", state, every=2, keep=None) as ck:
            while ck.global_step < 2:
                ck.step(loss=one_step(state, ck.global_step))
            if life == "weights":
                for parameter in model.parameters():
                    parameter.data.fill_(1.0)
            if life != "nothing":
                spread.to_local().fill_(1.0)
    return [record.getMessage() for record in said.buffer]
