"""Real lives of a run against a model of what retention keeps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from retention_model import Lives, Machine, next_name, play

from holdfast.storage import MemoryStorage, resolve


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed, capsys):
    """What is on the storage after every action is what the model says, with NaN, missing metrics, pins and kills."""
    play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_histories(seed, capsys):
    """The same for many more."""
    play(seed, steps=120)


Machine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestMachine = Machine.TestCase


def test_foreign_directories_survive():
    """Two runs under one root and a directory of somebody else: retention touches neither."""
    storage = resolve(f"memory://oracle-{next_name()}")
    assert isinstance(storage, MemoryStorage)
    storage.put("b/note.txt", b"keep")
    lives = Lives(storage, 1, None, None)
    lives.start()
    for _ in range(4):
        lives.step(True, None)
    lives.check()
    lives.kill()
    assert storage.read("b/note.txt") == b"keep"
