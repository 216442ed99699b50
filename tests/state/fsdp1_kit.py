"""The first generation of FSDP, through the state dicts of ``torch.distributed.checkpoint.state_dict``; real ranks."""

import sys
import warnings

import torch
import torch.distributed as dist
from parallel_kit import Transformer, assert_equal, save, train
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

import holdfast as hf
from holdfast.state.load.restore import load_state
from holdfast.state.load.selection import Fit
from holdfast.storage import LocalStorage


def build(world, seed, *, mesh, original):
    more = {"device_mesh": init_device_mesh("cpu", (world,))} if mesh else {}
    module = FullyShardedDataParallel(
        Transformer(seed), use_orig_params=original, device_id=torch.device("cpu"), **more
    )
    return {"model": module, "optimizer": torch.optim.AdamW(module.parameters(), lr=0.01)}


def whole(state):
    options = dcp_state.StateDictOptions(full_state_dict=True)
    return {
        key: value.clone() for key, value in dcp_state.get_model_state_dict(state["model"], options=options).items()
    }


def sharded(state):
    model, optimizer = state["model"], state["optimizer"]
    return {
        "model": dcp_state.get_model_state_dict(model),
        "optimizer": dcp_state.get_optimizer_state_dict(model, optimizer),
    }


def main():
    world, directory, place, mode, _, rank = sys.argv[1:]
    world, rank = int(world), int(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch says that FSDP1 is deprecated
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=world)
    storage = LocalStorage(directory)
    choice = {"mesh": mode == "mesh", "original": mode != "flat"}
    state = build(world, 3, **choice)
    train(state, range(2))
    try:
        save(storage, "refused", state, rank, world, 1)
    except hf.UnsupportedStateError as error:
        assert "get_model_state_dict" in str(error)  # noqa: PT017 - this is no test function
    else:
        raise AssertionError("FSDP1 was not refused")
    save(storage, mode, sharded(state), rank, world, 2)
    expected = whole(state)
    dist.barrier()
    plain = Transformer(50)
    load_state(storage.child(mode), {"model": plain}, Fit(skip="optimizer"))
    if rank == 0:
        assert_equal(plain.state_dict(), expected, mode)
    other = build(world, 9, **choice)
    train(other, [5])
    loaded = load_state(storage.child(mode), sharded(other), rank=rank).state
    dcp_state.set_model_state_dict(other["model"], loaded["model"])
    dcp_state.set_optimizer_state_dict(other["model"], other["optimizer"], loaded["optimizer"])
    for one in (state, other):
        train(one, [7])
    assert_equal(whole(other), whole(state), f"{mode}, trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
