"""Composer 0.32.1 and this trainer do the same where docs/migrate-from-composer.md says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from schedule_kit import run

SCRIPT = Path(__file__).with_name("composer_script.py")
ROOT = Path(__file__).resolve().parents[3]
# What Composer really saved (epoch:batch): 5 batches an epoch, of 5, 5, 5, 5 and 2 samples.
BY_SAMPLES = [
    ("1ep", "2ep", "1:5 2:10"),
    ("1ep", "7ba", "1:5 1:7"),
    ("1ep", "33sp", "1:5 1:8"),
    ("1", "2ep", "1:5 2:10"),
    ("1", "7ba", "1:5 1:7"),
    ("1", "33sp", "1:5 1:8"),
    ("2ep", "2ep", "2:10"),
    ("2ep", "7ba", "1:7"),
    ("2ep", "33sp", "1:8"),
    ("3ep", "2ep", "2:10"),
    ("3ep", "7ba", "1:7"),
    ("3ep", "33sp", "1:8"),
    ("1ba", "2ep", "0:1 0:2 0:3 0:4 0:5 1:6 1:7 1:8 1:9 1:10"),
    ("1ba", "7ba", "0:1 0:2 0:3 0:4 0:5 1:6 1:7"),
    ("1ba", "33sp", "0:1 0:2 0:3 0:4 0:5 1:6 1:7 1:8"),
    ("3ba", "2ep", "0:3 1:6 1:9 2:10"),
    ("3ba", "7ba", "0:3 1:6 1:7"),
    ("3ba", "33sp", "0:3 1:6 1:8"),
    ("5ba", "2ep", "0:5 1:10"),
    ("5ba", "7ba", "0:5 1:7"),
    ("5ba", "33sp", "0:5 1:8"),
    ("4ba", "2ep", "0:4 1:8 2:10"),
    ("4ba", "7ba", "0:4 1:7"),
    ("4ba", "33sp", "0:4 1:8"),
    ("100ba", "2ep", "2:10"),
    ("100ba", "7ba", "1:7"),
    ("100ba", "33sp", "1:8"),
    ("10sp", "2ep", "0:2 0:4 1:7 1:9 2:10"),
    ("10sp", "7ba", "0:2 0:4 1:7"),
    ("10sp", "33sp", "0:2 0:4 1:7 1:8"),
    ("7sp", "2ep", "0:2 0:3 0:5 1:7 1:8 1:9 2:10"),
    ("7sp", "7ba", "0:2 0:3 0:5 1:7"),
    ("7sp", "33sp", "0:2 0:3 0:5 1:7 1:8"),
    ("1sp", "2ep", "0:1 0:2 0:3 0:4 0:5 1:6 1:7 1:8 1:9 1:10"),
    ("1sp", "7ba", "0:1 0:2 0:3 0:4 0:5 1:6 1:7"),
    ("1sp", "33sp", "0:1 0:2 0:3 0:4 0:5 1:6 1:7 1:8"),
    ("0.1dur", "2ep", "0:1 0:2 0:3 0:4 0:5 1:6 1:7 1:8 1:9 1:10"),
    ("0.1dur", "7ba", "0:1 0:2 0:3 0:4 0:5 1:6 1:7"),
    ("0.1dur", "33sp", "0:1 0:2 0:3 0:4 1:6 1:7 1:8"),
    ("0.3dur", "2ep", "0:3 1:6 1:9 2:10"),
    ("0.3dur", "7ba", "0:3 1:6 1:7"),
    ("0.3dur", "33sp", "0:2 0:4 1:7 1:8"),
    ("0.5dur", "2ep", "0:5 1:10"),
    ("0.5dur", "7ba", "0:4 1:7"),
    ("0.5dur", "33sp", "0:4 1:8"),
    ("1dur", "2ep", "1:10"),
    ("1dur", "7ba", "1:7"),
    ("1dur", "33sp", "1:8"),
    ("0.25dur", "2ep", "0:3 1:6 1:9 2:10"),
    ("0.25dur", "7ba", "0:2 0:4 1:6 1:7"),
    ("0.25dur", "33sp", "0:2 0:4 1:6 1:8"),
]
# 5 batches an epoch, of 4 samples with 7 tokens each.
BY_TOKENS = [
    ("50tok", "2ep", "0:2 0:4 1:6 1:8 1:9 2:10"),
    ("50tok", "200tok", "0:2 0:4 1:6 1:8"),
    ("28tok", "2ep", "0:1 0:2 0:3 0:4 0:5 1:6 1:7 1:8 1:9 1:10"),
    ("28tok", "200tok", "0:1 0:2 0:3 0:4 0:5 1:6 1:7 1:8"),
    ("100tok", "2ep", "0:4 1:8 2:10"),
    ("100tok", "200tok", "0:4 1:8"),
]
# Composer rounds a share up to whole batches first; here the shares themselves are crossed.
OTHERWISE = {("0.3dur", "7ba"): "0:3 0:5 1:7", ("0.25dur", "2ep"): "0:3 0:5 1:8 1:10"}


def saves(interval: str, duration: str, sizes: list[int], tokens: int) -> str:
    found = run(int(interval) if interval.isdigit() else interval, duration, num_batches=5, sizes=sizes, tokens=tokens)
    return " ".join(name.removeprefix("ep").replace("-ba", ":") for name in found)


@pytest.mark.parametrize(("interval", "duration", "expected"), BY_SAMPLES)
def test_saves_by_samples(interval: str, duration: str, expected: str) -> None:
    """Saves fire when Composer's do."""
    expected = OTHERWISE.get((interval, duration), expected)
    assert saves(interval, duration, [5, 5, 5, 5, 2], 0) == expected


@pytest.mark.parametrize(("interval", "duration", "expected"), BY_TOKENS)
def test_saves_by_tokens(interval: str, duration: str, expected: str) -> None:
    """Saves by tokens fire when Composer's do."""
    assert saves(interval, duration, [4], 7) == expected


def answers(python: str, which: str, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, **({"PYTHONPATH": str(ROOT / "src")} if which == "holdfast" else {"PYTHONPATH": ""})}
    out = folder / f"{which}.json"
    command = [python, str(SCRIPT), which, str(folder / which), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.skipif("HOLDFAST_TEST_COMPOSER" not in os.environ, reason="it names a Python that has mosaicml")
def test_beside_composer(tmp_path: Path) -> None:
    """One script, run by both: names, links, lists of checkpoints and their contents are the same."""
    theirs = answers(os.environ["HOLDFAST_TEST_COMPOSER"], "composer", tmp_path)
    ours = answers(sys.executable, "holdfast", tmp_path)
    assert ours.keys() == theirs.keys()
    assert {name: ours[name] for name in theirs} == theirs
