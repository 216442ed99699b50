"""Where calls of Linux are missing, everything works by other ways: quick tests, run where they are taken away."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from docs_kit import ROOT

import holdfast

KIT = Path(__file__).parent / "kits" / "lacking"

# "refused": the kernel, a sandbox or the file system says no, to the trainer, its writer and all that they start.
# "unknown": Python does not have the names either, as on macOS. There is no memfd then, and the writer is a thread.
WAYS = ("refused", "unknown")
CHOSEN = {
    "runs": [
        "tests/checkpointer/test_resume_modes.py",
        "tests/run/test_catalog.py",
        "tests/run/test_latest_link.py",
    ],
    "ranks and mirrors": [
        "tests/ranks/test_joint_save.py::test_all_ranks_save_one_checkpoint",
        "tests/ranks/test_joint_runs.py::test_a_killed_run_goes_on_bit_exact",
        "tests/remote/test_mirror_runs.py::test_both_sides_are_runs_of_their_own",
        "tests/remote/test_mirror_runs.py::test_an_empty_disk_resumes_from_the_remote",
    ],
    "restarts": [
        "tests/supervisor/test_holdfast_run.py::test_a_script_that_is_killed_at_each_step_is_started_again_until_it_is_done",
        "tests/supervisor/test_holdfast_run.py::test_the_script_below_a_shell_is_told_and_waited_for",
        "tests/supervisor/test_holdfast_run.py::test_the_status_of_a_script_that_handles_a_signal_is_passed_on",
        "tests/trainers/test_fit_runs.py::test_the_same_script_again_resumes",
    ],
}

SHORT = (("refused", "runs"), ("unknown", "restarts"))

LOOK = """
import errno, fcntl, json, os, sys, tempfile

def says(call):
    try:
        call()
    except AttributeError:
        return "unknown"
    except OSError as error:
        return errno.errorcode[error.errno]
    return "works"

with tempfile.TemporaryFile(dir=sys.argv[1]) as file:
    print(json.dumps({
        "memfd": says(lambda: os.memfd_create("x")),
        "pidfd": says(lambda: os.pidfd_open(os.getpid())),
        "O_DIRECT": says(lambda: os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECT)),
        "flags": says(lambda: fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)),
        "O_TMPFILE": says(lambda: os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE)),
        "proc": [says(lambda: call("/proc/self/stat")) for call in (open, os.stat, os.listdir, os.readlink)],
        "flock": says(lambda: fcntl.flock(file, fcntl.LOCK_EX)),
        "waitid": says(lambda: os.waitid),
    }))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None or not sys.platform.startswith("linux"):
        pytest.skip("needs gcc on Linux")
    library = tmp_path_factory.mktemp("lacking") / "refused_calls.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, KIT / "refused_calls.c", "-ldl"], check=True)
    return library


def environment(library: Path, way: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "HOLDFAST_TEST_"))}
    paths = [str(Path(holdfast.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    if way == "unknown":
        paths.insert(0, str(KIT))
    return {**kept, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(paths)}


def test_the_calls_are_taken_away(library: Path, tmp_path: Path) -> None:
    """Also from a plain interpreter, as the writer process is one; nothing in Holdfast has to help."""

    def seen(way: str, *options: str) -> dict[str, object]:
        command = [sys.executable, *options, "-c", LOOK, str(tmp_path), __file__]
        done = subprocess.run(command, env=environment(library, way), capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    refused = {
        "memfd": "works", "pidfd": "ENOSYS", "O_DIRECT": "EINVAL", "flags": "EINVAL", "O_TMPFILE": "ENOTSUP",
        "proc": ["ENOENT"] * 4, "flock": "ENOLCK", "waitid": "works",
    }  # fmt: skip
    assert seen("refused") == seen("refused", "-I", "-S") == refused
    names = dict.fromkeys(("memfd", "pidfd", "O_DIRECT", "flags", "O_TMPFILE", "waitid"), "unknown")
    assert seen("unknown") == {**refused, **names}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "what"),
    [
        pytest.param(way, what, marks=pytest.mark.slow if (way, what) in SHORT else pytest.mark.long)
        for way in WAYS
        for what in CHOSEN
    ],
)
def test_everything_works_without_them(library: Path, way: str, what: str) -> None:
    """Saves, resumes, kills, loads, retention, ranks, mirrors, restarts: by other ways, slower."""
    few = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "not slow and not long", *CHOSEN[what]],
        cwd=ROOT, env=environment(library, way), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, few)),  # noqa: PLW1509 - no threads here
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = tests.communicate(timeout=540)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
    assert tests.returncode == 0, said[-20_000:]
