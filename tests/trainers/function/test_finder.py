"""What a start goes on from, in a real directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from catalog_kit import catalog_of

import holdfast as hf
from holdfast.errors import CorruptCheckpointError
from holdfast.storage import LocalStorage
from holdfast.trainers.function.control.checkpoints import RunContents, find_start
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import IngestJob, IngestSource


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints a, b, c; a and c are to be validated."""
    root = tmp_path / "run"
    storage = LocalStorage(root)
    with WriterClient.start(storage) as client:
        opened = client.open_run(storage).result(30)
        for step, name in enumerate("abc", start=1):
            source = tmp_path / name
            source.mkdir()
            (source / "x.txt").write_text(name * 100_000)
            manifest: dict[str, Any] = {
                "run_id": opened.run_id,
                "attempt": 1,
                "step": step,
                "checkpoint_id": name,
                "created": "2026-01-01T00:00:00Z",
                "metrics": {"_validated": True} if name == "b" else {},
                "extra": {} if name == "b" else {"validation": {"timeout_s": 3.0}},
            }
            job = IngestJob(
                directory=name,
                save_id=f"s-{step}",
                sources=(IngestSource(rank=0, path=str(source)),),
                manifest=manifest,
            )
            client.ingest(storage, job).result(30)
    return root


def find(root: Path, quarantined: dict[str, str] | None = None, **options: Any) -> tuple[RunContents, dict[str, str]]:
    storage = LocalStorage(root)
    noted: dict[str, str] = {}
    rows = catalog_of(storage).rows()
    found = find_start(storage, rows, quarantined=quarantined or {}, quarantine=noted.__setitem__, **options)
    return found, noted


def test_the_newest(run: Path) -> None:
    """All are known, the newest is taken, and every name is."""
    found, noted = find(run, validations=True)
    assert found.start is not None
    assert (found.start.name, found.start.step, found.start.checkpoint_id) == ("c", 3, "c")
    assert {one.name for one in found.kept} == {"a", "b", "c"}
    assert {"a", "b", "c", "run.json", "reports"} <= found.taken
    assert list(found.unvalidated.items()) == [("a", {"timeout_s": 3.0}), ("c", {"timeout_s": 3.0})]
    assert noted == {}


def test_damage(run: Path) -> None:
    """Missing and shortened files are seen, and other bytes in files that nobody compares later."""
    (run / "c" / "x.txt").write_text("short")
    found, noted = find(run)
    assert found.start is not None
    assert found.start.name == "b"
    assert found.skipped == tuple(noted.items())
    assert set(noted) == {"c"} == found.set_aside
    data = bytearray((run / "b" / "x.txt").read_bytes())
    data[5] ^= 1
    (run / "b" / "x.txt").write_bytes(data)
    found, noted = find(run)
    assert found.start is not None
    assert found.start.name == "a"
    assert set(noted) == {"b", "c"}


def test_none_is_good(run: Path) -> None:
    """Nothing starts from zero where there are checkpoints; quarantined ones count."""
    for name in "ab":
        (run / name / "x.txt").unlink()
    with pytest.raises(CorruptCheckpointError, match="3 checkpoint") as caught:
        find(run, {"c": "set aside last week"})
    assert "c: set aside last week" in str(caught.value)


def test_an_empty_run(tmp_path: Path) -> None:
    """There is nothing to go on from; strangers are left alone."""
    hf.save(tmp_path / "run" / "stranger", {"x": 1})
    found, noted = find(tmp_path / "run")
    assert found.start is None
    assert found.taken == {"stranger"}
    assert noted == {}
