"""Owners of reported directories, of parts and of joint saves that are stopped, taken over and woken up again.

As in sleeper_scenarios; the first owner does one of the cases of intake_scenarios, or a save of two ranks, and the
second one makes a checkpoint under the same name, with files of the same names, if the run lets it.
"""

from __future__ import annotations

import contextlib
import socket

from crash_scenarios import Diary
from intake_scenarios import (
    CASES,
    FOREIGN,
    KEEP,
    NEW,
    PARTS,
    check_contents,
    intake,
    open_run,
    part_job,
    tree,
    write,
)
from sleeper_scenarios import Sleeper, StoppingOps, elsewhere, impatient

from holdfast.checkpoint.verify import verify
from holdfast.errors import RunBusyError
from holdfast.run.catalog import Catalog
from holdfast.storage import LocalStorage
from holdfast.testing import FaultyStorage
from holdfast.writer.arena import MAILBOX_BYTES, Arena, StepMailbox
from holdfast.writer.client import WriterClient

THEIRS = {"same.pt": b"S" * 70_000, "differs.pt": b"D" * 9000, "only1.bin": b"here", "w.bin": b"w" * 5000}
SECOND = "checkpoint_000003"


def joint(client, storage, opened, root):
    """A save of two ranks, whose writers are joined; rank 0's commits."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        mailboxes = [stack.enter_context(Arena.create(MAILBOX_BYTES)) for _ in range(2)]
        arenas = [stack.enter_context(Arena.create(12_288)) for _ in range(2)]
        ranks = [client, stack.enter_context(WriterClient.start(storage))]
        saves = []
        for rank, (mailbox, arena, one) in enumerate(zip(mailboxes, arenas, ranks, strict=True)):
            StepMailbox(mailbox.view).clear(step=0)
            where = {"addresses": [listener.getsockname()], "token": "0123456789abcdef", "listener": None}
            if rank == 0:
                where["listener"] = listener.fileno()
            # A rank that sleeps is given up after `stale_s`: both sleep here, so no time passes for them.
            one.join(mailbox, rank=rank, world_size=2, timeout_s=60.0, beat_s=5.0, stale_s=60.0, **where)
            arena.view[:10_000] = bytes([rank]) * 10_000
        for rank, (arena, one) in enumerate(zip(arenas, ranks, strict=True)):
            job = part_job(opened, rank, joint=True, run=rank == 0)
            saves.append(one.submit(storage, job, [b'{"r":%d}' % rank], arena))
        for one in saves:
            one.result(60)
        ranks[1].close()
        client.close()


ALL = {**CASES, "joint": (joint, NEW, PARTS)}


def run_case(case, root, diary, stop_at, after, early):
    """Stop the first owner at one operation of its disk; None for ``stop_at`` counts them.

    The second owner saves before the first one wakes up (``early``), or right after.
    """
    ops = StoppingOps()

    def work(notes):
        elsewhere()
        storage = FaultyStorage(root, ops=ops)
        with WriterClient.start(storage) as client:
            opened = open_run(client, storage, "bbbbbbbb")
            ops.arm(crash_after=None)
            ops.stop_at, ops.stop_after = stop_at, after
            ALL[case][0](client, storage, opened, root)
            notes.promise(acked=2)
        notes.promise(count=ops.since)

    user = tree(f"{root}.user")
    sleeper = Sleeper(work, diary)
    if not sleeper.wait():
        assert sleeper.status == 0, Diary.read(diary)
        return {"count": Diary.read(diary)["count"], "stopped": False}
    impatient()
    storage = LocalStorage(root)
    refused, made, found = False, {}, []
    with WriterClient.start(thread=True) as client:
        try:
            opened = client.open_run(storage, owner={"start_id": "cccccccc"}, keep=KEEP, wait_s=2.0).result(60)
        except RunBusyError:
            refused = True  # stopped with the lock in its hand: nobody comes in, so nothing happened
            sleeper.wake()
        else:
            found = [row[0] for row in opened.records]
            check_found(case, storage, found, root)
            free = [name for name in (NEW, SECOND) if name not in (*found, *opened.taken, *opened.dead)]
            if not early:
                sleeper.wake()
            made[free[0]] = save(client, storage, opened, 3, free[0], root)
            if early:
                sleeper.wake()
            made["checkpoint_000004"] = save(client, storage, opened, 4, "checkpoint_000004", root)
    told = Diary.read(diary)
    assert sleeper.status in (0, 3), (sleeper.status, told)
    if refused:
        assert told["acked"] == 2, told
        found = [ALL[case][1], "checkpoint_000001"]
    elif "acked" in told:
        assert found[0] == ALL[case][1], f"{found[0]} was found, and {ALL[case][1]} had been acknowledged"
    check_after(case, root, found, made, user)
    return {"stopped": True, "refused": refused, "acked": "acked" in told, "error": told.get("error", "")[:150]}


def save(client, storage, opened, step, name, root):
    """Make a checkpoint of the files whose names the first owner has as well; give what must be in it."""
    source = write(f"{root}.theirs-{step}", {**THEIRS, "step.txt": b"%d" % step})
    client.ingest(storage, intake(opened, "cccccccc", step, name, {0: source})).result(60)
    return tree(source)


def check_found(case, storage, found, root):
    """What the second owner finds counts, and is whole."""
    _, name, contents = ALL[case]
    assert found[0] in (name, "checkpoint_000001"), found
    assert "checkpoint_000001" in found, found
    if found[0] == name:
        check_contents(storage, name, contents)


def check_after(case, root, found, made, user):
    """All that was acknowledged is there; nothing of the first owner's that the second one did not find counts."""
    storage = LocalStorage(root)
    assert tree(f"{root}.user") == user, "a directory that a rank keeps was touched"
    for name, files in made.items():
        assert verify(storage, name, deep=True).ok, name
        there = {path: storage.read(f"{name}/{path}") for path in files}
        assert there == files, name
    with WriterClient.start(thread=True) as client:  # a third one, as ever
        opened = open_run(client, storage, "dddddddd")
        names = [row[0] for row in opened.records]
        assert set(made) <= set(names) <= {*made, *found}, (names, list(made), found)
        assert len(names) >= 2
        for name in names:
            assert verify(storage, name, deep=True).ok, name
        assert names == (list(reversed(made)) if made else found)[: len(names)], names
        made["checkpoint_000005"] = save(client, storage, opened, 5, "checkpoint_000005", root)
    catalog = Catalog(storage)
    assert catalog.latest().name == "checkpoint_000005"
    there = tree(root)
    for path, data in FOREIGN.items():
        assert path.startswith(NEW) or there.get(path) == data, f"foreign file {path} was touched"
    if case != "in_place":
        assert verify(storage, "placed", deep=True).ok
    known = {*FOREIGN, "run.json", "lease.json", ".lease.lock"}
    for name in {*names, "checkpoint_000005", "placed", *catalog.void}:
        known |= {path for path in there if path.startswith(f"{name}/")}
    litter = [path for path in there.keys() - known if not path.startswith(("reports/", "fence-"))]
    assert not litter, f"litter: {litter}"
