"""The import paths of Composer in the migration page lead to things that are here, and none of ours is forgotten."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs/migrate-from-composer.md").read_text()
ROWS = re.findall(r"^\| (`composer.*?) \| (.*?) \| `([a-z.]+)` \|$", PAGE, re.MULTILINE)
# The modules that Composer's guide to checkpoints and its API reference import from, with what they are needed for.
MODULES = {
    *("composer", "composer.trainer", "composer.core", "composer.core.time", "composer.core.state"),
    *("composer.core.event", "composer.core.callback", "composer.core.algorithm", "composer.core.evaluator"),
    *("composer.core.data_spec", "composer.core.precision", "composer.callbacks", "composer.callbacks.early_stopper"),
    *("composer.callbacks.checkpoint_saver", "composer.callbacks.threshold_stopper", "composer.loggers"),
    *("composer.callbacks.load_checkpoint", "composer.loggers.remote_uploader_downloader", "composer.loggers.logger"),
    *("composer.loggers.logger_destination", "composer.optim", "composer.optim.scheduler", "composer.utils"),
    *("composer.optim.decoupled_weight_decay", "composer.utils.checkpoint", "composer.utils.object_store"),
    *("composer.utils.file_helpers", "composer.algorithms", "composer.algorithms.ema", "composer.models"),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split("`")[1])
def test_every_name_of_a_row_is_there(row: tuple[str, str, str]) -> None:
    """`from <here> import <name>` works for each name of the row."""
    _, names, here = row
    module = importlib.import_module(here)
    found = re.findall(r"`(\w+)`", names)
    assert found
    assert [name for name in found if not hasattr(module, name)] == []


def test_every_module_has_a_row_and_every_name_of_ours_stands_in_one() -> None:
    """What scripts import from; what is public in our modules of the same names, but for what Composer has not."""
    told = {module for modules, _, _ in ROWS for module in re.findall(r"`(composer[\w.]*)`", modules)}
    assert told >= MODULES
    named = {(here, name) for _, names, here in ROWS for name in re.findall(r"`(\w+)`", names)}
    own = {("holdfast.callbacks", "EarlyStopping"), ("holdfast.core", "Trainer"), ("holdfast.loggers", "JSONLLogger")}
    for here in ("callbacks", "core", "loggers", "optim", "utils"):
        public = {(f"holdfast.{here}", name) for name in importlib.import_module(f"holdfast.{here}").__all__}
        assert public - named <= own
