"""Reported directories beside files that another rank has uploaded itself: brought there, to be committed as one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast._log import get_logger
from holdfast.copying.transfer import copy_file
from holdfast.errors import ConfigError
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.ingest.incoming import read_incoming, remove_incoming
from holdfast.writer.ingest.merge import suffixed
from holdfast.writer.messages import is_incoming

from .actions import ReportedDirectory

__all__ = ["bring_beside"]

_LOG = get_logger("runtime")


def bring_beside(storage: Storage, directory: str, sources: Sequence[ReportedDirectory]) -> None:
    """Copy the files of reported directories into ``directory``, where files lie already.

    One name, one content, as everywhere: a file that is there with the same bytes is left out, one with others gets the
    rank in its name. What is brought and never committed is swept like all of an upload that failed.

    Args:
        storage: root of the run.
        directory: the uploaded directory.
        sources: what ranks reported; owned ones are removed afterwards.

    Raises:
        ConfigError: both are Holdfast checkpoints.
        HoldfastError: something could not be read or stored.
    """
    skip = len(directory) + 1
    taken = {info.path[skip:] for info in storage.list(directory)}
    for source in sources:
        here, names = _files(storage, source)
        if MANIFEST_NAME in names:
            raise ConfigError(
                f"rank {source.rank} reported {source.path}, a Holdfast checkpoint, while another rank uploaded files "
                "by itself: report both in one way"
            )
        for name, path in names.items():
            target = name
            if name in taken:
                if storage.read(join(directory, name)) == here.read(path):
                    continue
                target = suffixed(name, source.rank, taken)
                _LOG.warning(
                    "%s: %s of rank %d differs from the file there and is kept as %s; give files that differ between "
                    "ranks distinct names", directory, name, source.rank, target,
                )  # fmt: skip
            copy_file(here, path, storage, join(directory, target))
            taken.add(target)
    for source in sources:
        if is_incoming(source.path):
            remove_incoming(storage, source.path)
        elif source.owned:
            LocalStorage(os.path.dirname(source.path)).delete_tree(os.path.basename(source.path))


def _files(storage: Storage, source: ReportedDirectory) -> tuple[Storage, dict[str, str]]:
    """Give where the files of a source are, and the path of each there by its name."""
    path = source.path
    if is_incoming(path):
        contents = read_incoming(storage, path, source.rank).contents
        last = contents.manifest_file
        return storage, {one.name: one.source for one in (*contents.files, *(() if last is None else (last,)))}
    if os.path.isfile(path):
        head, name = os.path.split(path)
        return LocalStorage(head), {name: name}
    found = [
        os.path.relpath(os.path.join(place, name), path)
        for place, _, names in os.walk(path, followlinks=True)
        for name in names
    ]
    return LocalStorage(path), {name: name for name in sorted(found)}
