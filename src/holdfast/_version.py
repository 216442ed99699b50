"""The version of Holdfast, where every layer may read it, and which code this process runs."""

from __future__ import annotations

import functools
import os

__version__ = "0.1.0"

_HERE = os.path.dirname(os.path.abspath(__file__))


@functools.cache
def code_id() -> str:
    """Return what tells the code of this process from any other: version, commit where it is known, digest.

    Processes of a run must speak alike, and a version number does not change with every commit. So the digest is of
    the package's own source: of two installations with the same code it is the same, wherever they came from.
    """
    import hashlib  # these are not above: the version alone has to be read in no time
    from pathlib import Path

    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(Path(_HERE).rglob("*.py")):
        digest.update(path.relative_to(_HERE).as_posix().encode() + b"\0")
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    commit = _commit()
    return f"{__version__} ({f'commit {commit[:10]}, ' if commit else ''}code {digest.hexdigest()})"


def _commit() -> str | None:
    """Return the commit that was installed, or that is checked out; None if nothing says so."""
    import json
    import re
    from importlib import metadata
    from pathlib import Path

    try:
        origin = json.loads(metadata.distribution("holdfast").read_text("direct_url.json") or "{}")
        found = origin.get("vcs_info", {}).get("commit_id")
        if found is None:
            git = Path(_HERE).parents[1] / ".git"
            git = git if git.is_dir() else Path(git.read_text().partition("gitdir: ")[2].strip())
            head = (git / "HEAD").read_text().strip()
            if head.startswith("ref: "):
                common = git / "commondir"
                git = (git / common.read_text().strip()) if common.exists() else git
                head = (git / head[5:]).read_text().strip()
            found = head
    except (OSError, ValueError, AttributeError, metadata.PackageNotFoundError):
        return None
    return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{7,64}", found) else None
