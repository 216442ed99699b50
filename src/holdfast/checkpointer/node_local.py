"""Ranks whose machines share no local disk: who sees what, and what an earlier life has left on the disks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import CheckpointError, ConfigError
from holdfast.format.names import join
from holdfast.format.parts import read_part, staged_name, sweep_given_up
from holdfast.run.view import RunView
from holdfast.storage.base import Storage
from holdfast.writer.messages import RunOpened

from .run_session import RunSession

__all__ = ["share_a_disk", "take_up"]

_LOG = get_logger("checkpointer")
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

    A staged save counts if as many ranks start again as saved it, and every part is on the disk of some rank: machines
    may come back in another order. A whole checkpoint on rank 0's disk (of a life on one machine) counts, too.
    Afterwards `RunSession.opened` lists what the run has.
    """
    meeting, local, opened = session.meeting, session.storage, session.opened
    found = meeting.agree("staged", lambda: _left(local, opened, meeting.rank), _newest_first)

    def choose(all_: Sequence[list[list[int]]]) -> tuple[int, list[list[int]]] | None:
        for number, about in enumerate(found):
            if about["save"] is None:
                return number, []
            bearers = _bearers(about["writers"], [parts[number] for parts in all_])
            if bearers is not None and about["writers"] == meeting.world_size:
                return number, bearers
        return None

    chosen = (
        meeting.agree("staged parts", lambda: [_parts_here(local, about) for about in found], choose) if found else None
    )
    about, bearers = (None, []) if chosen is None else (found[chosen[0]], chosen[1])
    for lost in found[: len(found) if chosen is None else chosen[0]] if session.leads else []:
        _LOG.warning(
            "%s, which %d ranks had staged, is given up: not all of its parts are on the disks of the %d ranks that "
            "start now",
            lost["name"], lost["writers"], meeting.world_size,
        )  # fmt: skip
    if about is not None and about["save"] is not None:
        where = join(about["name"], staged_name(about["save"]))
        is_holder = meeting.rank == about["rank"]
        data = meeting.agree(
            "staged manifest",
            lambda: local.read(where).decode() if is_holder and about["rank"] != 0 else None,
            lambda values: values[about["rank"]],
        )
        if session.leads and data is not None:  # the disk that rank 0 had is that of another rank now
            local.put(where, data.encode())

    def bring() -> Any:
        if not session.leads or about is None:
            return None
        session.ask("bring", name=about["name"], save=about["save"], parts=bearers)
        return session.ask("records")

    if about is not None:
        records = meeting.agree("brought", bring, work_s=2 * session.timeout_s)
        session.opened = replace(opened, records=tuple(records))
        session.names.update(row[0] for row in records)
    # The lease is ours, so no writer of a dead life works on any of the disks any more.
    for info in local.list("", recursive=False):
        name = info.path.rstrip("/")
        if name.startswith("step_"):
            sweep_given_up(local, name, keep_start_id=session.start_id)
            local.tidy(name)


def _left(local: Storage, opened: RunOpened, rank: int) -> list[dict[str, Any]]:
    """List what the disk of a rank knows of that is newer than all the remote has; whole ones only on rank 0."""
    from holdfast.writer.uploads.staged_run import staged_saves  # not above: few trainers need it, and each start waits

    newest = max(((row[1], row[2], row[0]) for row in opened.records), default=(-1, -1, ""))
    staged = staged_saves(local)
    found = [
        ((manifest.attempt, manifest.step or 0, name), {"name": name, "save": save, "writers": len(manifest.writers)})
        for name, save, manifest in staged
    ]
    runs = [manifest.run_id for _, _, manifest in staged]
    if rank == 0:
        catalog = RunView(local)
        whole = [record for record in catalog.records() if record.order > newest]
        found += [(record.order, {"name": record.name, "save": None, "writers": 0}) for record in whole]
        runs += [catalog.index.run_id for _ in whole]
    for other in runs:
        if other != opened.run_id:  # its owner may start it again: what it has here is not ours to remove
            raise ConfigError(
                f"{local.uri} of rank {rank} holds another run ({other}) than the remote ({opened.run_id}): give each "
                "run a local_dir of its own, empty this one, or bring it to the remote first (holdfast push)"
            )
    return [{**about, "rank": rank, "order": list(order)} for order, about in found if order > newest]


def _newest_first(all_: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Join what the disks know of; a save that several ranks see is listed by the first of them."""
    found: dict[tuple[str, str | None], dict[str, Any]] = {}
    for about in (about for left in all_ for about in left):
        found.setdefault((about["name"], about["save"]), about)
    return sorted(found.values(), key=lambda about: tuple(about["order"]), reverse=True)


def _parts_here(local: Storage, about: dict[str, Any]) -> list[int]:
    """List the parts of a save that are on the disk of this rank."""
    found = []
    for writer in range(about["writers"]):
        try:
            if read_part(local, about["name"], about["save"], writer) is not None:
                found.append(writer)
        except CheckpointError:  # damaged; a disk that does not answer is an error, for what is on it is removed below
            continue
    return found


def _bearers(writers: int, seen: Sequence[list[int]]) -> list[list[int]] | None:
    """Choose which parts each rank brings: its own if it sees it, else the first that sees it; None if one is lost."""
    parts: list[list[int]] = [[] for _ in seen]
    for writer in range(writers):
        ranks = [rank for rank, those in enumerate(seen) if writer in those]
        if not ranks:
            return None
        parts[writer if writer in ranks else ranks[0]].append(writer)
    return parts
