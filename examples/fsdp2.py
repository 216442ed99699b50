"""The GPT of gpt.py with its weights spread over several processes (FSDP2, `fully_shard`); the loop is that of ddp.py.

    torchrun --nproc-per-node 4 examples/fsdp2.py --out runs/fsdp2 --steps 200

Each process saves the part of the weights and of the optimizer's state that it has. A start with another number of
processes reads what each of them needs. With GPUs each process takes one, without them it trains on the CPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp import main
from gpt import GPT


def spread(model: GPT) -> nn.Module:
    """Spread the weights over all processes, block by block."""
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    main(spread)
