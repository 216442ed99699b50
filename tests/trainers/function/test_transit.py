"""Functions on the way to workers."""

from __future__ import annotations

import torch

from holdfast.trainers.function.transit import error_from_wire, error_to_wire, pack_call, unpack_call


def test_a_word_that_torch_has_too() -> None:
    """A function of a script may use torch and say `.ops` of something else: ``torch.ops`` is no plain module."""
    names = {"torch": torch, "__name__": "__main__", "keras": torch}
    exec("def train():\n    return torch is not None and keras.ops", names)
    function, config = unpack_call(pack_call(names["train"], {"lr": 0.1}))
    assert function() is torch.ops
    assert config == {"lr": 0.1}


class Wordless(Exception):
    def __str__(self) -> str:
        raise AttributeError("code")


def test_an_error_whose_words_fail() -> None:
    """The driver shows it by others, and does not end by it."""
    error = error_from_wire(*error_to_wire(Wordless(3)))
    assert str(error).startswith("Wordless: <its message cannot be made: AttributeError('code')")
