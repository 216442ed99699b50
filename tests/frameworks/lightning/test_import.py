"""`holdfast import` of a checkpoint that Lightning wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

import holdfast as hf
from holdfast.testing import assert_state_equal


class Options:
    """An object among the hyper-parameters, of a class that only the script has."""


@pytest.mark.parametrize("tree", tiny.TREES)
def test_a_checkpoint(tmp_path: Path, tree: str) -> None:
    """Model, optimizer, scheduler, counters, callbacks and loops are taken over; an object is left out and named."""
    model = tiny.make_model(tree, width=8, options=Options())
    trainer = tiny.make_trainer(tree, tmp_path, callbacks=[tiny.keeper(tree, tmp_path)], max_epochs=2)
    trainer.fit(model)
    done = hf.import_checkpoint(tmp_path / "last.ckpt", tmp_path / "taken")
    assert (done.format, done.checkpoint.step) == ("lightning", 16)
    assert [path for path, _ in done.not_taken] == ["['hyper_parameters']['options']"]
    other = tiny.make_model(tree)
    (optimizer,), (scheduler,) = other.configure_optimizers()
    live = {"model": other, "optimizer": optimizer, "scheduler": scheduler}
    hf.load(done.checkpoint, live, only=list(live))
    rest = hf.load(done.checkpoint, skip=list(live))
    assert_state_equal(other.state_dict(), model.state_dict())
    assert_state_equal(optimizer.state_dict(), trainer.optimizers[0].state_dict())
    assert scheduler.last_epoch == 2
    assert rest["hyper_parameters"] == {"width": 8, "lr": 0.05}
    assert any("ModelCheckpoint" in name for name in rest["callbacks"])
    bare = tiny.make_model(tree).net
    hf.load(done.checkpoint, {"model": bare}, only="model", rename={"model/net.*": "model/*"})
    x = torch.ones(2, 4)
    assert torch.equal(bare(x), model(x))
