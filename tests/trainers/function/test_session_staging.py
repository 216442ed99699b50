"""`RunConfig(local_dir=...)`: shares of a state are stored on the node's disk and brought to the run behind."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from test_session_state import Committer, assert_loads, copy_of, make_state, pair_of

import holdfast as hf
from holdfast.errors import ConfigError, StorageError
from holdfast.storage import LocalStorage
from holdfast.torch import TorchTrainer
from holdfast.trainers.function import handoff
from holdfast.trainers.function.handoff import Staging


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_state_goes_over_the_disk(root: Path, tmp_path: Path) -> None:
    """Each checkpoint holds its own moment and loads; nothing stays on the disk, and nobody is told 'sealed'."""
    state, moments, disk = make_state(0), [], tmp_path / "disk"
    with Committer(root, 2) as script:
        pairs = [pair_of(root, script, rank, 2, local_dir=str(disk)) for rank in (0, 1)]
        with pairs[0], pairs[1]:
            for number in range(4):
                state["epoch"] = number
                moments.append(copy_of(state))
                for pair in pairs:
                    pair.session.report({"n": number}, state=state)
                with torch.no_grad():
                    for parameter in state["model"].parameters():
                        parameter.add_(1.0)
            for pair in pairs:
                pair.session.drain()
            assert {header["on"] for _, header in script.told} == {"report", "staged", "part"}
    for number, weights in enumerate(moments):
        assert_loads(root / f"checkpoint_{number + 1:06d}", weights, number)
    assert left(disk) == []


def test_a_slow_store_holds_the_third(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shares wait on the disk while the store stands still; the next one waits for room, and then goes on."""
    open_, brought = threading.Event(), handoff.send_entries

    def slow(*args: Any) -> Any:
        assert open_.wait(20)
        return brought(*args)

    monkeypatch.setattr(handoff, "send_entries", slow)
    state = make_state(1)
    with Committer(root) as script, pair_of(root, script, local_dir=str(tmp_path / "disk")) as pair:
        for number in range(2):
            pair.session.report({"n": number}, state=state)
        third = threading.Thread(target=lambda: pair.session.report({"n": 2}, state=state))
        third.start()
        third.join(0.5)
        assert third.is_alive()
        open_.set()
        third.join(20)
        assert not third.is_alive()
        pair.session.drain()
    assert len(list(root.glob("checkpoint_*/manifest.json"))) == 3


def test_a_slow_store_is_no_silence(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker says that a store is at work for as long as it is; a worker that was stopped does not."""
    open_, brought = threading.Event(), handoff.send_entries

    def slow(*args: Any) -> Any:
        assert open_.wait(20)
        return brought(*args)

    monkeypatch.setattr(handoff, "send_entries", slow)
    options = {"local_dir": str(tmp_path / "disk"), "beat_s": 0.02}
    with Committer(root) as script, pair_of(root, script, **options) as pair:
        pair.session.report({"n": 0}, state=make_state(1))
        pair.controller.wait(lambda _: len(pair.controller.headers("storing")) > 2)
        open_.set()
        pair.session.drain()
        pair.session.report({"n": 1})
        last = pair.controller.wait(lambda heard: heard if heard[-1]["on"] == "rows" else None)
        threading.Event().wait(0.1)
        assert pair.controller.headers() == last


def test_a_store_that_fails_costs_that_save(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call says so, once; the saves after it are brought, and the disk is empty again."""
    brought, calls = handoff.send_entries, []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise StorageError("the store is on fire")
        return brought(*args)

    monkeypatch.setattr(handoff, "send_entries", fails_once)
    state, disk = make_state(2), tmp_path / "disk"
    with Committer(root) as script, pair_of(root, script, local_dir=str(disk)) as pair:
        pair.session.report({"n": 0}, state=state)
        with pytest.raises(StorageError, match="on fire"):
            pair.session.drain()
        for number in range(3):
            pair.session.report({"n": number}, state=state)
        pair.session.drain()
    assert not (root / "checkpoint_000001" / "manifest.json").exists()
    assert len(list(root.glob("checkpoint_*/manifest.json"))) == 3
    assert left(disk) == []


def test_a_callback_that_raises_gives_its_room_back(root: Path, tmp_path: Path) -> None:
    """Else the states after it would wait for room until they time out."""

    def ended(error: BaseException | None) -> None:
        raise RuntimeError("of the callback") from error

    staging = Staging(str(tmp_path / "disk"), LocalStorage(root), rank=0, start_id="ab" * 8, sweeps=False)
    stored: Future[None] = Future()
    stored.set_result(None)
    for _ in range(2):
        assert staging.wait(1.0)
        staging.bring(stored, {"directory": "checkpoint_000001", "save_id": "s"}, ended)  # a share that is not there
    assert staging.wait(10.0, at_most=0)
    staging.close()


def test_what_a_dead_start_has_left_is_swept(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only what is this run's, and only what carries the id of a start, which is said; other things stay."""
    disk = tmp_path / "disk"
    with Committer(root) as script, pair_of(root, script, local_dir=str(disk)) as pair:
        pair.session.report({}, state=make_state())
        pair.session.drain()
    (home,) = disk.iterdir()
    for place in (home / "0123456789abcdef" / "checkpoint_000001", home / "mine", disk / "other" / "0123456789abcdef"):
        place.mkdir(parents=True)
        (place / "file").write_text("x")
    with Committer(root) as script, pair_of(root, script, local_dir=str(disk), first_index=7) as pair:
        pair.session.report({}, state=make_state())
        pair.session.drain()
    assert "shares of checkpoint_000001 were stored by an earlier start and never brought" in caplog.text
    assert sorted(path.relative_to(disk) for path in left(disk)) == sorted(
        [Path(home.name, "mine", "file"), Path("other", "0123456789abcdef", "file")]
    )


def test_it_stands_in_front_of_a_store_only(tmp_path: Path) -> None:
    """In front of a directory it would be one copy more and nothing else: refused where the trainer is made."""
    config = hf.RunConfig(name="x", storage_path=f"file://{tmp_path}", local_dir=tmp_path / "disk")
    with pytest.raises(ConfigError, match="stands in front of a remote storage_path"):
        TorchTrainer(lambda: None, run_config=config)
