"""Where the loop trainer's metrics and uploads go."""

from __future__ import annotations

from .trainers.loop.callbacks import Logger, LoggerDestination
from .trainers.loop.loggers import ConsoleLogger, JSONLLogger, ProgressBar, TensorBoardLogger
from .trainers.loop.saving.uploads import RemoteUploaderDownloader

__path__: list[str] = []  # an import of one of Composer's inner modules is answered with where it is
__all__ = [
    "ConsoleLogger", "JSONLLogger", "Logger", "LoggerDestination", "ProgressBar", "RemoteUploaderDownloader",
    "TensorBoardLogger",
]  # fmt: skip
