"""Lives of trainers on storages of other packages and of the user's own modules; run by a fork server."""

from __future__ import annotations

import os
import signal

import torch

import holdfast as hf


def user_storage(folder):
    """Return a storage of a module that lies beside the user's script."""
    import my_storage

    return my_storage.MyStorage(folder, {"key": "hunter2"})


def trainer(location, found, *, of_user=False):
    """Note what this life finds, make one step, and die by SIGKILL as soon as ``ck.step`` has returned."""
    where = user_storage(location) if of_user else location
    state = {"w": torch.zeros(2_000_000)}
    with hf.Checkpointer(where, state, every=1) as ck:
        with open(found, "a", encoding="ascii") as file:
            file.write(f"{ck.global_step} {state['w'][0]:.0f}\n")
        state["w"] += 1
        ck.step()
        os.kill(os.getpid(), signal.SIGKILL)


def fsspec_trainer(folder, module, *, is_main=False):
    """Save once through a file system of fsspec whose class lies in the user's module; return what is said."""
    import importlib
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("holdfast").addHandler(handler)
    kind = importlib.import_module(module).SlowDisk
    if is_main:
        kind.__module__ = "__main__"
    saved = hf.save(hf.Checkpoint(f"{folder}/one", filesystem=kind()), {"step": 1})
    return [hf.load(saved)["step"], said]
