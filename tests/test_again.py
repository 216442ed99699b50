"""What CI does with a test that fails beside others: once more, alone, and named (`tests/conftest.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CONFTEST = Path(__file__).resolve().with_name("conftest.py")
_TESTS = """
from pathlib import Path
import pytest

HERE = Path(__file__).parent

@pytest.mark.parametrize("name", ["one", "two/[x] y"])
def test_second_time(name):
    mark = HERE / name[:3]
    known = mark.exists()
    mark.touch()
    assert known

def test_never():
    assert not (HERE / "never").exists()
"""


def _pytest(folder: Path, again: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(_CONFTEST.read_text())
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider\n")
    (folder / "test_these.py").write_text(_TESTS)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder, env={**environment, "HOLDFAST_TEST_AGAIN": str(again)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_one_that_passes_alone_is_named(tmp_path: Path) -> None:
    done = _pytest(tmp_path, 2, "-n", "2")
    assert done.returncode == 0, done.stdout
    assert "2 failed, 1 passed" in done.stdout
    assert "test_these.py::test_second_time[one]" in done.stdout.split("once more, alone")[1]
    end = done.stdout.rpartition("failed beside others, passed alone: ")[2]
    assert "assert known" in end  # the text of the first failure
    assert "2 passed alone, failed beside others" in done.stdout.strip().splitlines()[-1]


def test_one_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "never").touch()
    done = _pytest(tmp_path, 3)
    assert done.returncode == 1
    assert "once more, alone" in done.stdout
    assert "1 failed, 2 passed" in done.stdout


def test_three_that_pass_alone_are_red(tmp_path: Path) -> None:
    """Three bounds that do not fit, or three meetings with a race, are no accident of a busy machine."""
    (tmp_path / "test_more.py").write_text(_TESTS.replace("two/[x] y", "three").replace("never", "nothing"))
    done = _pytest(tmp_path, 5)
    assert done.returncode == 1, done.stdout
    assert "3 passed alone, failed beside others" in done.stdout.strip().splitlines()[-1]
    assert "as this run" in done.stdout.strip().splitlines()[-1]


def test_many_are_no_accident(tmp_path: Path) -> None:
    done = _pytest(tmp_path, 1)
    assert done.returncode == 1
    assert "once more" not in done.stdout
