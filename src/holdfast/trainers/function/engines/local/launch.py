"""Starting the zygote, and the environment that workers get."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.trainers.function.engine import GroupSpec

__all__ = ["Launched", "import_paths", "launch_zygote", "threads_for", "worker_environment"]

# The folder of the current directory that `-c` puts first must not shadow the modules we start with.
_BOOT = (
    "import sys;sys.path[:1]=[p for p in sys.path[:1] if p];import json;a=json.loads(sys.argv[1]);"
    "sys.path[:]=a['paths'];from holdfast.trainers.function.engines.local.zygote import main;"
    "sys.exit(main(a['socket']))"
)
_HOST = "127.0.0.1"
_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


class Launched:
    """A zygote as its driver sees it.

    Attributes:
        process: the interpreter.
        sock: our end of the socket pair.
        out: read end of its stdout, and ``err`` of its stderr; workers have their own.
    """

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, out: int, err: int) -> None:
        self.process, self.sock, self.out, self.err = process, sock, out, err


def import_paths() -> list[str]:
    """Return the driver's ``sys.path`` for another process: relative entries absolute, "" (the current folder) kept."""
    paths = [os.path.abspath(entry) if entry else "" for entry in sys.path if isinstance(entry, str)]
    # Last: a driver may find this package by an import hook alone.
    return list(dict.fromkeys([*paths, str(Path(__file__).resolve().parents[5])]))


def threads_for(num_workers: int) -> int:
    """Return the number of threads of each worker on this machine: its cores divided by the workers, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, num_workers))


def launch_zygote(num_workers: int) -> Launched:
    """Start the interpreter that loads torch and forks workers; it takes requests at once.

    Args:
        num_workers: how many workers are expected: thread pools read OMP_NUM_THREADS when torch is loaded.

    Raises:
        HoldfastError: the interpreter could not be started.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise HoldfastError("cannot start workers: sys.executable does not name a Python interpreter")
    ours, theirs = socket.socketpair()
    out, out_write = os.pipe()
    err, err_write = os.pipe()
    request = json.dumps({"socket": theirs.fileno(), "paths": import_paths()})
    try:
        process = subprocess.Popen(
            [sys.executable, *_args_from_interpreter_flags(), "-c", _BOOT, request],
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            env={"OMP_NUM_THREADS": str(threads_for(num_workers)), **os.environ},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        os.close(out)
        os.close(err)
        raise HoldfastError(
            f"cannot start workers with {sys.executable}: {error}; check the limits on processes and open files"
        ) from error
    finally:
        theirs.close()
        os.close(out_write)
        os.close(err_write)
    return Launched(process, ours, out, err)


def worker_environment(spec: GroupSpec, rank: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of a worker.

    Args:
        spec: the group.
        rank: of the worker.
        port: where rank 0 listens.
        base: the driver's own variables.
    """
    environment = {
        # One machine: a host name that does not resolve, or resolves to a VPN, must not matter.
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
        "OMP_NUM_THREADS": str(threads_for(spec.num_workers)),
        **base,
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.num_workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(spec.num_workers),
        "GROUP_RANK": "0",
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }
    if not spec.use_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return {**environment, **spec.environment.get(rank, {})}
