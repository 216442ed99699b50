"""Warnings say who speaks."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast._log import get_logger

SOURCE = Path(__file__).resolve().parents[1] / "src" / "holdfast"


def test_warnings_begin_with_the_name_of_the_package(caplog: pytest.LogCaptureFixture) -> None:
    """With arguments too, once however often the logger is asked for; what says it already is left alone."""
    caplog.set_level(logging.INFO)
    for _ in range(2):
        logger = get_logger("area")
    logger.warning("%d files of %s", 3, "100%")
    logger.error("holdfast.attrs: no")
    logger.info("quiet")
    assert [one.getMessage() for one in caplog.records] == [
        "holdfast: 3 files of 100%", "holdfast.attrs: no", "quiet",
    ]  # fmt: skip


def test_a_script_without_logging_shows_them_so() -> None:
    """What a user sees on stderr, with Python's own last resort."""
    script = "from holdfast._log import get_logger; get_logger('data').warning('replayed')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "holdfast: replayed\n"


def test_every_logger_of_the_package_is_made_here() -> None:
    """A module that calls logging.getLogger itself would speak without a name."""
    own = [
        path.name
        for path in SOURCE.rglob("*.py")
        if path.name != "_log.py" and re.search(r"= logging\.getLogger\(", path.read_text())
    ]
    assert own == []
