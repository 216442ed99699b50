"""Ranks whose machines share no local disk: who sees what, and what an earlier life has left on the disks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast.errors import CheckpointError, ConfigError
from holdfast.format.parts import read_part, sweep_given_up
from holdfast.run.view import RunView
from holdfast.storage.base import Storage
from holdfast.writer.messages import RunOpened

from .meeting import Meeting
from .run_session import RunSession

__all__ = ["share_a_disk", "take_up"]

_VISIBLE_S = 0.3  # a disk that shows a file later than this counts as not shared


def share_a_disk(session: RunSession) -> bool:
    """Tell whether all ranks see one local directory; the same on all of them."""
    meeting, local = session.meeting, session.storage
    home = f".probe-{session.start_id}"
    mark = f"{home}/ranks"

    def leave_mark() -> None:
        if meeting.rank == 0:
            local.put(mark, b"do all ranks see this file?")

    def sees() -> bool:
        until = time.monotonic() + _VISIBLE_S
        while not (found := local.exists(mark)) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def decide(seen: list[bool]) -> bool:
        local.delete(mark)
        local.tidy(home)
        return all(seen)

    meeting.agree("mark", leave_mark)
    shared: bool = meeting.agree("disk", sees, decide)
    return shared


def take_up(session: RunSession) -> None:
    """Bring the newest save that the disks hold completely to the remote, if that has none as new; sweep the rest.

    A staged save counts if as many ranks start again as saved it, and each still has its own part; parts of other
    ranks never count. A whole checkpoint on rank 0's disk (of a life on one machine) counts, too. Afterwards
    `RunSession.opened` lists what the run has.
    """
    meeting, local, opened = session.meeting, session.storage, session.opened
    found = meeting.agree("staged", lambda: _left(local, opened) if session.leads else [])

    def have() -> list[bool]:
        return [_has(local, part, meeting) for part in found]

    def choose(all_: Sequence[list[bool]]) -> int | None:
        return next((number for number in range(len(found)) if all(has[number] for has in all_)), None)

    chosen = meeting.agree("staged parts", have, choose) if found else None

    def bring() -> Any:
        if not session.leads:
            return None
        part = found[chosen]
        session.ask("bring", name=part["name"], save=part["save"])
        return session.ask("records")

    if chosen is not None:
        records = meeting.agree("brought", bring, work_s=2 * session.timeout_s)
        session.opened = replace(opened, records=tuple(records))
        session.names.update(row[0] for row in records)
    # The lease is ours, so no writer of a dead life works on any of the disks any more.
    for info in local.list("", recursive=False):
        name = info.path.rstrip("/")
        if name.startswith("step_"):
            sweep_given_up(local, name, keep_start_id=session.start_id)
            local.tidy(name)


def _left(local: Storage, opened: RunOpened) -> list[dict[str, Any]]:
    """List, on rank 0, what its disk knows of that is newer than all the remote has, newest first."""
    from holdfast.writer.uploads.staged_run import staged_saves  # not above: few trainers need it, and each start waits

    newest = max(((row[1], row[2], row[0]) for row in opened.records), default=(-1, -1, ""))
    staged = staged_saves(local)
    found = [
        ((manifest.attempt, manifest.step or 0, name), {"name": name, "save": save, "writers": len(manifest.writers)})
        for name, save, manifest in staged
    ]
    catalog = RunView(local)
    whole = [record for record in catalog.records() if record.order > newest]
    runs = [manifest.run_id for _, _, manifest in staged] + [catalog.index.run_id for _ in whole]
    for other in runs:
        if other != opened.run_id:  # its owner may start it again: what it has here is not ours to remove
            raise ConfigError(
                f"{local.uri} of rank 0 holds another run ({other}) than the remote ({opened.run_id}): give each run a "
                "local_dir of its own, empty this one, or bring it to the remote first (holdfast push)"
            )
    found += [(record.order, {"name": record.name, "save": None, "writers": 0}) for record in whole]
    return [part for order, part in sorted(found, key=lambda row: row[0], reverse=True) if order > newest]


def _has(local: Storage, about: dict[str, Any], meeting: Meeting) -> bool:
    """Tell whether this rank has its part of what rank 0 has found."""
    if about["save"] is None:
        return True
    try:
        part = read_part(local, about["name"], about["save"], meeting.rank)
    except CheckpointError:  # damaged; a disk that does not answer is an error, for what is on it is removed below
        return False
    return part is not None and about["writers"] == meeting.world_size
