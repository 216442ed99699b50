"""Configuration values: what they mean, and what wrong ones say."""

from __future__ import annotations

import inspect
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from holdfast import CheckpointConfig, CheckpointStrategy, FailureConfig, Keep, RunConfig, ScalingConfig


class Callback:
    def after_report(self, run_context, metrics, checkpoint) -> None: ...


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ScalingConfig(num_workers=-1), "at least 1"),
        (lambda: ScalingConfig(num_workers=True), "at least 1"),
        (lambda: ScalingConfig(num_workers=2.0), "at least 1"),
        (lambda: ScalingConfig(num_workers=(4, 1)), "1 <= least <= most"),
        (lambda: ScalingConfig(num_workers=(1, 4), engine="local"), "needs engine='ray'"),
        (lambda: ScalingConfig(num_workers=0, engine="ray"), "in this process"),
        (lambda: ScalingConfig(placement_strategy="NEAR"), "'STRICT_PACK'"),
        (lambda: ScalingConfig(label_selector={"zone": 1}), "labels by name"),
        (lambda: ScalingConfig(use_gpu="yes"), "True or False"),
        (lambda: ScalingConfig(engine="slurm"), "'local', 'ray' or 'auto'"),
        (lambda: ScalingConfig(resources_per_worker=4), "by name"),
        (lambda: ScalingConfig(resources_per_worker={"CPU": -1}), "'CPU': -1"),
        (lambda: ScalingConfig(resources_per_worker={"CPU": math.nan}), "no amount"),
        (lambda: ScalingConfig(resources_per_worker={"GPU": 1}), "use_gpu=True"),
        (lambda: ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0}), "contradict"),
        (lambda: CheckpointConfig(num_to_keep=0), "at least 1"),
        (lambda: CheckpointConfig(num_to_keep=-3), "at least 1"),
        (lambda: CheckpointConfig(num_to_keep="2"), "whole number"),
        (lambda: CheckpointConfig(checkpoint_score_order="best"), "'max' (larger is better) or 'min'"),
        (lambda: CheckpointConfig(checkpoint_score_attribute=""), "name of a metric"),
        (lambda: CheckpointConfig(checkpoint_score_attribute=7), "name of a metric"),
        (lambda: Keep(best=1, metric=["loss"]), "name of a metric"),
        (lambda: Keep(every="1e400ba"), "positive and whole"),
        (lambda: CheckpointConfig(keep=3), "holdfast.Keep"),
        (lambda: CheckpointConfig(keep=Keep(last=1), num_to_keep=2), "leave num_to_keep"),
        (lambda: CheckpointStrategy(num_to_keep=-1), "0 to write none"),
        (lambda: CheckpointStrategy(checkpoint_score_order="up"), "'max' (larger is better) or 'min'"),
        (lambda: CheckpointStrategy(checkpoint_score_attribute=None), "name of a metric"),
        (lambda: FailureConfig(max_failures=-2), "-1 for no limit"),
        (lambda: FailureConfig(max_failures=1.5), "-1 for no limit"),
        (lambda: FailureConfig(max_preemptions=-2), "max_preemptions=-2"),
        (lambda: FailureConfig(hang_timeout_s=0), "positive"),
        (lambda: FailureConfig(hang_timeout_s=math.inf), "positive"),
        (lambda: RunConfig(name="a//b"), "a plain name"),
        (lambda: RunConfig(name="../b"), "a plain name"),
        (lambda: RunConfig(name=".."), "a plain name"),
        (lambda: RunConfig(name=""), "a plain name"),
        (lambda: RunConfig(name=7), "a plain name"),
        (lambda: RunConfig(storage_path=7), "directory or a URI"),
        (lambda: RunConfig(storage_path=""), "directory or a URI"),
        (
            lambda: RunConfig(local_dir="~/ray_results"),
            "local_dir='~/ray_results'): where a run lives is called storage_path",
        ),
        (lambda: RunConfig(storage_path="/runs", local_dir="/scratch"), "in front of a remote one"),
        (lambda: RunConfig(storage_path="s3://b/runs", local_dir=7), "a directory of each node's own disk"),
        (lambda: RunConfig(checkpoint_config=FailureConfig()), "CheckpointConfig or holdfast.CheckpointStrategy"),
        (lambda: RunConfig(failure_config={"max_failures": 1}), "holdfast.FailureConfig"),
        (lambda: RunConfig(callbacks=Callback()), "a list"),
        (lambda: RunConfig(callbacks=[object()]), "after_report"),
        (lambda: hf.Checkpointer("run", seed_samples="no"), "seed_samples='no': use True or False"),
        (lambda: hf.Checkpointer("run", exit_code_for_requeue=True), "exit status"),
    ],
)
def test_wrong_values_are_refused_when_they_are_given(make, says: str) -> None:
    """Each is a ConfigError (a ValueError), which names the argument and says what would do."""
    with pytest.raises(hf.ConfigError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "argument", "says"),
    [
        (RunConfig, "sync_config", "storage_path"),
        (RunConfig, "verbose", "logger"),
        (RunConfig, "stop", "train_func"),
        (RunConfig, "progress_reporter", "Result"),
        (RunConfig, "log_to_file", "logs"),
        (RunConfig, "worker_runtime_env", "environment"),
        (FailureConfig, "fail_fast", "max_failures=0"),
        (FailureConfig, "max_preemption_failures", "max_preemptions"),
        (CheckpointConfig, "checkpoint_frequency", "report"),
        (CheckpointConfig, "checkpoint_at_end", "train_func"),
        (ScalingConfig, "trainer_resources", "leave it out"),
        (ScalingConfig, "bundle_label_selector", "label_selector"),
        (ScalingConfig, "use_tpu", "use_gpu"),
    ],
)
def test_arguments_of_ray_train_that_are_gone_say_what_to_use_instead(kind, argument: str, says: str) -> None:
    """A script that is being moved over is told what to do; any other unknown name is Python's own TypeError."""
    with pytest.raises(hf.ConfigError, match=argument) as caught:
        kind(**{argument: None})
    assert says in str(caught.value)
    with pytest.raises(TypeError):
        kind(no_such_argument=1)


