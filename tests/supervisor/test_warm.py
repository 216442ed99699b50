"""The spare interpreter becomes the next life, exactly as a new one would have begun, or says why it does not fit."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_holdfast_run import STEPS, finished

import holdfast
from holdfast.run.life import MODULES, LifeReport
from holdfast.run.python_command import PythonCommand

WAITS = """
def wait(ready, seconds=30):
    until = time.monotonic() + seconds
    while not ready() and time.monotonic() < until: time.sleep(0.01)
def has_spare():
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    return any(b"spare.py" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)
"""
DIES_BESIDE_A_SPARE = """
advance()
if step == 1:
    wait(has_spare)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def lives_of(*command: str | Path, env: dict[str, str] | None = None) -> tuple[str, str]:
    """Run a command below `holdfast run` until it is done, and return its output and what was said."""
    words = [sys.executable, "-m", "holdfast", "run", "--", *map(os.fspath, command)]
    package = {"PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    found = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **package, **(env or {})}
    )
    assert found.returncode == 0, found.stderr
    return found.stdout, found.stderr


def installed(home: Path, **modules: str) -> Path:
    """Make an environment with these modules installed, and return its interpreter."""
    venv.create(home / "venv", symlinks=True)
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    for name, source in modules.items():
        (packages / f"{name}.py").write_text(source)
    return home / "venv" / "bin" / "python"


def test_the_next_life_begins_with_its_imports_done(tmp_path: Path) -> None:
    """In the first life the module is not there before its import, in the second it is; all else is as in the first."""
    script = (
        "import sys\nbefore = 'wsgiref.handlers' in sys.modules\nimport wsgiref.handlers\n"
        + STEPS
        + WAITS
        + """
def here_is(): return [sys.argv[1:], __name__, __file__, sys.path[0], os.getcwd(), vars().get("__spec__"),
                       sys.modules["__main__"].advance is advance, sys.flags.dev_mode, os.getpgid(0) == os.getpid()]
(here / f"seen-{lives.read_text()}").write_text(repr(here_is()))
(here / f"before-{lives.read_text()}").write_text(str(before))
"""
        + DIES_BESIDE_A_SPARE
    )
    status, _, err = finished(script, tmp_path)
    assert status == 0, err
    assert [(tmp_path / f"before-{life}").read_text() for life in (1, 2)] == ["False", "True"]
    assert (tmp_path / "seen-1").read_text() == (tmp_path / "seen-2").read_text()


def test_a_life_that_was_a_spare_ends_as_any_other(tmp_path: Path) -> None:
    """Its exception is printed without our frames, and is the cause of its death."""
    script = (
        STEPS
        + WAITS
        + DIES_BESIDE_A_SPARE
        + """
if step == 2: raise OSError("second life")
"""
    )
    status, _, err = finished(script, tmp_path)
    assert status == 0, err
    assert "exit status 1 (OSError: second life" in err
    assert "spare.py" not in err
    assert "python_command.py" not in err


def test_a_script_that_changes_its_environment_starts_cold_and_that_is_said_once(tmp_path: Path) -> None:
    """What it sets before its imports (threads, devices) might be read by them: the spare is dropped."""
    script = (
        "import os\nos.environ['OMP_NUM_THREADS'] = '3'\n"
        + STEPS
        + WAITS
        + """
advance()
if step < 3:
    if step == 1: wait((Path(os.environ["HOLDFAST_LIFE"]).parent / "refusal").exists)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    status, _, err = finished(script, tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert status == 0, err
    assert err.count("no spare interpreter is kept: the script changes its environment (OMP_NUM_THREADS)") == 1


def test_a_spare_that_refuses_when_it_is_to_begin_costs_no_life(tmp_path: Path) -> None:
    """The life before dies while the spare still imports: what comes next is life 2, and nothing failed in between."""
    python = installed(
        tmp_path, large="import sys, time\nif any('spare.py' in word for word in sys.orig_argv): time.sleep(2)"
    )
    script = "import os, large\nos.environ['OMP_NUM_THREADS'] = '3'\n" + STEPS + WAITS + DIES_BESIDE_A_SPARE
    (tmp_path / "script.py").write_text(script)
    _, err = lives_of(python, tmp_path / "script.py", tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert err.count("no spare interpreter is kept: the script changes its environment (OMP_NUM_THREADS)") == 1
    assert "exit status 1" not in err
    assert (tmp_path / "lives").read_text() == "2"


@pytest.mark.parametrize("is_module", [False, True])
def test_the_path_of_a_life_that_was_a_spare_is_that_of_a_safe_path(tmp_path: Path, is_module: bool) -> None:
    """With PYTHONSAFEPATH the folder of the script is not on it, in no life, and none is lost."""
    script = STEPS + WAITS + "(here / f'path-{lives.read_text()}').write_text(repr(sys.path))\n" + DIES_BESIDE_A_SPARE
    (tmp_path / "its_script.py").write_text(script)
    paths = [str(Path(holdfast.__file__).parents[1]), *([str(tmp_path)] if is_module else [])]
    words = ["-m", "its_script"] if is_module else [tmp_path / "its_script.py"]
    _, err = lives_of(
        sys.executable, *words, tmp_path, env={"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    )
    assert err.count("ended after") == 1, err
    assert (tmp_path / "lives").read_text() == "2"
    assert (tmp_path / "path-1").read_text() == (tmp_path / "path-2").read_text()


@pytest.mark.parametrize("folder", ["", "lib"])
def test_a_module_beside_the_script_is_not_mistaken_for_an_installed_one(tmp_path: Path, folder: str) -> None:
    """A spare would give an installed package the installed module of that name, and the script too: there is none."""
    python = installed(tmp_path, a_package="import common", common="whose = 'installed'")
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "common.py").write_text("whose = 'own'")
    (tmp_path / "script.py").write_text(
        f"import sys\nif {folder!r}: sys.path.insert(0, {str(tmp_path / folder)!r})\n"
        "import a_package, common\nprint(common.whose, a_package.common.whose, flush=True)\n"
        + STEPS
        + WAITS
        + """
advance()
if step == 1:
    wait((Path(os.environ["HOLDFAST_LIFE"]).parent / "refusal").exists, 3)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    out, err = lives_of(python, tmp_path / "script.py", tmp_path)
    assert out == "own own\n" * 2
    assert err.count("no spare interpreter is kept: modules beside the script have the names of installed ones") == 1
    assert "(common)" in err


def test_a_spare_below_another_supervisor_reports_to_none(tmp_path: Path) -> None:
    """It is no life yet; the folder of the life that its supervisor is part of is not its own."""
    script = STEPS + WAITS + (
        "advance()\nif step == 1:\n    wait(has_spare)\n"
        "    for pid in Path(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read_text().split():\n"
        "        if b'spare.py' in Path(f'/proc/{pid}/cmdline').read_bytes():\n"
        "            print(b'HOLDFAST_LIFE' in Path(f'/proc/{pid}/environ').read_bytes())"
    )  # fmt: skip
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "outer").mkdir()
    out, _ = lives_of(sys.executable, tmp_path / "script.py", tmp_path, env={"HOLDFAST_LIFE": str(tmp_path / "outer")})
    assert out == "False\n"


