"""Which names of a checkpoint a load takes, what they are called on the other side, and how both have to fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from holdfast._units import listed
from holdfast.errors import ConfigError

__all__ = ["Fit", "Selection", "covers", "of_one_name_each", "patterns_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a checkpoint has to fit the state that it is loaded into.

    Attributes:
        only: names or globs of what is loaded; None: everything.
        skip: names or globs of what is not.
        rename: globs of stored names -> names in the state.
        idle_names: ``only``, ``skip`` and ``rename`` may name entries that nobody has: a run that is started again with
            the same arguments has renamed or left them out already.
        strict: refuse any difference.
        lenient: names or globs of entries that need not fit: those that do not are listed as not restored.
        allow_missing: names or globs of what the checkpoint need not have.
        added: finds, in the stored tree, the paths of values that came into the state in training: where the state
            lacks them, they come back as values.
        apart: the ranks that hold the same as this rank, where others hold other entries: then the checkpoint may have
            entries that the state lacks; where all ranks load together some rank must hold each of them. None: all
            hold the same.
        bookkeeping: the entry that a run adds to its checkpoints, which the state need not have.
    """

    only: str | Iterable[str] | None = None
    skip: str | Iterable[str] | None = None
    rename: Mapping[str, str] | None = None
    idle_names: bool = False
    strict: bool = True
    lenient: Iterable[str] = ()
    allow_missing: tuple[str, ...] = ()
    added: Callable[[Any], Collection[str]] | None = None
    apart: tuple[int, ...] | None = None
    bookkeeping: str | None = None


def covers(patterns: Iterable[str], path: str) -> bool:
    """Tell whether a glob matches ``path`` or a container above it ("model" covers "model/wte.weight")."""
    for pattern in patterns:
        if path == pattern or path.startswith(pattern + "/") or fnmatchcase(path, pattern):
            return True
        if fnmatchcase(path, pattern + "/*"):
            return True
    return False


def of_one_name_each(names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Turn pairs of (stored name, new name) into new name -> stored name.

    Raises:
        ConfigError: two entries would have one name, and one of them would be gone.
    """
    origin: dict[str, str] = {}
    for old, new in names:
        if (other := origin.setdefault(new, old)) != old:
            raise ConfigError(
                f"rename: {other!r} and {old!r} of the checkpoint would both be {new!r}: give another new name, or "
                "choose one of them by its stored name with only= or skip="
            )
    return origin


class Selection:
    """The ``only``, ``skip`` and ``rename`` arguments of a load.

    Args:
        only: names or globs over "/"-joined paths; None takes everything.
        skip: names or globs to leave out.
        rename: glob of stored names -> new name; each ``*`` in the new name takes what the same ``*`` matched. The
            name of a container renames everything in it.
    """

    def __init__(
        self,
        only: str | Iterable[str] | None = None,
        skip: str | Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self.only = None if only is None else patterns_of(only, "only")
        self.skip = patterns_of(skip, "skip")
        self._used: set[str] = set()  # patterns of `skip` that have left something out
        rename = {} if rename is None else rename
        if not isinstance(rename, Mapping) or {type(name) for pair in rename.items() for name in pair} - {str}:
            raise ConfigError(f"rename={rename!r}: give a dict {{stored name or glob: new name}}")
        self._rules = {old: (_compile(old), new) for old, new in rename.items()}
        for old, new in rename.items():
            if new.count("*") > old.count("*"):
                raise ConfigError(f"rename {{{old!r}: {new!r}}}: the new name has more '*' than the old name")

    def partly(self, path: str) -> bool:
        """Tell whether something below ``path`` may be treated unlike the container itself."""
        below = path + "/"
        patterns = (*(self.only or ()), *self.skip)
        return any(glob.startswith(below) or ("*" in glob and _may_match(glob, below)) for glob in patterns)

    @property
    def renames(self) -> bool:
        """True when names change."""
        return bool(self._rules)

    @property
    def everything(self) -> bool:
        """True when every entry is taken under its stored name."""
        return self.only is None and not self.skip and not self._rules

    def takes(self, *paths: str) -> bool:
        """Tell whether the entry known under these paths is wanted: chosen by one of them and skipped by none."""
        skipped = {glob for glob in self.skip if any(covers((glob,), path) for path in paths)}
        self._used |= skipped
        return not skipped and (self.only is None or any(covers(self.only, path) for path in paths))

    def renamed(self, name: str) -> str:
        """Return what a stored name is called in the live state; the first rule that matches wins."""
        if not self._rules:
            return name
        for pattern, new in self._rules.values():
            if match := pattern.fullmatch(name):
                parts = new.split("*")
                filled = parts[0]
                for number, part in enumerate(parts[1:]):
                    filled += match.groups()[number] + part
                return filled + (match["below"] or "")
        return name

    def outdone(self, names: Iterable[str]) -> set[str]:
        """Return the stored names that are not taken and whose place one takes that is.

        Raises:
            ConfigError: two entries that are taken would have one name.
        """
        if not self._rules:
            return set()
        pairs = [(name, self.renamed(name)) for name in names]
        origin = of_one_name_each((old, new) for old, new in pairs if self.takes(new, old))
        return {old for old, new in pairs if origin.get(new, old) != old}

    def check(self, paths: Iterable[str]) -> None:
        """Refuse patterns that match nothing: a misspelt one would silently load nothing, or what was to be left out.

        With `skip`, `takes` has to have been asked for all entries of a live state, which may have more.

        Args:
            paths: every path of the checkpoint.

        Raises:
            ConfigError: names the patterns, and the first paths of the checkpoint.
        """
        if self.everything:
            return
        known = set(paths)
        idle = [f"only: {glob!r}" for glob in self.only or () if not any(covers((glob,), path) for path in known)]
        skips = (glob for glob in self.skip if glob not in self._used)
        idle += [f"skip: {glob!r}" for glob in skips if not any(covers((glob,), path) for path in known)]
        idle += [f"rename: {old!r}" for old, (rule, _) in self._rules.items() if not any(map(rule.fullmatch, known))]
        if idle:
            examples = listed(sorted(known, key=lambda path: (path.count("/"), path)), 12)
            raise ConfigError(f"nothing in the checkpoint matches {', '.join(idle)}: it holds {examples}")


def _may_match(glob: str, below: str) -> bool:
    # Only what stands before the first wildcard can rule a container out.
    fixed = re.split(r"[*?\[]", glob, maxsplit=1)[0]
    return fixed.startswith(below) or below.startswith(fixed)


def patterns_of(value: str | Iterable[str] | None, argument: str) -> tuple[str, ...]:
    """Return the names or globs that a user gave as ``argument``; none for None.

    Raises:
        ConfigError: there is something else among them.
    """
    if value is None:
        return ()
    patterns = tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else (value,)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{argument}: give names or globs such as 'model' or 'optimizer/*', not {pattern!r}")
    return tuple(pattern.rstrip("/") for pattern in patterns)


def _compile(glob: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(re.escape(part) for part in glob.split("*")) + "(?P<below>/.*)?", re.DOTALL)