def test_signatures_survive_the_check_for_removed_arguments() -> None:
    """`help()` and editors show the real arguments."""
    assert list(inspect.signature(FailureConfig).parameters) == ["max_failures", "max_preemptions", "hang_timeout_s"]


@pytest.mark.parametrize(
    ("config", "keep"),
    [
        (CheckpointConfig(), Keep()),
        (CheckpointConfig(num_to_keep=3), Keep(last=3)),
        (
            CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val/acc"),
            Keep(best=2, metric="val/acc", mode="max"),
        ),
        (
            CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min"),
            Keep(metric="loss", mode="min"),
        ),
        (CheckpointConfig(keep=Keep(every="1h")), Keep(every="1h")),
        (CheckpointStrategy(), Keep(metric="_timestamp", mode="max")),
        (CheckpointStrategy(num_to_keep=0), Keep(metric="_timestamp", mode="max")),
        (
            CheckpointStrategy(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"),
            Keep(best=2, metric="loss", mode="min"),
        ),
    ],
)
def test_retention_follows_from_the_configuration(config, keep: Keep) -> None:
    """With an attribute the best stay, without one the newest, without a number all."""
    assert config.retention == keep


def test_configurations_are_values() -> None:
    """They compare by value, pickle, do not change, and a list of callbacks becomes a tuple."""
    config = RunConfig(
        name="gpt", storage_path=Path("runs"), checkpoint_config=CheckpointConfig(num_to_keep=1),
        failure_config=FailureConfig(max_failures=-1, hang_timeout_s=60), callbacks=[],
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.callbacks == ()
    with pytest.raises(AttributeError):
        config.name = "other"
    callback = Callback()
    assert RunConfig(callbacks=[callback]).callbacks == (callback,)
    assert ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 1, "CPU": 0.5}).num_workers == 2


def test_public_names_load_on_first_use() -> None:
    """Configurations, results and the names of `holdfast.torch` come without torch."""
    code = (
        "import sys, holdfast as hf, holdfast.torch as ht\n"
        "hf.RunConfig, hf.Result, hf.CheckpointUploadMode.ASYNC, hf.ReportedCheckpointStatus, dir(ht)\n"
        "assert 'torch' not in sys.modules, 'torch imported too early'\n"
        "assert 'pandas' not in sys.modules\n"
        "ht.get_device(); assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert all(getattr(hf, name) is not None for name in hf.__all__)
    assert {"CheckpointConfig", "CheckpointStrategy", "FailureConfig", "Result", "report"} <= set(dir(hf))


def test_no_callbacks() -> None:
    """None is a common default of arguments that are passed through."""
    assert RunConfig(callbacks=None).callbacks == ()


def test_a_range_is_not_strict() -> None:
    """Workers of a range are placed one by one, so that no strategy holds for all of them."""
    with pytest.raises(hf.ConfigError, match=r"num_workers=\(1, 3\).*placed one by one"):
        hf.ScalingConfig(num_workers=(1, 3), engine="ray", placement_strategy="STRICT_SPREAD")
    assert hf.ScalingConfig(num_workers=(2, 2), engine="ray", placement_strategy="STRICT_PACK").most_workers == 2


@pytest.mark.parametrize("silence_s", [0, -1, 0.5, True, "30", float("nan"), float("inf")])
def test_silence_is_a_number_of_seconds(silence_s, tmp_path):
    """Both places refuse what is none, and name the argument."""
    with pytest.raises(hf.ConfigError, match=r"RunConfig\(silence_s=.*seconds from 1"):
        hf.RunConfig(silence_s=silence_s)
    with pytest.raises(hf.ConfigError, match=r"silence_s=.*seconds from 1"):
        hf.Checkpointer(tmp_path, {}, silence_s=silence_s)


def test_silence_longer_than_a_save_may_take(tmp_path):
    """It could never be waited for: said at once, with what to do."""
    with pytest.raises(hf.ConfigError, match=r"silence_s=90.*longer than timeout_s=60.*raise timeout_s"):
        hf.Checkpointer(tmp_path, {}, silence_s=90, timeout_s=60)
    hf.Checkpointer(tmp_path, {}, timeout_s=5)
