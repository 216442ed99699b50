"""Loggers whose warnings say who speaks (most scripts show a warning as its text alone), and show no credentials."""

from __future__ import annotations

import logging
import traceback

from ._outgoing import masked, visible

_NAME = "holdfast"


class _Outgoing(logging.Filter):
    """Puts the name of the package in front of warnings and errors, and takes credentials out of all records."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and not str(record.msg).startswith(_NAME):
            record.msg = f"{_NAME}: {record.msg}"
        text = record.getMessage()
        if (clean := visible(masked(text))) != text:
            record.msg, record.args = clean, ()
        if record.exc_info and record.exc_info[0] is not None:
            # Exceptions of clients show what they were given; a formatter takes this text if it is there.
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            if (clean := masked(text)) != text:
                record.exc_text = clean
        return True


_OUTGOING = _Outgoing()


def get_logger(area: str) -> logging.Logger:
    """Return the logger ``holdfast.<area>``.

    Args:
        area: part of the package that speaks, such as "checkpointer".
    """
    logger = logging.getLogger(f"{_NAME}.{area}")
    logger.addFilter(_OUTGOING)  # once, however often it is added
    return logger
