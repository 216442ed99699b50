"""`ray job submit`: a script with a working directory, stopped and submitted again."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import ray
from cluster_kit import LIMIT_S, Nodes, wait_until
from ray.job_submission import JobStatus, JobSubmissionClient

import holdfast as hf

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
JOB = Path(__file__).resolve().parent / "job"


def test_a_job_is_stopped_and_submitted_again(nodes: Nodes, tmp_path: Path) -> None:
    """Ranks on a node have the job's modules; `ray job stop` keeps what is saved, and the same job goes on from it."""
    nodes.add(2)
    client = JobSubmissionClient(nodes.dashboard)

    def submit() -> str:
        return client.submit_job(
            entrypoint=f"{sys.executable} job_script.py {tmp_path}", runtime_env={"working_dir": str(JOB)}
        )

    def ended(job: str) -> bool:
        return client.get_job_status(job).is_terminal()

    first = submit()
    wait_until(lambda: ended(first) or (tmp_path / "waiting").exists(), "the workers wait")
    wait_until(
        lambda: ended(first) or (tmp_path / "job" / "checkpoint_000004" / "manifest.json").exists(), "it is saved"
    )
    assert not ended(first), client.get_job_logs(first)
    stopping = time.monotonic()
    client.stop_job(first)
    wait_until(lambda: ended(first), "the job is stopped")
    print(f"stopped after {time.monotonic() - stopping:.1f} s")
    assert client.get_job_status(first) == JobStatus.STOPPED
    wait_until(
        lambda: all(one["state"] == "REMOVED" for one in ray.util.placement_group_table().values()),
        "the placement groups are gone",
    )
    newest = hf.Result.from_path(tmp_path / "job").checkpoint
    assert newest is not None
    assert newest.verify().ok
    assert hf.load(newest) == {"total": 15, "step": 5}
    second = submit()
    wait_until(lambda: ended(second), "the job ends", LIMIT_S)
    said = client.get_job_logs(second)
    assert client.get_job_status(second) == JobStatus.SUCCEEDED, said
    assert "job resumes from checkpoint_000004 at report 5" in said
    assert "the job ends with 21" in said
