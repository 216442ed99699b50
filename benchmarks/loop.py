"""The loop trainer: what a step costs beside a hand-written loop, how long a save holds training, and its start-up.

``HOLDFAST_BENCH_COMPOSER=/path/to/python`` names an interpreter that has Composer: then it is measured beside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.callbacks import Callback

from .bench import Context, Goal, Outcome, remove

__all__ = ["run"]


def run(context: Context) -> Outcome:
    """Interleave the two loops; save after every batch, in a directory and in a ``.pt`` file; start from nothing."""
    outcome = Outcome()
    steps(context, outcome)
    for name, suffix, goal in (("directory", "", 1.25), ("pt", ".pt", 1.5)):
        saves(context, outcome, name, suffix, goal)
    startup(context, outcome)
    composer(context, outcome)
    return outcome


def network(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip


def sizes(context: Context) -> tuple[int, int, int]:
    """Return width of the model, samples of a batch and epochs of the small training."""
    return (32, 16, 1) if context.quick else (512, 128, 4)


def big_width(context: Context) -> int:
    """Return the width of the model whose saves are measured."""
    return 64 if context.quick else int(4096 * context.scale**0.5)


def steps(context: Context, outcome: Outcome) -> None:
    width, batch, epochs = sizes(context)
    data = TensorDataset(torch.randn(batch * 40, width), torch.randint(10, (batch * 40,)))
    for turn in range(context.repeat + 1):
        for name, loop in (("by hand", by_hand), ("Trainer", by_trainer)):
            torch.manual_seed(0)
            outcome.add(name, first=not turn, milliseconds=loop(data, network(width), batch, epochs) * 1e3)
    ratio = outcome.median("Trainer", "milliseconds") / outcome.median("by hand", "milliseconds")
    outcome.ratios["step: Trainer / by hand"] = ratio
    outcome.goals.append(Goal(what="step of Trainer / of a hand-written loop", value=ratio, at_most=1.03))


def by_hand(data: TensorDataset, model: torch.nn.Module, batch: int, epochs: int) -> float:
    """Return seconds a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    begun, count = time.perf_counter(), 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            count += 1
    return (time.perf_counter() - begun) / count


def by_trainer(data: TensorDataset, model: torch.nn.Module, batch: int, epochs: int) -> float:
    """Return seconds a batch; nothing is saved."""
    trainer = hf.Trainer(
        model=model, loss_fn=functional.cross_entropy, optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=DataLoader(data, batch_size=batch, shuffle=True), max_duration=f"{epochs}ep",
        progress_bar=False,
    )  # fmt: skip
    begun = time.perf_counter()
    trainer.fit()
    return (time.perf_counter() - begun) / int(trainer.state.timestamp.batch)


class Held(Callback):
    """Measures how long the savers hold training: they run last at a checkpoint event. Right before, a plain copy.

    One after the other, because the speed of memory changes within seconds on a machine that is shared.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.begun, self.seconds, self.copied = folder, 0.0, list[float](), list[float]()
        self.source, self.target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def batch_end(self, state: Any, logger: Any) -> None:
        begun = time.perf_counter()
        self.target.copy_(self.source)
        self.copied.append(time.perf_counter() - begun)

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        self.begun = time.perf_counter()

    def batch_start(self, state: Any, logger: Any) -> None:
        if not self.begun:
            return
        self.seconds.append(time.perf_counter() - self.begun)
        # The save has to be over before the next one, or waiting for it is measured.
        name = self.folder / f"ba{int(state.timestamp.batch)}"
        while not any(path.exists() for path in (name / "manifest.json", name.with_suffix(".pt"))):
            time.sleep(0.005)


def saves(context: Context, outcome: Outcome, name: str, suffix: str, goal: float) -> None:
    width = big_width(context)
    torch.manual_seed(0)
    model, folder = network(width), context.folder(f"loop-{name}")
    nbytes = 3 * sum(param.numel() * param.element_size() for param in model.parameters())
    held = Held(folder, nbytes)
    trainer = hf.Trainer(
        model=model, loss_fn=functional.cross_entropy, optimizers=torch.optim.AdamW(model.parameters()),
        train_dataloader=[(torch.randn(2, width), torch.randint(10, (2,)))] * (context.repeat + 4), max_duration="1ep",
        save_folder=folder, save_filename="ba{batch}" + suffix, save_interval="1ba", callbacks=held,
        save_num_checkpoints_to_keep=2, progress_bar=False,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    remove(folder)
    for turn, seconds in enumerate(held.copied):
        outcome.add(f"memcpy {name}", first=not turn, seconds=seconds)
    for turn, seconds in enumerate(held.seconds):
        if turn < 2:  # pages are made; the second one may lay out what does not change anew
            outcome.first.setdefault(name, {})["seconds"] = max(
                seconds, outcome.first.get(name, {}).get("seconds", 0.0)
            )
        else:
            outcome.add(name, seconds=seconds)
    ratio = outcome.median(name, "seconds") / outcome.median(f"memcpy {name}", "seconds")
    outcome.ratios[f"held by a save ({name}) / memcpy"] = ratio
    outcome.goals.append(Goal(what=f"held by a save ({name}), {nbytes / 2**20:.0f} MiB", value=ratio, at_most=goal))


_START = """
import json, time
begun = time.perf_counter()
import torch
torch_s = time.perf_counter() - begun
begun = time.perf_counter()
from holdfast import Trainer
import_s = time.perf_counter() - begun
begun = time.perf_counter()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())  # the first one makes torch import its compiler
optimizer_s = time.perf_counter() - begun
begun = time.perf_counter()
data = [(torch.randn(2, 4), torch.tensor([0, 1]))]
trainer = Trainer(model=model, loss_fn=torch.nn.functional.cross_entropy, train_dataloader=data, max_duration="1ba",
                  optimizers=optimizer, save_folder=FOLDER, save_filename="ba{batch}", autoresume=True,
                  progress_bar=False)
