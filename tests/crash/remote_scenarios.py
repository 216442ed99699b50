"""What the remote sweep kills, and what it checks afterwards. Runs in children of a fork server."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import crash_scenarios as local
import torch
from crash_scenarios import assert_state_equal, checkpointer, one_step, quiet

import holdfast as hf
from holdfast.run.index import RunIndex
from holdfast.storage.object.object_storage import ObjectStorage

ARMED = "armed"
"""Asked for by a life that is prepared: requests count from there on."""


def state_at(step):
    """The state of the local sweeps, with a frozen part so large that a store copies it instead of getting it again."""
    state = local.state_at(step)
    torch.manual_seed(1)
    state["frozen"] = torch.nn.Linear(300, 300).requires_grad_(False)
    return state


def storage_at(endpoint, uri):
    keys = {"access_key_id": "AKIAHOLDFASTTEST0001", "secret_access_key": "s3cret-of-the-sweep"}
    return ObjectStorage(uri, {"endpoint": endpoint, **keys})


def say_who(pid_file):
    """Tell the test which process to kill; its writer is its child."""
    Path(pid_file).write_text(str(os.getpid()))


# ---- what there is before a case


def prepare_empty(storage):
    storage.put("notes.txt", b"mine")


def prepare_run(storage):
    """Step 3 of two lives, the oldest deleted by retention."""
    prepare_empty(storage)
    for saves in (2, 1):
        state = state_at(0)
        with quiet(), checkpointer(storage, state) as ck:
            for _ in range(saves):
                one_step(ck, state)
                ck.save()


def prepare_many(storage):
    """Six steps of a life without retention."""
    prepare_empty(storage)
    state = state_at(0)
    with quiet(), checkpointer(storage, state, keep=None) as ck:
        for _ in range(6):
            one_step(ck, state)
            ck.save()


def prepare_one(storage):
    prepare_empty(storage)
    hf.save(hf.Checkpoint.at(storage, "best"), state_at(1))


def prepare(case, endpoint, uri):
    CASES[case][0](storage_at(endpoint, uri))


# ---- what is killed


def first_save(storage):
    """A whole life: start, one save, end."""
    storage.exists(ARMED)
    state = state_at(0)
    with quiet(), checkpointer(storage, state) as ck:
        one_step(ck, state)
        ck.save()


def next_save(storage):
    """A save that copies what did not change on the server, late metrics, retention, and the end of the life."""
    state = state_at(0)
    with quiet(), checkpointer(storage, state) as ck:
        storage.exists(ARMED)
        one_step(ck, state)
        ck.save()
        ck.wait()
        assert ck.stats.bytes_reused > 0
        ck.report(late=0.5)


def resume(storage):
    """The start of a life on what is there."""
    storage.exists(ARMED)
    state = state_at(0)
    with quiet(), checkpointer(storage, state):
        assert_state_equal(state, state_at(3))


def thin(storage):
    """The start of a life that keeps two, with one save: the others are deleted together."""
    storage.exists(ARMED)
    state = state_at(0)
    with quiet(), checkpointer(storage, state) as ck:
        one_step(ck, state)
        ck.save()


def overwrite(storage):
    """Another checkpoint under the same name."""
    storage.exists(ARMED)
    hf.save(hf.Checkpoint.at(storage, "best"), state_at(2), overwrite=True)


def life(case, endpoint, uri, pid_file):
    say_who(pid_file)
    CASES[case][1](storage_at(endpoint, uri))


# ---- what must be true afterwards


def check_run(storage, before):
    """Start as a user would: exactly the previous or the new checkpoint, bit for bit."""
    state = state_at(0)
    with quiet(), checkpointer(storage, state) as ck:
        step = ck.global_step
        assert step in (before, before + 1), f"resumed at {step}, not at {before} or the one after it"
        assert_state_equal(state, state_at(step))
        found = {one.name: one for one in ck.checkpoints()}
    assert len(found) >= min(2, before), sorted(found)
    numbers = [one.attempt for one in RunIndex.load(storage).attempts]
    assert numbers == sorted(set(numbers)), numbers
    return step, found


def check_one(storage, _):
    state = state_at(0)
    hf.load(hf.Checkpoint.at(storage, "best"), into=state)
    step = len(state["note"].log)
    assert step in (1, 2), step
    assert_state_equal(state, state_at(step))
    hf.save(hf.Checkpoint.at(storage, "best"), state_at(step), overwrite=True)
    return step, {"best": hf.Checkpoint.at(storage, "best")}


def check(case, endpoint, uri):
    """Look with a fresh process; give the step found and the paths that may be there."""
    storage = storage_at(endpoint, uri)
    _, _, look, before = CASES[case]
    step, found = look(storage, before)
    allowed = {"notes.txt", "run.json"}
    for name, checkpoint in found.items():
        verification = checkpoint.verify()
        assert verification.ok, f"{name}: {verification.problems}"
        files = ("manifest.json", *local.SIDECARS, *(one.path for one in checkpoint.manifest.files))
        allowed |= {f"{name}/{path}" for path in files}
    assert storage.read("notes.txt") == b"mine"
    return step, sorted(allowed)


CASES = {
    "first": (prepare_empty, first_save, check_run, 0),
    "next": (prepare_run, next_save, check_run, 3),
    "resume": (prepare_run, resume, check_run, 3),
    "thin": (prepare_many, thin, check_run, 6),
    "overwrite": (prepare_one, overwrite, check_one, 1),
}

with contextlib.suppress(ImportError):  # import before any fork what every life imports; nothing is connected
    import obstore.store  # noqa: F401
