"""A small training whose data, weights and life can be broken, for the tests of the guard."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf

BATCHES, EPOCHS = 24, 2


def live(
    run: Path, *, poison: dict[tuple[int, int], str] | None = None, leave_out: frozenset[tuple[int, int]] = frozenset(),
    flip_at: int = 0, kill_at: int = 0, kill_how: int = signal.SIGKILL,
    accumulate: int = 1, **options: Any,
) -> bytes:  # fmt: skip
    """Live one life to its end; return the bytes of the model, the optimizer and what was seen.

    Args:
        run: the run.
        poison: what is done to the batches of (epoch, index): "nan" or "spike".
        leave_out: batches that this loop does not train: a twin that never had them.
        flip_at: after this step a bit of a weight flips, if no file says that it has.
        kill_at: after this step the process is killed, if no file says that it was.
        kill_how: by this signal.
        accumulate: batches a step.
        **options: of the `Checkpointer`.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.arange(BATCHES * 8), torch.randn(BATCHES * 8, 4))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    seen: list[int] = []
    options.setdefault("every", 5)
    options.setdefault("keep", hf.Keep(last=1))
    options.setdefault("guard", hf.Guard(max_rollbacks=20))
    with hf.Checkpointer(run, {"model": model, "optimizer": optimizer, "seen": seen}, **options) as ck:
        for epoch in ck.epochs(EPOCHS):
            for index, (which, x) in ck.enumerate(loader):
                if (epoch, index) in leave_out:
                    continue
                what = (poison or {}).get((epoch, index))
                if what is not None:
                    x.mul_(math.nan if what == "nan" else 1e4)
                loss = 1 + model(x).pow(2).mean()
                (loss / accumulate).backward()
                seen += which.tolist()
                if (index + 1) % accumulate:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                ck.step(loss=loss.detach())
                if ck.global_step == flip_at and once(run, f"flipped-{flip_at}"):
                    with torch.no_grad():
                        bits = model[2].bias.view(torch.int32)
                        bits ^= 1 << 30  # the highest bit of the exponent
                if ck.global_step == kill_at and once(run, f"killed-{kill_at}"):
                    os.kill(os.getpid(), kill_how)
    return whole(model, optimizer, seen)


def once(run: Path, name: str) -> bool:
    """Tell, the first time, that it is the first time."""
    marker = run.with_name(f"{run.name}-{name}")
    if marker.exists():
        return False
    marker.touch()
    return True


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seen: list[int]) -> bytes:
    """Return all of a state as bytes."""
    tensors = [*model.state_dict().values()]
    for entry in optimizer.state_dict()["state"].values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return b"".join(tensor.numpy().tobytes() for tensor in tensors) + json.dumps(seen).encode()


def random_case(root: str, seed: int) -> dict[str, Any]:
    """Break a training at random, kill some of its lives, start it again as `holdfast run` does; compare with a twin.

    Returns:
        What was done, how its lives ended, and whether the end is bitwise that of the twin.
    """
    torch.set_num_threads(1)
    rng = random.Random(seed)
    run, total = Path(root, "run"), BATCHES * EPOCHS
    steps = rng.sample(range(total - 3), rng.randint(1, 3))
    poison, flip_at = {}, 0
    for step in steps:
        kind = rng.choice(["nan", "spike", "flip"])
        if kind == "flip" and not flip_at:
            flip_at = max(1, step)
        else:
            # A spike needs twenty values before it.
            poison[divmod(step, BATCHES)] = "spike" if kind == "spike" and step > 22 else "nan"
    options = {
        "every": rng.randint(2, 8), "keep": hf.Keep(last=rng.randint(1, 2)),
        "guard": hf.Guard(max_rollbacks=50, skip="bad"), "rescue": rng.choice([None, 1, 3]),
    }  # fmt: skip
    kills, ends = rng.randint(0, 3), []
    while not ends or ends[-1] != 0:
        after_s = rng.uniform(0.05, 0.6) if ends.count(-9) < kills and rng.random() < 0.6 else None
        ends.append(in_a_child(run, after_s, poison=poison, flip_at=flip_at, **options))
        if ends[-1] not in (0, 86, -9) or len(ends) > 40:
            break
    twin = Path(root, "twin")
    status = in_a_child(twin, None, leave_out=frozenset(poison), **{**options, "rescue": None, "guard": None})
    files = [path.with_name(f"{path.name}-end") for path in (run, twin)]
    same = status == 0 and all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes()
    what = {str(place): kind for place, kind in poison.items()} | ({"flip": flip_at} if flip_at else {})
    return {"broken": what, "ends": ends, "same": same, "options": str(options)}


def in_a_child(run: Path, after_s: float | None, **options: Any) -> int:
    """Live one life in a child, which is killed after so many seconds; return its status."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            if after_s is not None:
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            end = live(run, **options)
            run.with_name(f"{run.name}-end").write_bytes(end)
            status = 0
        except SystemExit as left:
            status = int(left.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
