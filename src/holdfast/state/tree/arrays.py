"""What torch and NumPy values look like in a stored tree: dtypes, devices, arrays; what is refused; bytes moved.

And whether a tensor is spread over ranks (DTensor, ShardedTensor), its memory here, and what FSDP asks of modules.
torch's distributed package is not imported for that: before some other code imports it, no such tensor exists.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.errors import CorruptCheckpointError, UnsupportedStateError
from holdfast.format.codec import OUTER
from holdfast.format.tensor_file import item_size

_DENSE = (torch.Tensor, torch.nn.Parameter)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in this process
_NO_NUMPY_BYTES = "OV"  # object and structured arrays: no bytes of their own, or no stable layout


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype)[6:]


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a stored name.

    Raises:
        CorruptCheckpointError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"this torch ({torch.__version__}) knows no dtype {name!r}: a newer torch may")
    return dtype


def all_dense(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether each tensor is one block of elements (strided, with memory, no subclass).

    One loop, because a state has thousands of them.
    """
    strided = torch.strided
    for tensor in tensors:
        if (
            type(tensor) not in _DENSE
            or tensor.layout is not strided
            or tensor.is_meta
            or tensor.is_quantized
            or tensor.is_nested
        ):
            return False
    return True


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor whose bytes cannot be stored as they are.

    Raises:
        UnsupportedStateError: names ``path``, and says what to save instead.
    """
    if all_dense((tensor,)):
        return
    if torch.nn.parameter.is_lazy(tensor):
        advice = "run one batch through the lazy module first, so that it gets its shape"
    elif tensor.is_nested:
        advice = "it is nested: save tensor.unbind(), the tensors in it"
    elif tensor.layout is not torch.strided:
        advice = f"it is sparse ({tensor.layout}): save tensor.to_dense(), or its indices and values"
        advice += "; a buffer that each start makes the same: register_buffer(..., persistent=False)"
    elif tensor.is_meta:
        advice = "it is on the meta device and has no data: materialise the model first (to_empty, load)"
    elif tensor.is_quantized:
        advice = "it is quantized: save tensor.int_repr() with its scale and zero point"
    else:
        advice = "save a plain tensor made from it, or give the object that owns it a state_dict()"
    raise UnsupportedStateError(f"{path}: {type(tensor).__name__} cannot be saved: {advice}")


def parts_of(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Return the tensors that a tensor of a class of others wraps, by name, and under `OUTER` what else makes it.

    Quantized weights and the state of 8-bit optimizers are such tensors (torchao). They say themselves what they are
    made of, by ``__tensor_flatten__`` (the protocol of torch for "traceable wrapper subclasses").

    Returns:
        None for a tensor that has memory of its own, or whose class cannot be put together again.
    """
    kind = type(tensor)
    if kind in PLAIN or not (hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")):
        return None
    if tensor.is_nested or tensor.is_meta:
        return None
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    plain = is_plain_context(context)
    outer = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "size": list(tensor.shape),
        "stride": list(tensor.stride()),
        "text": "" if plain else _ADDRESS.sub("", repr(context)),
        "context": context if plain else None,
    }
    return {**{name: getattr(tensor, name) for name in names}, OUTER: outer}


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return the one tensor that a wrapper is made of, where it has its shape and dtype; any other tensor as it is.

    Such wrappers say how a weight is to be used, and are not stored: FSDP2 gathers weights in float8 so (torchao).
    """
    parts = parts_of(tensor)
    if parts is None or len(parts) > 2:
        return tensor
    inner = next((part for key, part in parts.items() if key != OUTER), None)
    alike = isinstance(inner, torch.Tensor) and (inner.shape, inner.dtype) == (tensor.shape, tensor.dtype)
    return inner if alike else tensor  # type: ignore[return-value]


def is_plain_context(context: Any) -> bool:
    """Tell whether what a tensor, or the state of an object, says of itself can be stored as it is."""
    if isinstance(context, (list, tuple)) and type(context) in (list, tuple, torch.Size):
        return all(map(is_plain_context, context))
    if type(context) is dict:
        return all(type(key) is str and is_plain_context(value) for key, value in context.items())
    return type(context) in (int, float, str, bool, type(None), torch.dtype, torch.device)


def whole_of(state: Mapping[str, Any]) -> Any:
    """Put together what `parts_of` took apart, once its tensors are there; the parts where that cannot be done here.

    Raises:
        CorruptCheckpointError: its class does not accept them.
    """
    outer, inner = state[OUTER], {name: value for name, value in state.items() if name != OUTER}
    kind = None if outer["text"] else _imported(outer["class"])
    if kind is None:
        return dict(state)
    try:
        return kind.__tensor_unflatten__(inner, outer["context"], torch.Size(outer["size"]), tuple(outer["stride"]))
    except Exception as error:
        raise CorruptCheckpointError(f"a stored {outer['class']} cannot be made of its parts: {error}") from error


def why_not_whole(state: Mapping[str, Any]) -> str | None:
    """Say why a tensor that was taken apart cannot be made anew here; None if it can.

    Nothing is imported for it: its class has to be one of those that the program uses.
    """
    outer = state[OUTER]
    if outer["text"]:
        return f"a {outer['class']} can be loaded into a live one alone: make one before the load"
    if _imported(outer["class"]) is None:
        return f"a {outer['class']} is stored, and no such class is imported: import it before the load"
    return None


def _imported(name: str, base: type = torch.Tensor) -> Any:
    """Return the subclass of tensors of this name; None if there is none in this process."""
    kinds: list[type] = type.__subclasses__(base)
    for kind in kinds:
        if hasattr(kind, "__tensor_unflatten__") and f"{kind.__module__}.{kind.__qualname__}" == name:
            return kind
        if (found := _imported(name, kind)) is not None:
            return found
    return None


def encode_torch_value(value: Any) -> dict[str, Any] | None:
    """Encode torch's plain values (dtype, device, Size, Generator); None for anything else."""
    if isinstance(value, torch.dtype):
        return {"$": "torch", "t": "dtype", "v": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$": "torch", "t": "device", "v": str(value)}
    if isinstance(value, torch.Size):
        return {"$": "torch", "t": "size", "v": list(value)}
    if isinstance(value, torch.Generator):
        state = value.get_state().cpu().numpy().tobytes().hex()
        return {"$": "torch", "t": "generator", "d": str(value.device), "v": state}
    return None


def decode_torch_value(node: dict[str, Any]) -> Any:
    """Rebuild what `encode_torch_value` encoded.

    Raises:
        CorruptCheckpointError: the node is of no known kind, or its value does not fit this torch.
    """
    kind, value = node.get("t"), node.get("v")
    try:
        if kind == "dtype":
            return dtype_of(str(value))
        if kind == "device":
            return torch.device(str(value))
        if kind == "size":
            return torch.Size(value)  # type: ignore[arg-type]
        if kind == "generator":
            device = torch.device(node["d"])
            if device.type != "cpu":
                devices = torch.get_device_module(device)
                if not devices.is_available():
                    device = torch.device("cpu")
                elif device.index is not None and device.index >= devices.device_count():
                    device = torch.device(device.type)  # it was that of another rank, or of another machine
            generator = torch.Generator(device=device)
            state = torch.frombuffer(bytearray.fromhex(str(value)), dtype=torch.uint8)
            if generator.device.type == torch.device(node["d"]).type:
                generator.set_state(state)
            return generator
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptCheckpointError(f"a stored torch {kind} cannot be rebuilt: {error}") from error
    raise CorruptCheckpointError(f"unknown torch value {kind!r} in a stored tree")


def is_array(value: Any) -> bool:
    """Tell whether ``value`` is a NumPy array, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def array_to_tensor(array: Any, path: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a tensor over the array's memory, and what is needed to make the same array again.

    An array that is read-only or not contiguous is copied.

    Raises:
        UnsupportedStateError: a subclass of ndarray, or a dtype without bytes of its own.
    """
    import numpy as np

    if type(array) is not np.ndarray:
        raise UnsupportedStateError(
            f"{path}: {type(array).__name__} is a subclass of ndarray: save np.asarray(it), and beside it what "
            "the subclass has more (the mask of a masked array)"
        )
    if array.dtype.kind in _NO_NUMPY_BYTES or array.dtype.hasobject:
        raise UnsupportedStateError(
            f"{path}: an array of {array.dtype} cannot be saved: use one array for each field, or a list"
        )
    flat = np.ascontiguousarray(array)
    if not flat.flags.writeable:
        flat = flat.copy()
    extra = {"dt": array.dtype.str, "sh": list(array.shape)}
    if flat.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), extra
    try:
        return torch.from_numpy(flat.reshape(array.shape)), extra
    except (TypeError, ValueError):  # a dtype torch lacks (dates, text, foreign byte order): its bytes
        return torch.from_numpy(flat.reshape(-1).view(np.uint8)), extra


