"""Test kits for users of Holdfast and authors of plug-ins; also what Holdfast's own tests use.

`StorageTests` proves a storage, `FaultyStorage` breaks a disk at any operation, `power_cut_states` builds the states a
power cut may leave, `FaultProxy` makes requests to a server fail, `ForkServer` and `ArmedOps` kill a piece of work at
each of its operations. `assert_resumes` runs any training script uninterrupted and killed, and names the first
difference; `verify_resume` and `verify_resume_script` do so for a `Checkpointer` in a function, and compare its whole
state; `assert_state_equal` compares two states bit by bit. Names load on first use: a
writer process that uses a faulty disk imports no pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.verify.resume import NothingToVerifyError as NothingToVerifyError
    from holdfast.verify.resume import ResumeDivergedError as ResumeDivergedError
    from holdfast.verify.resume import ResumeReport as ResumeReport
    from holdfast.verify.resume import verify_resume as verify_resume
    from holdfast.verify.resume import verify_resume_script as verify_resume_script
    from holdfast.verify.scripts import assert_resumes as assert_resumes
    from holdfast.verify.state import assert_state_equal as assert_state_equal

    from .fault_proxy import Exchange as Exchange
    from .fault_proxy import Fault as Fault
    from .fault_proxy import FaultProxy as FaultProxy
    from .faults import CRASH_EXIT_CODE as CRASH_EXIT_CODE
    from .faults import ArmedOps as ArmedOps
    from .faults import FaultyOps as FaultyOps
    from .faults import FaultyStorage as FaultyStorage
    from .faults import ForkServer as ForkServer
    from .faults import Operation as Operation
    from .faults import Outcome as Outcome
    from .faults import count_operations as count_operations
    from .power_cut import PowerCutState as PowerCutState
    from .power_cut import Snapshot as Snapshot
    from .power_cut import power_cut_states as power_cut_states
    from .power_cut import snapshot as snapshot
    from .storage_tests import StorageTests as StorageTests

_NAMES = {
    "holdfast.verify.resume": (
        "NothingToVerifyError", "ResumeDivergedError", "ResumeReport", "verify_resume", "verify_resume_script",
    ),
    "holdfast.verify.scripts": ("assert_resumes",),
    "holdfast.verify.state": ("assert_state_equal",),
    ".fault_proxy": ("Exchange", "Fault", "FaultProxy"),
    ".faults": (
        "ArmedOps", "CRASH_EXIT_CODE", "FaultyOps", "FaultyStorage", "ForkServer", "Operation", "Outcome",
        "count_operations",
    ),
    ".power_cut": ("PowerCutState", "Snapshot", "power_cut_states", "snapshot"),
    ".storage_tests": ("StorageTests",),
}  # fmt: skip
_HOME = {name: home for home, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.testing' has no attribute {name!r}")
    if home == ".storage_tests":
        import pytest

        # So that a failed assertion of the suite shows its values in another project, too.
        pytest.register_assert_rewrite(f"{__name__}{home}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
