"""What holds for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forked_kit import WriterServer
    from ranks_kit import RankServer

# Started in the background of a script, pytest would hand its deaf ear for Ctrl-C on to the processes under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two processes of tests share two cores with the writers that they start. The tensors are small, and threads of OpenMP
# that wait for one another there burn the cores: a training of the loop trainer's tests took ten times as long. Set
# before torch is loaded; processes of tests get it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says nothing where other processes have the cores. Environments of frameworks have no such
# package.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, Phase, settings

    # `make mutants` asks whether a test fails, and not for the smallest example.
    left_out = {Phase.shrink, Phase.explain} if os.environ.get("HOLDFAST_TEST_SHRINK") == "0" else set()
    phases = [phase for phase in Phase if phase not in left_out]
    settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=phases)
    settings.load_profile("holdfast")

# When a run with a limit, as CI has one, has to be over (seconds since 1970). What would begin later is skipped, and
# files come in another order every day, so that it is not always the same ones.
_UNTIL = float(os.environ.get("HOLDFAST_TEST_UNTIL", "0")) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is made here stays: to look for garbage among it is a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _UNTIL is not None:
        files = sorted({item.path for item in items})
        random.Random(int(_UNTIL // 86400)).shuffle(files)  # alike in all processes of a run
        items.sort(key=lambda item: files.index(item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _UNTIL is not None and time.time() > _UNTIL:
        pytest.skip("no time left (HOLDFAST_TEST_UNTIL)")


# To import torch takes longer than most tests: the processes that they start are forked from one that has it.
_HERE = Path(__file__).parent
_FOLDERS = [_HERE / folder for folder in ("kits", "crash", "trainers/loop")]
_CASES = (
    "crash/crash_scenarios", "crash/handed_scenarios", "crash/sleeper_scenarios", "frameworks/shared/shard_cases",
    "kits/guard_training", "ranks/different_cases", "ranks/fault_cases", "ranks/joint_cases", "ranks/rescue_cases",
    "ranks/resplit_cases", "ranks/wrapped_cases", "remote/staged_rank_cases", "trainers/loop/rank_cases",
    "trainers/loop/sharded_cases",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """What is there before the tests of a module is large: collections in forks of this process would copy it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    """One server of ranks, and of single processes, for each process of tests."""
    from ranks_kit import RankServer

    with RankServer(preload=["docs_kit", *(str(_HERE / f"{case}.py") for case in _CASES)], path=_FOLDERS) as one:
        yield one


# A life of a run waits for a disk some sixty times (fsync). What becomes of files on one is shown by the tests of
# storage, format, writer, damage, single_files, crash, ranks, trainers and others, and by all sweeps; these quick tests
# keep theirs in memory, by the same calls, where the machine has room there. Not those that need a disk's slowness.
_IN_MEMORY = (
    "checkpoint/", "checkpointer/", "cli/", "copying/", "crash/test_intake_sweep.py", "crash/test_power_cuts.py",
    "crash/test_run_faults.py", "crash/test_twin_runs.py", "crash/test_writer_deaths.py", "frameworks/shared/",
    "loops/", "page/", "remote/", "run/", "test_docs.py", "trainers/loop/",
)  # fmt: skip
_ON_DISK = ("checkpointer/test_rescue.py", "trainers/loop/test_loop_ranks.py", "trainers/loop/test_loop_saver.py")
_MEMORY = Path("/dev/shm")
_ROOM = 2 << 30


def _file_of(request: pytest.FixtureRequest) -> str:
    return request.path.relative_to(_HERE).as_posix()


def _is_quick(request: pytest.FixtureRequest) -> bool:
    return not any(request.node.get_closest_marker(mark) for mark in ("slow", "long"))


