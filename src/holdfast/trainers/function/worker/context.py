"""`get_context`: who this worker is, and where its run is stored."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint._location import file_system
from holdfast.errors import ConfigError
from holdfast.storage.base import Storage, check_path

__all__ = ["Context", "StorageContext", "TrainContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageContext:
    """Where a run is stored, under the names of Ray Train.

    Attributes:
        uri: of the run.
        storage: the storage of the run; None if it lives in the memory of the driver.
        experiment_dir_name: name of the run.
        experiment_fs_path: path of the run: absolute on a local disk, else without its scheme.
    """

    uri: str
    storage: Storage | None
    experiment_dir_name: str
    experiment_fs_path: str

    @property
    def storage_filesystem(self) -> Any:
        """The file system of the paths: see `Checkpoint.filesystem`; None if it lives in the memory of the driver."""
        return None if self.storage is None else file_system(self.storage)

    @property
    def storage_fs_path(self) -> str:
        """The path that holds this run and others."""
        path, name = self.experiment_fs_path.rstrip("/"), f"/{self.experiment_dir_name}"  # a name may have folders
        return path.removesuffix(name) if path.endswith(name) else path.rpartition("/")[0]

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return where a checkpoint of this name lies: what to upload to with ``NO_UPLOAD``.

        Raises:
            ConfigError: the name is not that of a single directory.
        """
        if "/" in check_path(checkpoint_name):
            raise ConfigError(f"checkpoint name {checkpoint_name!r}: give the name of a single directory, without '/'")
        return f"{self.experiment_fs_path.rstrip('/')}/{checkpoint_name}"


class Context:
    """What a worker knows about itself and its run. Cheap, never waits.

    Example:
        >>> context = holdfast.get_context()  # doctest: +SKIP
        >>> context.get_world_rank(), context.get_world_size()  # doctest: +SKIP
        (0, 2)
    """

    __slots__ = ("_begin", "_storage")

    def __init__(self, begin: dict[str, Any], storage: StorageContext) -> None:
        self._begin, self._storage = begin, storage

    def get_world_rank(self) -> int:
        """Rank among all workers, from 0."""
        return int(self._begin["rank"])

    def get_world_size(self) -> int:
        """Number of all workers."""
        return int(self._begin["world_size"])

    def get_local_rank(self) -> int:
        """Rank among the workers of this machine."""
        return int(self._begin["local_rank"])

    def get_local_world_size(self) -> int:
        """Number of workers on this machine."""
        return int(self._begin["local_world_size"])

    def get_node_rank(self) -> int:
        """Number of this machine among those of the run."""
        return int(self._begin["node_rank"])

    def get_experiment_name(self) -> str:
        """Name of the run (`RunConfig.name`)."""
        return str(self._begin["experiment_name"])

    def get_storage(self) -> StorageContext:
        """Where the run is stored."""
        return self._storage

    # Ray Train has no trials any more; scripts that still ask get the run.

    def get_trial_name(self) -> str:
        """Name of the run."""
        return str(self._begin["run_name"])

    def get_trial_id(self) -> str:
        """Name of the run and number of this attempt: changes with each start of the workers."""
        return f"{self._begin['run_name']}-{self._begin['attempt']:05d}"

    def get_trial_dir(self) -> str:
        """Path of the run."""
        return self._storage.experiment_fs_path

    def get_trial_resources(self) -> dict[str, Any]:
        """Number of workers."""
        return {"num_workers": self.get_world_size()}

    def get_metadata(self) -> dict[str, Any]:
        """Deprecated in Ray Train and empty here; put what you want to pass into ``train_loop_config``."""
        warnings.warn("get_metadata() is always {}: pass it in train_loop_config", DeprecationWarning, stacklevel=2)
        return {}


TrainContext = Context  # what Ray Train calls it
