"""What makes the directory of a checkpoint a model of Hugging Face: its small files, and the names of its tensors."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast._optional import require
from holdfast.errors import ConfigError
from holdfast.model_files import ModelFiles
from holdfast.state.tree.flatten import flatten
from holdfast.state.tree.objects import unwrap

__all__ = ["model_files"]

_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"


def model_files(model: Any, tokenizer: Any = None, *, item: str = "model", folder: str = "") -> ModelFiles:
    """Make the small files with which the directory of a checkpoint is a model: give them to ``model_files=``.

    ``AutoModel.from_pretrained(checkpoint.path)`` then loads it as it lies there: ``model.safetensors.index.json``
    names the files of the checkpoint, and no tensor is written twice. Of a PEFT model the adapter is written to
    ``adapter_model.safetensors``, for ``PeftModel.from_pretrained(base, checkpoint.path)``. Weights have the type that
    they are trained in, which ``config.json`` says (``dtype``).

    Args:
        model: what is saved in the state under ``item``, wrapped (DDP, ``torch.compile``) or not.
        tokenizer: a tokenizer, processor or whatever has ``save_pretrained`` and belongs to the model.
        item: key of the model in the state.
        folder: where in the checkpoint these files lie, for several models in one: "encoder".

    Returns:
        The files, as they are now: make them anew if the configuration changes.

    Raises:
        ConfigError: it is no model of transformers or PEFT.

    Example:
        >>> files = model_files(model, tokenizer)                                           # doctest: +SKIP
        >>> with holdfast.Checkpointer("runs/a", {"model": model}, model_files=files) as ck:  # doctest: +SKIP
        ...     ...
    """
    module = unwrap(model)
    prefix = f"{folder}/" if folder else ""
    with tempfile.TemporaryDirectory(prefix="holdfast-model-") as made:
        if hasattr(module, "peft_config"):
            named = {f"{prefix}{_ADAPTER}": _adapter(module, item, made)}
            indexes = {}
        elif hasattr(module, "config") and hasattr(module.config, "save_pretrained"):
            named, indexes = {}, {f"{prefix}{_INDEX}": item}
            _write_config(module, made)
        else:
            raise ConfigError(
                f"model_files: {type(module).__name__} is no model of transformers or PEFT (it has no config that "
                "can be saved): for another library give model_files={name: bytes} yourself"
            )
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        files = {
            prefix + path.relative_to(made).as_posix(): path.read_bytes()
            for path in sorted(Path(made).rglob("*"))
            if path.is_file()
        }
    return ModelFiles(files=files, indexes=indexes, named=named)


def _write_config(model: Any, folder: str) -> None:
    """Write the configurations as the model's own ``save_pretrained`` does, which would write the weights as well."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(_dtype_of(model)).removeprefix("torch.")
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.save_pretrained(folder)


def _dtype_of(model: Any) -> torch.dtype:
    """Return the type that the stored weights have, which a reader gets by default."""
    floating = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    return floating[0] if floating else torch.get_default_dtype()


def _adapter(model: Any, item: str, folder: str) -> Mapping[str, str]:
    """Write the configuration of the active adapter; returns the tensors of its file: path in the state -> name."""
    peft = require("peft", extra="transformers", purpose="model_files of a PEFT model")
    active = model.active_adapter
    if not isinstance(active, str):
        raise ConfigError(f"model_files: {active!r} are active, and one directory holds one adapter: use set_adapter")
    config = copy.deepcopy(model.peft_config[active])
    config.inference_mode = True
    base = model.get_base_model()
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None)
    config.save_pretrained(folder)
    flat = flatten({item: model})
    paths: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in zip(flat.names, flat.tensors, strict=True):
        paths.setdefault((tensor.data_ptr(), tensor.shape), name)  # a tied tensor is stored under its first name
    stored = peft.get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
    tensors: dict[str, str] = {}
    for name, tensor in stored.items():
        path = paths.get((tensor.data_ptr(), tensor.shape))
        if path is None:
            raise ConfigError(
                f"model_files: {type(config).__name__} stores {name!r}, which is computed and no parameter of the "
                "model: save such an adapter with its own save_pretrained"
            )
        if path in tensors:
            raise ConfigError(
                f"model_files: {type(config).__name__} stores {tensors[path]!r} and {name!r}, one tensor, and "
                "it is written once: save such an adapter with its own save_pretrained"
            )
        tensors[path] = name
    return tensors
