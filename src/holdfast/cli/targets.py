"""What a PATH argument means: a run with checkpoints below it, or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import split_arg_string

from holdfast._units import listed, parse_span, short_units
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.verify import known_damaged
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    HoldfastError,
    StoragePermissionError,
    UnknownMetricError,
)
from holdfast.format.names import MANIFEST_NAME
from holdfast.run.catalog import Catalog
from holdfast.run.index import RUN_FILE, RunIndex
from holdfast.run.lease import is_claim
from holdfast.run.record import Record, flat_metrics
from holdfast.run.remains import is_remains
from holdfast.run.retention import rankable
from holdfast.run.rollbacks import bad_steps
from holdfast.run.view import refuse_checkpoint, runs_below
from holdfast.storage.base import Storage
from holdfast.storage.resolve import resolve

from .terminal import note

PATH = click.Path()  # a directory or a URI; the shell completes it
_Command = Callable[..., None]
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which checkpoint of a run is meant.

    Attributes:
        best: name of the metric by which it is the best.
        mode: "min" or "max"; None: what the run's `Keep` says about this metric, else "min".
        step: the step it was saved at.
        newest: the newest is asked for; changes nothing where a single checkpoint is wanted anyway.
    """

    best: str | None = None
    mode: str | None = None
    step: int | None = None
    newest: bool = False

    @property
    def is_given(self) -> bool:
        """Whether anything was asked for."""
        return self.newest or self.best is not None or self.step is not None


def pick_options(*, whole: bool) -> Callable[[_Command], _Command]:
    """Give a command the options ``--best``, ``--mode`` and ``--step``, which reach it as ``pick``.

    Args:
        whole: the command takes whole runs as well; then ``--newest`` asks for the newest checkpoint alone.
    """
    only = "Of a run: only" if whole else "Of a run:"

    def decorate(command: _Command) -> _Command:
        def taken(**options: Any) -> None:
            names = ("best", "mode", "step", "newest")
            pick = Choice(**{name: options.pop(name) for name in names if name in options})
            if sum((pick.newest, pick.best is not None, pick.step is not None)) > 1:
                raise ConfigError("--newest, --best and --step name different checkpoints: give one of them")
            if pick.mode is not None and pick.best is None:
                raise ConfigError("--mode says how --best METRIC ranks: give both, or neither")
            command(pick=pick, **options)

        taken.__name__, taken.__doc__ = command.__name__, command.__doc__
        taken.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
        options = [
            click.option("--step", type=int, metavar="N", help=f"{only} the checkpoint of step N."),
            click.option("--mode", type=click.Choice(["min", "max"]), help="Is the best the smallest or the largest?"),
            click.option(
                "--best",
                metavar="METRIC",
                shell_complete=complete_metric,
                help=f"{only} the checkpoint that is best by METRIC.",
            ),
        ]
        if whole:
            options.append(click.option("--newest", is_flag=True, help="Of a run: only the newest checkpoint."))
        for option in options:
            taken = option(taken)
        return taken

    return decorate


def reach(path: str) -> Storage:
    """Return the storage rooted at ``path``; where no credentials are found, say where they were looked for.

    Called before any request: without credentials an answer takes long and says little.
    """
    storage = resolve(path)
    if places := storage.credentials_missing_in():
        said = f"no credentials for {storage.uri} in {', '.join(places)}"
        note(f"{said}; going on with the role of this machine, if it has one")
    return storage


def find(path: str) -> tuple[Storage, Checkpoint | None]:
    """Return the storage rooted at ``path``, and the checkpoint if the path is one (complete or not).

    Raises:
        CheckpointNotFoundError: there is nothing.
    """
    storage = reach(path)
    root = storage.local_root
    if root is not None and os.path.isfile(root):  # not `Path.is_file`, which raises what may not be looked at
        return storage, Checkpoint(path)
    children = [info.path for info in storage.list("", recursive=False) if not is_claim(info.path)]
    if not children:
        _refuse_nothing(storage)
    if MANIFEST_NAME in children:
        return storage, Checkpoint(path)
    if RUN_FILE not in children and is_remains(children):
        return storage, Checkpoint(path)
    # Files and no directories: nothing in there can be a checkpoint of a run.
    if children and RUN_FILE not in children and not any(child.endswith("/") for child in children):
        return storage, Checkpoint(path)
    return storage, None


