"""What the writer of one of several ranks tells its trainer, message by message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import CheckpointError
from holdfast.storage import MemoryStorage
from holdfast.writer.distributed import Joint
from holdfast.writer.messages import SaveJob
from holdfast.writer.ranks.agreement import named_error


@pytest.mark.parametrize(("heard", "begins_last"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_save_that_begins_after_its_end(heard: bool, begins_last: bool) -> None:
    """A trainer that comes late to a save another rank has failed, and left for, gets the error that all others got."""
    failed: list[BaseException] = []
    answers: Any = SimpleNamespace(later=lambda work: work(), say_failed=lambda _, error: failed.append(error))
    ours = Joint(answers)
    error = named_error("CheckpointError", "rank 0: boom")
    if heard:
        ours._hear({"do": "outcome", "save": "aaaaaaa1-1", "error": error, "value": None, "discard": False})
    job = SaveJob(directory="step_00000001", save_id="aaaaaaa1-1")
    steps = [
        lambda: ours._hear({"do": "lost", "why": "rank 0: it has left the run"}),
        lambda: ours.begun(1, job, MemoryStorage("late"), again=False),
    ]
    for step in steps if begins_last else reversed(steps):
        step()
    ours.failed(job, CheckpointError("not stored here either"))
    assert [str(one) for one in failed] == [
        "rank 0: boom"
        if heard
        else "rank 0: it has left the run; whether this save was committed is not known, the checkpoint before it stays"
    ]