def array_from_tensor(tensor: torch.Tensor, node: Mapping[str, Any]) -> Any:
    """Rebuild the array that `array_to_tensor` took apart, over the memory of ``tensor``.

    Raises:
        CorruptCheckpointError: dtype and shape in ``node`` do not fit the bytes.
    """
    import numpy as np

    try:
        dtype = np.dtype(node["dt"])
        if dtype.hasobject:
            raise CorruptCheckpointError("a stored array claims to hold Python objects: refused")
        return tensor.reshape(-1).numpy().view(dtype).reshape([int(size) for size in node["sh"]])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"a stored array cannot be rebuilt: {error}") from error


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor over an array's memory if that can be, else a copy on the CPU. Nobody may write to it.

    Args:
        array: of NumPy, or anything that DLPack or NumPy reads.

    Raises:
        UnsupportedStateError: torch has no such dtype.
    """
    import numpy as np

    if not isinstance(array, np.ndarray):
        try:
            found: torch.Tensor = torch.from_dlpack(array)  # type: ignore[attr-defined]
            return found
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            pass  # a dtype or a layout that DLPack lacks
    values = np.asarray(array)
    if not values.flags.writeable or not values.flags.c_contiguous:
        values = np.array(values, order="C")
    if values.dtype.isbuiltin == 1:
        return torch.from_numpy(values)
    dtype = getattr(torch, values.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or item_size(values.dtype.name) != values.itemsize:
        raise UnsupportedStateError(
            f"an array of {values.dtype.name} cannot be saved: torch has no such dtype; cast it"
        )
    return torch.from_numpy(values.reshape(-1).view(np.uint8)).view(dtype).reshape(values.shape)


def array_of(tensor: torch.Tensor) -> Any:
    """Return a NumPy array over a tensor of the CPU; dtypes that NumPy lacks are those of the package ml_dtypes."""
    import numpy as np

    try:
        return tensor.numpy()
    except TypeError:
        dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype_name(tensor.dtype)))
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return flat.view(dtype).reshape(tensor.shape)


def _bind(library: Any) -> Any:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


move = _bind(ctypes.CDLL(None))
"""``move(target, source, size)``; other threads run meanwhile."""

move_small = _bind(ctypes.PyDLL(None))
"""The same with the GIL kept: giving it up for every kilobyte costs more than the copy."""


_SPREAD = (
    ("torch.distributed._tensor", "DTensor"),  # the only name before torch 2.5
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
)
PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Types of tensors that are memory of this process, whatever is imported."""


