"""``holdfast sweep``: remove uploads that killed processes left unfinished in a bucket."""

from __future__ import annotations

import time
from typing import Any

import click

from holdfast._units import format_duration, parse_span
from holdfast.errors import ConfigError
from holdfast.storage.resolve import resolve
from holdfast.storage.unfinished import UnfinishedUploads

from .terminal import age, console, print_json, printable

__all__ = ["sweep"]


@click.command()
@click.argument("uri")
@click.option("--older", default="1d", show_default=True, help="Only those begun longer ago than this: 12h, 30min.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def sweep(uri: str, older: str, dry_run: bool, as_json: bool) -> None:
    """Remove unfinished multipart uploads below URI (s3://, oci://, gs:// with HMAC keys).

    A process that is killed in the middle of an upload leaves its parts in the bucket: no listing shows them, and they
    are paid for. Needs boto3: pip install 'holdfast[s3-sweep]'.
    """
    older_s = parse_span(older.strip().lower().replace(" ", ""))
    if older_s is None:
        raise ConfigError(f"--older {older}: give a time such as 1d, 12h or 30min")
    uploads = UnfinishedUploads(resolve(uri))
    now = time.time()
    rows: list[dict[str, Any]] = []
    for upload in uploads.find():
        is_old = now - upload.started > older_s
        if is_old and not dry_run:
            uploads.remove(upload)
        state = "kept" if not is_old else "would be removed" if dry_run else "removed"
        rows.append({"path": upload.path, "started": upload.started, "upload_id": upload.upload_id, "state": state})
    if as_json:
        print_json({"uri": uri, "older_s": older_s, "dry_run": dry_run, "uploads": rows})
        return
    out = console()
    for row in printable(rows):
        out.print(f"{row['path']}  begun {age(row['started'], now)} ago, {row['state']}")
    removed = sum(row["state"] != "kept" for row in rows)
    done = "would be removed" if dry_run else "removed"
    out.print(f"{removed} of {len(rows)} unfinished uploads {done} (those begun over {format_duration(older_s)} ago)")
