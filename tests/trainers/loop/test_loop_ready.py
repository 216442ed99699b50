"""What a saver does before its first save is due: what cannot be saved comes out at once, memory is there in time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from loop_kit import names, plain

import holdfast as hf
from holdfast.callbacks import Callback


class Odd(Callback):
    """Has something in its state that no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": object()}


class Looks(Callback):
    """Notes, at the beginning of each batch, whether the savers have their memory."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def batch_start(self, state: Any, logger: Any) -> None:
        self.seen += [one._saves._snapshotter.arena is not None for one in state.callbacks if hasattr(one, "_saves")]


@pytest.mark.parametrize("name", ["ep{epoch}", "ep{epoch}.pt"])
def test_what_cannot_be_saved_comes_out_after_the_first_batch(tmp_path: Path, name: str) -> None:
    """The first save may be hours away."""
    trainer = plain(tmp_path, save_filename=name, save_interval="1ep", callbacks=[Odd()])
    with pytest.raises(hf.UnsupportedStateError, match=r"lock.*save_ignore_keys"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 1
    assert names(tmp_path) == []


def test_the_memory_of_the_first_save_is_got_before_it(tmp_path: Path) -> None:
    """From the second batch on; a saver that saves at once needs no preparation."""
    looks = Looks()
    trainer = plain(tmp_path, save_interval="1ep", max_duration="1ep", callbacks=[looks])
    trainer.fit()
    assert looks.seen[:3] == [False, True, True]


def test_a_glob_that_matches_nothing_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not at every save."""
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        plain(tmp_path, save_interval="1ep", save_ignore_keys=["state/nothing"]).fit()
    assert len(names(tmp_path)) == 2
    assert sum("state/nothing" in one.getMessage() for one in caplog.records) == 1
