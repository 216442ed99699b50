"""The function trainer for PyTorch: `TorchTrainer`, and what its training function uses.

Importing this module imports no torch: names load their module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainers.function.trainer import TorchTrainer
    from .trainers.torch_helpers import (
        PreparedLoader,
        enable_reproducibility,
        get_device,
        get_devices,
        prepare_data_loader,
        prepare_model,
    )

__all__ = [
    "PreparedLoader", "TorchTrainer", "enable_reproducibility", "get_device", "get_devices", "prepare_data_loader",
    "prepare_model",
]  # fmt: skip

_HOME = {
    "PreparedLoader": "trainers.torch_helpers",
    "TorchTrainer": "trainers.function.trainer",
    "enable_reproducibility": "trainers.torch_helpers",
    "get_device": "trainers.torch_helpers",
    "get_devices": "trainers.torch_helpers",
    "prepare_data_loader": "trainers.torch_helpers",
    "prepare_model": "trainers.torch_helpers",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        from ._not_here import missing

        raise missing(__name__, name)
    value = getattr(importlib.import_module(f"holdfast.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
