"""Names with variables: ``ep{epoch}-ba{batch}`` into a name, and back from a name to the counters in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

from holdfast._ranks import RankInfo
from holdfast.errors import ConfigError

from ..times.timestamp import COUNTERS, Timestamp

__all__ = ["Destinations", "NameTemplate", "SaverNames", "is_later", "run_variables"]

RUN_VARIABLES = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
TIME_VARIABLES = (*(name for name in COUNTERS if name != "iteration"), "total_wct", "epoch_wct", "batch_wct")
# The totals first: two counters within an epoch say nothing without the epoch.
_TOTALS = ("batch", "sample", "token", "epoch")
_WITHIN = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
# Far into a training; no two counters are the same.
_LATE = Timestamp(
    **{name: 1_234_567_890 + number for number, name in enumerate(COUNTERS)},
    **dict.fromkeys(TIME_VARIABLES[-3:], 12_345_678.9),
)


class NameTemplate:
    """A folder, file, latest or remote name as the user wrote it.

    Args:
        text: the template.
        what: the argument it came from, for messages.
        times: whether variables of progress (epoch, batch, ...) are allowed.
        read_back: whether the counters have to be found in the name again, see `pattern`.

    Raises:
        ConfigError: a variable is unknown, the braces do not match, or names could not be read back.
    """

    def __init__(self, text: str, *, what: str, times: bool = True, read_back: bool = False) -> None:
        self.text, self.what = text, what
        allowed = (*RUN_VARIABLES, *(TIME_VARIABLES if times else ()))
        try:
            self._parts = [(before, name, spec or "") for before, name, spec, _ in Formatter().parse(text)]
        except ValueError as error:
            raise ConfigError(f"{what}={text!r}: {error}; write {{{{ and }}}} for braces themselves") from None
        self.variables = tuple(name for _, name, _ in self._parts if name is not None)
        unknown = sorted({name for name in self.variables if name not in allowed})
        if unknown:
            raise ConfigError(f"{what}={text!r}: unknown variable {', '.join(unknown)}; there are {', '.join(allowed)}")
        if any("{" in spec for _, _, spec in self._parts):
            raise ConfigError(f"{what}={text!r}: a variable in the format of another; write that format out")
        self._check_formats(read_back=read_back)

    def _check_formats(self, *, read_back: bool) -> None:
        """Refuse now what `format` would fail at when training has gone on for hours, or a later life at reading."""
        run: dict[str, Any] = {name: "r" if name == "run_name" else 0 for name in RUN_VARIABLES}
        for timestamp in (Timestamp(), _LATE):
            try:
                name = self.format(run, timestamp)
            except (ValueError, KeyError, IndexError) as error:
                raise ConfigError(
                    f"{self.what}={self.text!r}: {error}; variables take formats such as {{epoch:04d}} or none"
                ) from None
            if read_back and not self._is_readable(name, run, timestamp):
                raise ConfigError(
                    f"{self.what}={self.text!r}: no later start could tell the counters in {name!r}; use formats such "
                    "as {epoch:04d} or none, and something between two variables"
                )

    def _is_readable(self, name: str, run: Mapping[str, Any], timestamp: Timestamp) -> bool:
        found = self.pattern(run).fullmatch(name)
        groups = {} if found is None else found.groupdict()
        counters = {counter: text for counter, text in groups.items() if not counter.endswith("wct")}
        return found is not None and all(int(text) == timestamp.count(counter) for counter, text in counters.items())

    def format(self, run: Mapping[str, Any], timestamp: Timestamp | None = None) -> str:
        """Fill the variables in.

        Args:
            run: from `run_variables`.
            timestamp: where training is.
        """
        values = dict(run)
        if timestamp is not None:
            found = timestamp.state_dict()
            values.update({name: found[name] for name in TIME_VARIABLES})
        return self.text.format(**values)

    def shape(self, run: Mapping[str, Any]) -> str:
        """Return the name in this run with all counters alike: two that give the same may write over each other."""
        parts = []
        for before, name, spec in self._parts:
            parts.append(before)
            if name is not None:
                parts.append("*" if name in TIME_VARIABLES else format(run[name], spec))
        return "".join(parts)

    def pattern(self, run: Mapping[str, Any]) -> re.Pattern[str]:
        """Return a pattern that matches every name this template gives in this run, counters as groups."""
        pieces, seen = [], set()
        for before, name, spec in self._parts:
            pieces.append(re.escape(before))
            if name is None:
                continue
            if name not in TIME_VARIABLES:
                pieces.append(re.escape(format(run[name], spec)))
            elif name in seen:
                pieces.append(f"(?P={name})")
            else:
                seen.add(name)
                pieces.append(f"(?P<{name}>{r'[0-9.e+-]+' if name.endswith('wct') else '[0-9]+'})")
        return re.compile("".join(pieces))


class Destinations(NamedTuple):
    """Further names of a checkpoint; None for those it does not get.

    Attributes:
        latest: the link to it in its folder.
        remote: of its upload.
        remote_latest: of the pointer to its upload.
    """

    latest: str | None
    remote: str | None
    remote_latest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverNames:
    """The names that one saver gives in one run.

    Attributes:
        variables: of the run, from `run_variables`.
        file: of a checkpoint in its folder.
        latest: of the link to the newest; None for none.
        remote: of an upload; None if nothing is uploaded.
        remote_latest: of the pointer to the newest upload; None for none.
    """

    variables: Mapping[str, Any]
    file: NameTemplate
    latest: NameTemplate | None
    remote: NameTemplate | None
    remote_latest: NameTemplate | None

    @property
    def shape(self) -> str:
        """The name of a checkpoint, its counters left open."""
        return self.file.shape(self.variables)

    @property
    def nested(self) -> bool:
        """True when checkpoints lie in sub-folders, be it by the name of the run."""
        return "/" in self.shape

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches every name of a checkpoint in this run, counters as groups."""
        return self.file.pattern(self.variables)

    def at(self, now: Timestamp) -> str:
        """Return the name of the checkpoint of a moment."""
        return self.file.format(self.variables, now)

    @property
    def fixed_latest(self) -> str | None:
        """Name of the link to the newest; None if there is none, or each moment has its own."""
        return _fixed(self.latest, self.variables)

    @property
    def fixed_remote_latest(self) -> str | None:
        """Name of the pointer to the newest upload; None if there is none, or each moment has its own."""
        return _fixed(self.remote_latest, self.variables)

    def destinations(self, now: Timestamp) -> Destinations:
        """Return the names, apart from its own, that the checkpoint of a moment gets."""
        templates = (self.latest, self.remote, self.remote_latest)
        return Destinations(
            *(None if template is None else template.format(self.variables, now) for template in templates)
        )


def _fixed(template: NameTemplate | None, variables: Mapping[str, Any]) -> str | None:
    if template is None or set(template.variables) & set(TIME_VARIABLES):
        return None
    return template.format(variables)


def run_variables(run_name: str, ranks: RankInfo) -> dict[str, Any]:
    """Return the variables that do not change in a run. One joint checkpoint is named after rank 0."""
    return {
        "run_name": run_name,
        "rank": 0,
        "local_rank": 0,
        "node_rank": 0,
        "world_size": ranks.world_size,
        "local_world_size": ranks.local_world_size,
    }


def is_later(found: re.Match[str], now: Timestamp) -> bool | None:
    """Tell whether the counters in a name lie after ``now``; None if it has none that say."""
    groups = {name: int(value) for name, value in found.groupdict().items() if not name.endswith("wct")}
    if not groups:
        return None
    if any(groups[name] > now.count(name) for name in _TOTALS if name in groups):
        return True
    within = [name for name in _WITHIN if name in groups]
    if not within:
        return False
    if "epoch" not in groups and not any(name in groups for name in _TOTALS):
        return None
    same_epoch = groups.get("epoch", now.count("epoch")) == now.count("epoch")
    return same_epoch and any(groups[name] > now.count(name) for name in within)
