"""What the tests of the Checkpointer share: a tiny model, whole runs of it, and trainers in processes of their own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import holdfast as hf
from holdfast.run.catalog import Catalog
from holdfast.storage import resolve

ROOT = Path(__file__).resolve().parents[2]


class Ids(Dataset[int]):
    """Samples that are their own ids."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def make_state(seed: int = 0, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.01)}


def train_one(state: dict[str, Any], batch: Any = None) -> torch.Tensor:
    """One optimizer step that depends on the batch and on the random generator."""
    state["optimizer"].zero_grad()
    inputs = torch.randn(2, 3) + (0.0 if batch is None else float(torch.as_tensor(batch).float().mean()) / 10)
    loss = state["model"](inputs).square().sum()
    loss.backward()
    state["optimizer"].step()
    return loss


def train(path: Any, steps: int, *, state: dict[str, Any] | None = None, **options: Any) -> hf.Checkpointer:
    """A run of a step-counting loop up to ``steps`` in all; returns the closed Checkpointer."""
    state = make_state() if state is None else state
    options.setdefault("every", 2)
    options.setdefault("keep", None)
    with hf.Checkpointer(path, state, **options) as ck:
        while ck.global_step < steps:
            ck.step(loss=train_one(state))
    return ck


def loader(count: int = 12, *, batch_size: int = 3, **options: Any) -> DataLoader[int]:
    return DataLoader(Ids(count), batch_size=batch_size, shuffle=True, **options)


def names(path: Any) -> list[str]:
    """Committed checkpoints that may be resumed from, newest first."""
    return [record.name for record in Catalog(resolve(path)).records()]


def steps(path: Any) -> list[int]:
    return sorted(record.step for record in Catalog(resolve(path)).records())


def weights(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value.clone() for value in state["model"].state_dict().values()]


def flip(path: Path, role: str = "safetensors") -> Path:
    """Damage one byte in the middle of a file of a checkpoint."""
    target = next(file for file in sorted(path.iterdir()) if role in file.name)
    data = bytearray(target.read_bytes())
    data[len(data) // 2 if role != "safetensors" else -5] ^= 0x40
    target.write_bytes(data)
    return target


def be_impatient(ck: hf.Checkpointer, timeout_s: float) -> None:
    """Bound every wait from now on: not the start, which a busy machine may need longer for."""
    ck.options = dataclasses.replace(ck.options, timeout_s=timeout_s)
    ck._session.timeout_s = ck._session.saves.timeout_s = ck._boundary._snapshotter.timeout_s = timeout_s


def script(body: str) -> str:
    return textwrap.dedent(body)


def start(body: str, *arguments: object, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
    """Run a script in a process of its own; it finds this kit."""
    return subprocess.Popen(
        [sys.executable, "-c", script(body), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}", **env},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 120.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.rstrip("\n")


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    for line in lines(process):
        if line.startswith(word):
            return line[len(word) :].strip()
    raise AssertionError(f"ended without saying {word!r}: {process.stderr.read() if process.stderr else ''}")
