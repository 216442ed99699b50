"""Modules built on the meta device: each tensor gets memory once, and what is stored is read straight into it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from holdfast._log import get_logger

__all__ = ["MetaMemory", "home_of", "without_memory"]

_LOG = get_logger("state")


def home_of(tensor: torch.Tensor, device: torch.device | None) -> torch.device:
    """Return where a tensor lives, or will: on the device of its mesh, or ``device`` (the CPU), if it has no memory."""
    if not tensor.is_meta:
        return tensor.device
    mesh = getattr(tensor, "device_mesh", None)
    return torch.device(mesh.device_type) if mesh is not None else device or torch.device("cpu")


class MetaMemory:
    """New memory for the tensors of one module.

    Args:
        device: for tensors that no mesh has a place for; None for the CPU.
        module: some of its tensors are on the meta device.
    """

    def __init__(self, device: torch.device | None, module: nn.Module) -> None:
        self._device, self._module = device, module
        self._tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._tensors.update(module.named_buffers(remove_duplicate=False))
        self._made: dict[int, torch.Tensor] = {}  # by id: tied tensors stay tied

    def make(self, key: str) -> torch.Tensor | None:
        """Return memory for the tensor of this name in the ``state_dict``; None if it is not the module's own."""
        tensor = self._tensors.get(key)
        if tensor is None or not tensor.is_meta:
            return None
        if id(tensor) not in self._made:
            with torch.no_grad():
                self._made[id(tensor)] = torch.empty_like(tensor, device=home_of(tensor, self._device))
        return self._made[id(tensor)]

    def install(self) -> None:
        """Put the memory into the module. Parameters stay the objects they are, so optimizers go on knowing them."""
        new: dict[int, nn.Parameter | None] = {}  # by id: None where the old object has the new memory
        for key, tensor in self._tensors.items():
            made = self._made.get(id(tensor))
            if made is None:
                continue
            path, _, leaf = key.rpartition(".")
            owner = self._module.get_submodule(path)
            if leaf in owner._buffers:
                owner._buffers[leaf] = made
                continue
            if id(tensor) not in new:
                new[id(tensor)] = _filled(tensor, made, key)
            if (other := new[id(tensor)]) is not None:
                owner._parameters[leaf] = other


def _filled(tensor: torch.Tensor, made: torch.Tensor, key: str) -> nn.Parameter | None:
    """Give a parameter its memory; returns a new one where torch cannot change the old one."""
    new = nn.Parameter(made, requires_grad=tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # somebody holds a weak reference
        _LOG.warning("%s is a new parameter now; optimizers made before do not know it (%s)", key, error)
        return new
    return None


def without_memory(module: nn.Module) -> Iterator[str]:
    """Yield the names of tensors that have no memory."""
    for named in (module.named_parameters, module.named_buffers):
        yield from (name for name, tensor in named() if tensor.is_meta)
