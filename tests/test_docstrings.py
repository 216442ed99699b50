"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import importlib
import tempfile
from pathlib import Path

import pytest
from docs_kit import ROOT

_SRC = ROOT / "src"


def has_examples(file: Path) -> bool:
    """Whether a module has an example that is run, see `doctest.SKIP`."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return any(line.startswith(">>> ") and "+SKIP" not in line for line in lines)


MODULES = sorted(
    ".".join(file.relative_to(_SRC).with_suffix("").parts).removesuffix(".__init__")
    for file in _SRC.rglob("*.py")
    if has_examples(file)
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They run in an empty folder; those that need what a test has not say ``+SKIP``."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs an optional package: {error}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    failed, _ = doctest.testmod(module)
    assert not failed, capfd.readouterr().out
