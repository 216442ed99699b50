"""What holds for every test."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

# Started in the background of a script, pytest would hand its deaf ear for Ctrl-C on to the processes under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing where other processes have the cores. Environments of frameworks have no such
# package.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("holdfast")

# When a run with a limit, as CI has one, has to be over (seconds since 1970). What would begin later is skipped, and
# files come in another order every day, so that it is not always the same ones.
_UNTIL = float(os.environ.get("HOLDFAST_TEST_UNTIL", "0")) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _UNTIL is not None:
        files = sorted({item.path for item in items})
        random.Random(int(_UNTIL // 86400)).shuffle(files)  # alike in all processes of a run
        items.sort(key=lambda item: files.index(item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _UNTIL is not None and time.time() > _UNTIL:
        pytest.skip("no time left (HOLDFAST_TEST_UNTIL)")
