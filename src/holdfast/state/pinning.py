"""Try whether memory shared with the writer can be pinned for the devices of this machine."""

from __future__ import annotations

import time

import torch

from holdfast.writer.arena import Arena

__all__ = ["try_pinning"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device context


def try_pinning(size: int) -> tuple[list[str], float]:
    """Pin so many bytes as a save does, copy to them, and let them go.

    Returns:
        The names of the devices, and the seconds that pinning took.

    Raises:
        RuntimeError: torch sees no device, or the driver refuses.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no device")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with Arena.create(size) as arena:
        memory = torch.frombuffer(arena.view, dtype=torch.uint8)
        memory.fill_(0)  # its pages are there, as they are before a save
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), size, _PORTABLE))
        seconds = time.perf_counter() - start
        try:
            memory.copy_(torch.ones(size, dtype=torch.uint8, device="cuda"))
            if int(memory[-1]) != 1:
                raise RuntimeError("a copy from the device to pinned memory did not arrive")
        finally:
            torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))
            del memory
    return names, seconds
