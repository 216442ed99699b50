"""Random generators of this process: python, NumPy's global one, torch's CPU one and those of the accelerators.

The captured form is plain data (ints, floats, bytes) and uint8 tensors, so that it travels through the codec like any
other state. Capturing advances no generator and starts no accelerator that the process has not used yet.
"""

from __future__ import annotations

import contextlib
import random
import re
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..accelerator import accelerator
from .values import RNG, RngSentinel

__all__ = ["REFUSALS", "RNG", "RngSentinel", "capture", "plain", "python_entry", "restore", "set_devices"]

_MASK = (1 << 64) - 1
_DTYPE = re.compile(r"[<>|=][iufb]\d")
_WORDS = struct.Struct("<625I")  # 624 words of the Mersenne Twister and the position in them
# Errors of the setters below for a malformed or foreign entry; such an entry is listed as not restored.
REFUSALS = (
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    IndexError,
    ArithmeticError,
    struct.error,
    ImportError,
)


def capture(*, devices: bool = True) -> dict[str, Any]:
    """Describe the state of every generator of this process.

    Args:
        devices: include the accelerators in use; False: only the three generators on the host.
    """
    state: dict[str, Any] = {"python": python_entry(random.getstate()), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = plain(numpy.random.get_state(legacy=False))
    if devices:
        kind = _accelerator()
        if kind is not None:
            state["devices"] = {kind: _device_states(kind)}
    return state


def restore(state: Mapping[str, Any], *, devices: bool = True) -> list[str]:
    """Put every generator back into the state `capture` described.

    Args:
        state: what `capture` returned.
        devices: include the accelerators.

    Returns:
        One line for each generator that could NOT be restored, empty when all were.
    """
    problems: list[str] = []
    _restore_one(problems, state, "python", _set_python)
    if "numpy" in state or "numpy" in sys.modules:
        _restore_one(problems, state, "numpy", _set_numpy)
    _restore_one(problems, state, "torch", _set_torch)
    if not devices:
        return problems
    saved = state.get("devices")
    saved = saved if isinstance(saved, Mapping) else {}
    for kind in saved:
        problems += _set_devices(str(kind), saved[kind])
    kind = _accelerator()
    if kind is not None and kind not in saved:
        problems.append(f"{kind} generators: the checkpoint has no entry for them")
    return problems


def _restore_one(problems: list[str], state: Mapping[str, Any], name: str, setter: Callable[[Any], None]) -> None:
    if name not in state:
        problems.append(f"{name} generator: the checkpoint has no entry for it")
        return
    try:
        setter(state[name])
    except REFUSALS as error:
        problems.append(f"{name} generator: {type(error).__name__}: {error}")


def set_devices(kind: str, state: torch.Tensor | int) -> list[str]:
    """Give every accelerator of a kind one state, or seed each anew from a number.

    Returns:
        A list of one line if that cannot be done, else an empty list.
    """
    module: Any = getattr(torch, kind, None)
    if not hasattr(module, "set_rng_state") or not hasattr(module, "device_count") or not module.is_available():
        return [f"{kind} generators: this machine has no {kind} device"]
    try:
        for number in range(module.device_count()):
            # mps has one device, and takes no number of it.
            with module.device(number) if hasattr(module, "device") else contextlib.nullcontext():
                if isinstance(state, int):
                    _ = module.manual_seed((state + number) & _MASK)
                else:
                    _ = module.set_rng_state(state.cpu())
    except REFUSALS as error:
        return [f"{kind} generators: {type(error).__name__}: {error}"]
    return []


def python_entry(state: tuple[Any, ...]) -> dict[str, Any]:
    """Describe a state of `random.Random` as `capture` does."""
    version, words, gauss_next = state
    return {"version": version, "words": _WORDS.pack(*words), "gauss_next": gauss_next}


def _set_python(saved: Any) -> None:
    random.setstate((saved["version"], _WORDS.unpack(saved["words"]), saved["gauss_next"]))


def plain(value: Any) -> Any:
    """Replace the arrays of a NumPy bit generator's state by plain data."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "tobytes") and getattr(value, "ndim", None):
        return {"dtype": value.dtype.str, "data": value.tobytes()}
    return value.item() if hasattr(value, "item") else value


def _arrays(value: Any) -> Any:
    """Undo `plain`."""
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"dtype", "data"}:
        import numpy as np

        if not isinstance(value["dtype"], str) or not _DTYPE.fullmatch(value["dtype"]):
            raise ValueError(f"{str(value['dtype'])[:40]!a} is no dtype of a generator's words")  # NumPy runs a parser
        return np.frombuffer(value["data"], dtype=value["dtype"]).copy()
    return {key: _arrays(item) for key, item in value.items()}


def _set_numpy(saved: Any) -> None:
    import numpy as np

    np.random.set_state(_arrays(saved))


def _set_torch(saved: Any) -> None:
    torch.set_rng_state(saved.cpu())


def _accelerator() -> str | None:
    """Name the kind of accelerator this process has in use.

    An unused accelerator has drawn nothing; asking for its state would start it (seconds, and hundreds of megabytes)
    and forbid the fork of loader workers.
    """
    kind = accelerator()
    module = None if kind is None else getattr(torch, kind, None)
    if not hasattr(module, "get_rng_state") or not getattr(module, "is_initialized", lambda: True)():
        return None
    return kind


def _device_states(kind: str) -> list[torch.Tensor]:
    module = getattr(torch, kind)
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]


def _set_devices(kind: str, saved: Any) -> list[str]:
    module = getattr(torch, kind, None)
    saved = list(saved)
    if module is None or not hasattr(module, "set_rng_state") or not module.is_available():
        return [f"{kind} generators: {len(saved)} saved, this machine has no {kind} device"]
    num_devices = module.device_count()
    single = not hasattr(module, "set_rng_state_all")  # mps: one device, no device argument
    problems = []
    for number, tensor in enumerate(saved[:num_devices]):
        try:
            _ = module.set_rng_state(tensor.cpu()) if single else module.set_rng_state(tensor.cpu(), number)
        except REFUSALS as error:
            problems.append(f"{kind} generator {number}: {type(error).__name__}: {error}")
    if len(saved) > num_devices:
        problems.append(
            f"{kind} generators {num_devices} to {len(saved) - 1}: only {num_devices} {kind} device(s) here"
        )
    elif num_devices > len(saved):
        problems.append(f"{kind} generators {len(saved)} to {num_devices - 1}: saved on {len(saved)} {kind} device(s)")
    return problems
