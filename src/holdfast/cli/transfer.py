"""``holdfast push``, ``pull`` and ``cp`` from one storage to another; ``sweep`` what killed uploads have left there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from holdfast._progress import progress_bar
from holdfast._units import format_bytes, format_duration
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.verify import verify as verify_checkpoint
from holdfast.copying.run_transfer import CopyOutcome, RunPlan, check_apart, copy_into_run, copy_run, plan_run
from holdfast.copying.transfer import Copied, compare_files, copy_checkpoint, copy_file
from holdfast.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError, HoldfastError, StorageError
from holdfast.run.index import RUN_FILE
from holdfast.run.names import refuse_run
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve

from .targets import PATH, Choice, choose, find, pick_options, reach, span_option, warn_of_quarantine
from .terminal import age, console, counted, json_option, print_json, printable

_Command = Callable[..., None]
Progress = Callable[[int], None]
_WORDS = {"ok": "green", "foreign": "yellow", "gone": "yellow", "failed": "red"}


def _options(command: _Command) -> _Command:
    for option in (
        json_option,
        click.option("--verify", is_flag=True, help="Read every byte at the destination again and compare digests."),
        click.option("--overwrite", is_flag=True, help="Replace another checkpoint, or files, that are in the way."),
    ):
        command = option(command)
    return pick_options(whole=True)(command)


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@_options
def push(source: str, target: str, **options: Any) -> None:
    """Copy a local run or checkpoint to a remote: SOURCE becomes TARGET/<name of SOURCE>.

    Run the same command again to go on after an interruption, or to bring what is new. `holdfast cp` copies between
    any two places.
    """
    here = resolve(source)
    if here.local_root is None or resolve(target).local_root is not None:
        raise ConfigError("push copies from a local path to a remote URI: `holdfast cp` copies between any two places")
    _copy(source, f"{target.rstrip('/')}/", **options)


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH, default=".")
@_options
def pull(source: str, target: str, **options: Any) -> None:
    """Copy a run or checkpoint from a remote: SOURCE becomes TARGET/<name of SOURCE>, by default in this directory.

    Run the same command again to go on after an interruption, or to bring what is new.
    """
    if resolve(source).local_root is not None or resolve(target).local_root is None:
        raise ConfigError("pull copies from a remote URI to a local path: `holdfast cp` copies between any two places")
    _copy(source, f"{target.rstrip('/')}/", **options)


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@_options
def cp(source: str, target: str, **options: Any) -> None:
    """Copy a run or checkpoint between any two places: SOURCE becomes TARGET, or TARGET/<name of SOURCE> after a "/".

    What TARGET becomes does not depend on whether it exists: the same command again goes on where it was.
    """
    _copy(source, target, **options)


@dataclass(slots=True)
class _Job:
    """What is copied where, and the outcomes so far.

    Attributes:
        source: uri of what is copied.
        target: storage at the destination; names of checkpoints are relative to it.
        plan: what there is to copy.
        steps: copies one after the other, each given a function that takes the bytes just done.
        is_run: a whole run, not one checkpoint.
        done: outcomes so far.
        ended: why it ended early.
    """

    source: str
    target: Storage
    plan: RunPlan
    steps: Callable[[Progress], Iterator[CopyOutcome]]
    is_run: bool
    done: list[CopyOutcome] = field(default_factory=list)
    ended: str | None = None
    interrupted: bool = False


def _copy(source: str, target: str, *, overwrite: bool, verify: bool, as_json: bool, pick: Choice) -> None:
    begun = time.monotonic()
    reach(target)
    job = _job(source, target, pick, overwrite=overwrite)
    try:
        with progress_bar(f"copy {job.source.rstrip('/').rpartition('/')[2]}", job.plan.total_bytes) as progress:
            for outcome in job.steps(progress):
                job.done.append(outcome)
    except KeyboardInterrupt:
        job.interrupted, job.ended = True, "interrupted"
    except StorageError as error:
        job.ended = str(error)
    problems = _verify(job) if verify and not job.ended else {}
    document = _document(job, problems, verified=verify and not job.ended, seconds=time.monotonic() - begun)
    if as_json:
        print_json(document)
    else:
        _print(printable(document))
    if not document["ok"]:
        raise click.exceptions.Exit(1)


def _job(source: str, target: str, pick: Choice, *, overwrite: bool) -> _Job:
    if pick.is_given:
        return _checkpoint_job(choose(source, pick), target, overwrite=overwrite)
    storage, checkpoint = find(source)
    if checkpoint is None:
        plan = plan_run(storage)
        if plan.is_run:
            return _run_job(storage, plan, target, overwrite=overwrite)
        checkpoint = Checkpoint(source)
    warn_of_quarantine(checkpoint)
    return _checkpoint_job(checkpoint, target, overwrite=overwrite)


def _run_job(storage: Storage, plan: RunPlan, target: str, *, overwrite: bool) -> _Job:
    name = storage.uri.rstrip("/").rpartition("/")[2] or "run"
    root = resolve(target).child(name) if target.endswith("/") else resolve(target)
    check_apart(storage, root)

    def steps(progress: Progress) -> Iterator[CopyOutcome]:
        return copy_run(storage, plan, root, overwrite=overwrite, progress=progress)

    return _Job(storage.uri, root, plan, steps, is_run=True)


def _checkpoint_job(old: Checkpoint, target: str, *, overwrite: bool) -> _Job:
    new = Checkpoint.at(resolve(target), old.name) if target.endswith("/") else Checkpoint(target)
    check_apart(old.storage.child(old.directory), new.storage.child(new.directory))
    refuse_run(new.storage, new.directory)
    plan = RunPlan(names=(new.directory,), total_bytes=_size(old))

    def steps(progress: Progress) -> Iterator[CopyOutcome]:
        places = (old.storage, old.directory, new.storage, new.directory)
        if old.storage.exists(old.directory):
            present = compare_files(*places) if new.storage.exists(new.directory) else None
            if present == "same":
                copied = Copied(bytes_there=plan.total_bytes, files=1, is_foreign=True)
            elif present == "other" and not overwrite:
                raise CheckpointExistsError(f"{new.uri} is another file: --overwrite replaces it, or give another name")
            else:
                copy_file(*places, progress=progress)
                copied = Copied(bytes_sent=plan.total_bytes, files=1, is_foreign=True)
        else:
            copy = copy_into_run if new.storage.exists(RUN_FILE) else copy_checkpoint
            copied = copy(*places, overwrite=overwrite, progress=progress)
        yield CopyOutcome(name=new.directory, state="foreign" if copied.is_foreign else "ok", copied=copied)

    return _Job(old.uri, new.storage, plan, steps, is_run=False)


def _size(checkpoint: Checkpoint) -> int:
    """Return the bytes to copy; 0 for a checkpoint that cannot be read: the copy raises the reason."""
    try:
        return checkpoint.size_bytes
    except CheckpointNotFoundError:
        raise
    except HoldfastError:
        return 0


def _verify(job: _Job) -> dict[str, list[str]]:
    """Read all that was copied once more, at the destination."""
    names = [outcome.name for outcome in job.done if outcome.state == "ok"]
    total = sum(outcome.copied.total_bytes for outcome in job.done if outcome.state == "ok")
    problems = {}
    with progress_bar("verify", total) as progress:
        for name in names:
            found = verify_checkpoint(job.target, name, deep=True, progress=progress)
            problems[name] = list(found.problems)
    return problems


def _document(job: _Job, problems: dict[str, list[str]], *, verified: bool, seconds: float) -> dict[str, Any]:
    rows = []
    for outcome in job.done:
        found = [outcome.problem] if outcome.problem else problems.get(outcome.name, [])
        row = {"name": outcome.name, "uri": f"{job.target.uri.rstrip('/')}/{outcome.name}", "state": outcome.state}
        row |= {name: getattr(outcome.copied, name) for name in ("files", *_BYTES)}
        rows.append({**row, "problems": found})
    failed = any(row["problems"] and row["state"] != "gone" for row in rows)
    bad = failed or job.ended is not None or job.plan.damaged or not rows
    return {
        "source": job.source,
        "target": rows[0]["uri"] if rows and not job.is_run else job.target.uri,
        "kind": "run" if job.is_run else "checkpoint",
        "ok": not bad,
        "interrupted": job.interrupted,
        "error": job.ended,
        "verified": verified,
        "checkpoints": rows,
        "left_out": [{"name": name, "why": why} for name, why in job.plan.left_out.items()],
        "not_reached": list(job.plan.names[len(rows) :]),
        **{name: sum(row[name] for row in rows) for name in _BYTES},
        "seconds": round(seconds, 3),
    }


_BYTES = ("bytes_sent", "bytes_there", "bytes_copied")


def _print(document: dict[str, Any]) -> None:
    from rich.text import Text

    out = console()
    rows = document["checkpoints"]
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        state = "damaged" if row["problems"] and row["state"] == "ok" else row["state"]
        line = Text(f"{row['name']:<{width}}  ") + Text(state, style=_WORDS.get(state, "red"))
        out.print(line + Text(f"  {_bytes(row)}", style="dim") if row["state"] in ("ok", "foreign") else line)
        for problem in row["problems"]:
            out.print(Text(f"  {problem}", style="red" if row["state"] != "gone" else "dim"))
    for left in document["left_out"]:
        out.print(Text(f"{left['name']}  left out, {left['why']}", style="yellow"))
    checked = "every byte verified there" if document["verified"] else "digests checked on the way"
    foreign = sum(row["state"] == "foreign" for row in rows)
    if foreign:
        checked += f"; {foreign} without a manifest of Holdfast: nothing to check against"
    done = {"push": "pushed", "pull": "pulled"}.get(click.get_current_context().info_name or "", "copied")
    done = done if document["error"] is None else f"not all {done}"
    head = f"{done} to {document['target']}: {_bytes(document)} in {format_duration(document['seconds'])}"
    out.print(Text(f"{head} ({checked})" if document["error"] is None else head, style="bold"), soft_wrap=True)
    if document["error"] is not None:
        text = f"{document['error']}; {len(document['not_reached'])} not complete: the same command again goes on"
        out.print(Text(text, style="red"), soft_wrap=True)


def _bytes(row: dict[str, Any]) -> str:
    parts = [f"{format_bytes(row['bytes_sent'])} sent"]
    parts += [f"{format_bytes(row['bytes_there'])} there already"] if row["bytes_there"] else []
    parts += [f"{format_bytes(row['bytes_copied'])} copied at the destination"] if row["bytes_copied"] else []
    return ", ".join(parts)


@click.command()
@click.argument("uri", type=PATH)
@click.option("--older", default="1d", show_default=True, help="Only those begun longer ago than this: 12h, 30min.")
@click.option("--yes", is_flag=True, help="Remove. Without it, only what would go is said.")
@json_option
def sweep(uri: str, older: str, yes: bool, as_json: bool) -> None:
    """Remove unfinished multipart uploads below URI (s3://, oci://, gs:// with HMAC keys).

    A process that is killed in the middle of an upload leaves its parts in the bucket: no listing shows them, and they
    are paid for. Without --yes nothing is removed. Needs boto3, which the extra s3-sweep brings.
    """
    from holdfast.storage.object.client import UnfinishedUploads  # here: no other command needs this client

    older_s = span_option("--older", older)
    uploads = UnfinishedUploads(reach(uri))
    now = time.time()
    rows = []
    with progress_bar("sweep", after_s=1.0, counts=True) as progress:
        for upload in uploads.find():
            is_old = upload.started < now - older_s
            if is_old and yes:
                uploads.remove(upload)
            progress(1)
            state = "kept" if not is_old else "removed" if yes else "would be removed"
            about = {"path": upload.path, "started": upload.started, "upload_id": upload.upload_id}
            rows.append({**about, "state": state})
    if as_json:
        print_json({"uri": uri, "older_s": older_s, "dry_run": not yes, "uploads": rows})
        return
    out = console()
    for row in printable(rows):
        out.print(f"{row['path']}  begun {age(row['started'], now)} ago, {row['state']}")
    removed = sum(row["state"] != "kept" for row in rows)
    done = "removed" if yes else "would be removed: nothing is, without --yes"
    among = counted(len(rows), "unfinished upload")
    out.print(f"{removed} of {among} {done} (those begun over {format_duration(older_s)} ago)")
