"""A torch backend for tests, ``torch.device("late")``, in host memory and as late as CUDA allows (`late_device.cpp`).

`load` builds it once for a version of torch and its source; importing this module builds nothing. Two devices. What
nobody waits for is not done: a copy with ``non_blocking=True`` shows a pattern to a reader that does not wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import types
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

NAME = "late"
_SOURCE = Path(__file__).with_name("late_device.cpp")
_FOLDER = Path(__file__).resolve().parents[2] / "build" / "late_device"


def missing() -> str | None:
    """Say why the device cannot be had here; None if it can."""
    if shutil.which("g++") is None:
        return "the late device needs a C++ compiler (g++)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the late device needs the headers of Python"
    return None


@cache
def load() -> types.ModuleType:
    """Build the backend if need be, register it with torch, and return ``torch.late``."""
    library = ctypes.PyDLL(str(_build()))
    library.late_generator.restype = ctypes.py_object
    for name in ("late_waits", "late_operations", "late_allocated"):
        getattr(library, name).restype = ctypes.c_uint64
    torch.utils.rename_privateuse1_backend(NAME)
    module = _device_module(library)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    # In a forked child torch makes its pool of threads anew, without a lock. The autograd threads of two devices would
    # do that at once ("Invalid thread pool!" and SIGABRT in one of three lives): it is made here, by one thread.
    torch.set_num_threads(torch.get_num_threads())
    return module


def _build() -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode() + sysconfig.get_platform().encode())
    target = _FOLDER / f"{key.hexdigest()[:16]}.so"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait for it
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    fresh = target.with_suffix(f".{os.getpid()}")
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", str(_SOURCE), "-o", str(fresh)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{folder}" for folder in folders]
    command += [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{_SOURCE.name} does not compile:\n{done.stderr[-4000:]}")
    fresh.replace(target)


def _device_module(library: ctypes.PyDLL) -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")

    def index_of(device) -> int:
        if device is None:
            return module.current_device()
        index = device if isinstance(device, int) else torch.device(device).index
        return module.current_device() if index is None else index

    class Device:
        def __init__(self, device):
            self.index = index_of(device)

        def __enter__(self):
            self.before = module.current_device()
            module.set_device(self.index)

        def __exit__(self, *_):
            module.set_device(self.before)

    @contextmanager
    def stream(chosen):
        before = module.current_stream(chosen.device)
        torch.accelerator.set_stream(chosen)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    module.device = Device
    module.stream = stream
    module.Stream = lambda device=None, **more: torch.Stream(torch.device(NAME, index_of(device)), **more)
    module.Event = lambda **more: torch.Event(NAME, **more)
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 2
    module.current_device = torch._C._accelerator_getDeviceIndex
    module.set_device = lambda device: torch._C._accelerator_setDeviceIndex(index_of(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(torch.device(NAME, index_of(device)))
    module.synchronize = lambda device=None: torch._C._accelerator_synchronizeDevice(index_of(device))
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]

    module.default_generators = tuple(library.late_generator(number) for number in range(2))
    module.get_rng_state = lambda device=None: module.default_generators[index_of(device)].get_state()
    module.get_rng_state_all = lambda: [each.get_state() for each in module.default_generators]
    module.set_rng_state = lambda state, device=None: module.default_generators[index_of(device)].set_state(state)

    def set_rng_state_all(states):
        for number, state in enumerate(states):
            module.set_rng_state(state, number)

    def manual_seed(seed):
        module.default_generators[module.current_device()].manual_seed(seed)

    def manual_seed_all(seed):
        for generator in module.default_generators:
            generator.manual_seed(seed)

    module.set_rng_state_all = set_rng_state_all
    module.manual_seed, module.manual_seed_all = manual_seed, manual_seed_all

    # For tests alone.
    module.num_waits = library.late_waits  # how often this thread has waited for a device
    module.num_operations = library.late_operations
    module.allocated = library.late_allocated
    module.set_patience = lambda milliseconds: library.late_set_patience(ctypes.c_uint64(milliseconds))
    module.set_limit = lambda num_bytes: library.late_set_limit(ctypes.c_uint64(num_bytes))
    module.set_lateness = lambda operations, seed=0: library.late_set_lateness(
        ctypes.c_uint64(operations), ctypes.c_uint64(seed)
    )
    return module


if __name__ == "__main__":
    missing() or _build()
