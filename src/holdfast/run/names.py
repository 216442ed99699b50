"""Names of the files that a run keeps beside its checkpoints, which no checkpoint may have."""

from __future__ import annotations

__all__ = [
    "CHANGES_FILE",
    "LATEST",
    "LEASE_FILE",
    "LOGS",
    "REPORTS",
    "RUN_FILE",
    "RUN_NAMES",
    "VERIFIED_FILE",
    "is_checkpoint_name",
]

RUN_FILE, CHANGES_FILE = "run.json", "run-changes.json"
LEASE_FILE = "lease.json"
REPORTS, LOGS = "reports", "logs"
VERIFIED_FILE = ".verified.json"
LATEST = "latest"
"""Name of the link to the newest checkpoint, in a run on a disk; older runs may have a checkpoint of this name."""
RUN_NAMES = tuple(sorted((RUN_FILE, CHANGES_FILE, LEASE_FILE, REPORTS, LOGS)))
"""Names right below the root of a run that belong to the run. Its other names begin with a dot."""


def is_checkpoint_name(name: str) -> bool:
    """Tell whether a directory right below the root of a run may have this name."""
    return bool(name) and "/" not in name and not name.startswith(".") and name not in (*RUN_NAMES, LATEST)
