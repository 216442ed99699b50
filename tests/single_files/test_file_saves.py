"""What the loop trainer saves as single files: names, replacement, durability, and folders that several runs share."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from loop_kit import flip, names, plain

import holdfast as hf
from holdfast.core import Event
from holdfast.storage import resolve
from holdfast.trainers.loop.saving.files import read_note
from holdfast.trainers.loop.saving.folder import FileLeases, _of


def test_a_constant_name_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    """One name for all: each save replaces the one before."""
    trainer = plain(tmp_path, save_filename="model.pt", save_interval="1ba", max_duration="3ba")
    trainer.fit()
    assert names(tmp_path) == ["model.pt"]
    note = read_note(resolve(tmp_path), "model.pt", verify=True)
    assert note is not None
    assert note["step"] == 3
    assert trainer.saved_checkpoints == [f"{tmp_path}/model.pt"]


def test_saved_now_is_durable_on_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """save_checkpoint_to_save_folder returns when the checkpoint and the link to it are there, or says why not."""
    submit = FileLeases.submit

    def slow(*args: Any, **options: Any) -> Any:
        durable = submit(*args, **options)
        late: Future[Any] = Future()
        threading.Timer(0.2, lambda: late.set_result(durable.result(60))).start()  # a return too early would come now
        return late

    monkeypatch.setattr(FileLeases, "submit", slow)
    with plain(tmp_path, save_filename="ba{batch}.pt") as trainer:
        trainer.save_checkpoint_to_save_folder()
        assert os.readlink(tmp_path / "latest-rank0") == "ba0.pt"

    def full(*args: Any, **options: Any) -> Any:
        lost: Future[Any] = Future()
        lost.set_exception(hf.StorageFullError("no room here"))
        return lost

    monkeypatch.setattr(FileLeases, "submit", full)
    other = plain(tmp_path / "other", save_filename="ba{batch}.pt")
    with pytest.raises(hf.StorageFullError, match="was NOT saved"):
        other.save_checkpoint_to_save_folder()


def test_failures_of_the_background_surface(tmp_path: Path) -> None:
    """A folder that cannot be written any more ends training with an error, at the next batch or at the end."""
    trainer = plain(tmp_path / "runs", save_interval="1ba", save_filename="ba{batch}.pt", max_duration="50ep")
    hold = threading.Event()

    def break_it(state: Any, event: Event) -> bool:
        if int(state.timestamp.batch) == 3 and not hold.is_set():
            hold.set()
            os.rename(tmp_path / "runs", tmp_path / "gone")
            (tmp_path / "runs").write_text("in the way")
        return True

    trainer._savers[0].every = break_it
    with pytest.raises((hf.StorageError, hf.RunBusyError)):  # nothing can be stored, or the lease is gone
        trainer.fit()
    assert names(tmp_path / "gone")[0] == "ba1.pt"


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    """A file of weights is checked against its digest, too."""
    plain(tmp_path, max_duration="1ep", save_filename="w.safetensors", save_weights_only=True).fit()
    flip(tmp_path / "w.safetensors")
    with pytest.raises(hf.CorruptCheckpointError, match=r"w\.safetensors is damaged"):
        plain(None, load_path=tmp_path / "w.safetensors")


def test_weights_with_a_forged_header_are_an_error(tmp_path: Path) -> None:
    """What such a file says about itself is text, and its tensors lie one behind the other."""
    apart = '{"__metadata__":{"holdfast":"{}"},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    for header, data in (('{"__metadata__":{"holdfast":5}}', b""), (apart, b"ab")):
        (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)
        with pytest.raises(hf.CorruptCheckpointError, match=r"w\.safetensors"):
            plain(None, load_path=tmp_path / "w.safetensors")


def test_runs_that_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With {run_name} in the file names a run goes on from its own checkpoints only, and says whose else there are."""
    options: dict[str, Any] = {"save_filename": "{run_name}-ep{epoch}.pt", "save_latest_filename": None}
    plain(tmp_path, run_name="one", max_duration="2ep", **options).fit()
    plain(tmp_path, run_name="two", max_duration="1ep", autoresume=True, **options).fit()
    assert "of other runs, by their names: one-ep1.pt, one-ep2.pt" in capsys.readouterr().err
    assert int(plain(tmp_path, run_name="two", autoresume=True, **options).state.timestamp.epoch) == 1
    assert int(plain(tmp_path, run_name="one", autoresume=True, **options).state.timestamp.epoch) == 2


def test_files_of_several_runs_in_one_folder(tmp_path: Path) -> None:
    """Trainers whose files have other names share a folder; one whose name was taken from it writes nothing more."""
    options: dict[str, Any] = {"save_filename": "{run_name}-ep{epoch}.pt", "save_latest_filename": None}
    with plain(tmp_path, run_name="one", **options) as one, plain(tmp_path, run_name="two", **options) as two:
        for trainer in (one, two):
            trainer.save_checkpoint_to_save_folder()
        claims = two._savers[0].place.claims
        (shape,) = claims._held
        lease = tmp_path / f"lease-{_of(shape)}.json"
        assert lease.exists()
        lease.write_text('{"pid": 1, "host": "another", "start_id": "x"}')
        with pytest.raises(hf.RunBusyError, match="was lost to process 1 on another"):
            claims.confirm(shape)
        with pytest.raises(hf.RunBusyError, match="was lost"):
            two.fit()
        lease.unlink()
    assert sorted(os.listdir(tmp_path)) == ["one-ep0.pt", "two-ep0.pt"]


def test_names_of_a_run_beside_files(tmp_path: Path) -> None:
    """Where checkpoints are files there is no run to keep anything in logs/ or reports/: they may lie there."""
    with plain(
        tmp_path, save_filename="logs/b{batch}.pt", save_latest_filename="reports/last", max_duration="1ep"
    ) as one:
        one.fit()
    assert (tmp_path / "reports" / "last").resolve() == (tmp_path / "logs" / "b6.pt").resolve()
    again = plain(tmp_path, save_filename="logs/b{batch}.pt", autoresume=True)
    assert int(again.state.timestamp.batch) == 6


def test_whoever_waits_for_a_save_finds_its_name_free(tmp_path: Path) -> None:
    """A close that has waited for the last save leaves nothing behind, and another trainer begins at once."""
    for epochs in (1, 2):
        trainer = plain(
            tmp_path, save_filename="ba{batch}.pt", save_interval="1ep", max_duration=f"{epochs}ep", autoresume=True
        )
        trainer.fit()
        trainer.close()
        assert not [path.name for path in tmp_path.iterdir() if "lease" in path.name]
    assert names(tmp_path) == ["ba12.pt", "ba6.pt"]
