"""The figures of the house are counted, not guessed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from benchmarks.house.passed import measure
from benchmarks.house.rooms import Rooms

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


@pytest.mark.slow
def test_a_step_is_followed_through_both_processes() -> None:
    """The functions of the trainer and of the writer process are seen, and more lines are loaded than passed."""
    figures = measure(ROOT)
    assert figures["step to commit: functions"] > figures["save: functions"] > 100
    assert figures["lines loaded by the README's own loop"] > figures["step to commit: lines of these modules"]
