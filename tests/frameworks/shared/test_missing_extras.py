"""The public module of a framework that is not installed says what to install, with an extra that exists."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf

PROJECT = (Path(__file__).parents[3] / "pyproject.toml").read_text()
# module of ours -> packages of theirs, and what is done with it; an Accelerator or an engine of DeepSpeed users bring
MODULES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "jax": ("jax", lambda it: it.Pytree({})),
    "keras": ("keras", lambda it: it.HoldfastCallback),
    "lightning": ("lightning pytorch_lightning", lambda it: it.ReportCallback()),
    "megatron": ("megatron.core.dist_checkpointing", lambda it: it.load({}, ".")),
    "optuna": ("optuna", lambda it: it.resume_killed(None)),
    "ray_tune": ("ray.tune", lambda it: it.get_checkpoint()),
    "trackers": ("mlflow", lambda it: it.MLflowTracker()),
    "transformers": ("transformers", lambda it: it.ReportCallback()),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a bare ImportError nor a name that pip does not know."""
    packages, use = MODULES[name]
    for package in packages.split():
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"holdfast.{name}", raising=False)
    with pytest.raises(hf.MissingExtraError, match=r"pip install -e '/.*\[") as caught:
        use(importlib.import_module(f"holdfast.{name}"))
    extra = str(caught.value).rpartition("[")[2].partition("]")[0]
    assert f"\n{extra} = [" in PROJECT
    assert f"holdfast.{name}" in str(caught.value)


def test_modules_are_thin() -> None:
    """No public module of a framework has more than 190 lines: what they do is in `frameworks`."""
    folder = Path(hf.__file__).parent
    for name in (*MODULES, "accelerate", "deepspeed"):
        assert len((folder / f"{name}.py").read_text().splitlines()) <= 190, name
