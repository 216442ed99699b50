"""What to do instead of names and modules that other trainers have and Holdfast has not; loaded when asked for one."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Mapping

_DATA = "Ray Data is not used: give each worker its part with holdfast.torch.prepare_data_loader"
_GROUP = "the process group is gloo on CPUs and nccl on GPUs; start another one in the train function"
_PREEMPTED = (
    "holdfast.should_save() is True on every worker when it is time to report a checkpoint, because one of them has "
    "to go; a worker that goes (SIGTERM, or exit status 85) is started again as often as "
    "FailureConfig(max_preemptions=...) says; holdfast.Checkpointer saves on the signal"
)
_DIRECTLY = "use PyTorch itself: prepare_model and prepare_data_loader are all that is needed"
_OTHER = "there is no trainer for it; TorchTrainer runs any function, and report() takes any directory"

NOT_HERE: Mapping[str, Mapping[str, str]] = {
    "holdfast": {
        "Backend": _GROUP,
        "BackendConfig": _GROUP,
        "BaseTrainer": "holdfast.torch.TorchTrainer is the trainer; give it a function",
        "DataConfig": _DATA,
        "DataParallelTrainer": "holdfast.torch.TorchTrainer is the trainer; give it a function",
        "DatasetCheckpointConfig": "put what prepare_data_loader returns into report(state=...): it knows its position",
        "HorovodTrainer": _OTHER,
        "JaxTrainer": "holdfast.jax saves and loads the state of JAX programs; there is no trainer for them",
        "LightGBMTrainer": _OTHER,
        "LoggingConfig": "use the logger 'holdfast' (logging.getLogger('holdfast').setLevel(...))",
        "NCCLHangError": "FailureConfig(hang_timeout_s=...) makes a hang a failure: WorkerHangError among failures",
        "PreemptionError": f"a preemption above the limit raises TrainingFailedError; {_PREEMPTED}",
        "PreemptionInfo": _PREEMPTED,
        "SyncConfig": "checkpoints go straight to storage_path, nothing is synced",
        "TRAIN_DATASET_KEY": _DATA,
        "TensorflowTrainer": "holdfast.keras has the callback; TorchTrainer runs any function",
        "TuneReportCallback": "holdfast.ray_tune is the bridge to Ray Tune",
        "XGBoostTrainer": _OTHER,
        "get_dataset_shard": _DATA,
        "get_preemption_info": _PREEMPTED,
        "horovod": _OTHER,
        "huggingface": "it is holdfast.transformers",
        "lightgbm": _OTHER,
        "session": "its functions are in holdfast itself: report, get_checkpoint, get_context().get_world_rank()",
        "tensorflow": "it is holdfast.keras",
        "xgboost": _OTHER,
    },
    "holdfast.torch": {
        "TorchCheckpoint": "report(state={'model': model}) saves, get_checkpoint().load(into=...) restores",
        "TorchConfig": _GROUP,
        "TorchXLAConfig": "TPUs are not supported",
        "accelerate": _DIRECTLY,
        "backward": _DIRECTLY,
        "prepare_optimizer": _DIRECTLY,
        "xla": "TPUs are not supported",
    },
    "holdfast.keras": {
        "TensorflowConfig": "set TF_CONFIG in the train function, before TensorFlow is imported",
        "TensorflowTrainer": "TorchTrainer runs any function; report with ReportCheckpointCallback",
        "prepare_dataset_shard": _DATA,
    },
}


_CONFIGS = "RunConfig, ScalingConfig, CheckpointConfig and FailureConfig are in holdfast itself"
# Paths that stand in scripts after `ray.train` or `composer` has become `holdfast`, by what is below the package.
_MODULES_NOT_HERE = {
    **{name: NOT_HERE["holdfast"][name] for name in ("horovod", "huggingface", "lightgbm", "session", "tensorflow")},
    "xgboost": NOT_HERE["holdfast"]["xgboost"],
    "air": f"{_CONFIGS}, as are report, get_checkpoint and get_context",
    "algorithms": "Algorithm, EMA and LabelSmoothing are in holdfast.core",
    "base_trainer": NOT_HERE["holdfast"]["BaseTrainer"],
    "data_parallel_trainer": NOT_HERE["holdfast"]["DataParallelTrainer"],
    "datasets": "data sets are not part of it: use torch.utils.data, or those of another package",
    "functional": "there are no functional forms of algorithms; those in holdfast.core change the training loop",
    "metrics": "use torchmetrics, or any function of (outputs, targets)",
    "models": "give a torch.nn.Module with loss(outputs, batch), or any module together with loss_fn",
    "profiler": "use torch.profiler in a callback of your own",
    "trainer": "Trainer is in holdfast itself; TorchTrainer is in holdfast.torch",
    "v2": "what Ray Train v2 has is in holdfast itself and in holdfast.torch",
    **{f"core.{name}": "it is in holdfast.core" for name in (
        "algorithm", "callback", "data_spec", "engine", "evaluator", "event", "precision", "state", "time", "types",
    )},
    **{f"callbacks.{name}": "it is in holdfast.callbacks" for name in (
        "checkpoint_saver", "early_stopper", "load_checkpoint", "threshold_stopper",
    )},
    **{f"loggers.{name}": "it is in holdfast.loggers" for name in (
        "console_logger", "logger", "logger_destination", "progress_bar_logger", "remote_uploader_downloader",
        "tensorboard_logger",
    )},
    **{f"optim.{name}": "it is in holdfast.optim" for name in ("decoupled_weight_decay", "scheduler")},
    **{f"utils.{name}": "it is in holdfast.utils" for name in ("checkpoint", "file_helpers", "object_store")},
    "utils.dist": "use torch.distributed: the process group is the default one",
    "utils.reproducibility": "give Trainer(seed=...), or call holdfast.torch.enable_reproducibility()",
}  # fmt: skip


def refuse_module(name: str) -> None:
    """Raise the error for a module of this package that is not here, and that scripts for other trainers know."""
    advice = _MODULES_NOT_HERE.get(name.partition(".")[2])
    if advice is not None:
        raise ModuleNotFoundError(f"there is no module {name}: {advice}", name=name)


def missing(module: str, name: str) -> Exception:
    """Make the error for a name that a module does not have; call it from the module's ``__getattr__``.

    ``from module import name`` replaces an AttributeError by words of its own, so it gets an ImportError.
    """
    advice = NOT_HERE.get(module, {}).get(name)
    if advice is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    text = f"{module} has no {name}: {advice}"
    return ImportError(text, name=module) if _is_import() else AttributeError(text, name=name)


def _is_import() -> bool:
    """Tell whether the caller's caller is asked on behalf of ``from ... import``."""
    frame = sys._getframe(3) if hasattr(sys, "_getframe") else None
    if frame is None:
        return False
    if frame.f_code.co_name == "_handle_fromlist":  # of importlib: it asks packages first
        return True
    return frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]
