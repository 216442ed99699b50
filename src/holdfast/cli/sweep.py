"""``holdfast sweep``: remove uploads that killed processes left unfinished in a bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from holdfast._progress import progress_bar
from holdfast._units import format_duration
from holdfast.storage.object.unfinished import UnfinishedUploads

from .targets import PATH, reach, span_option
from .terminal import age, console, counted, print_json, printable

__all__ = ["sweep"]


@click.command()
@click.argument("uri", type=PATH)
@click.option("--older", default="1d", show_default=True, help="Only those begun longer ago than this: 12h, 30min.")
@click.option("--yes", is_flag=True, help="Remove. Without it, only what would go is said.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def sweep(uri: str, older: str, yes: bool, as_json: bool) -> None:
    """Remove unfinished multipart uploads below URI (s3://, oci://, gs:// with HMAC keys).

    A process that is killed in the middle of an upload leaves its parts in the bucket: no listing shows them, and they
    are paid for. Without --yes nothing is removed. Needs boto3, which the extra s3-sweep brings.
    """
    dry_run = not yes
    older_s = span_option("--older", older)
    uploads = UnfinishedUploads(reach(uri))
    now = time.time()
    with progress_bar("sweep", after_s=1.0, counts=True) as progress:
        rows = [_swept(uploads, upload, now - older_s, dry_run=dry_run, progress=progress) for upload in uploads.find()]
    if as_json:
        print_json({"uri": uri, "older_s": older_s, "dry_run": dry_run, "uploads": rows})
        return
    out = console()
    for row in printable(rows):
        out.print(f"{row['path']}  begun {age(row['started'], now)} ago, {row['state']}")
    removed = sum(row["state"] != "kept" for row in rows)
    done = "would be removed: nothing is, without --yes" if dry_run else "removed"
    among = counted(len(rows), "unfinished upload")
    out.print(f"{removed} of {among} {done} (those begun over {format_duration(older_s)} ago)")


def _swept(
    uploads: UnfinishedUploads, upload: Any, before: float, *, dry_run: bool, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Remove an upload if it is old; return its row with what was done."""
    is_old = upload.started < before
    if is_old and not dry_run:
        uploads.remove(upload)
    progress(1)
    state = "kept" if not is_old else "would be removed" if dry_run else "removed"
    return {"path": upload.path, "started": upload.started, "upload_id": upload.upload_id, "state": state}
