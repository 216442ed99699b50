"""Random generators of a Keras training: those of `holdfast.RNG`, and the one that Keras draws from without a seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.state.tree import rng

__all__ = ["capture", "restore", "seeds", "set_seeds"]

_NAME = "global_seed_generator"


def capture() -> dict[str, Any]:
    """Describe the state of every generator; nothing is advanced."""
    return {**rng.capture(), "keras": seeds()}


def restore(state: Mapping[str, Any]) -> None:
    """Put every generator back into the state that `capture` described."""
    if "keras" in state:
        set_seeds(state["keras"])
    rng.restore(state)  # to make Keras's generator draws from python's


def seeds() -> list[int] | None:
    """Return the state of the generator that ``keras.random`` draws from without a seed; None if nobody has yet."""
    found = _keras_state()
    generator = None if found is None else found.get_global_attribute(_NAME)
    return None if generator is None else [int(number) for number in generator.state.value]


def set_seeds(saved: list[int] | None) -> None:
    """Undo `seeds`."""
    found = _keras_state()
    if found is None:
        return
    if saved is None:
        found.set_global_attribute(_NAME, None)
        return
    if found.get_global_attribute(_NAME) is None:
        import keras

        found.set_global_attribute(_NAME, keras.random.SeedGenerator())
    found.get_global_attribute(_NAME).state.assign(np.asarray(saved, dtype="uint32"))


def _keras_state() -> Any:
    """Return where Keras keeps it, which it tells nobody; None if it is elsewhere in this version."""
    try:
        from keras.src.backend.common import global_state
    except ImportError:
        return None
    return global_state