def refuse_file(storage: Storage) -> None:
    """Refuse a file where a directory is meant, which need not be there yet.

    Raises:
        ConfigError: it is one.
    """
    root = storage.local_root
    if root is not None and os.path.isfile(root):
        raise ConfigError(f"{storage.uri} is a file: give a directory")


def _refuse_nothing(storage: Storage) -> None:
    """Refuse a place that holds nothing, and is no empty directory.

    Raises:
        CheckpointNotFoundError: saying so.
    """
    root = storage.local_root
    if not (root is not None and os.path.isdir(root)):
        raise CheckpointNotFoundError(f"there is nothing at {storage.uri}: check the path")


def look_at(storage: Storage) -> Catalog | list[tuple[str, Storage]]:
    """Return the run at a place, or if it is a folder of runs these, also those that may not be read.

    Raises:
        StorageError: the storage does not answer, or denies a part of a run.
    """
    try:
        catalog = Catalog(storage)
    except StoragePermissionError:
        runs = [] if storage.exists(RUN_FILE) else runs_below(storage)
        if not runs:
            raise
        return runs
    is_folder = catalog.index.damage == "missing" and not catalog.records()
    return (runs_below(storage, catalog.foreign) if is_folder else []) or catalog


def choose(path: str, pick: Choice, *, warns: bool = True, heeds: bool = True) -> Checkpoint:
    """Return the checkpoint that is meant: that at ``path``, or of the run there the one asked for.

    Says on stderr which checkpoint of a run is taken if ``pick`` names none, and, unless ``warns`` is false, that the
    checkpoint at ``path`` is quarantined. What `holdfast verify` found damaged is not the newest or the best of a run,
    unless ``heeds`` is false; its step brings it.

    Raises:
        CheckpointNotFoundError: there is nothing at ``path``.
        CheckpointError: the run there has no such checkpoint.
        ConfigError: ``path`` is no run, or ``pick`` asks for a checkpoint of a run where ``path`` is a checkpoint.
    """
    storage, checkpoint = find(path)
    if checkpoint is not None:
        if pick.is_given:
            raise ConfigError(f"{path} is one checkpoint: newest, best and --step choose among those of a run")
        if warns:
            warn_of_quarantine(checkpoint)
        return checkpoint
    catalog = run_at(storage, path)
    damaged = heed_checks(catalog) if heeds and pick.step is None else {}
    record = _pick(catalog, pick)
    if not pick.is_given:
        note(f"{storage.uri} is a run: its newest checkpoint, {record.name}, is taken")
    if (not pick.is_given or pick.newest) and (newer := catalog.passed_over(record.name)):
        note(f"newer, but no start takes them, for its guard: {newer}")
    elif (why := catalog.bad_steps().get(record.name)) is not None and warns:
        note(f"{record.name}: no start takes it: {why}")
    for name, why in damaged.items():
        if pick.best is not None or catalog.record(name).order > record.order:
            note(f"{name} is passed over: `holdfast verify` found it damaged: {why}")
    return Checkpoint.at(storage, record.name)


def warn_of_quarantine(checkpoint: Checkpoint) -> None:
    """Say on stderr why a checkpoint is never resumed from, if that is so."""
    index = RunIndex.load(checkpoint.storage, head_only=True)
    why = index.quarantined.get(checkpoint.directory)
    if why is not None:
        note(f"{checkpoint.uri} is quarantined, no resume takes it: {why}")
    elif (why := bad_step_in(checkpoint, index)) is not None:
        note(f"{checkpoint.uri}: no start takes it: {why}")


def bad_step_in(checkpoint: Checkpoint, index: RunIndex) -> str | None:
    """Return what the guard of a run has found in one of its checkpoints; None if that is nothing."""
    try:
        manifest = checkpoint.manifest if index.notes else None
        if manifest is None or manifest.run_id != index.run_id:
            return None
        row = (checkpoint.directory, manifest.attempt, manifest.step or 0, checkpoint.metrics)
    except CheckpointError:
        return None  # the command says what is wrong with it
    return bad_steps([row], index.notes).get(checkpoint.directory)


