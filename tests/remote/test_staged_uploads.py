"""What rank 0's writer knows of a staged save on its way to the remote: who has brought what, who never will."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.copying.sending import TransferStopped
from holdfast.errors import CheckpointError, CorruptCheckpointError, StorageError
from holdfast.writer.ranks.agreement import JointUploads, named_error

ORDER = {"do": "upload", "save": "s-1", "directory": "step_1"}


def never() -> bool:
    return False


def bring(
    uploads: JointUploads, *events: Any, order: dict[str, Any] = ORDER, stop: Any = never
) -> list[dict[str, Any]]:
    """Bring a save, in which ``events`` happen as soon as the order is given; the orders given."""
    given: list[dict[str, Any]] = []

    def send(message: dict[str, Any]) -> None:
        given.append(message)
        assert uploads.order == message, "for a rank that joins again meanwhile"
        for event in events:
            event()

    uploads.bring(order, send, stop)
    return given


def test_a_save_is_there_when_all_have_brought_their_parts() -> None:
    """In whatever order, and said more than once; what is said of another save counts for nothing."""
    uploads = JointUploads(3)
    brought: list[int] = []

    def bring_last() -> None:
        brought.append(2)
        uploads.uploaded(2, "s-1", None)

    late = threading.Timer(0.05, bring_last)
    found = bring(
        uploads,
        lambda: uploads.uploaded(1, "s-1", None),
        lambda: uploads.uploaded(2, "s-0", None),
        lambda: uploads.uploaded(1, "s-1", None),
        lambda: uploads.uploaded(0, "s-1", None),
        late.start,
    )
    assert brought == [2], "the last one was waited for"
    assert found == [ORDER]
    assert uploads.order is None


def test_what_failed_is_tried_again_by_all_and_waited_for_by_those_who_lack_it() -> None:
    """The error names the rank; a part that has arrived is not waited for again."""
    uploads = JointUploads(2)
    failed = named_error("StorageUnavailableError", "no answer")
    with pytest.raises(StorageError, match="rank 1: no answer"):
        bring(uploads, lambda: uploads.uploaded(0, "s-1", None), lambda: uploads.uploaded(1, "s-1", failed))
    late = threading.Timer(0.05, uploads.uploaded, (1, "s-1", None))
    bring(uploads, late.start)  # until the answer comes, the error of the try before counts for nothing


def test_a_damaged_part_or_a_rank_that_is_gone_is_final() -> None:
    """Such a save is given up; one whose parts had all been brought before is not."""
    uploads = JointUploads(2)
    rotten = named_error("CorruptCheckpointError", "digest differs")
    with pytest.raises(CorruptCheckpointError, match="rank 1: digest differs"):
        bring(uploads, lambda: uploads.uploaded(1, "s-1", rotten))
    with pytest.raises(CheckpointError, match=r"part of rank 1 is on the disk of its own machine alone.*1: dead"):
        bring(uploads, lambda: uploads.gone(1, "dead"), order={**ORDER, "save": "s-2"})
    other = JointUploads(2)
    bring(
        other,
        lambda: other.uploaded(1, "s-1", None),
        lambda: other.gone(1, "dead"),
        lambda: other.uploaded(0, "s-1", None),
    )


def test_waiting_ends_with_the_run() -> None:
    """Nobody waits longer than the end of uploads allows."""
    with pytest.raises(TransferStopped):
        bring(JointUploads(2), stop=lambda: True)
