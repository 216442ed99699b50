"""Fingerprints: the same for the same values however they lie in memory, others for others, of every dtype."""

import pytest
import torch

from holdfast.state.tree.fingerprints import fingerprints

DTYPES = ["bool", "uint8", "int16", "uint16", "uint32", "int64", "uint64", "bfloat16", "float16", "float32", "float64"]
DTYPES += ["float8_e4m3fn", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_every_dtype_and_layout(dtype):
    """Strides do not matter; one other element that is looked at does."""
    raw = torch.arange(6 * dtype.itemsize).reshape(2, -1).remainder(2 if dtype is torch.bool else 50)
    value = raw.to(torch.uint8).view(dtype)
    turned = value.t().clone(memory_format=torch.contiguous_format).t()
    first, second, short = fingerprints([value, turned, value[:1]])
    assert first == second != short
    other = value.clone()
    other.view(torch.uint8)[-1, -1] ^= 1
    assert fingerprints([other]) != [first]


def test_bits_are_compared_not_values():
    """0.0 and -0.0, two NaNs, a number and its conjugate are told apart; lazy conjugates are what they mean."""
    zero = torch.zeros(3)
    assert fingerprints([zero]) != fingerprints([-zero])
    value = torch.randn(4, 4, dtype=torch.complex64)
    assert fingerprints([value.conj()]) == fingerprints([value.conj().resolve_conj()]) != fingerprints([value])
    assert fingerprints([value.conj().imag]) == fingerprints([value.conj().imag.clone()])


def test_only_a_few_elements_are_read():
    """A tensor of any size costs the same; scalars, parameters and expanded tensors work."""
    large = torch.empty(1, 1).expand(1 << 20, 1 << 20)
    assert len(set(fingerprints([large, torch.tensor(2.0), torch.nn.Parameter(torch.ones(1, 3))]))) == 3
    assert fingerprints([]) == []
