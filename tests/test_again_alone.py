"""What conftest.py does with tests that fail beside others and pass alone: listed last, and three of them are red."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FLAKY = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({count}))
def test_flaky(number):
    mark = pathlib.Path(__file__).with_name(f"seen-{{number}}")
    seen = mark.exists()
    mark.touch()
    assert seen, f"the first failure of {{number}}"
"""


@pytest.mark.parametrize(("count", "red"), [(2, False), (3, True)])
def test_passing_alone(tmp_path: Path, count: int, red: bool) -> None:
    """Each is named at the very end with the text of its first failure; three fail the run."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path / "conftest.py")
    (tmp_path / "test_some.py").write_text(FLAKY.format(count=count))
    environment = {**os.environ, "HOLDFAST_TEST_AGAIN": "5"}
    environment.pop("HOLDFAST_TEST_UNTIL", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path, env={**environment, "PYTEST_ADDOPTS": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if red else 0), done.stdout + done.stderr
    end = done.stdout.rpartition("failed beside others, passed alone: ")
    assert "the first failure of" in end[2]
    assert f"{count} failed beside others and passed alone" in done.stdout.strip().splitlines()[-1]
