"""How the ranks of a run agree on something at its start: through a store (`rendezvous`), or one rank with itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast._ranks import RankInfo

    from .rendezvous import Rendezvous

SILENCE_S = 30.0
"""A rank that says nothing for so many seconds is given up."""

Meeting: TypeAlias = "Alone | Rendezvous"


class Alone:
    """A meeting of one rank."""

    rank, world_size = 0, 1

    def agree(
        self,
        topic: str,
        give: Callable[[], Any],
        decide: Callable[[list[Any]], Any] = lambda values: values[0],
        *,
        work_s: float = 0.0,
    ) -> Any:
        """Decide on our own value; see `holdfast.checkpointer.rendezvous.Rendezvous.agree`."""
        return decide([give()])

    def swap(self, group: str, value: Any) -> list[Any]:
        """Give our own value back; see `Rendezvous.swap`."""
        return [value]


def meet(info: RankInfo, *, name: str, timeout_s: float, otherwise: str) -> Meeting:
    """Meet the other ranks through the process group's store, else through that of torchrun; alone if there are none.

    Args:
        info: who we are.
        name: of the meeting.
        timeout_s: bound of every wait.
        otherwise: what else the user may do, for the error.

    Raises:
        ConfigError: there are other ranks, and no store to meet them through.
    """
    if info.world_size == 1:
        return Alone()
    from .rendezvous import find_store, meet_in  # not above: most runs have one rank

    return meet_in(find_store(info, otherwise), info, name=name, timeout_s=timeout_s)


def same_for_all(values: Sequence[Any], what: str) -> Any:
    """Return the value that all ranks gave.

    Raises:
        ConfigError: they differ.
    """
    differing = [rank for rank, value in enumerate(values) if value != values[0]]
    if differing:
        raise ConfigError(
            f"{what} must be the same on all ranks: rank 0 has {values[0]!r}, rank {differing[0]} has "
            f"{values[differing[0]]!r}"
        )
    return values[0]
