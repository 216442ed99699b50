"""A rank of two: trains with FSDP2 and leaves what `save_state` leaves then, whole and sharded, and the weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer, set_seed


def plugin(kind: str) -> FullyShardedDataParallelPlugin:
    """How to shard, and to save: FULL or SHARDED."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="no_wrap",
        state_dict_type=f"{kind}_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def main(folder: Path) -> None:
    """Train three steps and save."""
    set_seed(5)
    accelerator = Accelerator(cpu=True)
    # Accelerate passes over an fsdp_plugin where there is no GPU: told after it has looked.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin("FULL")
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    adam = torch.optim.Adam(net.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(net, adam)
    for _ in range(3):
        accelerator.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    for kind in ("FULL", "SHARDED"):
        (folder / kind).mkdir(exist_ok=True)
        save_fsdp_model(plugin(kind), accelerator, model, str(folder / kind))
        save_fsdp_optimizer(plugin(kind), accelerator, optimizer, model, str(folder / kind))
    weights = {name: value.full_tensor().detach() for name, value in model.named_parameters()}
    if accelerator.is_main_process:
        torch.save(weights, folder / "weights.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(json.loads(sys.argv[1])["folder"]))
