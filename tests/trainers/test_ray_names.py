"""Every public name of Ray Train is here, or is answered with what to do instead, and is in the migration table."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from holdfast._not_here import NOT_HERE, missing

# What the pages of Ray Train's API reference list, and the `__all__` of its modules (2.60), by our module.
LISTED = {
    "holdfast": [
        *("Backend", "BackendConfig", "BaseTrainer", "Checkpoint", "CheckpointConfig", "CheckpointConsistencyMode"),
        *("CheckpointUploadMode", "ControllerError", "DataConfig", "DataParallelTrainer", "DatasetCheckpointConfig"),
        *("FailureConfig", "LoggingConfig", "NCCLHangError", "PreemptionError", "PreemptionInfo", "ReportedCheckpoint"),
        *("ReportedCheckpointStatus", "Result", "RunConfig", "ScalingConfig", "SessionMisuseError", "SyncConfig"),
        *("TRAIN_DATASET_KEY", "TrainContext", "TrainingFailedError", "TuneReportCallback", "UserCallback"),
        *("ValidationConfig", "ValidationFn", "ValidationTaskConfig", "WorkerGroupError"),
        *("get_all_reported_checkpoints", "get_checkpoint", "get_context", "get_dataset_shard", "get_preemption_info"),
        *("report", "HorovodTrainer", "JaxTrainer", "LightGBMTrainer", "XGBoostTrainer"),
        # Ray 1.x and 2.0
        *("CheckpointStrategy", "load_checkpoint", "local_rank", "save_checkpoint", "session", "world_rank"),
        "world_size",
    ],
    "holdfast.collective": ["barrier", "broadcast_from_rank_zero"],
    "holdfast.torch": [
        *("TorchCheckpoint", "TorchConfig", "TorchTrainer", "TorchXLAConfig", "accelerate", "backward"),
        *("enable_reproducibility", "get_device", "get_devices", "prepare_data_loader", "prepare_model"),
        "prepare_optimizer",
    ],
    "holdfast.lightning": [
        *("RayDDPStrategy", "RayDeepSpeedStrategy", "RayFSDPStrategy", "RayLightningEnvironment"),
        *("RayTrainReportCallback", "prepare_trainer"),
    ],
    "holdfast.transformers": ["RayTrainReportCallback", "prepare_trainer"],
    "holdfast.keras": ["ReportCheckpointCallback", "TensorflowConfig", "TensorflowTrainer", "prepare_dataset_shard"],
}
NAMES = [(module, name) for module, names in LISTED.items() for name in names]
TABLE = (Path(__file__).parents[2] / "docs/migrate-from-ray-train.md").read_text().partition("## Every name")[2]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_name_is_known(module: str, name: str) -> None:
    """The thing itself, or advice; and a row says which."""
    if name not in NOT_HERE.get(module, {}):
        if module in ("holdfast.transformers", "holdfast.keras"):  # they import what may not be installed
            source = Path(hf.__file__).parent / f"{module.partition('.')[2]}.py"
            assert re.search(rf"^(class|def) {name}\b|^{name} = ", source.read_text(), re.MULTILINE)
        else:
            assert getattr(importlib.import_module(module), name) is not None
    assert re.search(rf"(?<![A-Za-z_]){name}(?![A-Za-z_])", TABLE), f"{name} is not in the table"


def test_names_that_are_not_here_are_imported_with_advice() -> None:
    """``from ... import`` shows it too, and so does an attribute; nobody takes the name to be there."""
    with pytest.raises(ImportError, match="holdfast has no get_dataset_shard: Ray Data is not used"):
        from holdfast import get_dataset_shard  # noqa: F401
    with pytest.raises(ImportError, match=r"holdfast.torch has no TorchConfig: the process group"):
        from holdfast.torch import TorchConfig  # noqa: F401
    with pytest.raises(AttributeError, match="has no session: its functions are in holdfast"):
        _ = hf.session
    assert not hasattr(hf, "session")
    assert isinstance(missing("holdfast", "nonsense"), AttributeError)


@pytest.mark.parametrize(("module", "words"), [
    ("holdfast.huggingface", "holdfast.transformers"),
    ("holdfast.huggingface.transformers", "holdfast.transformers"),
    ("holdfast.tensorflow.keras", "holdfast.keras"),
    ("holdfast.air.config", "RunConfig"),
    ("holdfast.core.time", "it is in holdfast.core"),
    ("holdfast.trainer", "Trainer is in holdfast itself"),
])  # fmt: skip
def test_modules_that_are_not_here_are_imported_with_advice(module: str, words: str) -> None:
    """``import holdfast.air`` and ``from holdfast.core.time import Time`` say where it is."""
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'holdfast\.nonsense'"):
        importlib.import_module("holdfast.nonsense")


def test_total_resources() -> None:
    """What all workers reserve, under Ray's name."""
    assert hf.ScalingConfig(num_workers=2, use_gpu=True).total_resources == {"CPU": 2, "GPU": 2}
    assert hf.ScalingConfig(3, resources_per_worker={"CPU": 4, "custom": 0.5}).total_resources == {
        "CPU": 12, "custom": 1.5,
    }  # fmt: skip
    assert hf.ScalingConfig((1, 4)).total_resources == {"CPU": 4}


def test_preemption_names_what_saves() -> None:
    """The advice for `get_preemption_info` names `should_save`."""
    with pytest.raises(ImportError, match=r"should_save\(\)"):
        from holdfast import get_preemption_info  # noqa: F401


@pytest.mark.usefixtures("forked")
def test_submodules_after_a_plain_import() -> None:
    """`holdfast.torch.TorchTrainer` needs no import of its own.

    Nor does `holdfast.ray_tune`: the process of a trial imports what the function itself names, and no more.
    """
    code = "import sys, holdfast; holdfast.torch.__name__; holdfast.collective.barrier; holdfast.ray_tune.report"
    anew = (
        "import sys; [sys.modules.pop(name) for name in [*sys.modules] if name.startswith('holdfast')]"  # of the fork
    )
    subprocess.run([sys.executable, "-c", f"{anew}; {code}; holdfast.torch.TorchTrainer"], check=True)


def test_positional_arguments_of_configs() -> None:
    """In the order of Ray Train's."""
    assert hf.FailureConfig(3).max_failures == 3
    assert hf.CheckpointConfig(2, "loss", "min").retention == hf.Keep(best=2, metric="loss", mode="min")
    run = hf.RunConfig("run", "place", None, hf.FailureConfig(1), hf.CheckpointConfig(2))
    assert (run.failure_config, run.checkpoint_config) == (hf.FailureConfig(1), hf.CheckpointConfig(2))
    assert hf.ScalingConfig(2).num_workers == 2
    assert hf.CheckpointStrategy(1).num_to_keep == 1


def test_going_on_with_a_run(tmp_path: Path) -> None:
    """`restore` says how; `can_restore` looks."""
    from holdfast.torch import TorchTrainer

    with pytest.raises(hf.ConfigError, match=r"RunConfig\(name='run', storage_path='/results'\)"):
        TorchTrainer.restore("/results/run", train_loop_per_worker=None)
    assert not TorchTrainer.can_restore(tmp_path)


def test_errors_of_workers() -> None:
    """Ray's names catch what `fit` raises."""
    error = hf.TrainingFailedError("no", failures={1: ValueError()})
    assert isinstance(error, hf.WorkerGroupError)
    assert isinstance(error, RuntimeError)  # as before Ray Train v2
    assert isinstance(error, hf.ControllerError)
    assert error.worker_failures == error.failures
