"""What ``holdfast verify`` has found is remembered, shown, and not believed once the files have changed."""

from __future__ import annotations

import json
import os

import pytest
import torch
from command_kit import invoke

import holdfast as hf
from holdfast.checkpoint.verify import read_verified
from holdfast.page import collect
from holdfast.run.names import VERIFIED_FILE
from holdfast.storage import LocalStorage


def call(*arguments: object) -> str:
    return invoke(*arguments, code=None).output


def verified(root):
    """What ls says of each checkpoint."""
    rows = json.loads(call("ls", root, "--json"))["checkpoints"]
    return {row["step"]: row.get("verified") for row in rows}


@pytest.fixture
def root(tmp_path):
    with hf.Checkpointer(tmp_path / "run", {"w": torch.zeros(9)}, every=1, keep=None) as ck:
        ck.step()
        ck.wait()
        ck.step()
    return tmp_path / "run"


def test_nothing_is_said_of_what_was_never_verified(root):
    """Without a check there is no column, no field and no line."""
    assert verified(root) == {1: None, 2: None}
    assert "verified" not in call("ls", root)
    assert "verified" not in call("show", root, "--step", "1")


def test_a_check_is_remembered(root):
    """When and how deep; sizes alone do not replace a look at every byte; ls, show and the page tell it."""
    call("verify", root / "step_00000001")
    call("verify", root)
    one, two = verified(root)[1], verified(root)[2]
    assert (one["deep"], one["ok"], one["unchanged"]) == (True, True, True)
    assert (two["deep"], two["ok"], two["unchanged"]) == (False, True, True)
    assert "sizes" in call("ls", root)
    assert "every byte, right" in call("show", root, "--step", "1")
    told = {row["step"]: row["details"]["verified"] for row in collect(LocalStorage(root))["checkpoints"]}
    assert "every byte, right" in told[1]
    assert "manifest and sizes, right" in told[2]


def test_damage_is_not_forgotten_by_a_look_at_sizes(root):
    """A byte that is wrong is known until the files change: sizes that match do not make it well in ls and show."""
    weights = next((root / "step_00000001").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    call("verify", root, "--deep")
    call("verify", root)
    one = verified(root)[1]
    assert (one["deep"], one["ok"], one["unchanged"]) == (True, False, True)
    assert call("ls", root).split("step_00000001")[1].split()[-1] == "damaged"
    assert "step_00000001  damaged" in call("show", root, "--step", "1")


def test_changed_files_are_not_verified(root):
    """A file written since, even with equal bytes, or one that is gone, and what was said of it holds no more."""
    call("verify", root, "--deep")
    weights = next((root / "step_00000001").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, (1, 1))
    assert verified(root)[1]["unchanged"] is False
    assert verified(root)[2]["unchanged"] is True
    assert "changed since" in call("ls", root)
    assert "have changed since" in call("show", root, "--step", "1")


def test_a_pin_changes_nothing(root):
    """What may change at any time, and no resume depends on, does not count."""
    call("verify", root, "--deep")
    hf.Checkpoint(root / "step_00000001").pin()
    assert verified(root)[1]["unchanged"] is True


def test_damage_is_remembered(root):
    """What was found damaged is shown as damaged."""
    weights = next((root / "step_00000001").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    invoke("verify", root, "--deep", code=1)
    assert verified(root)[1]["ok"] is False
    assert "damaged" in call("ls", root)


@pytest.mark.parametrize("data", [b"", b"[]", b"{" * 100_000, b'{"checkpoints": {"step_00000001": {"deep": 1}}}'])
def test_a_damaged_memory_is_no_memory(root, data):
    """Whatever the file holds: nothing counts as verified, every command works, and a check writes it anew."""
    call("verify", root, "--deep")
    (root / VERIFIED_FILE).write_bytes(data)
    assert read_verified(LocalStorage(root)) == {}
    assert verified(root) == {1: None, 2: None}
    call("verify", root)
    assert verified(root)[1]["ok"] is True


def test_only_a_run_remembers(tmp_path):
    """A checkpoint that belongs to no run leaves nothing beside it; a run that may not be written to is no error."""
    hf.save(tmp_path / "alone", {"w": torch.zeros(2)})
    call("verify", tmp_path / "alone")
    assert [path.name for path in tmp_path.iterdir()] == ["alone"]


def test_what_is_gone_is_forgotten(root):
    """The next check drops what is remembered of deleted checkpoints, and a copy of the run begins without."""
    call("verify", root)
    call("rm", root / "step_00000001", "--yes")
    call("verify", root)
    assert list(read_verified(LocalStorage(root))) == ["step_00000002"]
    call("cp", root, root.parent / "copy")
    assert read_verified(LocalStorage(root.parent / "copy")) == {}
