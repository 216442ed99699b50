"""The SLURM job that this process belongs to."""

from __future__ import annotations

import os
from datetime import datetime

from .errors import ConfigError

__all__ = ["job_end", "job_life"]

_ASK_S = 30.0


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
        told = asked.stdout.strip()
        return None if told in ("N/A", "NONE", "Unknown") else datetime.fromisoformat(told).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or error
        raise ConfigError(
            f"deadline='slurm': the end of job {job} is not known: SLURM_JOB_END_TIME is not set, and "
            f"`{' '.join(command)}` failed: {str(said).strip()}. In the job script, before the training: "
            'export SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s)'
        ) from error
