"""Training states to save: built without a forward pass, filled, and changed between saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["TrainState", "gpt2_state", "small_state"]


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)


class _GPT(nn.Module):
    def __init__(self, dim: int, layers: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.h = nn.ModuleList(_Block(dim) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight


@dataclass(slots=True)
class TrainState:
    """One training state in the two shapes it is saved in.

    Attributes:
        objects: module and optimizer, as a user of Holdfast passes them.
        tensors: the same memory as a flat dict, each tensor once ("model.x", "exp_avg.x", "exp_avg_sq.x", "step.x"):
            what peers get, so that neither ``state_dict()`` nor tied weights cost them anything.
    """

    objects: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def touch(self, names: set[str] | None = None) -> None:
        """Change every tensor a little, at least once per MiB, as a training step would."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if names is None or name in names:
                    tensor.view(-1)[:: 1 << 17] += 1

    def clear(self) -> None:
        """Overwrite everything, so that a load has something to restore."""
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.zero_()

    def probe(self) -> list[float]:
        """Sample every tensor; equal lists mean that a load brought the bytes back."""
        return [float(tensor.view(-1)[-1]) + float(tensor.view(-1)[0]) for tensor in self.tensors.values()]


def gpt2_state(*, scale: float = 1.0, quick: bool = False, frozen: float = 0.0) -> TrainState:
    """Build a GPT-2-small-like model with AdamW: 148 parameters, tied head, 1.39 GiB at scale 1.

    Args:
        scale: factor on the width.
        quick: about 20 MiB.
        frozen: fraction of the parameter bytes that need no gradient.
    """
    width = 64 if quick else max(64, int(768 * scale) // 64 * 64)
    with torch.device("meta"):
        model = _GPT(width, 12, 16000 if quick else 50257, 128 if quick else 1024)
    model = model.to_empty(device="cpu")
    model.lm_head.weight = model.wte.weight
    parameters = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    left = total * frozen
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.normal_(std=0.02)
            # The embedding is 31 % of the model: freezing in order of size comes nearest to the fraction asked for.
            if frozen and parameter.numel() <= left and not name.startswith("h.11."):
                parameter.requires_grad_(False)
                left -= parameter.numel()
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-4)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in trained.items():
        entry = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
        optimizer.state[parameter] = entry
        tensors |= {f"{key}.{name}": entry[key] for key in ("exp_avg", "exp_avg_sq", "step")}
    return TrainState(objects={"model": model, "optimizer": optimizer}, tensors=tensors)


def small_state(count: int) -> TrainState:
    """Build ``count`` tensors of 1 KB in one dict."""
    tensors = {f"t{number:06d}": torch.randn(256) for number in range(count)}
    return TrainState(objects={"tensors": tensors}, tensors=tensors)
