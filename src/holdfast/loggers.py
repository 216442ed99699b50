"""Where the loop trainer's metrics and uploads go."""

from __future__ import annotations

from .trainers.loop.loggers import ConsoleLogger, JSONLLogger, Logger, LoggerDestination, TensorBoardLogger
from .trainers.loop.progress import ProgressBar
from .trainers.loop.uploads import RemoteUploaderDownloader

__all__ = [
    "ConsoleLogger",
    "JSONLLogger",
    "Logger",
    "LoggerDestination",
    "ProgressBar",
    "RemoteUploaderDownloader",
    "TensorBoardLogger",
]
