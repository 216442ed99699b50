"""What is published works where there is nothing else: the wheel and the source, in an environment of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from docs_kit import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_TRIED = """
    import pathlib, holdfast
    from holdfast._optional import install_command

    assert "site-packages" in holdfast.__file__, holdfast.__file__
    assert (pathlib.Path(holdfast.__file__).parent / "py.typed").exists()
    print(install_command("s3"))
"""

# What examples/plugin offers: a storage, a tracker, and files of models.
_PLUGGED = """
    import json, os, torch, holdfast

    os.environ["HOLDFAST_JOURNAL"] = "journal"
    model = torch.nn.Linear(2, 2)
    model.pretrained_cfg, model.num_classes = {"architecture": "line"}, 2
    place = f"box://{os.getcwd()}/box"
    with holdfast.Checkpointer(place, {"model": model}, every=1, on_commit="journal", model_files="timm") as ck:
        for _ in range(2):
            ck.step()
    ck.options.on_commit[0].wait()
    with ck.latest().as_directory() as folder:
        assert json.load(open(f"{folder}/config.json"))["architecture"] == "line"
"""
_ONLY_SOURCE = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command without anything of the checkout in its environment; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """Return the folder with both, as `python -m build` makes them."""
    with TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
        yield Path(folder)


def test_metadata(packages: Path) -> None:
    """An index takes both, README rendered; the source is small and has no data, wheels or results in it."""
    source, wheel = next(packages.glob("*.tar.gz")), next(packages.glob("*.whl"))
    assert run(sys.executable, "-m", "twine", "check", "--strict", source, wheel).count("PASSED") == 2
    assert source.stat().st_size <= 2_000_000
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"src/holdfast/py.typed", "docs/quickstart.md", "examples/demo.py", "LICENSE", "SECURITY.md"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/")) or name.endswith((".whl", ".pyc"))]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.partition("/")[0] for name in names} == {"holdfast", "holdfast-0.1.0.dist-info"}
    assert {"holdfast/page/page.js", "holdfast/page/page.css", "holdfast/py.typed"} <= names
    for line in (
        "Author: The Holdfast developers", "License-Expression: Apache-2.0", "Classifier: Typing :: Typed",
        "Classifier: Programming Language :: Python :: 3.13", "Requires-Python: >=3.10",
    ):  # fmt: skip
        assert f"\n{line}\n" in metadata, line
    assert "Project-URL" not in metadata  # there is none to name yet


def test_both_work_in_an_environment_with_nothing_else(packages: Path) -> None:
    """README's first example trains, is found by the command and is resumed; torch and the dependencies are enough."""
    source, wheel = next(packages.glob("*.tar.gz")), next(packages.glob("*.whl"))
    example = blocks(ROOT / "README.md", "python")[0]
    with TemporaryDirectory() as bare:
        run(sys.executable, "-m", "venv", bare)
        python, folder = Path(bare) / "bin" / "python", Path(bare) / "work"
        folder.mkdir()
        (folder / "train.py").write_text(example)
        (folder / "tried.py").write_text(textwrap.dedent(_TRIED))
        install = (python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
        run(*install, "--constraint", ROOT / "constraints.txt", wheel)
        for package in (wheel, source):
            run(*install, "--no-deps", "--force-reinstall", package)
            run(python, "train.py", cwd=folder)
            assert run(python, "tried.py", cwd=folder).strip() == f"pip install 'holdfast[s3] @ {package.as_uri()}'"
            assert "step_00000024" in run(python, "-m", "holdfast", "ls", "runs/first", cwd=folder)
            assert "step_00000024" in run(Path(bare) / "bin" / "holdfast", "verify", "--deep", "runs/first", cwd=folder)
        plugin = shutil.copytree(ROOT / "examples" / "plugin", Path(bare) / "plugin", ignore=_ONLY_SOURCE)
        run(
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
            "--disable-pip-version-check", "--wheel-dir", folder, plugin,
        )  # fmt: skip
        run(*install, "--no-deps", next(folder.glob("holdfast_box-*.whl")))
        (folder / "plugged.py").write_text(textwrap.dedent(_PLUGGED))
        run(python, "plugged.py", cwd=folder)
        assert "step_00000002" in run(python, "-m", "holdfast", "verify", "--deep", f"box://{folder}/box", cwd=folder)
        assert len((folder / "journal").read_text().splitlines()) == 2
        wrong = run(python, "-m", "pip", "check", "--disable-pip-version-check")
        assert "No broken requirements" in wrong


def test_the_workflow_calls_targets_that_exist() -> None:
    """What a host of the repository runs is what the Makefile has, nothing else."""
    makefile = (ROOT / "Makefile").read_text()
    workflow = (ROOT / ".github/workflows/checks.yml").read_text()
    commands = re.findall(r"- run: (.+)$", workflow, re.MULTILINE)
    assert commands == ["make lint test", "make docs"]
    for target in {word for command in commands for word in command.split()[1:]}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
