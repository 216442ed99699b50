"""A byte-level GPT learns to write Python from the standard library of the interpreter that runs it.

A plain training loop with `holdfast.Checkpointer`. Kill it whenever you like and start the same command again: it goes
on from the last checkpoint, and the result is bitwise the one of a run that was never killed.

    python examples/gpt.py --run runs/gpt --steps 250 --generate 400
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 256, 8, 2, 6


class Windows(Dataset):
    """Bytes of the standard library: sample i is (i, the bytes of window i, the same bytes shifted by one)."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return index, window[:-1], window[1:]


class Block(nn.Module):
    """Attention and a two-layer network, each on normalised input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map features to features, (batch, length, WIDTH)."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A causal transformer over bytes; the output layer is the embedding again (tied)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight
        for weight in self.parameters():
            if weight.ndim >= 2:
                nn.init.normal_(weight, std=0.04)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map bytes (batch, length) to scores for the byte after each."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.position(places))
        return self.head(self.norm(self.blocks(x)))


def read_library() -> torch.Tensor:
    """Return the modules at the top of the standard library, sorted by name, as one tensor of bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))), dtype=torch.uint8
    )


def make_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW without decay on vectors, and a learning rate that warms up and falls as a cosine."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
    warmup = max(1, steps // 12)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next byte, in nats."""
    return F.cross_entropy(model(inputs).view(-1, 256), targets.view(-1))


@torch.no_grad()
def evaluate(model: nn.Module, windows: Dataset, batches: int = 6) -> float:
    """Return the mean loss over the first windows that are never trained on."""
    model.eval()
    # A generator of its own: iterating a DataLoader draws a number, and a resume does not repeat this evaluation.
    loader = DataLoader(windows, BATCH, generator=torch.Generator())
    losses = [loss_of(model, x, y) for (_, x, y), _ in zip(loader, range(batches), strict=False)]
    model.train()
    return float(torch.stack(losses).mean())


@torch.no_grad()
def generate(model: nn.Module, length: int, prompt: str = "def ") -> str:
    """Let the model write ``length`` bytes after ``prompt``."""
    model.eval()
    chooser = torch.Generator().manual_seed(1)  # its own: writing must not move training's
    text = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        odds = F.softmax(model(text[:, -CONTEXT:])[0, -1] / 0.7, dim=-1)
        text = torch.cat([text, torch.multinomial(odds, 1, generator=chooser).view(1, 1)], dim=1)
    model.train()
    return bytes(text[0].tolist()).decode(errors="replace")


def train(arguments: argparse.Namespace) -> None:
    """Train, or go on training: the loop knows nothing of kills and restarts."""
    text = read_library()
    held_out = BATCH * CONTEXT * 8
    loader = DataLoader(Windows(text[:-held_out]), BATCH, shuffle=True, drop_last=True)
    validation = Windows(text[-held_out:])
    model = GPT()
    optimizer, scheduler = make_optimizer(model, arguments.steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    keep = holdfast.Keep(last=3, best=2, metric="val_loss", mode="min")
    with holdfast.Checkpointer(arguments.run, state, every=arguments.every or None, keep=keep) as ck:
        for _ in ck.epochs(1000):
            if ck.global_step >= arguments.steps:
                break
            for ids, inputs, targets in ck.batches(loader):
                loss = loss_of(model, inputs, targets)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                note(arguments.log, step=ck.global_step + 1, ids=ids.tolist(), loss=loss.item())
                ck.step(loss=loss)
                if ck.global_step * arguments.evals % arguments.steps < arguments.evals:
                    ck.report(val_loss=evaluate(model, validation))
                if ck.global_step >= arguments.steps or ck.should_stop:
                    break
    if arguments.stats:
        Path(arguments.stats).write_text(json.dumps(dataclasses.asdict(ck.stats), indent=1))
    if arguments.generate:
        print(generate(model, arguments.generate))


def note(log: str | None, **row: Any) -> None:
    """Append a line for a trained step: for the demo, which compares lives by it. SIGKILL tears no line."""
    if log:
        with Path(log).open("a") as file:
            file.write(json.dumps({**row, "at": time.monotonic(), "pid": os.getpid()}) + "\n")


def main() -> None:
    """Read the command line, make everything deterministic, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="directory of the run; the same one again resumes")
    parser.add_argument("--steps", type=int, default=250, help="steps to train")
    parser.add_argument("--every", default="25ba", help='how often to save: "25ba", "10min"; "" for the end only')
    parser.add_argument("--log", help="append one line of JSON for each trained step")
    parser.add_argument("--evals", type=int, default=4, help="how often to evaluate in the whole run")
    parser.add_argument("--stats", help="write what the saves cost to this file at the end")
    parser.add_argument("--generate", type=int, default=0, help="write this many bytes of text at the end")
    arguments = parser.parse_args()
    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    train(arguments)


if __name__ == "__main__":
    main()
