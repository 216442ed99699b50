"""What the launcher says about this process: its rank among the processes of the run, and its SLURM job."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from .errors import ConfigError

_ASK_S = 30.0  # for an answer of SLURM
_NAMED = 8  # ranks spelled out in a message

# launcher -> (rank, world size, local rank, local world size)
_ENVIRONMENTS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun and everything that imitates it
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Rank and world size, globally and on this node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is outside of a world of {self.world_size}: check RANK and WORLD_SIZE")


def current_ranks() -> RankInfo:
    """Read rank and world size from the process group if there is one, else from the launcher's environment.

    Does not import torch: a process group can only exist where torch.distributed is imported already.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return RankInfo(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_rank=local,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", max(1, local + 1))),
        )
    for rank, world, local_rank, local_world in _ENVIRONMENTS:
        if rank in os.environ and world in os.environ:
            try:
                # SLURM sets its variables in a plain `salloc` shell too: a step id tells a launched task apart.
                if rank.startswith("SLURM") and "SLURM_STEP_ID" not in os.environ:
                    continue
                return RankInfo(
                    rank=int(os.environ[rank]),
                    world_size=int(os.environ[world]),
                    local_rank=int(os.environ.get(local_rank, "0")),
                    local_world_size=int(os.environ.get(local_world, "1")),
                )
            except ValueError as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"{rank}={os.environ[rank]!r} / {world}={os.environ[world]!r} are not numbers"
                ) from error
    return RankInfo()


def rank_list(ranks: Iterable[int], *, num_ranks: int | None = None, most: int = _NAMED) -> str:
    """Spell out some ranks for people: "rank 3", "ranks 0, 2 and 5 more".

    Args:
        ranks: which, in any order; of many the first ones are enough.
        num_ranks: how many there are, if ``ranks`` are only the first of them.
        most: how many are named.
    """
    every = sorted(ranks)
    total = len(every) if num_ranks is None else num_ranks
    more = f" and {total - most} more" if total > most else ""
    return f"rank{'s' if total > 1 else ''} {', '.join(map(str, every[:most]))}{more}"


def job_life() -> tuple[str, int] | None:
    """Return the job and how often it was requeued before; None outside of a job.

    A task of an array is a job of its own.
    """
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if not job or not restarts.isdecimal():
        return None
    return f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}", int(restarts)


def job_end() -> float | None:
    """Return when SLURM ends the job (seconds since 1970); None without a time limit, and outside of a job.

    Raises:
        ConfigError: SLURM cannot be asked.
    """
    job, end = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_END_TIME", "")
    if not job:
        return None
    if end.isdecimal():
        return float(end)
    import subprocess  # not above: every writer start would wait for it

    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]
    try:
        asked = subprocess.run(
            command, env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
            capture_output=True, text=True, timeout=_ASK_S, check=True,
        )  # fmt: skip
        answer = asked.stdout.strip()
        return None if answer in ("N/A", "NONE", "Unknown") else datetime.fromisoformat(answer).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or error
        raise ConfigError(
            f"deadline='slurm': the end of job {job} is not known: SLURM_JOB_END_TIME is not set, and "
            f"`{' '.join(command)}` failed: {str(said).strip()}. In the job script, before the training: "
            'export SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s)'
        ) from error
