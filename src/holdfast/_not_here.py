"""Names that scripts for Ray Train know and Holdfast does not have: what to do instead of each, by module."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Mapping

__all__ = ["NOT_HERE", "missing"]

_DATA = "Ray Data is not used: give each worker its part with holdfast.torch.prepare_data_loader"
_GROUP = "the process group is gloo on CPUs and nccl on GPUs; start another one in the train function"
_PREEMPTED = (
    "a worker that is told to go (SIGTERM, or exit status 85) is started again as often as "
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
        "PreemptionError": f"one more than allowed raises TrainingFailedError; {_PREEMPTED}",
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