made_s = time.perf_counter() - begun
begun = time.perf_counter()
trainer.fit()
fit_s = time.perf_counter() - begun
told = {"torch_s": torch_s, "import_s": import_s, "optimizer_s": optimizer_s, "made_s": made_s, "fit_s": fit_s}
print(json.dumps(told))
"""


def startup(context: Context, outcome: Outcome) -> None:
    """Start an interpreter that trains one batch and saves it; what comes on top of importing torch is ours."""
    for turn in (1,) if context.quick else range(context.repeat + 1):
        folder = context.folder("loop-startup")
        code = _START.replace("FOLDER", repr(str(folder)))
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        outcome.add("start-up", first=not turn, **json.loads(ran.stdout.splitlines()[-1]))
        remove(folder)
    for what, name in (
        ("import torch", "torch_s"),
        ("import holdfast.Trainer after it", "import_s"),
        ("first optimizer of torch", "optimizer_s"),
        ("Trainer(autoresume=True) on an empty folder", "made_s"),
        ("fit of one batch, saved and durable", "fit_s"),
    ):
        outcome.goals.append(Goal(what=f"start-up: {what}", value=outcome.median("start-up", name), unit="s"))


def composer(context: Context, outcome: Outcome) -> None:
    """Let Composer's trainer do the same work, in the Python that has it."""
    python = os.environ.get("HOLDFAST_BENCH_COMPOSER")
    if not python:
        outcome.notes.append("Composer is not installed (HOLDFAST_BENCH_COMPOSER names a Python that has it)")
        return
    out, folder = context.folder("composer.json"), context.folder("loop-composer")
    asked = {
        "step": sizes(context), "repeat": context.repeat, "width": big_width(context), "folder": str(folder),
        "out": str(out),
    }  # fmt: skip
    script = Path(__file__).with_name("loop_peer.py")
    ran = subprocess.run([python, str(script), json.dumps(asked)], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        outcome.notes.append(f"Composer did not run: {ran.stderr.strip().splitlines()[-1:]}")
        return
    found = json.loads(out.read_text())
    out.unlink()
    for turn, milliseconds in enumerate(found["step_ms"]):
        outcome.add("Composer", first=not turn, milliseconds=milliseconds)
    for turn, seconds in enumerate(found["save_s"]):
        outcome.add("Composer save", first=not turn, seconds=seconds)
    hand, copied = outcome.median("by hand", "milliseconds"), outcome.median("memcpy pt", "seconds")
    rows = (
        ("step of Composer / of a hand-written loop", outcome.median("Composer", "milliseconds") / hand, "x"),
        ("held by a save of Composer (.pt) / memcpy", outcome.median("Composer save", "seconds") / copied, "x"),
        ("import composer after torch", found["import_s"], "s"),
    )
    outcome.goals += [Goal(what=what, value=value, unit=unit) for what, value, unit in rows]
