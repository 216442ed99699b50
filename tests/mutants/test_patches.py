"""The small mistakes of `make mutants` fit the code as it is."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_each_patch_fits():
    """Its old text occurs once, it makes Python, its tests are there: else it would be found out hours later."""
    module = runpy.run_path(str(Path(__file__).with_name("run.py")), run_name="mutants")
    assert [misfit for patch in module["patches"]() if (misfit := patch.misfit()) is not None] == []
