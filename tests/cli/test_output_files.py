"""Files that commands write: new ones, or in place of their own earlier output, never of anything else."""

from __future__ import annotations

import os

import pytest
from catalog_kit import begin, save, steps_of
from command_kit import invoke

from holdfast.storage import LocalStorage


@pytest.fixture
def run(tmp_path):
    save(begin(LocalStorage(tmp_path / "run")), 1)
    return tmp_path / "run"


COMMANDS = {"page": ("page", "-o"), "stats": ("stats", "--openmetrics")}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_only_own_output_is_replaced(run, tmp_path, command) -> None:
    """A script, a page of the user's own and the index of the run stay byte by byte, and the status is 2."""
    name, option = command
    own = tmp_path / "own.out"
    own.touch()  # nothing is lost with an empty file
    for _ in range(2):
        invoke(name, run, option, own)
    assert own.stat().st_size
    others = {"train.py": b"import torch\n# TYPE holdfast_step\n", "index.html": b"<!doctype html>\n<p>mine\n"}
    for file, data in others.items():
        (tmp_path / file).write_bytes(data)
        assert "was not written by" in invoke(name, run, option, tmp_path / file, code=2).stderr
        assert (tmp_path / file).read_bytes() == data
    before = (run / "run.json").read_bytes()
    invoke(name, run, option, run / "run.json", code=2)
    assert (run / "run.json").read_bytes() == before
    assert steps_of(run) == [1]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_names_of_no_file_are_refused(run, tmp_path, command) -> None:
    """No name, a pipe, and a folder that is not there: said in a line, and a pipe is not waited for."""
    name, option = command
    os.mkfifo(tmp_path / "pipe")
    assert "no name of a file" in invoke(name, run, option, "", code=2).stderr
    assert "was not written by" in invoke(name, run, option, tmp_path / "pipe", code=2).stderr
    assert "cannot write" in invoke(name, run, option, tmp_path / "none" / "x.html", code=1).stderr
    assert (tmp_path / "pipe").is_fifo()


def test_a_page_that_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch) -> None:
    """A verification takes minutes: --html is looked at first, and one document is printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('began', 'w')\n")
    for command in ("verify-resume", "attack"):
        for html, code in ((tmp_path / "none" / "x.html", 1), (tmp_path / "train.py", 2)):
            invoke(command, "--html", html, "--", "python", "train.py", code=code)
            assert not (tmp_path / "began").exists()
    assert (tmp_path / "train.py").read_text() == "open('began', 'w')\n"
