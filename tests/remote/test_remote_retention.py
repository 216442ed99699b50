"""Retention on an object store, by writer processes, keeps what its model says."""

import os

import pytest
import retention_model as oracle
from hypothesis import HealthCheck, settings
from object_kit import BUCKET, s3_environment


@pytest.fixture
def root(server, monkeypatch, request):
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        monkeypatch.delenv(name)
    for name, value in s3_environment(server).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}"


def test_a_random_history(root, capsys):
    """What is in the bucket after every action is what the model says."""
    oracle.play(2, steps=12, home=root)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 204))
def test_more_histories(root, capsys, seed):
    """The same for longer ones."""
    oracle.play(seed, steps=40, home=root)


@pytest.mark.long
def test_the_machine(root, capsys):
    """Hypothesis finds no short history that breaks it."""
    from hypothesis.stateful import run_state_machine_as_test

    remote = type("RemoteMachine", (oracle.Machine,), {"home": f"{root}/machine"})
    run_state_machine_as_test(
        remote,
        settings=settings(
            max_examples=6,
            stateful_step_count=8,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )
