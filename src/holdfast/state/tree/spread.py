"""Whether a tensor is spread over ranks (DTensor, ShardedTensor), its memory here, and what FSDP asks of modules.

torch's distributed package is not imported here: before some other code imports it, no such tensor exists.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from holdfast.errors import UnsupportedStateError

__all__ = ["check_module", "is_spread", "local_of", "local_tensor", "reshard", "spread_types"]

# torch < 2.5 has the first name only.
_DTENSOR = ("torch.distributed._tensor", "torch.distributed.tensor")
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor"


def spread_types() -> tuple[type, ...]:
    """Return the types of tensors that are spread over ranks, of those modules that are imported."""
    kinds = [getattr(sys.modules.get(name), "DTensor", None) for name in _DTENSOR]
    kinds.append(getattr(sys.modules.get(_SHARDED_TENSOR), "ShardedTensor", None))
    return tuple(dict.fromkeys(kind for kind in kinds if isinstance(kind, type)))


def is_spread(value: object) -> bool:
    """Tell whether a tensor is spread over ranks."""
    return type(value) not in _PLAIN and isinstance(value, spread_types())


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor as a plain tensor: the same memory, and ``value`` itself if it is plain.

    A ShardedTensor with several shards on this rank gives the first.
    """
    if type(value) in _PLAIN or not is_spread(value):
        return value
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return shards[0].tensor.detach() if shards else torch.empty(0)
    return local_of(value)


def local_of(value: Any) -> torch.Tensor:
    """Return the memory of a DTensor on this rank."""
    local = getattr(value, "_local_tensor", None)
    if type(local) is torch.Tensor and not local.requires_grad:
        return local  # a fiftieth of the time of to_local
    with torch.no_grad():
        return value.to_local().detach()  # type: ignore[no-any-return]


def check_module(module: nn.Module, path: str) -> None:
    """Refuse the first generation of FSDP, whose ``state_dict`` gathers everything and whose optimizers hold slices.

    Raises:
        UnsupportedStateError: says what to put into the state instead.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is None:
        return
    for child in module.modules():
        if isinstance(child, kind) and getattr(child.sharding_strategy, "name", "") != "NO_SHARD":
            raise UnsupportedStateError(
                f"{path}: {type(child).__name__} (FSDP1) keeps slices of flattened parameters: use "
                "torch.distributed.fsdp.fully_shard, or give {'model': get_model_state_dict(model), 'optimizer': "
                "get_optimizer_state_dict(model, optimizer)} of torch.distributed.checkpoint.state_dict, and hand what "
                "was loaded to set_model_state_dict and set_optimizer_state_dict; in a run give one object whose "
                "state_dict calls get_state_dict, and whose load_state_dict calls set_state_dict"
            )


def reshard(module: nn.Module) -> None:
    """Bring modules under ``fully_shard`` back to their sharded parameters, which optimizers know.

    After a forward pass without a backward pass (an evaluation) the gathered parameters may still be in place.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        for child in module.modules():
            if isinstance(child, kind):
                child.reshard()
