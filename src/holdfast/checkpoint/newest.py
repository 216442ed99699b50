"""What is meant where a checkpoint is expected and the path of a run is given: its newest checkpoint."""

from __future__ import annotations

from holdfast._log import get_logger
from holdfast.errors import CheckpointNotFoundError, HoldfastError, IncompleteCheckpointError
from holdfast.run.catalog import Catalog
from holdfast.run.index import RUN_FILE

from .handle import Checkpoint

__all__ = ["newest_of_run"]

_LOG = get_logger("checkpoint")


def newest_of_run(given: Checkpoint) -> Checkpoint:
    """Return the newest committed checkpoint of the run at ``given``; ``given`` itself if it is no run.

    Which one was taken is logged as a warning, for whoever meant another one.

    Raises:
        StorageError: the storage cannot be read.
    """
    try:
        if given.manifest is not None:
            return given
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        pass  # no checkpoint there: perhaps a run
    except HoldfastError:
        return given  # whoever reads it says what is wrong
    root = given.storage.child(given.directory)
    if not root.exists(RUN_FILE):
        return given
    record = Catalog(root).latest()
    if record is None:
        return given
    _LOG.warning("%s is a run: its newest checkpoint, %s, is taken", root.uri, record.name)
    return Checkpoint.at(root, record.name)
