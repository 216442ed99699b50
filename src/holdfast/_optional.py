"""Packages that only some users need."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import MissingExtraError

__all__ = ["require"]


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
            f"{purpose} needs the package {module.partition('.')[0]} ({error}): pip install 'holdfast[{extra}]'"
        ) from error
