"""A storage of another package, or of the user's own module, keeps what a path keeps when its trainer is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks_kit import LastingServer

SCENARIOS = str(Path(__file__).with_name("plugin_scenarios.py"))
BOX = Path(__file__).parents[2] / "examples" / "plugin"
MY_STORAGE = """
    from holdfast.errors import StoragePermissionError
    from holdfast_box import BoxStorage


    class MyStorage(BoxStorage):
        # Needs a key, which its description leaves out.

        def __init__(self, folder, secrets=None):
            if (secrets or {}).get("key") != "hunter2":
                raise StoragePermissionError(f"{folder}: no key")
            super().__init__(folder)

        def describe(self):
            return {"kind": f"{__name__}:MyStorage", "folder": self.folder}

        def secrets(self):
            return {"key": "hunter2"}
"""
MY_FILES = """
    from fsspec.implementations.local import LocalFileSystem


    class SlowDisk(LocalFileSystem):
        protocol = "slowdisk"
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Install the package from its folder, as a user would, into a directory that no virtual environment knows."""
    target, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    for file in BOX.iterdir():
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
         "--no-build-isolation", "--target", str(target), str(source)],
        check=True, timeout=120,
    )  # fmt: skip
    (target / "my_storage.py").write_text(textwrap.dedent(MY_STORAGE))
    (target / "my_files.py").write_text(textwrap.dedent(MY_FILES))
    return target


@pytest.fixture(scope="module")
def server(package):
    with LastingServer(preload=("torch", "holdfast.checkpointer", "fsspec", SCENARIOS), path=(package,)) as one:
        yield one


def found_by_lives(server, location, found, *, of_user):
    """Eleven lives of one run, each killed right after its step: step and weight that each has found."""
    for _ in range(11):
        outcome = server.run(f"{SCENARIOS}:trainer", location, str(found), of_user=of_user)
        assert outcome.status == -signal.SIGKILL, outcome.error + outcome.output
    return [tuple(map(int, line.split())) for line in found.read_text().splitlines()]


def test_a_package_s_storage_survives_a_kill_of_its_trainer(server, tmp_path):
    """box:// of an installed package: ten times of ten, the step whose ck.step returned is what the next life finds."""
    found = found_by_lives(server, f"box://{tmp_path}/run", tmp_path / "found", of_user=False)
    assert found == [(step, step) for step in range(11)]


def test_a_users_own_storage_survives_a_kill_of_its_trainer(server, tmp_path):
    """A class of a module beside the script, with a key that only its own processes are told: the same."""
    found = found_by_lives(server, f"{tmp_path}/run", tmp_path / "found", of_user=True)
    assert found == [(step, step) for step in range(11)]
    # Not by rglob: the writer of the last life may still delete.
    files = [Path(folder, name) for folder, _, names in os.walk(tmp_path) for name in names]
    told = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            told += [file] if b"hunter2" in file.read_bytes() else []
    assert not told


def test_a_file_system_of_the_users_module_is_written_by_the_writer_process(server, tmp_path):
    """A class of fsspec that only the trainer's sys.path leads to: no thread, no error."""
    step, said = server.run(f"{SCENARIOS}:fsspec_trainer", str(tmp_path), "my_files").checked()
    assert step == 1
    assert not [line for line in said if "thread" in line]


def test_a_file_system_of_the_script_itself_is_written_by_a_thread(server, tmp_path):
    """Another process cannot import a class of __main__: that is said, with what it costs and what to do."""
    step, said = server.run(f"{SCENARIOS}:fsspec_trainer", str(tmp_path), "my_files", is_main=True).checked()
    assert step == 1
    (line,) = [line for line in said if "thread" in line]
    assert "is lost" in line
    assert "__main__" in line


FIT = """
    import sys

    import torch

    import holdfast as hf
    from holdfast.torch import TorchTrainer


    def train(config):
        start = hf.get_checkpoint()
        step = hf.load(start)["step"] if start else 0
        for step in range(step + 1, step + 3):
            hf.report({"step": step}, state={"step": step, "w": torch.full((1000,), float(step))})


    where, own = sys.argv[1:]
    run = {"storage_path": where}
    if own == "own":
        import my_storage

        run = {"storage_filesystem": my_storage.MyStorage(where, {"key": "hunter2"})}
    for _ in range(2):
        result = TorchTrainer(train, run_config=hf.RunConfig(name="run", **run)).fit()
        print(type(result.checkpoint.storage.below).__name__, hf.load(result.checkpoint)["step"])
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("own", ["own", pytest.param("package", marks=pytest.mark.slow)])
def test_workers_of_a_trainer_use_it(package, tmp_path, own):
    """TorchTrainer takes a plug-in, by its location and as an object: its workers save there and go on from there."""
    script = tmp_path / "fit.py"
    script.write_text(textwrap.dedent(FIT))
    where = f"box://{tmp_path}/runs" if own == "package" else str(tmp_path / "runs")
    done = subprocess.run(
        [sys.executable, str(script), where, own], env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kind = "MyStorage" if own == "own" else "BoxStorage"
    said = [line for line in done.stdout.splitlines() if line.startswith(kind)]
    assert said == [f"{kind} 2", f"{kind} 4"], done.stdout[-2000:]
