"""A rank of two: trains a model of Transformers with FSDP2; each checkpoint of its run is a model."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hf_kit import leave_at_once
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast as hf
from holdfast.transformers import model_files

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def sharded(seed: int) -> Any:
    """Return a small model whose layers are cut over the ranks, with a weight that two modules share."""
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(folder: str) -> None:
    """Train four steps, save after two and four, and go on from the first in a model of other weights."""
    dist.init_process_group("gloo")
    model = sharded(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(3, 99, (4, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    weights = {}
    state = {"model": model, "optimizer": optimizer}
    with hf.Checkpointer(f"{folder}/run", state, every=2, keep=None, model_files=model_files(model)) as ck:
        while ck.global_step < 4:
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            weights[ck.global_step + 1] = whole(model)
            ck.step()
    again = sharded(7)
    hf.load(f"{folder}/run/step_00000002", {"model": again, "optimizer": torch.optim.AdamW(again.parameters())})
    assert all(torch.equal(value, weights[2][name]) for name, value in whole(again).items())
    if dist.get_rank() == 0:
        torch.save(weights, f"{folder}/weights.pt")
    dist.destroy_process_group()
    leave_at_once()


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Return all weights in full, put together by torch."""
    return {name: value.full_tensor().detach().clone() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1])["folder"])