def spread_types() -> tuple[type, ...]:
    """Return the types of tensors that are spread over ranks, of those modules that are imported."""
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in _SPREAD]
    return tuple(filter(None, dict.fromkeys(kinds)))


def is_spread(value: object) -> bool:
    """Tell whether a tensor is spread over ranks."""
    return type(value) not in PLAIN and isinstance(value, spread_types())


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor as a plain tensor: the same memory, and ``value`` itself if it is plain.

    A ShardedTensor with several shards on this rank gives the first.
    """
    if type(value) in PLAIN or not is_spread(value):
        return value
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return shards[0].tensor.detach() if shards else torch.empty(0, device="cpu")
    return local_of(value)


def local_of(value: Any) -> torch.Tensor:
    """Return the memory of a DTensor on this rank."""
    local = getattr(value, "_local_tensor", None)
    if type(local) is torch.Tensor and not local.requires_grad:
        return local  # a fiftieth of the time of to_local
    with torch.no_grad():
        return bare(value.to_local().detach())


_FLATTENED = "_fsdp_flattened"  # FSDP1 marks with it the parameters that it cuts
_INSTEAD = (
    " (FSDP1) keeps slices of flattened parameters: use torch.distributed.fsdp.fully_shard, or give {'model': "
    "get_model_state_dict(model), 'optimizer': get_optimizer_state_dict(model, optimizer)} of "
    "torch.distributed.checkpoint.state_dict, and hand what was loaded to set_model_state_dict and "
    "set_optimizer_state_dict; in a run give one object whose state_dict calls get_state_dict, and whose "
    "load_state_dict calls set_state_dict"
)


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
            raise UnsupportedStateError(f"{path}: {type(child).__name__}{_INSTEAD}")


def check_parameters(params: Iterable[torch.Tensor], path: str) -> None:
    """Refuse an optimizer of the first generation of FSDP, of parameters that no module of the state has.

    Raises:
        UnsupportedStateError: as `check_module`.
    """
    if "torch.distributed.fsdp" in sys.modules and any(getattr(param, _FLATTENED, False) for param in params):
        raise UnsupportedStateError(f"{path}: the optimizer of a FullyShardedDataParallel{_INSTEAD}")


def reshard(module: nn.Module) -> None:
    """Bring modules under ``fully_shard`` back to their sharded parameters, which optimizers know.

    After a forward pass without a backward pass (an evaluation) the gathered parameters may still be in place.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        for child in module.modules():
            if isinstance(child, kind):
                child.reshard()
