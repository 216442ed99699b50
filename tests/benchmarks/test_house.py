"""The figures of the house are counted, not guessed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from benchmarks.house.passed import measure
from benchmarks.house.rooms import Rooms
from benchmarks.house.tests import share_of_insiders

ROOT = Path(__file__).parents[2]


def test_rooms_are_counted(tmp_path: Path) -> None:
    """Lines, headers, importers and functions of a package of three modules, counted by hand."""
    package = tmp_path / "kelp"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text('"""Top."""\n\nfrom .deep import root\n')
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "root.py").write_text(
        textwrap.dedent(
            '''\
            """One."""

            import os

            __all__ = ["hold"]


            # why
            def hold():
                """Hold."""
                return os


            def both():
                def inner():
                    from .. import deep

                    return deep

                return inner()
            '''
        )
    )
    rooms = Rooms(package)
    figures = rooms.figures()
    assert rooms.packages() == {"(top)": (3, 1), "deep": (20, 2)}
    assert (figures["lines of src"], figures["modules"], figures["functions"]) == (23, 3, 3)
    assert (figures["  docstrings"], figures["  comments"], figures["  of one statement"]) == (3, 1, 1)
    assert figures["modules with one importer"] == 2, "root by the top, deep by root"
    assert figures["headers, % of lines"] == round(100 * (3 + 0 + 8) / 23, 1)


def test_tests_that_know_the_inside_of_another_package_are_counted(tmp_path: Path) -> None:
    """Seven tests of ten: a private module of another package, by each way to import it; kits and public names not."""
    for name in ("src/holdfast/run/lease.py", "src/holdfast/storage/memory.py", "src/holdfast/_units.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "src/holdfast/storage/resolve.py").touch()
    (tmp_path / "src/holdfast/storage/__init__.py").write_text('__all__ = ["Storage", "resolve"]')
    files = {
        "run/test_own.py": ["from holdfast.run.lease import Lease", "from holdfast.storage import Storage"],
        "crash/test_public.py": ["import holdfast as hf", "from holdfast.storage import resolve"],
        "crash/test_kit.py": ["from catalog_kit import Lease"],
        "run/test_module.py": ["from holdfast.storage import memory"],
        "run/test_name.py": ["import pytest", "from holdfast.storage.memory import MemoryStorage"],
        "crash/test_plain.py": ["import holdfast.run.lease"],
        "crash/test_late.py": ["def late():", "    from holdfast.run.lease import Lease"],
        "crash/test_top.py": ["from holdfast._units import size"],
        "test_top_of_tests.py": ["from holdfast.run.lease import Lease"],
        "run/test_again.py": ["from holdfast import _units"],
    }
    for name, lines in files.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text("\n".join([*lines, "def test_it(): ...", ""]))
    assert share_of_insiders(tmp_path) == 70.0


def test_most_tests_keep_to_public_names_and_kits() -> None:
    """What tests of one package import of the inside of another hinders every change of shape there."""
    assert share_of_insiders(ROOT) < 40


@pytest.mark.slow
def test_a_step_is_followed_through_both_processes() -> None:
    """The functions of the trainer and of the writer process are seen, and what a loop loads in the first of them."""
    figures = measure(ROOT)
    assert figures["step to commit: functions"] > figures["save: functions"] > 100
    assert figures["lines loaded by the README's own loop"] > figures["step to commit: lines of these modules"] / 2
