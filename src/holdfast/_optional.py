"""Packages that only some users need, and the command that brings them for the way in which Holdfast was installed."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from ._outgoing import masked
from .errors import MissingExtraError

__all__ = ["install_command", "require", "upgrade_command"]

# The checkout, if this file is in one. What the functions below import is for messages: starting must not pay for it.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def require(module: str, *, extra: str, purpose: str) -> Any:
    """Import an optional package.

    Args:
        module: what to import.
        extra: the extra of Holdfast that brings it.
        purpose: what it is needed for, such as "s3:// locations".

    Raises:
        MissingExtraError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs the package {module.partition('.')[0]} ({error}): {install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """Return the command that installs an extra.

    There need not be a release of Holdfast on any index: what was installed from a checkout, an archive or a repository
    is named by that again. Where it is no more, the packages of the extra are named themselves.

    Args:
        extra: as in ``pyproject.toml``.
    """
    kind, place = _origin()
    words = {
        "editable": [f"{place}[{extra}]"],
        "directory": [f"{place}[{extra}]"],
        "address": [f"holdfast[{extra}] @ {place}"],
        "gone": _packages(extra),
    }
    command = "pip install -e" if kind == "editable" else "pip install"
    return f"{command} {_quoted(words.get(kind) or [f'holdfast[{extra}]'])}"


def upgrade_command(version: str | None = None) -> str:
    """Return what to do for a newer Holdfast.

    Args:
        version: the least that is needed, None if nobody knows.
    """
    wanted = f"holdfast>={version}" if version else "holdfast"
    kind, place = _origin()
    if kind == "index":
        return f"pip install --upgrade {_quoted([wanted])}"
    if kind == "editable":
        return f"{wanted} is needed: update the checkout {place} (git pull)"
    if kind == "directory":
        return f"{wanted} is needed: update the checkout {place} (git pull), then pip install {_quoted([place])}"
    return f"{wanted} is needed: install it from where this Holdfast came from"


def _origin() -> tuple[str, str]:
    """Return how this Holdfast came here, and from where.

    Kinds: "editable" (code that runs from a checkout), "directory" (a checkout that was copied from), "address" (an
    archive or a repository, by its URL), "index" (its name is enough), "gone" (a folder or file that is no more).
    """
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    if _is_checkout(_ROOT):
        return "editable", _ROOT
    try:  # PEP 610: written by every installer for what did not come from an index
        found = json.loads(metadata.distribution("holdfast").read_text("direct_url.json") or "null")
        url, revision = found["url"], found.get("vcs_info", {})
    except (metadata.PackageNotFoundError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return "index", ""
    if not isinstance(url, str) or not isinstance(revision, dict):
        return "index", ""
    if revision:
        commit = revision.get("commit_id")
        return "address", f"{revision.get('vcs', 'git')}+{masked(url)}{f'@{commit}' if commit else ''}"
    if not url.startswith("file:"):
        return "address", masked(url)
    path = unquote(urlsplit(url).path)
    if _is_checkout(path):
        return "directory", path
    return ("address", url) if os.path.isfile(path) else ("gone", "")


def _is_checkout(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "pyproject.toml"), encoding="utf-8") as file:
            return re.search(r'^name = "holdfast"$', file.read(), re.MULTILINE) is not None
    except OSError:
        return False


def _packages(extra: str) -> list[str]:
    """Return what an extra requires, as the metadata of the installation has it."""
    from importlib import metadata

    try:
        requirements = metadata.requires("holdfast") or []
    except metadata.PackageNotFoundError:
        return []
    mark = re.compile(rf";\s*extra == ['\"]{re.escape(extra)}['\"]$")
    return [mark.sub("", one).strip() for one in requirements if mark.search(one)]


def _quoted(words: list[str]) -> str:
    import shlex

    return " ".join(shlex.quote(word) for word in words)
