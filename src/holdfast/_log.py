"""Loggers whose warnings say who speaks: most scripts show a warning as its text alone."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]

_NAME = "holdfast"


class _SaysWho(logging.Filter):
    """Puts the name of the package in front of warnings and errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and not str(record.msg).startswith(_NAME):
            record.msg = f"{_NAME}: {record.msg}"
        return True


_SAYS_WHO = _SaysWho()


def get_logger(area: str) -> logging.Logger:
    """Return the logger ``holdfast.<area>``.

    Args:
        area: part of the package that speaks, such as "checkpointer".
    """
    logger = logging.getLogger(f"{_NAME}.{area}")
    logger.addFilter(_SAYS_WHO)  # once, however often it is added
    return logger
