"""One rank of a test of `holdfast.dcp`: python dcp_ranks.py RANK WORLD_SIZE FOLDER ACTION...

Every rank makes the same model from the same seed, trains one step, shards it with `fully_shard`, and does the actions
in order; what it finds wrong ends it with a traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interop_kit import trained
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.dcp import HoldfastReader, HoldfastWriter


def sharded(world_size: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of ``seed`` after one step, sharded over all ranks, and its optimizer after one more."""
    model, _ = trained(seed, steps=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole(state: dict) -> dict:
    """The full tensors of a flat state dict."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def same(one: dict, other: dict) -> None:
    one, other = whole(one), whole(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def kept(optimizer: dict) -> dict:
    """The tensors of an optimizer's state dict, flat."""
    return {f"{name}.{key}": value for name, row in optimizer["state"].items() for key, value in row.items()}


def main(rank: int, world_size: int, folder: Path, actions: list[str]) -> None:
    """Do the actions."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{folder}/meet")
    model, optimizer = sharded(world_size, seed=1)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "note": {"epoch": 3, "path": Path("x")}}
    for action in actions:
        if action == "save":
            dcp.save(state, storage_writer=HoldfastWriter(folder / "mine", step=5, metrics={"loss": 0.5}))
        elif action == "async":
            dcp.async_save(state, storage_writer=HoldfastWriter(folder / "later")).result()
        elif action == "plain":
            dcp.save(state, checkpoint_id=folder / "plain")
        elif action.startswith("load="):
            other, other_optimizer = sharded(world_size, seed=2)
            found, others = get_state_dict(other, other_optimizer)
            target = {"model": found, "optimizer": others}
            dcp.load(target, storage_reader=HoldfastReader(folder / action[5:]))
            set_state_dict(other, other_optimizer, model_state_dict=found, optim_state_dict=others)
            again, others = get_state_dict(other, other_optimizer)
            same(again, weights)
            same(kept(others), kept(moments))
        else:
            raise ValueError(action)
    reference = {"model": whole(weights), "kept": whole(kept(moments))}  # collective: every rank takes part
    if rank == 0:
        torch.save(reference, folder / "reference.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    # Threads of gloo may still hold tensors when the interpreter is taken apart, and abort it (pytorch/pytorch 179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
