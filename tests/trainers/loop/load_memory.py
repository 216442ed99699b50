"""Loads a checkpoint into a training that has its memory already; prints what more that took at its peak, in MiB."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch
from memory_kit import peak_bytes
from torch.nn import functional

import holdfast as hf

WIDTH, LAYERS = 1024, 24  # 96 MiB of weights, 288 MiB with the optimizer's state


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose optimizer has stepped."""
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def main(folder: str, suffix: str) -> None:
    data = [(torch.randn(2, WIDTH), torch.randn(2, WIDTH))]
    model, optimizer = training()
    options = {"loss_fn": functional.mse_loss, "train_dataloader": data, "progress_bar": False}
    weights_only = suffix == ".safetensors"
    with hf.Trainer(
        model=model, optimizers=optimizer, max_duration="1ba", save_folder=folder, save_filename=f"x{suffix}",
        save_weights_only=weights_only, **options,
    ) as first:  # fmt: skip
        first.fit()
    del first
    other, its = training()
    for _ in range(2):  # the second time nothing is imported and no allocator grows
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_bytes()
        hf.Trainer(model=other, optimizers=its, load_path=f"{folder}/x{suffix}", **options).close()
        more = (peak_bytes() - before) >> 20
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    print(more)


if __name__ == "__main__":
    main(*sys.argv[1:])
