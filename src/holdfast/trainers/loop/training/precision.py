"""Mixed precision: which context forward runs in, and whether gradients are scaled."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch

from holdfast.errors import ConfigError

__all__ = ["Precision", "autocast", "check_precision", "make_scaler"]


class Precision(str, Enum):
    """How forward and loss are computed; the value is what ``precision`` of a trainer takes, too."""

    FP32 = "fp32"
    AMP_BF16 = "amp_bf16"
    AMP_FP16 = "amp_fp16"


_DTYPES = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
_ALIASES = {None: "fp32", "amp": "amp_fp16", "bf16": "amp_bf16", "fp16": "amp_fp16"}


def check_precision(precision: Any) -> str:
    """Return the name of a precision.

    Raises:
        ConfigError: it is unknown.
    """
    value = getattr(precision, "value", precision)
    name = _ALIASES.get(value, value) if value is None or isinstance(value, str) else ""
    if name != "fp32" and name not in _DTYPES:
        raise ConfigError(f"precision={precision!r}: use 'fp32', 'amp_bf16' or 'amp_fp16'")
    return str(name)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that forward and loss run in."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a scaler of gradients where they would underflow (float16)."""
    return torch.amp.GradScaler(device.type) if precision == "amp_fp16" else None