@pytest.fixture(scope="session")
def _memory() -> Iterator[Path]:
    """Where folders in memory are; what tests and late writers leave beside them goes with it."""
    with tempfile.TemporaryDirectory(prefix="holdfast-tests-", dir=_MEMORY, ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of the test's own; in memory for some tests."""
    file = _file_of(request)
    is_light = file.startswith(_IN_MEMORY) and not file.startswith(_ON_DISK)
    if not (is_light and _is_quick(request) and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM):
        yield request.getfixturevalue("tmp_path")
        return
    with tempfile.TemporaryDirectory(dir=request.getfixturevalue("_memory"), ignore_cleanup_errors=True) as path:
        yield Path(path)


# Where quick tests start writers by the dozen, about what these do: their modules take longer than most saves.
_STARTS_WRITERS = (
    "checkpoint/", "checkpointer/", "cli/", "crash/", "frameworks/shared/", "loops/", "page/", "ranks/", "remote/",
    "run/", "single_files/", "test_docs.py", "trainers/", "writer/test_attempts.py", "writer/test_client.py",
    "writer/test_commit_parts.py", "writer/test_inplace.py", "writer/test_intake.py", "writer/test_run.py",
)  # fmt: skip


@pytest.fixture(scope="session")
def writers() -> Iterator[WriterServer]:
    """One server of writers for each process of tests."""
    from forked_kit import WriterServer

    with WriterServer() as one:
        yield one


@pytest.fixture(autouse=True)
def _forked_writers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Writers that the quick tests of some folders and files start have their modules; others are started as ever."""
    if not _file_of(request).startswith(_STARTS_WRITERS) or not _is_quick(request):
        yield
        return
    from forked_kit import WRITERS, forked_interpreters

    with forked_interpreters(request.getfixturevalue("writers"), WRITERS):
        yield


@pytest.fixture
def forked(ranks: RankServer) -> Iterator[None]:
    """Interpreters that a test, or all of a module, starts have torch: `pytest.mark.usefixtures("forked")`."""
    from forked_kit import forked_interpreters

    with forked_interpreters(ranks):
        yield


@pytest.fixture(scope="module")
def all_forked(ranks: RankServer) -> Iterator[None]:
    """The same for all of a module, with what its own fixtures start once for all tests."""
    from forked_kit import forked_interpreters

    with forked_interpreters(ranks):
        yield


def pytest_unconfigure() -> None:
    if "object_kit" in sys.modules:
        sys.modules["object_kit"].end_servers()


# CI runs thousands of tests that kill, time and starve real processes, on two cores that other work may share. Up to
# this many that failed beside the others run once more when these are done, alone. One that fails again fails the run,
# and so do `_SUSPICIOUS` that pass: bounds do not fit, or a race of the product was met. Those that passed are the last
# thing that is printed, each with the text of its first failure: they are looked into, never shrugged off.
_AGAIN = int(os.environ.get("HOLDFAST_TEST_AGAIN", "0"))
_AGAIN_S = 900
_SUSPICIOUS = 3
_failed: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.setdefault(report.nodeid, report.longreprtext)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None]:
    yield
    if hasattr(session.config, "workerinput") or exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    if not 0 < len(_failed) <= _AGAIN:
        return
    print(f"\n\nonce more, alone (HOLDFAST_TEST_AGAIN={_AGAIN}):", *_failed, sep="\n  ", flush=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_TEST_AGAIN", "PYTEST_"))}
    environment.pop("HOLDFAST_TEST_UNTIL", None)
    try:
        again = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "0", *_failed],
            cwd=session.config.rootpath, env=environment, timeout=_AGAIN_S, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        again = 1
    if again == 0:
        is_red = len(_failed) >= _SUSPICIOUS
        for name, text in _failed.items():
            print(f"\nfailed beside others, passed alone: {name}\n\n{text}", flush=True)
        end = f"; {_SUSPICIOUS} or more are red, as this run" if is_red else ""
        print(
            f"\n{len(_failed)} passed alone, failed beside others (above, with their first failures): look into each "
            f"before an issue is called resolved{end}\n",
            flush=True,
        )
        if not is_red:
            session.exitstatus = pytest.ExitCode.OK
