"""The ranks that save together, seen from this rank; and when they save and stop, at steps that all agree on."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import Any

from holdfast._fork import after_fork_in_child
from holdfast._ranks import current_ranks, rank_list
from holdfast._version import __version__
from holdfast.errors import ConfigError, HoldfastError
from holdfast.run.process import network_name
from holdfast.storage.base import Storage
from holdfast.writer.arena import MAILBOX_BYTES, WHO_LEFT, Arena, StepMailbox
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import error_from_json, error_to_ranks
from holdfast.writer.ranks.link import check_connections

from .meeting import SILENCE_S, Meeting, same_for_all
from .pending_saves import ANSWER_MARGIN_S
from .progress import Progress
from .save_policy import Call, Deadline, SavePolicy, Schedule
from .signals import StopSignals

_WORD_S = 10.0
_LOOK_S = 0.0005
_OF_GROUP = ("gloo", "nccl", "connection", "distributed")  # in the errors of collectives whose partner is gone
BEAT_S = 5.0
_VISIBLE_S = 5.0  # that a network file system may take to show a file
_UNREACHABLE = ("127.", "::1", "0.")  # from other machines


class RankGroup:
    """Our writer has joined those of the other ranks; made by all ranks at the same point of their program.

    Args:
        meeting: where the ranks meet now.
        client: our writer.
        timeout_s: bound of one save, from the first rank to the last.
        silence_s: a rank that says nothing for so long is given up; never longer than a save may take.

    Attributes:
        rank: ours.
        world_size: number of ranks.
        start_id: of this life of all of them.
        mailbox: words shared with our writer.
    """

    def __init__(
        self, meeting: Meeting, client: WriterClient, *, timeout_s: float, silence_s: float = SILENCE_S
    ) -> None:
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self.client, self.timeout_s = client, timeout_s
        self._listener: socket.socket | None = None
        arena = self._arena = Arena.create(MAILBOX_BYTES)
        self.mailbox = StepMailbox(arena.view)
        self.mailbox.clear(step=0)
        try:
            agreed = meeting.agree("address", _facts, self._open)
            self.start_id: str = agreed["start_id"]
            client.join(
                arena,
                rank=self.rank,
                world_size=self.world_size,
                addresses=[(host, port) for host, port in agreed["addresses"]],
                token=agreed["token"],
                timeout_s=timeout_s,
                listener=None if self._listener is None else self._listener.fileno(),
                beat_s=min(BEAT_S, silence_s / 6),
                stale_s=min(silence_s, max(2 * BEAT_S, timeout_s)),
            )
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def broadcast_errors(self, save: str) -> Iterator[None]:
        """Send an error to the other ranks, which wait for our part of a save; all ranks raise the same error."""
        try:
            yield
        except Exception as error:
            sent = error_to_ranks(error)
            with contextlib.suppress(HoldfastError):
                self.client.tell_ranks("part_failed", save=save, error=sent)
            raise error_from_json({**sent, "message": f"rank {self.rank}: {sent['message']}"}) from error

    def may_save(self, step: int) -> bool:
        """Ask whether ``step`` is saved while the save before may still be under way; the same on all ranks."""
        return self._ask(f"save {step}", f"whether to save step {step}")

    def may_go_on(self, step: int, tries: int) -> bool:
        """Ask, while all ranks are held at ``step`` for the same reason, whether none of them wants to stop."""
        return not self._ask(f"stop {step} {tries}", f"whether to stop at step {step}")

    def trouble(self) -> HoldfastError | None:
        """Return the error of a rank that is gone, which names it; None while all are there, which costs nothing."""
        if not self.mailbox.broken:
            return None
        asked = self.client.ask_ranks(WHO_LEFT)
        wait([asked], timeout=ANSWER_MARGIN_S)
        error = asked.exception() if asked.done() else None
        return error if isinstance(error, HoldfastError) else HoldfastError("a rank is gone, nobody knows why")

    def explain(self, error: BaseException) -> HoldfastError | None:
        """Return the reason behind an error of a collective: which rank is gone first, and why; None for other errors.

        Waits for that word for up to ten seconds: the writer of the rank that is gone sends it.
        """
        if not isinstance(error, RuntimeError) or not any(word in str(error).lower() for word in _OF_GROUP):
            return None
        until = time.monotonic() + _WORD_S
        while (trouble := self.trouble()) is None and time.monotonic() < until:
            time.sleep(0.01)
        return trouble

    def _ask(self, about: str, what: str) -> bool:
        asked = self.client.ask_ranks(about)
        wait([asked], timeout=self.timeout_s)
        if not asked.done():
            raise HoldfastError(f"no answer from rank 0's writer within {self.timeout_s:g} s on {what}")
        return asked.result()

    def close(self) -> None:
        """Close the listening socket and the shared memory. Call it after the writer was closed; idempotent."""
        if self._listener is not None:
            self._listener.close()
        self.mailbox.close()
        self._arena.close()

    def _open(self, facts: list[Any]) -> dict[str, Any]:
        """On rank 0: listen where all ranks can reach us."""
        for name in ("holdfast", "world_size"):
            same_for_all([fact[name] for fact in facts], f"the {name} of the processes")
        check_connections(self.world_size)
        alone = all(fact["machine"] == facts[0]["machine"] for fact in facts)
        elsewhere = [fact["master"] for fact in facts if fact["machine"] != facts[0]["machine"]]
        self._listener, addresses = _listen(elsewhere, alone=alone, backlog=self.world_size)
        # As long as a loader worker's copy is open, a dead rank 0 seems to be there.
        after_fork_in_child(self._listener.close)
        return {"start_id": secrets.token_hex(4), "token": secrets.token_hex(16), "addresses": addresses}


def _facts() -> dict[str, Any]:
    world_size = current_ranks().world_size
    return {"machine": network_name(), "holdfast": __version__, "world_size": world_size, "master": _master()}


def _master() -> list[str]:
    """List the addresses by which this rank knows the process group's master, usually rank 0's machine."""
    with contextlib.suppress(OSError):
        if master := os.environ.get("MASTER_ADDR"):
            return [str(row[4][0]) for row in socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)]
    return []


def _listen(
    elsewhere: Sequence[Sequence[str]], *, alone: bool, backlog: int
) -> tuple[socket.socket, list[tuple[str, int]]]:
    """Open a listening socket where the ranks can reach us, and nowhere else if that is known.

    On loopback if all ranks are on this machine. Else on the address by which the ranks of other machines know the
    process group's master, if that is an address of this machine: they have just reached it. Else on all interfaces.
    """
    if alone:
        sock = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        return sock, [("127.0.0.1", sock.getsockname()[1])]
    for host in dict.fromkeys(address for known in elsewhere for address in known):
        if all(host in known for known in elsewhere) and not host.startswith(_UNREACHABLE):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with contextlib.suppress(OSError):  # no address of this machine
                sock = socket.create_server((host, 0), family=family, backlog=backlog)
                return sock, [(host, sock.getsockname()[1])]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    sock = socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)
    port = sock.getsockname()[1]
    return sock, [(host, port) for host in _own_addresses()]


def _own_addresses() -> list[str]:
    """List names of this machine, the likeliest to be reached from the others first."""
    found = []
    master = os.environ.get("MASTER_ADDR")
    if master:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing: only asks which interface would be used
            found.append(probe.getsockname()[0])
    found.append(socket.gethostname())
    with contextlib.suppress(OSError):
        found += [str(row[4][0]) for row in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return [address for address in dict.fromkeys(found) if not address.startswith(_UNREACHABLE)] or found


class DistributedSavePolicy(SavePolicy):
    """Decides as `SavePolicy` does from steps and epochs, alike on all ranks, and asks the others for the rest.

    Rank 0 decides by intervals of time or samples (batches need not be equally long) and by the deadline; any rank may
    receive a signal.

    Args:
        schedule: when saves are due.
        signals: those that ask the run to stop.
        deadline: when the processes will be ended.
        progress: the counters.
        rank_group: the ranks.
    """

    def __init__(
        self, schedule: Schedule, signals: StopSignals, deadline: Deadline, progress: Progress, rank_group: RankGroup
    ) -> None:
        super().__init__(schedule, signals, deadline, progress)
        self._rank_group = rank_group
        self._wants_save = self._wants_stop = self._wants_keep = False  # the others know, and it is not done yet
        self._keep_agreed = False
        self._is_due = self._is_broken = False  # the deadline is near; another rank has left

    @property
    def stopped_by(self) -> str:
        """As of one process; beside that, what another rank was asked, or its end."""
        if not self.stopping or self._signals.received is not None or self._is_due:
            return super().stopped_by
        return "the end of another rank" if self._is_broken else "a signal to another rank"

    @property
    def stop_asked(self) -> bool:
        """Whether all ranks stop: a signal to a single rank does not count before they have agreed."""
        return self.stopping

    def call(self, now: float, *, step_s: float, save_s: float) -> Call:
        """Publish the step; return what it calls for, the same on all ranks; waits while they are about to agree."""
        rank_group, step = self._rank_group, self._progress.step
        called = rank_group.mailbox.calls(step)
        if self._must_stop(now, step_s, save_s):
            self._want_stop()
        elif rank_group.rank == 0:
            self._wish(now)
        kind = agreed(rank_group, step) if called else None
        if kind is not None:
            # A wish that this step does not fulfil is sent again: rank 0's writer counts repeated wishes once.
            self._wants_save = self._wants_stop = self._wants_keep = False
        if kind == "keep":
            self._keep_agreed = True
        elif kind is not None and kind != "settle":
            return kind
        if rank_group.mailbox.broken:
            self._is_broken = True
            return "stop"  # a rank is gone, and no save can succeed any more: the last one raises which rank, and why
        return "save" if step >= self._schedule.next_step else kind

    def poll(self, *, step_s: float, save_s: float) -> bool:
        """Tell whether the run is to stop: never between steps, where ranks would leave at different places."""
        return self.stopping

    def must_end(self, tries: int) -> bool:
        """Tell whether to stop where all ranks are held at the same step; the same on all of them."""
        if self._must_stop(time.monotonic(), 0.0, 0.0):
            self._want_stop()
        return not self._rank_group.may_go_on(self._progress.step, tries)

    def saved(self) -> None:
        """Count a save."""
        super().saved()
        self._wants_save = False

    def _want_stop(self) -> None:
        if not self._wants_stop:
            self._wants_stop = True
            self._rank_group.client.tell_ranks("want", kind="stop")

    def _wish(self, now: float) -> None:
        """Ask for a save, or a snapshot, if it is due by what the others count differently; on rank 0."""
        if not self._wants_save and self._wished(self._schedule, now):
            self._wants_save = True
            self._rank_group.client.tell_ranks("want", kind="save")
        snapshots = self.snapshots
        if snapshots is not None and not self._wants_keep and self._wished(snapshots, now) and not self.busy():
            self._wants_keep = True
            self._rank_group.client.tell_ranks("want", kind="keep")

    def _keep_due(self, snapshots: Schedule, now: float) -> bool:
        agreed, self._keep_agreed = self._keep_agreed, False
        return self._progress.step >= snapshots.next_step or agreed

    def _wished(self, schedule: Schedule, now: float) -> bool:
        return now >= schedule.next_time or (schedule.counts_samples and self._progress.samples >= schedule.next_sample)

    def _must_stop(self, now: float, step_s: float, save_s: float) -> bool:
        if self._signals.received is not None:
            return True
        # Ranks stop two or three steps after a rank asks.
        if self._rank_group.rank == 0 and self._deadline.near(now=now, step_s=3 * step_s, save_s=save_s):
            self._is_due = True
        return self._is_due


def agreed(rank_group: RankGroup, step: int) -> Call:
    """Return what all ranks do at ``step``, if they agreed on it; waits while they are about to agree.

    Raises:
        HoldfastError: rank 0's writer does not answer in time.
    """
    mailbox, timeout_s = rank_group.mailbox, rank_group.timeout_s
    until = time.monotonic() + timeout_s
    while mailbox.calls(step):
        target = mailbox.target
        if mailbox.armed and mailbox.target == target:
            kind: Any = mailbox.kind
            mailbox.act(target)
            rank_group.client.tell_ranks("acted", step=target)
            return kind  # type: ignore[no-any-return]
        if mailbox.broken:
            return None
        if time.monotonic() > until:
            raise HoldfastError(
                f"rank {rank_group.rank} waits at step {step} for the word of rank 0's writer, which has not come "
                f"within {timeout_s:g} s (timeout_s)"
            )
        time.sleep(_LOOK_S)
    return None


def check_shared(meeting: Meeting, storage: Storage, mark: str) -> None:
    """Make sure that all ranks see a file that rank 0 has made in the root of their run; rank 0 removes it.

    Raises:
        ConfigError: one does not; names it, and the place that it was given if that is another one.
    """

    def decide(seen: Sequence[tuple[bool, str]]) -> None:
        storage.delete(mark)
        storage.tidy(mark.partition("/")[0])
        blind = {rank: uri for rank, (is_there, uri) in enumerate(seen) if not is_there}
        if not blind:
            return
        other = {rank: uri for rank, uri in blind.items() if uri != storage.uri}
        why = (
            "so the run needs a place that all machines share: a network file system, or remote storage such as "
            "s3://bucket/run"
        )
        if other:
            first = min(other)
            why = (
                f"but {rank_list(other)} {'was' if len(other) == 1 else 'were'} given another path ({other[first]}). "
                "A path with the time, a random name or the rank in it is another one on each rank: give it on the "
                "command line, or let rank 0 choose it (torch.distributed.broadcast_object_list)"
            )
        raise ConfigError(
            f"{rank_list(blind)} cannot see what rank 0 writes to {storage.uri}: all ranks save parts of the same "
            f"checkpoints, {why}"
        )

    meeting.agree("place", lambda: [sees(storage, mark, within_s=_VISIBLE_S), storage.uri], decide)


def sees(storage: Storage, mark: str, *, within_s: float) -> bool:
    """Look for a file that rank 0 has made; a network file system may show it a little later."""
    until = time.monotonic() + within_s
    while not (found := storage.exists(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return found
