"""How many files a process may have open, where rank 0's writer has a connection to the writer of every rank.

The soft limit is 1 024 on most systems, for the sake of programs that call `select`; the hard one is what counts for
others. Both the trainer, which can still refuse a run, and the writer, which needs the files, ask here.
"""

from __future__ import annotations

import resource

from holdfast.errors import ConfigError

__all__ = ["allow_connections", "check_connections"]

_OTHERS = 64  # files of a save, shared memory, logs, connections that have not proved yet who they are


def check_connections(num_ranks: int) -> None:
    """Refuse more ranks than a process may have connections.

    Raises:
        ConfigError: not even the hard limit is enough.
    """
    needed = num_ranks + _OTHERS
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _enough(hard, needed):
        raise ConfigError(
            f"{num_ranks} ranks need {needed} open files in rank 0's writer, which has a connection to each, and a "
            f"process may have {hard} (hard limit): raise it (`ulimit -Hn`, LimitNOFILE= of the service, --ulimit "
            "nofile= of the container), or train with fewer ranks"
        )


def allow_connections(num_ranks: int) -> None:
    """Raise our soft limit to the hard one if it is not enough for so many ranks."""
    needed = num_ranks + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _enough(soft, needed):
        # Without a hard limit some systems still refuse an unlimited soft one.
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def _enough(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
