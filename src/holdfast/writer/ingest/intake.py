"""Reported directories in, committed checkpoint out: `merge` decides, this module moves and copies.

What somebody has brought into the checkpoint's directory by himself it commits where it is (`commit_in_place`).

Before the first file comes a plan file: after a crash at any point the same job goes on where it was (files that were
moved are where the plan says), and the next start removes what a job left that nobody repeats.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    HoldfastError,
    IncompleteCheckpointError,
    StorageFullError,
)
from holdfast.format.commit import look_before, make_folders, read_manifest
from holdfast.format.digest import check_blanks, close_by_blanks, file_digest
from holdfast.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from holdfast.format.names import METADATA_FILE, REMOVING_NAME, SIDECARS, check_path, join
from holdfast.format.parts import clear_planned, drop_plan, is_passing, plan_name, put_plan, read_plan
from holdfast.storage.base import FileBatch, Storage, errors_of
from holdfast.storage.local.beneath import Beneath
from holdfast.storage.local.local_storage import LocalStorage, door_of
from holdfast.storage.together import SerialExecutor, together

from ..messages import IngestJob, IngestSource, SaveResult
from ..open_run import Run
from ..save import committed_already, committing, outcome
from .merge import FileList, MergePlan, contested, known_fields, merge, merged_fields
from .sources import (
    SMALL_BYTES,
    Contents,
    Copier,
    SourceFile,
    changed,
    check_metadata,
    damaged,
    opened,
    read_incoming,
    remove_incoming,
    scan,
)

_LOG = get_logger("writer")
_NAMED = 5
_TINY_BYTES, _MANY = 64 << 10, 32


class Intake:
    """One job with sources; one object for each time it is carried out.

    Args:
        storage: where to.
        job: what to take.
        side: helps with digests and fsyncs.
    """

    def __init__(self, storage: Storage, job: IngestJob, side: SerialExecutor) -> None:
        self._storage, self._job, self._side = storage, job, side
        self._copier = Copier(side)
        self._plan_name = plan_name(job.save_id)
        self._tables: dict[str, bytes] = {}  # source -> chunk digests
        self._seconds = {"scan": 0.0, "digest": 0.0, "write": 0.0, "commit": 0.0}
        self._written = 0
        self._copied_bytes = -1  # up to this size files are copied that could be moved
        # What of ours may be there by now, and by which paths; None if nothing may be touched.
        self._begun: tuple[MergePlan, tuple[str, ...]] | None = None

    def take(self, run: Run | None, *, again: bool) -> SaveResult:
        """Store, commit, remove owned sources, record in the run.

        Args:
            run: the open run it belongs to, if any.
            again: an earlier writer process may have begun or even finished it.

        Raises:
            HoldfastError: nothing was committed, nothing of this job is left in the storage, and the sources are as
                they were.
        """
        start = time.perf_counter()
        job = self._job
        manifest = committed_already(self._storage, job.directory, job.manifest) if again else None
        warnings: tuple[str, ...] = ()
        if manifest is not None:
            found = read_plan(self._storage, job.directory, self._plan_name)
            warnings = MergePlan.from_json(found[1]).warnings if found is not None else ()
        else:
            with committing(self._storage, job, run, undo=self._undo) as commit:
                try:
                    manifest, warnings = self._attempt(run, commit)
                except StorageFullError:
                    # As in a save: retention may be behind.
                    if run is None or not run.make_room():
                        raise
                    manifest, warnings = self._attempt(run, commit)
        make_folders(self._storage, job.directory, manifest)
        self._clean()
        self._seconds["total"] = time.perf_counter() - start
        return outcome(
            job.directory,
            manifest,
            run,
            seconds=self._seconds,
            bytes_written=self._written,
            warnings=warnings,
            kind="files",
        )

    # ---- steps

    def _attempt(
        self, run: Run | None, commit: Callable[..., tuple[Manifest, bytes]]
    ) -> tuple[Manifest, tuple[str, ...]]:
        storage, job = self._storage, self._job
        found = read_plan(storage, job.directory, self._plan_name)
        plan, paths = (MergePlan.from_json(found[1]), found[0]) if found is not None else self._make_plan(run)
        if run is not None:
            # From here on files get names that others may use as well. Who takes the run over sees the plan, and
            # leaves this directory alone. If somebody has by now, files of these names are his.
            run.verify()
        self._begun = plan, paths
        if sum(item.movable and item.size <= _TINY_BYTES for item in plan.items) > _MANY:
            self._copied_bytes = _TINY_BYTES  # many copies become durable together, at once
        listing = FileList(job.save_id, plan.writers)
        with self._timed("write"):
            self._copy_incoming(plan, begun=found is not None)
            # Durable together at the end of the block, which is before the manifest.
            with storage.batch(sum(item.size <= SMALL_BYTES for item in plan.items)) as batch:
                for item in plan.items:
                    table = self._store(item, batch, begun=found is not None)
                    if item.entry is not None:
                        listing.add(item.entry)
                    else:
                        listing.add_file(item.name, item.size, table, writer=item.rank)
            self._written += listing.put_digests(storage, job.directory)
            if plan.metadata is not None:
                metadata = plan.metadata if check_blanks(plan.metadata) is not None else close_by_blanks(plan.metadata)
                storage.put(join(job.directory, METADATA_FILE), metadata)
        with self._timed("commit"):
            fields = merged_fields(job.manifest, plan.fields, folders=plan.folders)
            return commit(fields, listing.parts())[0], plan.warnings

    def _make_plan(self, run: Run | None) -> tuple[MergePlan, tuple[str, ...]]:
        """Decide which file goes where, and say so; give the plan, and all paths there will be."""
        storage, job = self._storage, self._job
        with self._timed("scan"):
            self._check_sources()
            sources = [self._look_at(source) for source in job.sources]
        needed = contested(sources)
        with self._timed("digest"):
            for file in needed:
                if file.source not in self._tables:
                    self._tables[file.source] = self._copier.digest_file(file.source, file.size)
        digests = {(file.rank, file.name): file_digest(self._tables[file.source]) for file in needed}
        plan = merge(sources, digests)
        paths = {item.name for item in plan.items} | {FileList(job.save_id, plan.writers).digests_path}
        paths |= {METADATA_FILE} if plan.metadata is not None else set()
        skip = len(job.directory) + 1
        taken = sorted({info.path[skip:] for info in storage.list(job.directory)} & {*paths, MANIFEST_NAME})
        if taken == [MANIFEST_NAME] and run is not None and run.is_void(job.directory):
            taken = []  # of an owner that was taken over, who committed afterwards
        if taken:
            what = "a committed checkpoint" if MANIFEST_NAME in taken else f"a directory that holds {taken[0]}"
            raise CheckpointExistsError(
                f"{join(storage.uri, job.directory)} is {what} already: reported files keep their names, so none of "
                "them can be replaced; use another directory"
            )
        self._begun = plan, ()
        put_plan(storage, job.directory, job.save_id, paths, plan.to_json())
        return plan, tuple(sorted(paths))

    def _look_at(self, source: IngestSource) -> Contents:
        """List a source; of one in the store the digests are known then."""
        if not source.is_incoming:
            return scan(source)
        found = read_incoming(self._storage, source.path, source.rank)
        self._tables.update(found.tables)
        return found.contents

    def _check_sources(self) -> None:
        storage, job = self._storage, self._job
        ranks = sorted(source.rank for source in job.sources)
        if len(set(ranks)) != len(ranks):
            raise ConfigError(f"{job.directory}: sources of the ranks {ranks}: give one for each rank")
        if storage.local_root is None:
            return
        target = os.path.realpath(os.path.join(storage.local_root, job.directory))
        for source in job.sources:
            real = os.path.realpath(source.path).rstrip("/")
            if f"{target}/".startswith(f"{real}/") or f"{real}/".startswith(f"{target}/"):
                raise ConfigError(
                    f"rank {source.rank} reported {source.path}, but the checkpoint is to be made in {target}: one of "
                    "them lies inside of the other; report a directory that holds the checkpoint's files alone"
                )

    def _copy_incoming(self, plan: MergePlan, *, begun: bool) -> None:
        """Bring files that ranks have put into the store to their places, several at once."""
        storage = self._storage
        homes = {source.rank: source for source in self._job.sources if source.is_incoming}
        items = [item for item in plan.items if item.rank in homes]
        for source in homes.values() if begun else ():  # the plan is that of an earlier writer
            self._look_at(source)

        def copy(item: SourceFile) -> None:
            target = join(self._job.directory, item.name)
            if begun:
                storage.delete(target)
            storage.copy(item.source, target)

        together(storage, [partial(copy, item) for item in items])
        self._written += sum(item.size for item in items)

    def _store(self, item: SourceFile, batch: FileBatch, *, begun: bool) -> bytes:
        """Bring one file to its place; give its chunk digests (b"" where its manifest has them and it was moved)."""
        storage = self._storage
        if not os.path.isabs(item.source):
            return self._tables[item.source]  # it is there: `_copy_incoming`
        target = join(self._job.directory, item.name)
        if begun:
            if item.movable and not os.path.lexists(item.source) and storage.exists(target):
                # It was moved before the crash.
                return b"" if item.entry is not None else self._copier.digest_object(storage, target)
            storage.delete(target)
        if item.movable and item.size > self._copied_bytes:
            with self._held(item) as source, opened(source, item.size) as fd:
                moving = self._side.run(lambda: storage.adopt(source, target))
                try:
                    table = self._tables.get(item.source, b"")
                    if not table and item.entry is None:
                        table = self._copier.digest_open(fd, item.source, item.size)
                finally:
                    moving.exception()
                if moving.result():
                    return table
        return self._copy(item, target, batch)

    def _inside(self, item: SourceFile) -> tuple[str, str]:
        """Return the directory that was reported, and the path of a file in it; "" if it was reported by itself."""
        top = next(source.path for source in self._job.sources if source.rank == item.rank).rstrip("/")
        return top, item.source[len(top) :].strip("/")

    @contextmanager
    def _held(self, item: SourceFile) -> Iterator[str]:
        """Yield a file that may be moved by its directory, reached without links: what is put in the way is no file.

        Else a link that took the place of a directory since `scan` would have somebody else's file moved.
        """
        top, inside = self._inside(item)
        if not inside:
            yield item.source
            return
        head, _, name = inside.rpartition("/")
        with errors_of("take over", item.source):
            folder = Beneath(top).folder(head)
        with folder:
            yield folder.at(name)

    def _copy(self, item: SourceFile, target: str, batch: FileBatch) -> bytes:
        table = self._copier.copy(item.source, item.size, self._storage, target, batch)
        if self._tables.get(item.source, table) != table:
            raise changed(item.source)
        if item.entry is not None and file_digest(table) != item.entry.digest:
            raise damaged(item.source, item.name)
        self._written += item.size
        return table

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - begin

    # ---- afterwards

    def _clean(self) -> None:
        """After the commit: remove the plan, then what is left of owned sources. A failure is only said."""
        try:
            self._storage.delete(join(self._job.directory, self._plan_name))
            for source in self._job.sources:
                if not source.owned:
                    continue
                if source.is_incoming:
                    remove_incoming(self._storage, source.path)
                    continue
                home, name = _home(self._storage, source.path)
                if os.path.islink(source.path):
                    home.delete(name)  # the link; what it leads to is somebody else's
                elif os.path.isdir(source.path):
                    home.delete_tree(name)
                else:
                    home.delete(name)
                    home.delete(f".{name}{METADATA_FILE}")
        except HoldfastError as error:
            _LOG.warning("%s is committed, but remains of its making stay for now: %s", self._job.directory, error)

    def _undo(self) -> None:
        """Put moved files back and remove what was stored.

        What fails here is left for the sweep of the next start. The plan file need not be there any more: whoever took
        the run over has swept it, and what was stored since goes by what we know of it.
        """
        storage, job = self._storage, self._job
        if self._begun is None:
            return
        plan, paths = self._begun
        for item in plan.items if paths else ():
            target = join(job.directory, item.name)
            if item.movable and not os.path.lexists(item.source) and storage.exists(target):
                top, inside = self._inside(item)
                home, name = _home(storage, top)
                self._put_back(target, home, join(name, inside))
        clear_planned(storage, job.directory, self._plan_name, paths)
        storage.tidy(job.directory)

    def _put_back(self, target: str, home: Storage, path: str) -> None:
        found = door_of(self._storage)
        if found is None:
            return
        door, prefix = found
        head, _, name = join(prefix, target).rpartition("/")
        with door.folder(head) as folder:
            home.adopt(folder.at(name), path)


def _home(storage: Storage, path: str) -> tuple[Storage, str]:
    """Give the directory of a local path as a storage: a part of ``storage`` if it lies there; and the name in it."""
    parent, name = os.path.split(path.rstrip("/"))
    if isinstance(storage, LocalStorage):
        inside = os.path.relpath(parent, storage.uri)
        if inside.split("/")[0] != os.pardir:
            return storage.child("" if inside == os.curdir else inside), name
    return LocalStorage(parent), name


def commit_in_place(
    storage: Storage, job: IngestJob, run: Run | None, side: SerialExecutor, *, again: bool
) -> SaveResult:
    """Make a checkpoint of everything in ``job.directory``. Nothing is moved, copied or removed.

    A Holdfast checkpoint that was saved or copied there keeps roles and digests of its files and gets a new manifest.

    Args:
        storage: where it is.
        job: has no sources.
        run: the open run it belongs to, if any.
        side: helps.
        again: an earlier writer process may have committed it.

    Raises:
        CheckpointExistsError: it is a checkpoint of this run already.
        CheckpointNotFoundError: there is nothing.
        HoldfastError: it is as it was.
    """
    start = time.perf_counter()
    seconds = {"digest": 0.0, "write": 0.0, "commit": 0.0}
    manifest = committed_already(storage, job.directory, job.manifest) if again else None
    written = 0
    if manifest is None:
        replaced = look_before(storage, job.directory)
        before = _manifest_there(storage, job, run)
        listing = FileList(job.save_id, (0,) if before is None else before.writers)
        clear = partial(clear_planned, storage, job.directory, plan_name(job.save_id), [listing.digests_path])
        with committing(storage, job, run, undo=clear) as commit:
            # Says whose the digest file is if the commit does not come. Nothing else is ours to remove.
            put_plan(storage, job.directory, job.save_id, [listing.digests_path], {})
            folders = _list(storage, job, before, listing, Copier(side))
            seconds["digest"] = time.perf_counter() - start
            written = listing.put_digests(storage, job.directory)
            fields = merged_fields(job.manifest, {} if before is None else known_fields(before), folders=folders)
            overwrite = None if before is None else replaced
            manifest, _ = commit(fields, listing.parts(), overwrite=overwrite, keep_sidecars=True)
        seconds["commit"] = time.perf_counter() - start - seconds["digest"]
    drop_plan(storage, job.directory, job.save_id)
    seconds["total"] = time.perf_counter() - start
    return outcome(job.directory, manifest, run, seconds=seconds, bytes_written=written, kind="in place")


def _manifest_there(storage: Storage, job: IngestJob, run: Run | None) -> Manifest | None:
    where = join(storage.uri, job.directory)
    try:
        manifest = read_manifest(storage, job.directory, check_sizes=True)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return None
    except CorruptCheckpointError as error:
        raise ConfigError(
            f"{where}: its {MANIFEST_NAME} is not one of Holdfast, or does not fit the files ({error}): checkpoints "
            "keep theirs under this name; rename the file"
        ) from error
    # One that counts for nothing is of an owner that was taken over: what it lists is listed anew.
    is_void = run is not None and run.is_void(job.directory, manifest)
    if manifest.run_id is not None and manifest.run_id == job.manifest.get("run_id") and not is_void:
        raise CheckpointExistsError(
            f"{where} is a checkpoint of this run already (step {manifest.step}): report each one once, under a name "
            "of its own"
        )
    return manifest


def _list(
    storage: Storage, job: IngestJob, before: Manifest | None, listing: FileList, copier: Copier
) -> tuple[str, ...]:
    """Digest what no manifest describes; gather the rest. Returns the directories that hold nothing."""
    folders = _check_links(storage, job)
    known: dict[str, FileEntry] = {} if before is None else {entry.path: entry for entry in before.files}
    for entry in known.values():
        listing.add(entry)
    skip = len(job.directory) + 1
    names = {info.path[skip:]: info.size for info in storage.list(job.directory)}
    if not {*names} - {plan_name(job.save_id)}:
        raise CheckpointNotFoundError(
            f"there is nothing at {join(storage.uri, job.directory)}: with NO_UPLOAD, or an upload function of your "
            "own, the files must be there when report() is called"
        )
    if REMOVING_NAME in names:
        raise ConfigError(
            f"{join(storage.uri, job.directory)} is being removed ({REMOVING_NAME}): use another directory"
        )
    own = {MANIFEST_NAME, *SIDECARS, listing.digests_path, *known}
    others = sorted(name for name in names if name not in own and not is_passing(name))
    bad = [name for name in others if not _is_fit(name)]
    if bad:
        raise ConfigError(
            f"{join(storage.uri, job.directory)}: files of a checkpoint cannot be called "
            f"{listed(map(ascii, bad), _NAMED)}: use names in UTF-8, without backslashes"
        )
    if METADATA_FILE in names:
        place = join(job.directory, METADATA_FILE)
        check_metadata(join(storage.uri, job.directory), storage.read(place))
    storage.sync_all([join(job.directory, name) for name in [*known, *others]])  # who brought them need not have cared
    for name in others:
        table = copier.digest_object(storage, join(job.directory, name))
        listing.add_file(name, names[name], table, writer=0)
    return folders


def _check_links(storage: Storage, job: IngestJob) -> tuple[str, ...]:
    """Refuse links; returns the directories that hold nothing."""
    if storage.local_root is None:
        return ()
    home = os.path.join(storage.local_root, job.directory)
    if not os.path.isdir(home):
        return ()
    found = scan(IngestSource(rank=0, path=home, owned=True))
    links = [file.name for file in found.files if not file.movable]
    if links:
        raise ConfigError(
            f"{home}: {listed(links, _NAMED)} is reached through a link: what is committed where it lies must lie "
            "there itself; copy it (cp -rL), or report the directory without NO_UPLOAD"
        )
    return found.bare


def _is_fit(name: str) -> bool:
    try:
        check_path(name, where=name)
    except CorruptCheckpointError:
        return False
    return True
