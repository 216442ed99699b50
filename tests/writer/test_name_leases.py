"""The leases of file names that a writer holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import RunBusyError, StorageUnavailableError
from holdfast.run.lease import Lease
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.name_leases import NameLeases

OF = "0123abcd"


def take(leases: NameLeases, storage: LocalStorage) -> None:
    leases.take(storage, OF, {"start_id": "ab12", "trainer_pid": 1}, wait_s=0.0, pause=lambda _: None)


def test_a_storage_that_did_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that was started again takes the lease with the next file, if it could not at its start."""
    storage, leases, original = LocalStorage(tmp_path), NameLeases(), Lease.acquire
    answers = iter([StorageUnavailableError("no answer"), StorageUnavailableError("no answer"), None])

    def acquire(*arguments: Any, **options: Any) -> Lease:
        error = next(answers)
        if error is not None:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(Lease, "acquire", acquire)
    with pytest.raises(StorageUnavailableError):
        take(leases, storage)
    with pytest.raises(StorageUnavailableError):
        leases.held(OF)
    assert leases.held(OF) is not None
    assert leases.held(OF) is leases.held(OF)
    leases.close()


def test_a_name_that_somebody_else_has_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are theirs to write from now on."""
    calls: list[int] = []

    def acquire(*_: Any, **__: Any) -> Lease:
        calls.append(1)
        raise RunBusyError("theirs")

    leases = NameLeases()
    monkeypatch.setattr(Lease, "acquire", acquire)
    with pytest.raises(RunBusyError):
        take(leases, LocalStorage(tmp_path))
    for _ in range(2):
        with pytest.raises(RunBusyError, match="theirs"):
            leases.held(OF)
    assert len(calls) == 1
