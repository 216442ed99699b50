"""`make demo` says what it saw: equal, not equal, or that there was nothing to compare."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from docs_kit import ROOT, run_example


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(600)  # of two processes that train, beside whatever else the machine does
def test_three_kills_and_the_same_bits(tmp_path: Path) -> None:
    """The whole demo, shorter: `holdfast run` sees three kills, and everything that is compared is equal."""
    said = run_example("demo.py", tmp_path, "--steps", "60", "--generate", "20", timeout_s=560)
    assert "Nothing was lost: three kills, the same bits." in said
    assert "DIFFERS" not in said
    output = (tmp_path / "demo-runs/killed/output.txt").read_text()
    assert len(re.findall(r"holdfast run: life \d ended after .*: killed by SIGKILL", output)) == 3


@pytest.mark.parametrize(("command", "word"), [("sleep 60", "STALLED"), ("false", "FAILED")])
def test_nothing_was_compared(demo: ModuleType, command: str, word: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """A trainer that stands still or fails is called so, never a difference."""

    class Still(demo.Trainer):  # type: ignore[name-defined, misc]
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            self.command = command.split()

    monkeypatch.setattr(demo, "Trainer", Still)
    monkeypatch.setattr(demo, "STALL_S", 0.2)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--directory", str(tmp_path)])
    assert demo.main() == 1
    said = capsys.readouterr().out
    assert f"{word}, nothing was compared" in said
    assert "NOT EQUAL" not in said