def test_what_imports_print_is_not_printed_by_a_life_that_was_a_spare(tmp_path: Path) -> None:
    """Not later either: what Python and C have in their buffers is gone before the life begins."""
    talks = "import ctypes\nprint('of Python')\nctypes.CDLL(None).printf(b'of C\\n')"
    python = installed(tmp_path, talks=talks)
    (tmp_path / "script.py").write_text(
        STEPS + "before = 'talks' in sys.modules\nimport talks\nprint('life', step, before)\n"
        + WAITS + DIES_BESIDE_A_SPARE
    )  # fmt: skip
    out, _ = lives_of(python, tmp_path / "script.py", tmp_path, env={"PYTHONUNBUFFERED": ""})
    assert out == "life 1 True\n"


@pytest.mark.parametrize("changes", [False, True])
def test_what_a_step_imports_is_imported_ahead_unless_the_environment_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    """Those modules may have read a variable that the spare interpreter does not have."""
    monkeypatch.setenv("HOLDFAST_LIFE", os.fspath(tmp_path))
    monkeypatch.delitem(sys.modules, "wsgiref.handlers", raising=False)
    monkeypatch.setitem(sys.modules, "a_stub", SimpleNamespace(__file__=SimpleNamespace()))
    life = LifeReport.begin(uri="run", attempt=1, rank=0)
    assert life is not None
    life.trains(0, requeue=85, wait_s=1)
    if changes:
        monkeypatch.setenv("HOLDFAST_KNOB", "1")
    importlib.import_module("wsgiref.handlers")
    life.stepped(1)
    told = json.loads((tmp_path / MODULES).read_bytes())
    assert ("wsgiref.handlers" in told["modules"]) is not changes
    assert "HOLDFAST_KNOB" not in told["environment"]


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("python train.py --lr 1", ["train.py", "--lr", "1"]),
        ("/usr/bin/python3.11 -u -X dev -m pkg.train", None),
        ("python -u -Wignore -m pkg.train a", ["pkg.train", "a"]),
        ("python -c pass", None),
        ("python -I train.py", None),
        ("python -P train.py", None),
        ("torchrun train.py", None),
    ],
)
def test_commands_of_python(command: str, argv: list[str] | None) -> None:
    """Options that change what an interpreter imports, and other programs, go without a spare."""
    found = PythonCommand.parse(command.split())
    assert (None if found is None else found.argv) == argv
    assert os.path.basename(command.split(maxsplit=1)[0]).startswith("python") or found is None


def test_a_script_is_a_file_of_source(tmp_path: Path) -> None:
    """Python also runs a folder, an archive and compiled code, whatever their names are; a spare cannot."""
    (tmp_path / "script.py").write_text("")
    (tmp_path / "script").write_text("#!/usr/bin/env python\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    py_compile.compile(str(tmp_path / "script.py"), cfile=str(tmp_path / "x.pyc"), doraise=True)
    (tmp_path / "compiled").write_bytes((tmp_path / "x.pyc").read_bytes())
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    (tmp_path / "app").write_bytes(b"#!/usr/bin/env python\n" + (tmp_path / "app.zip").read_bytes())
    found = {path.name for path in tmp_path.iterdir() if PythonCommand.parse(["python", str(path)]) is not None}
    assert found == {"script.py", "script"}


def test_a_folder_is_started_anew_after_each_death(tmp_path: Path) -> None:
    """No life is lost to a spare that cannot run it."""
    (tmp_path / "app").mkdir()
    script = (
        STEPS + WAITS + "advance()\nif step == 1:\n    wait(has_spare, 2)\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    (tmp_path / "app" / "__main__.py").write_text(script)
    _, err = lives_of(sys.executable, tmp_path / "app", tmp_path)
    assert err.count("ended after") == 1
    assert (tmp_path / "lives").read_text() == "2"
