"""What the controller needs of an engine, and the events that an engine delivers.

An engine starts one group of workers at a time, carries messages, and reports exits. It decides nothing: what a death
means is the controller's business. `engines.process_engine` runs workers on this machine or on the nodes of a cluster,
`local_mode` in this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

from holdfast.writer.frames import Message

Reason: TypeAlias = Literal["process", "garbled", "node", "drained", "unreachable", "unplaced"]
"""Why a worker has ended: its process ended; it was killed for what it sent; its node ended, or the
agent there; its node ended as announced; the node was given up though it may be alive; or there was no
place to start it."""


def node_name(node: str, address: str = "") -> str:
    """Name a node for people."""
    return f"node {node[:8]}" + (f" ({address})" if address else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group of workers to start.

    Attributes:
        num_workers: ranks 0 .. num_workers - 1.
        attempt: number of this start in the run; for names and messages only.
        environment: variables for single ranks, on top of the driver's own and those the engine sets.
        log_directory: folder of this attempt; rank r's output is appended to ``rank-<r>.log`` in it. None keeps none.
        use_gpu: workers may use accelerators and talk over NCCL.
    """

    num_workers: int
    attempt: int = 1
    environment: Mapping[int, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    log_directory: Path | None = None
    use_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a rank is started; comes before its `Started`. Engines of one machine may leave it out.

    Attributes:
        rank: among all workers.
        node: id of the node; ranks that follow one another share nodes.
        address: of the node, for people.
        local_rank: rank among the workers of the node.
        local_size: number of them.
        node_rank: number of the node among those of the group.
    """

    rank: int
    node: str
    address: str = ""
    local_rank: int
    local_size: int
    node_rank: int

    @property
    def where(self) -> str:
        """Name of the node for people."""
        return node_name(self.node, self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The process of a rank exists and will take messages."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A worker sent a message."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Dying:
    """A worker is at its end: it sends nothing more, and its Exited follows as soon as its status is known.

    It is seen before the errors that other workers get for want of this one. Engines may leave it out.
    """

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker has ended; nothing more comes from this rank until the next start.

    With an exception: if it died by itself (``reason`` "process" or "garbled"), its node finishes what it had handed
    over, and the message "part" about that comes as a Received after this.

    Attributes:
        rank: whose process.
        exit_code: exit status, None when a signal ended it or when the status is not known.
        signal: number of the signal that ended it.
        detail: what else is known, for people: the end of its error output, or why it could not be started.
        node: where it ran, for people; "" on a single machine.
        reason: what ended it.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    detail: str = ""
    node: str = ""
    reason: Reason = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many workers there is room for now, those that run included; comes each time that changes.

    Attributes:
        num_workers: places that a group could be started on.
        num_ready: those of them where a worker starts at once, as a group that grows wants it; None: all.
        detail: what there is and what is missing, for people.
    """

    num_workers: int
    num_ready: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """Nodes are about to go, with these ranks on them.

    Attributes:
        ranks: of the group that runs.
        detail: which nodes, and how soon, for people.
        left_s: seconds until the first of them goes.
    """

    ranks: tuple[int, ...]
    detail: str
    left_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unable:
    """The engine can never run this, so that no retry helps: the run ends with ``error``."""

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """`Engine.wake` was called; several calls may make one event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """A task has ended: it returned (``result``), or it raised, died or was killed (``error``).

    Attributes:
        task: number that ``run_task`` gave.
        result: the pickled return value.
        error: what it raised with its own traceback as cause, or a TrainingError that says how its process ended.
    """

    task: int
    result: bytes | None
    error: BaseException | None


Event: TypeAlias = Placed | Started | Received | Dying | Exited | Capacity | Draining | Unable | Woken | TaskEnded


class Engine(Protocol):
    """Runs worker groups, and tasks, for one controller; every method but `wake` belongs to the controller's thread.

    Each rank of a started group yields Started once (unless it could not be started, and with Placed before it where
    there are nodes), then Received for each message in order, then Exited once and last (see there); a Dying
    comes a little before. An engine that has to find places says with Capacity how many there are, first of all.
    """

    def start(self, spec: GroupSpec) -> None:
        """Start a group without waiting for it. Messages may be sent at once; they arrive when the worker is up.

        Raises:
            HoldfastError: workers of an earlier group have not exited yet, or nothing can be started at all.
        """

    def send(self, rank: int, header: dict[str, Any], attachments: Sequence[bytes] = ()) -> None:
        """Send a message without blocking; a message to a worker that has ended is dropped (an Exited says so)."""

    def events(self, timeout_s: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout_s``. None waits until there is one."""

    def kill(self, ranks: Iterable[int] | None = None, grace_s: float = 0.0) -> None:
        """End workers (None: all) with everything they started: SIGTERM, and SIGKILL ``grace_s`` later.

        Does not wait. Every rank still yields its Exited.
        """

    def run_task(self, blob: bytes, *, name: str = "task", log_file: Path | None = None) -> int:
        """Run a pickled function without arguments in a process of its own, beside the group.

        Args:
            blob: cloudpickle of the function.
            name: stands before each line of its output.
            log_file: its output is appended to it.

        Returns:
            The number that its `TaskEnded` will have.
        """

    def kill_task(self, task: int, grace_s: float = 0.0) -> None:
        """End a task; its `TaskEnded` still comes. A task that has ended is left alone."""

    def wake(self) -> None:
        """Make `events` return; callable from any thread and from signal handlers, also after `close`."""

    def close(self) -> None:
        """End everything that still runs and let go of all resources. Idempotent; takes a second or two at most."""
