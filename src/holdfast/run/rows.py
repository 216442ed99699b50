"""The rows of a run in memory: a dictionary that keeps its order by age and remembers which names were touched."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["RecordTable"]


class RecordTable(dict[str, list[Any]]):
    """Packed rows (`record.pack`) by checkpoint name; whatever grows with a run looks at what was touched alone.

    Example:
        >>> rows = Rows([["a", 1, 7, "[]"], ["b", 1, 9, "[]"]])
        >>> touched = rows.watch()
        >>> del rows["a"]
        >>> list(rows.newest_first()), touched
        (['b'], {'a'})
    """

    def __init__(self, rows: Iterable[list[Any]] = ()) -> None:
        super().__init__((row[0], row) for row in rows)
        self._order: list[tuple[int, int, str]] | None = None  # oldest first; made when first asked for
        self._watches: list[set[str]] = []

    def watch(self) -> set[str]:
        """Return a set that will have every name touched from now on; whoever asked may clear it."""
        touched: set[str] = set()
        self._watches.append(touched)
        return touched

    def newest_first(self) -> Iterator[str]:
        """Iterate over all names, the highest (attempt, step, name) first; stop before anything is changed."""
        if self._order is None:
            self._order = sorted((row[1], row[2], name) for name, row in self.items())
        return (name for _, _, name in reversed(self._order))

    def __setitem__(self, name: str, row: list[Any]) -> None:
        self._leave(name)
        super().__setitem__(name, row)
        if self._order is not None:
            insort(self._order, (row[1], row[2], name))

    def __delitem__(self, name: str) -> None:
        self._leave(name)
        super().__delitem__(name)

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a row and return it, ``default`` if there is none."""
        row = self.get(name, default)
        if name in self:
            del self[name]
        return row

    def update(self, rows: Mapping[str, list[Any]]) -> None:  # type: ignore[override]  # the one form that is used
        """Set all of these rows."""
        for name, row in rows.items():
            self[name] = row

    def clear(self) -> None:
        """Remove all rows."""
        for touched in self._watches:
            touched.update(self)
        super().clear()
        self._order = None

    def _leave(self, name: str) -> None:
        """Take a name out of the order, before its row changes."""
        for touched in self._watches:
            touched.add(name)
        if self._order is not None and (row := self.get(name)) is not None:
            del self._order[bisect_left(self._order, (row[1], row[2], name))]
