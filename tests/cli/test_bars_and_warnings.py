"""What takes long shows how far it is; what somebody should know is said on stderr, and never as escape codes."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from test_cli import invoke, run  # noqa: F401 - a fixture

import holdfast as hf
from holdfast import _progress
from holdfast._progress import progress_bar
from holdfast.cli.targets import reach
from holdfast.cli.terminal import PlainTable

ODD = "a\x1b[31mb"


@pytest.fixture(autouse=True)
def _arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["holdfast"])


@pytest.fixture
def bars(monkeypatch) -> list:
    """All bars drawn while stderr counts as a terminal: label, total, done."""
    drawn = []

    class Recorder:
        def __init__(self, label, total, after_s, *, counts):
            self.label, self.total, self.done = label, total, 0
            drawn.append(self)

        def update(self, done):
            self.done += done

        def stop(self):
            self.total = self.total() if callable(self.total) else self.total

    monkeypatch.setattr(_progress, "_Bar", Recorder)
    monkeypatch.setattr(_progress, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    return drawn


@pytest.fixture
def saved(tmp_path):
    for name in "ab":
        state = {"model": torch.nn.Linear(300, 200), "rng": hf.RNG, "own": hf.PerRank(torch.ones(3)), "step": 1}
        hf.save(tmp_path / name, state)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "verify {a}",
        "export {a} {out}.pt --to torch",
        "export {a} {out}.safetensors --to safetensors --dtype float16",
        "export {a} {out} --to hf",
        "export {a} {out} --to dcp",
        "import {pt} {out}",
        "cp {a} {out}",
        "diff {a} {b} --only model",
        "average {a} {b} -o {out}",
    ],
)
def test_the_bar_comes_to_its_end(saved, bars, command) -> None:
    """Of all that takes long: the bytes that it counts are those that it has announced."""
    torch.save({"model": torch.nn.Linear(300, 200).state_dict()}, saved / "theirs.pt")
    names = {"a": saved / "a", "b": saved / "b", "out": saved / "out", "pt": saved / "theirs.pt"}
    invoke(*command.format(**names).split(), code=int(command.startswith("diff")))
    bar = bars[0]
    assert 200_000 < bar.total <= bar.done < 1.01 * bar.total


def test_verifying_a_run_counts_checkpoints(run, bars) -> None:  # noqa: F811
    """Without --deep no bytes are read."""
    invoke("verify", run)
    assert (bars[0].done, bars[0].total) == (3, 3)


def test_labels_are_no_escape_codes(monkeypatch) -> None:
    """Names of checkpoints stand beside the bar."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar(f"copy {ODD}", 3) as progress:
        progress(3)
    assert "[31m" in terminal.getvalue()
    assert "\x1b[31m" not in terminal.getvalue()


def test_a_quarantined_checkpoint_is_never_taken_without_a_word(run, tmp_path) -> None:  # noqa: F811
    """By whatever names it."""
    bad, good = run / "step_30", run / "step_20"
    for arguments, code in (
        (("diff", bad, bad), 0),
        (("cp", bad, tmp_path / "copy"), 0),
        (("pin", bad), 0),
        (("verify", bad), 0),
        (("show", bad), 1),
    ):
        result = invoke(*arguments, code=code)
        assert "quarantined" in result.output + result.stderr
        assert "bytes differ" in result.output + result.stderr
    assert "quarantined" not in invoke("diff", good, good).stderr


@pytest.mark.parametrize(
    ("uri", "variable"),
    [
        ("s3://bucket/run", "AWS_ACCESS_KEY_ID"),
        ("gs://bucket/run", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://bucket/run", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("oci://bucket@space/run", "OCI_ACCESS_KEY_ID"),
    ],
)
def test_missing_credentials_are_said_before_the_network_is_asked(uri, variable, monkeypatch, tmp_path, capsys) -> None:
    """With what was looked for; silent once something is there."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_", "GCS_", "GOOGLE_", "AZURE_", "OCI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OCI_REGION", "somewhere")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    reach(uri)
    said = capsys.readouterr().err
    assert f"no credentials for {uri.partition('@')[0]}" in said
    assert variable in said
    monkeypatch.setenv(variable, "x" * 20)
    reach(uri)
    assert capsys.readouterr().err == ""
    reach(str(tmp_path))
    assert capsys.readouterr().err == ""


def test_names_of_new_commands_are_no_escape_codes(tmp_path) -> None:
    """Neither in tables nor in messages; --json has them as they are."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        hf.save(tmp_path / name, {"model": {ODD: torch.full((3,), value), f"{ODD}i": torch.ones(2).int()}, ODD: name})
    for arguments, code in (
        (("diff", tmp_path / "a", tmp_path / "b"), 1),
        (("average", tmp_path / "a", tmp_path / "b", "-o", tmp_path / ODD), 0),
        (("average", tmp_path / "a", tmp_path / "b", "-o", tmp_path / ODD), 1),
        (("show", tmp_path / ODD, "--tensors"), 0),
        (("doctor", tmp_path / ODD, "--bytes", "0"), 0),
    ):
        result = invoke(*arguments, code=code)
        assert "\x1b" not in result.stdout + result.stderr
        assert "[31m" in result.stdout + result.stderr


def test_a_listing_is_aligned_and_coloured_where_that_is_seen(monkeypatch) -> None:
    """Also with names that are two columns wide; without colours in a pipe and under NO_COLOR."""
    from rich.cells import cell_len
    from rich.console import Console

    listing = PlainTable([("name", "left"), ("step", "right"), ("state", "left")])
    listing.add(["日本", "5", "ok"], last="green")
    listing.add([ODD, "12345", ""], style="dim")
    for is_terminal, no_color in ((False, False), (True, True), (True, False)):
        text = io.StringIO()
        out = Console(file=text, force_terminal=is_terminal, no_color=no_color, width=40)
        assert listing.print(out, fitting=True)
        assert ("\x1b[32mok" in text.getvalue()) == (is_terminal and not no_color)
        assert ("\x1b" in text.getvalue()) == (is_terminal and not no_color)
    plain = io.StringIO()
    listing.print(Console(file=plain, width=40))
    header, first, second = plain.getvalue().splitlines()
    assert cell_len(first.partition("ok")[0]) == header.index("state")
    assert second.index("12345") + 5 == header.index("step") + 4
    assert not listing.print(Console(file=io.StringIO(), width=15), fitting=True)