def run_at(storage: Storage, path: str) -> Catalog:
    """Open the run in ``storage``.

    Raises:
        ConfigError: there is no run of Holdfast.
        CheckpointNotFoundError: there is nothing.
    """
    catalog = Catalog(storage)
    if catalog.index.damage == "missing" and not catalog.records():
        if next(storage.list("", recursive=False), None) is None:
            _refuse_nothing(storage)
        inside = [name for name in catalog.foreign if storage.exists(f"{name}/{RUN_FILE}")]
        inside += [record.name for record in catalog.strangers()]
        refuse_checkpoint(storage, ConfigError)
        hint = f"it has {listed(inside)}: give one of them" if inside else "there is no run.json in it"
        raise ConfigError(f"{storage.uri} is no run: {hint} (`holdfast ls {path}` lists what is there)")
    return catalog


def heed_checks(catalog: Catalog) -> dict[str, str]:
    """Set aside, in ``catalog`` alone, what `holdfast verify` found damaged; return the problems by name.

    Then none of these is the newest, or takes the place of a sound one.
    """
    damaged = known_damaged(catalog.storage, catalog.index.rows, catalog.found())
    catalog.corrupt.update(damaged)
    return damaged


def ranking(keep: Mapping[str, Any] | None, metric: str | None, mode: str | None) -> tuple[str | None, str]:
    """Return the metric and the mode that rank: those given, else those of the run's `Keep`."""
    rules = keep or {}
    name = metric or rules.get("metric")
    return name, mode or (rules.get("mode") if name == rules.get("metric") else None) or "min"


def _pick(catalog: Catalog, pick: Choice) -> Record:
    where = catalog.storage.uri
    if pick.step is not None:
        return _at_step(catalog, pick.step)
    if pick.best is not None:
        metric, mode = ranking(catalog.index.keep, pick.best, pick.mode)
        record = catalog.best(metric or "", mode)
        if record is None:
            known = rankable(saved.metrics for saved in catalog.records())
            raise UnknownMetricError(
                f"no checkpoint of {where} has a number for {metric!r}; they have: {', '.join(known) or 'no metrics'}"
            )
        return record
    newest = catalog.latest()
    if newest is None:
        bad = catalog.bad() | catalog.bad_steps()
        why = f"all {len(bad)} are damaged, quarantined or hold a bad step" if bad else "none has been committed yet"
        raise CheckpointError(f"the run {where} has no checkpoint to take: {why} (`holdfast ls` lists what is there)")
    return newest


def _at_step(catalog: Catalog, step: int) -> Record:
    records = catalog.records()
    found = [record for record in records if record.step == step]
    if found:
        return found[0]  # that of the newest attempt: the others are of lives that were gone back behind
    bad = {catalog.record(name).step: (name, why) for name, why in catalog.bad().items() if name in catalog.index.rows}
    if step in bad:
        name, why = bad[step]
        raise CheckpointError(f"step {step} of {catalog.storage.uri} is quarantined ({name}): {why}")
    near = sorted({record.step for record in records}, key=lambda other: (abs(other - step), other))[:_SHOWN]
    has = f"the nearest are {', '.join(map(str, sorted(near)))}" if near else "it has none at all"
    raise CheckpointError(f"the run {catalog.storage.uri} has no checkpoint of step {step}: {has}")


def complete_metric(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the metrics of the run that the command line names so far, for the shell."""
    # click has not parsed the arguments when the word it completes is the value of an option.
    words = [word for word in split_arg_string(os.environ.get("COMP_WORDS", ""))[2:] if word[:1] != "-"]
    path = next((word for word in words if "://" in word or os.path.isdir(word)), ".")
    try:
        catalog = Catalog(resolve(path))
        names = {name for record in catalog.records() for name in flat_metrics(record.metrics)}
        names |= {name for row in catalog.index.history() for name in flat_metrics(row.get("metrics") or {})}
    except HoldfastError:
        return []
    return sorted(name for name in names if name.startswith(incomplete) and name.isprintable() and name[0] != "_")


def poll_option(text: str) -> float:
    """Return the seconds between two looks that ``--poll`` asks for.

    Raises:
        ConfigError: it is no time, or less than a second.
    """
    every = span_option("--poll", text)
    if every < 1:
        raise ConfigError(f"--poll {text}: give at least one second")
    return every


def span_option(option: str, text: str) -> float:
    """Return the seconds that an option asks for.

    Raises:
        ConfigError: it is no time.
    """
    seconds = parse_span(short_units(text))
    if seconds is None:
        raise ConfigError(f"{option} {text}: give a time such as 30s, 15min, 12h or 1d")
    return seconds
