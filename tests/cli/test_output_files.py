"""Files that commands write: new ones, or in place of their own earlier output, never of anything else."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import types

import pytest
from catalog_kit import begin, catalog_of, save, steps_of
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


@pytest.fixture
def command(monkeypatch):
    """Run the command as a shell does, on the standard output that `sys.stdout` is; its status."""
    from holdfast.__main__ import main

    def run(*arguments: object) -> object:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return run


@pytest.mark.parametrize("name", ["ls", "latest", "stats"])
def test_an_output_that_is_full_is_said(run, name, command, monkeypatch, capfd) -> None:
    """One line and status 1, whichever way a command prints, and no second error when Python ends."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert command(name, run) == 1
        sys.stdout.flush()
        assert sys.stdout is not full
        sys.stdout.close()
        with contextlib.suppress(OSError):
            full.close()
    said = capfd.readouterr().err
    assert said.startswith("holdfast: cannot write to standard output: ")
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["ls", "latest", "stats"])
def test_no_output_at_all(run, name, command, monkeypatch) -> None:
    """`>&-`: the command does its work."""
    monkeypatch.setattr(sys, "stdout", None)
    assert command(name, run) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_verification_that_is_ended_tidies_up(tmp_path, monkeypatch, number) -> None:
    """Copies of the working directory go and the lives end, as after Ctrl-C; the signals are as before afterwards."""
    places = []

    def examine(*_: object, **__: object) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as place:
            places.append(place)
            signal.raise_signal(number)

    before = signal.signal(number, signal.SIG_DFL)  # nohup leaves SIGHUP ignored
    try:
        for name, function in (("verify-resume", "scripts.verify_script"), ("attack", "attack.attack_script")):
            monkeypatch.setattr(f"holdfast.verify.{function}", examine)
            invoke(name, "--", "python", "train.py", code=128 + number)
            assert not os.path.exists(places.pop())
            assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_figures_are_not_cut(run, monkeypatch) -> None:
    """In a narrow terminal `stats` leaves columns out, and names them."""
    journal = catalog_of(run).index
    journal.register_attempt("00000002", host="h", pid=1)
    journal.journal.add("cost", name="step_0001", step=1, durable_s=1234.5678, held_s=123.45678, lost_s=12345.678)
    journal.save()
    wide = invoke("stats", run).stdout
    assert "1234.6" in wide or "1.23e+03" in wide
    monkeypatch.setattr("holdfast.cli.terminal._PIPE_WIDTH", 50)
    said = invoke("stats", run).stdout
    assert "…" not in said
    assert "..." not in said
    assert "no room for: " in said
    assert max(map(len, said.splitlines()[4:8])) <= 50


def test_names_that_are_no_utf_8(tmp_path) -> None:
    """A page of such a run is written; a script gets the path as it is, byte for byte."""
    root = os.fsencode(tmp_path) + b"/run \xff\xfe\n\xc3\xbc"
    save(begin(LocalStorage(os.fsdecode(root))), 1)
    invoke("page", os.fsdecode(root), "-o", tmp_path / "run.html")
    assert "step_0001" in (tmp_path / "run.html").read_text()
    assert invoke("latest", os.fsdecode(root)).stdout_bytes == root + b"/step_0001\n"
    assert "\\udcff" in invoke("ls", os.fsdecode(root)).stdout


def test_a_terminal_of_another_encoding(run, command, monkeypatch, tmp_path) -> None:
    """What the encoding of standard output lacks is printed as an escape."""
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert command("ls", run) == 0
    assert " \\xb7 attempt 1 " in (tmp_path / "out").read_text()


def test_an_interruption_while_the_commands_are_imported(command, monkeypatch, capsys) -> None:
    """Ctrl-C right after the start ends in a word, as later, and in no traceback."""

    class Slow(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "holdfast.cli.main", Slow("holdfast.cli.main"))
    assert command("ls") == 1
    assert capsys.readouterr().err == "Aborted!\n"
