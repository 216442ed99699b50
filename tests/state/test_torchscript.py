"""Modules of TorchScript are saved and loaded like any other."""

import pytest
import torch

import holdfast as hf


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(2, 4))])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_comes_back_also_into_a_plain_one(make, tmp_path) -> None:
    """Weights and optimizer state of a scripted or traced module; names are those of the module it was made of."""
    model = make(net())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    hf.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
    for other in (make(net()), net()):
        into = torch.optim.AdamW(other.parameters())
        hf.load(tmp_path / "one", {"model": other, "optimizer": into})
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value)
        first, second = (next(iter(one.state.values()))["exp_avg"] for one in (optimizer, into))
        assert torch.equal(first, second)
