"""A state that was saved into a directory of its own and reported from there loads as it was saved."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.errors import HoldfastError
from holdfast.storage import LocalStorage
from holdfast.testing import assert_state_equal
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import IngestJob, IngestSource


def state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 300)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": {"epoch": 3, "best": float("inf")}}


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_reported_state_loads(tmp_path, owned, in_place):
    """Moved, copied or committed where it lies, with files of another rank beside it: the same state, bit by bit."""
    if in_place and owned:
        pytest.skip("what is committed in place is never moved")
    root = tmp_path / "run"
    saved = state()
    home = root / "checkpoint_000000" if in_place else tmp_path / "saved"
    hf.save(home, saved, step=7, metrics={"loss": 0.5})
    (tmp_path / "other").mkdir()
    (tmp_path / "other/tokenizer.json").write_text("{}")
    sources = () if in_place else (
        IngestSource(rank=0, path=str(tmp_path / "other"), owned=owned),
        IngestSource(rank=1, path=str(home), owned=owned),
    )  # fmt: skip
    fields = {"run_id": "run", "checkpoint_id": "c", "attempt": 1, "step": 1, "world_size": 2, "metrics": {"acc": 1}}
    job = IngestJob(directory="checkpoint_000000", save_id="aaaaaaaa-1", sources=sources, manifest=fields, run=False)
    with WriterClient.start(thread=True) as client:
        client.ingest(LocalStorage(root), job).result(60)
    checkpoint = hf.Checkpoint(root / "checkpoint_000000")
    assert checkpoint.verify().ok
    assert (checkpoint.step, checkpoint.metrics) == (1, {"acc": 1})
    into = state()
    with torch.no_grad():
        into["model"][0].weight.zero_()
    loaded = hf.load(checkpoint, into=into)
    assert_state_equal(into["model"].state_dict(), saved["model"].state_dict())
    assert_state_equal(into["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert loaded["note"] == saved["note"]


def test_files_are_no_state(tmp_path):
    """A checkpoint of files alone says so when somebody wants to load a state from it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.pt").write_bytes(b"1")
    source = IngestSource(rank=0, path=str(tmp_path / "source"))
    job = IngestJob(directory="c", save_id="aaaaaaaa-1", sources=(source,), manifest={"checkpoint_id": "c"}, run=False)
    with WriterClient.start(thread=True) as client:
        client.ingest(LocalStorage(tmp_path / "run"), job).result(60)
    with pytest.raises(HoldfastError, match="holds no state to load"):
        hf.load(tmp_path / "run/c")
