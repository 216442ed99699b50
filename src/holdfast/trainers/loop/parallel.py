"""Where a model trains: the processes that train together (`Ranks`), the device of each, and the model on them.

Gradients are averaged by DDP, or the user has sharded the model already. Steps that torch takes for tensors of a single
kind only are taken here for models with sharded and plain parameters.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast._log import get_logger
from holdfast._ranks import RankInfo, current_ranks
from holdfast.checkpointer.meeting import Alone, Meeting, meet
from holdfast.checkpointer.rendezvous import Rendezvous, store_of_this_life
from holdfast.errors import ConfigError, HoldfastError
from holdfast.state.accelerator import accelerator, default_device, group_backend, has_streams, make_current
from holdfast.state.data.seeding import seed_all
from holdfast.state.gradient_order import fix_or_warn
from holdfast.state.tree.arrays import is_spread, local_tensor

from .arguments import several

_LOG = get_logger("trainers.loop")
TIMEOUT_S = 600.0
_BUCKET = 250 << 20
_INSTEAD = "; the trainer gives every rank its own part of the data: use holdfast.Checkpointer in a loop of your own"
_HOW = (
    "give each kind {what} of its own, of the parameters that are DTensors and of the others (isinstance(one, "
    "torch.distributed.tensor.DTensor) tells)"
)


class Ranks:
    """One process alone, or one of several that make the same calls in the same order.

    Args:
        info: who we are.

    Attributes:
        rank, world_size: ours among all.
        leads: we are rank 0, which alone writes what is not divided: files, links, logs.
    """

    def __init__(self, info: RankInfo | None = None) -> None:
        self.info = info if info is not None else RankInfo()
        self.rank, self.world_size = self.info.rank, self.info.world_size
        self.leads = self.rank == 0
        self._meeting: Meeting = Alone()
        self._number = 0
        self._topic: str | None = None
        self._host_group: Any = None  # of gloo: what is read on the host must not wait for a device
        if self.world_size > 1:
            self._meeting = self.meeting("trainer")
            if "gloo" not in str(dist.get_backend_config()):
                self._host_group = dist.new_group(backend="gloo")

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Find the other ranks, and make the process group if nobody did.

        Raises:
            ConfigError: there are other ranks, and nothing says where they meet.
        """
        info = current_ranks()
        if info.world_size > 1:
            make_current(device)
            if not dist.is_initialized():
                _make_group(info, device)
        return cls(info)

    def meeting(self, name: str) -> Meeting:
        """Return somewhere else to meet."""
        return meet(
            self.info, name=f"loop-{name}", timeout_s=TIMEOUT_S, otherwise="start the trainer in one process alone"
        )

    def agree(
        self,
        topic: str,
        give: Callable[[], Any],
        decide: Callable[[list[Any]], Any] = lambda values: values[0],
        *,
        work_s: float = 0.0,
    ) -> Any:
        """Let every rank give plain data and rank 0 decide; all return, or raise, the same. See `Rendezvous.agree`."""
        before, self._number = self._topic, self._number + 1
        self._topic = f"{self._number}/{topic}"
        decision = self._meeting.agree(self._topic, give, decide, work_s=work_s)
        if isinstance(self._meeting, Rendezvous) and before is not None:
            self._meeting.forget(before)  # all have come here, so nobody reads it any more
        return decision

    def watch(self, watch: Callable[[], HoldfastError | None] | None) -> None:
        """Give up what is being agreed on when ``watch`` returns an error: a rank is gone."""
        if isinstance(self._meeting, Rendezvous):
            self._meeting.watch = watch

    def lead(self, topic: str, act: Callable[[], Any], *, work_s: float = 0.0) -> Any:
        """Let rank 0 do something; all return what came of it, or raise what it raised. See `agree`."""
        return self.agree(topic, act if self.leads else lambda: None, work_s=work_s)

    # -- numbers, through the process group

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up numbers of the host over all ranks."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(tensor, group=self._host_group)
        return tensor.tolist()

    def mean(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to take the mean of a tensor over all ranks, on its device; what is returned ends it."""
        if self.world_size == 1:
            return lambda: value
        mean = value.detach() / self.world_size
        work = dist.all_reduce(mean, async_op=True)

        def ended() -> torch.Tensor:
            work.wait()
            return mean

        return ended

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means over all ranks."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for kind in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in kind]) / self.world_size
            dist.all_reduce(flat)
            for tensor, mean in zip(kind, torch.split(flat, [tensor.numel() for tensor in kind]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the values that rank 0 has."""
        if self.world_size > 1 and tensors:
            group = dist.distributed_c10d._get_default_group()
            dist._broadcast_coalesced(group, list(tensors), _BUCKET, 0)  # type: ignore[attr-defined]


def _make_group(info: RankInfo, device: torch.device) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this is rank {info.rank} of {info.world_size}, and {' and '.join(missing)} do not say where the ranks "
            "meet: start with torchrun, or call torch.distributed.init_process_group before the Trainer is made"
        )
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{group_backend(device.type)}"
    store, rank, world_size = next(dist.rendezvous("env://", info.rank, info.world_size))  # type: ignore[attr-defined]
    # The store of torchrun may outlive a restart of the ranks: gloo must not find the addresses of an earlier life.
    timeout_s = dist.distributed_c10d.default_pg_timeout.total_seconds()
    life = store_of_this_life(store, info, timeout_s=timeout_s)
    dist.init_process_group(backend, store=life, rank=rank, world_size=world_size)


