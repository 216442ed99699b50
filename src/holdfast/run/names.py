"""Names in a run: of what it keeps beside its checkpoints, which no checkpoint may have, and of checkpoints."""

from __future__ import annotations

import re

from holdfast.errors import CheckpointExistsError
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.storage.base import Storage

RUN_FILE, CHANGES_FILE = "run.json", "run-changes.json"
LEASE_FILE = "lease.json"
REPORTS, LOGS = "reports", "logs"
VERIFIED_FILE = ".verified.json"
PROBE = ".probe-"
"""First characters of the directory of a probe; the start id follows."""
INCOMING = ".incoming-"
"""First characters of the directory of files that workers have handed over and that are not taken in yet."""
NUMBERED = re.compile(r"step_\d{8}|checkpoint_\d{6,}")
"""What the name of a checkpoint begins with that Holdfast has given by itself."""
GIVEN = re.compile(r"step_\d{8}(?:-a\d+)?(?:\.\d+)?|checkpoint_\d{6,}")
"""The whole name of a checkpoint that Holdfast has given by itself."""
LATEST = "latest"
"""Name of the link to the newest checkpoint, in a run on a disk; older runs may have a checkpoint of this name."""
ROLLBACKS = "rollbacks"
"""Name of the note of a run that remembers bad steps."""
WATCHED = "watched"
"""Name of the note that has the metric of the guard, as long as the run has one that acts."""
RUN_NAMES = tuple(sorted((RUN_FILE, CHANGES_FILE, LEASE_FILE, REPORTS, LOGS)))
"""Names right below the root of a run that belong to the run. Its other names begin with a dot."""


def is_checkpoint_name(name: str) -> bool:
    """Tell whether a directory right below the root of a run may have this name."""
    return bool(name) and "/" not in name and not name.startswith(".") and name not in (*RUN_NAMES, LATEST)


def refuse_run(storage: Storage, directory: str) -> None:
    """Refuse a run as the place of a single checkpoint, which would hide it: a directory with a manifest is no run.

    Raises:
        CheckpointExistsError: there is a run in ``directory``.
    """
    if storage.exists(join(directory, RUN_FILE)):
        where = join(storage.uri.rstrip("/"), directory)
        raise CheckpointExistsError(
            f"{where} is a run: a checkpoint written onto it would hide it. Give a name of its own, beside the run or "
            f"within it ({where}/NAME); overwriting does not replace a run"
        )


def check_free(storage: Storage, directory: str, *, overwrite: bool, where: str = "") -> None:
    """Refuse to write a checkpoint onto a run, or onto a committed one, before any work is done.

    Args:
        storage: where to.
        directory: the checkpoint in it.
        overwrite: a committed one is to be replaced.
        where: where else to say so, for the message.

    Raises:
        CheckpointExistsError: one is there.
    """
    refuse_run(storage, directory)
    if not overwrite and storage.exists(join(directory, MANIFEST_NAME)):
        raise CheckpointExistsError(
            f"{join(storage.uri.rstrip('/'), directory)} is a committed checkpoint already: pass overwrite=True{where} "
            "to replace it, or use another name"
        )
