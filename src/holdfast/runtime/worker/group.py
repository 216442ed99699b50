"""The default process group of a worker: set up before the train function, torn down after it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import ConfigError

__all__ = ["process_group"]

_LOG = logging.getLogger("holdfast.runtime")


@contextmanager
def process_group(rank: int, world_size: int, *, listen_fd: int, use_gpu: bool) -> Iterator[None]:
    """Join the group at MASTER_ADDR:MASTER_PORT for the time of the block: gloo, or NCCL with ``use_gpu``.

    After an exception the group is left to the end of the process: tearing NCCL down waits for ranks that may be dead.

    Args:
        rank: of this worker.
        world_size: number of workers.
        listen_fd: rank 0's socket that listens on MASTER_PORT; it is taken over.
        use_gpu: there is a device for each worker.

    Raises:
        ConfigError: there are fewer devices than workers.
    """
    import torch
    import torch.distributed as dist

    if use_gpu:
        _choose_device(torch.cuda.device_count())
    if not dist.is_available():
        yield
        return
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=listen_fd if rank == 0 and listen_fd >= 0 else None,
    )
    dist.init_process_group("nccl" if use_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    yield
    if dist.is_initialized():  # the function may have done it itself
        try:
            dist.destroy_process_group()
        except RuntimeError as error:
            _LOG.warning("the process group was not torn down cleanly: %s", error)


def _choose_device(count: int) -> None:
    """Make LOCAL_RANK's device the current one. All workers see all devices, as under torchrun: NCCL needs them."""
    import torch

    workers, place = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if count < workers:
        raise ConfigError(
            f"use_gpu=True with {workers} workers on this machine, but torch sees {count} CUDA devices "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}): one for each worker is needed; "
            f"lower num_workers or leave use_gpu out"
        )
    torch.cuda.set_device(place)