def seed_ranks(seed: int | None, ranks: Ranks) -> int:
    """Seed this process, each rank differently, and return the seed of rank 0; without a seed, torch's own decides.

    Raises:
        ConfigError: it is no seed.
    """
    if seed is not None and (isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= int(seed) < 1 << 62):
        raise ConfigError(f"seed={seed!r}: give a whole number from 0 to 2**62, or None")
    common = int(ranks.agree("seed", lambda: torch.initial_seed() % (1 << 62) if seed is None else seed))
    if seed is not None or ranks.rank > 0:
        seed_all(common + ranks.rank)
        torch.manual_seed(common + ranks.rank)
    return common


def choose_device(device: Any) -> torch.device:
    """Return the device to train on: a GPU where there is one.

    Raises:
        ConfigError: torch knows no such device, or cannot use it.
    """
    if device is None:
        return _own(default_device(0).type)
    try:
        chosen = (
            device
            if isinstance(device, torch.device)
            else _own((accelerator() or "cuda") if device == "gpu" else device)
        )
        torch.empty(0, device=chosen)  # fails for a missing device, and for a kind that this torch was built without
        return chosen
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from error


def _own(device: Any) -> torch.device:
    """Return the GPU of this process where several on this machine have one each."""
    found, ranks = torch.device(device), current_ranks()
    if found.type == default_device(0).type != "cpu" and found.index is None and ranks.world_size > 1:
        return default_device(ranks.local_rank)
    return found


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module out of a `DistributedDataParallel`."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    """Tell whether ranks hold parts of this model, so that they have to go through it together."""
    return any(is_spread(parameter) for parameter in model.parameters())


class Parallel:
    """How a model is called in training. `state.model` stays the bare module: names and methods are those of the user.

    Args:
        given: what the user passed; a `DistributedDataParallel` is used as it is.
        ranks: the processes that train.

    Raises:
        ConfigError: parts of it would not be trained in step.
    """

    def __init__(self, given: nn.Module, ranks: Ranks) -> None:
        self._given, self._ranks = given, ranks
        self._wrapped: nn.Module | None = given if isinstance(given, DistributedDataParallel) else None
        self._plain: list[nn.Parameter] = []  # whole on every rank, in a model that is sharded otherwise
        self._fsdp: list[Any] = []  # what gathers gradients by itself
        if ranks.world_size > 1:
            _check_sharding(bare(given), ranks.world_size)
        _gather_in_evaluations(bare(given))

    def ready(self, model: nn.Module, device: torch.device) -> None:
        """Wrap the model, if several ranks train and nobody did; all ranks begin with the weights of rank 0."""
        if self._ranks.world_size == 1:
            return
        if self._wrapped is not None and bare(self._wrapped) is model:
            self._fix_order()
            return
        self._wrapped, self._plain, self._fsdp = None, [], []
        if is_sharded(model):
            _check_sharding(model, self._ranks.world_size)
            self._ready_sharded(model)
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        ids = [device] if has_streams(device) else None
        # Buffers are shared after the step, see `settle`. The argument has another name from torch 2.13 on.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers: Any = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
        self._wrapped = DistributedDataParallel(model, device_ids=ids, **buffers)
        self._fix_order()

    def _fix_order(self) -> None:
        if isinstance(self._wrapped, DistributedDataParallel):
            fix_or_warn(self._wrapped, leads=self._ranks.leads)

    def _ready_sharded(self, model: nn.Module) -> None:
        """Share the parameters outside of `fully_shard` among the ranks; `average` then averages their gradients."""
        # Frozen parameters may be trained later.
        self._plain = [tensor for tensor in model.parameters() if not is_spread(tensor)]
        self._ranks.share([tensor.detach() for tensor in self._plain])
        self._fsdp = list(_synchronised(model))

    def callable(self, model: nn.Module) -> Any:
        """Return what is called with a training batch."""
        return model if self._wrapped is None else self._wrapped

    def gathering(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one part of a batch: gradients are averaged with the last part only."""
        if isinstance(self._wrapped, DistributedDataParallel) and not last:
            return self._wrapped.no_sync()
        for module in self._fsdp:
            module.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def average(self) -> None:
        """Average the gradients that neither DDP nor FSDP has: of plain parameters beside sharded ones."""
        if not self._plain:
            return
        counts = self._ranks.sum([float(parameter.grad is not None) for parameter in self._plain])
        used = [parameter for parameter, count in zip(self._plain, counts, strict=True) if count]
        for parameter in used:
            if parameter.grad is None:  # other ranks went through it with this batch
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout is not torch.strided:  # of rows that differ between ranks
                parameter.grad = parameter.grad.to_dense()
        self._ranks.average([parameter.grad for parameter in used if parameter.grad is not None])

    def settle(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0 after a step: they evaluate, average and save one state."""
        if self._ranks.world_size > 1:
            self._ranks.share([buffer for buffer in model.buffers() if not is_spread(buffer)])


def _synchronised(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules under `fully_shard`: the root may not be among them."""
    if callable(getattr(module, "set_requires_gradient_sync", None)):
        yield module
        return
    for child in module.children():
        yield from _synchronised(child)


def _gather_in_evaluations(model: nn.Module) -> None:
    """Let ``eval_forward`` find the whole of a sharded model: FSDP gathers it for `forward` alone."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    register = getattr(fsdp, "register_fsdp_forward_method", None)  # takes no notice of other models
    if register is not None and callable(getattr(model, "eval_forward", None)) and "eval_forward" not in vars(model):
        register(model, "eval_forward")


def _check_sharding(model: nn.Module, world_size: int) -> None:
    """Refuse a model of which ranks that see different data hold different parts, in other ways than `fully_shard`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    first = getattr(fsdp, "FullyShardedDataParallel", None)
    if first is not None and any(isinstance(module, first) for module in model.modules()):
        raise ConfigError(
            "model is wrapped in FullyShardedDataParallel (FSDP1), whose flattened parameters the trainer does not "
            "save: use torch.distributed.fsdp.fully_shard instead"
        )
    older = sys.modules.get("torch.distributed._composable.fsdp")  # torch < 2.6
    second: Any = getattr(fsdp, "FSDPModule", None) or getattr(older, "FSDPModule", ())
    for name, parameter, within in _spread_parameters(model, second):
        mesh = getattr(parameter, "device_mesh", None)  # a ShardedTensor has none
        places = () if mesh is None else zip(parameter.placements, mesh.shape, strict=True)
        if mesh is None or not within or sum(size > 1 and not place.is_replicate() for place, size in places) > 1:
            raise ConfigError(
                f"the parameter {name} is split over ranks by something else than fully_shard (such as tensor "
                f"parallelism){_INSTEAD}"
            )
        if mesh.size() != world_size:
            raise ConfigError(
                f"the parameter {name} is sharded over {mesh.size()} of {world_size} ranks, so the others "
                "would train another model: give fully_shard a mesh of all ranks"
            )


def _spread_parameters(module: nn.Module, fsdp: Any, path: str = "", within: bool = False) -> Iterator[Any]:
    """Yield the sharded parameters: name, parameter, and whether it lies within a module under `fully_shard`."""
    within = within or isinstance(module, fsdp)
    for name, parameter in module._parameters.items():
        if parameter is not None and is_spread(parameter):
            yield f"{path}{name}", parameter, within
    for name, child in module.named_children():
        yield from _spread_parameters(child, fsdp, f"{path}{name}.", within)


def move_plain(model: nn.Module, device: torch.device) -> None:
    """Bring what `fully_shard` did not move to the device, in place: optimizers keep the parameters they have."""
    for parameter in model.parameters():
        if not is_spread(parameter) and parameter.device != device:
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_spread(buffer):
                module._buffers[name] = buffer.to(device)


def place_model(model: torch.nn.Module, device: torch.device) -> None:
    """Bring a model to its device; of a sharded model only the parameters and buffers that are not sharded."""
    if is_sharded(model):
        move_plain(model, device)
    else:
        model.to(device)


def choose_optimizers(
    given: Any, model: torch.nn.Module, device: torch.device, *, trains: bool, scaled: bool
) -> list[torch.optim.Optimizer]:
    """Return the optimizers given, else an AdamW if there is something to train.

    Raises:
        ConfigError: an entry is no optimizer, or cannot be used on the device or with scaled gradients.
    """
    found, parameters = several(given, "optimizers"), list(model.parameters())
    if not found and trains and parameters:
        # One group whatever is sharded, so that a checkpoint fits a model that is sharded in another way.
        options: dict[str, Any] = {"foreach": False} if _is_mixed(parameters) else {}
        found = [torch.optim.AdamW(parameters, lr=1e-3, **options)]
    check_optimizers(found, device, scaled=scaled)
    of_model = {id(parameter) for parameter in parameters}
    for number, optimizer in enumerate(found):
        groups = getattr(optimizer, "param_groups", ())
        held = {id(parameter) for group in groups for parameter in group["params"]}
        if held and held.isdisjoint(of_model):
            _LOG.warning(
                "optimizers[%d] (%s) has no parameter of the model and trains nothing of it: make it from the "
                "parameters() of the model that the Trainer gets, after that was copied or sharded",
                number, type(optimizer).__name__,
            )  # fmt: skip
    return found


def check_optimizers(optimizers: Iterable[Any], device: torch.device, *, scaled: bool) -> None:
    """Refuse optimizers that would fail at their first step, over sharded and plain parameters at once.

    Args:
        optimizers: of the trainer.
        device: trained on.
        scaled: gradients are scaled (amp_fp16).

    Raises:
        ConfigError: saying how to part them.
    """
    for number, optimizer in enumerate(optimizers):
        groups = getattr(optimizer, "param_groups", ())
        where = f"optimizers[{number}] ({type(optimizer).__name__})"
        if scaled and _is_mixed([parameter for group in groups for parameter in group["params"]]):
            raise ConfigError(
                f"{where} has sharded and plain parameters, whose gradients precision='amp_fp16' cannot scale "
                f"together: {_HOW.format(what='an optimizer')}, or use 'amp_bf16'"
            )
        for at, group in enumerate(groups):
            way = _way(group, device)
            if way is not None and _is_mixed(group["params"]):
                raise ConfigError(
                    f"{where} has sharded and plain parameters in its group {at}, which {way} cannot step together: "
                    f"{_HOW.format(what='a group')}, or pass foreach=False"
                )


def _way(group: dict[str, Any], device: torch.device) -> str | None:
    """Return how an optimizer goes through a group at once; None if it takes one parameter after another."""
    for way in ("fused", "foreach"):
        if group.get(way):
            return f"{way}=True"
    unset = "foreach" in group and group["foreach"] is None and group.get("fused") is None
    return f"foreach (torch's choice on {device.type})" if unset and device.type not in ("cpu", "mps") else None


def _is_mixed(parameters: Iterable[torch.Tensor]) -> bool:
    """Tell whether parameters of both kinds are trained; frozen ones have no gradient to step with."""
    return len({is_spread(parameter) for parameter in parameters if parameter.requires_grad}) == 2


def check_clip(norm: Any) -> float | None:
    """Return the bound of gradients as a number, be it one of NumPy or torch.

    Raises:
        ConfigError: it is no positive number.
    """
    if norm is None:
        return None
    try:
        bound = 0.0 if isinstance(norm, (bool, str, bytes)) else float(norm)
    except (TypeError, ValueError, RuntimeError):
        bound = 0.0
    if not bound > 0:
        raise ConfigError(f"grad_clip_norm={norm!r}: give a positive number, or None")
    return bound


def clip_gradients(model: nn.Module, bound: float) -> None:
    """Bound the norm of all gradients together, sharded and plain ones (which torch's own function does not mix)."""
    with_grad = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grads: list[Any] = [parameter.grad for parameter in with_grad]
    kinds = [[grad for grad in grads if is_spread(grad) is spread] for spread in (True, False)]
    if not all(kinds):
        torch.nn.utils.clip_grad_norm_(with_grad, bound)
        return
    norms = [_norm(kind) for kind in kinds]
    whole = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    factor = (bound / (whole + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local = local_tensor(grad)  # a part of it is scaled as the whole is
        local.mul_(factor.to(local.device))


def _norm(grads: Sequence[Any]) -> torch.Tensor:
    """Measure gradients of one kind together, and leave them as they are."""
    total = getattr(torch.nn.utils, "get_total_norm", None)
    if total is not None:
        norm = total(grads)
    else:  # torch < 2.6
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    return norm.full_tensor() if is_spread(norm) else norm  # type: ignore[no-any-return]
