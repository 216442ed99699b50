"""The small files of a checkpoint, read by everybody who looks into it in the same way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_kit import invoke
from torch import nn

import holdfast as hf
from holdfast.format.contents import ContentsReader

ROLES = ["index", "state"]


@pytest.fixture
def saved(tmp_path: Path) -> hf.Checkpoint:
    torch.manual_seed(0)
    return hf.save(tmp_path / "one", {"model": nn.Linear(2, 3), "step": 41})


def rot(checkpoint: hf.Checkpoint, role: str) -> Path:
    """Change one digit: still JSON, still a structure or an index, and not what was written."""
    (entry,) = checkpoint.manifest.with_role(role)
    path = Path(checkpoint.path) / entry.path
    data = path.read_bytes()
    path.write_bytes(data.replace(b"41", b"42") if role == "state" else data.replace(b"[3,2]", b"[2,3]"))
    assert path.read_bytes() != data
    return path


@pytest.mark.parametrize("role", ROLES)
def test_all_who_look_into_a_checkpoint_say_the_same_of_a_rotten_small_file(saved: hf.Checkpoint, role: str) -> None:
    """A changed digit is never shown, compared, exported or loaded as if it had been saved."""
    name = rot(saved, role).name
    other = hf.save(Path(saved.path).parent / "other", {"model": nn.Linear(2, 3), "step": 41})
    message = f"{name}: its bytes are not what was written"
    with pytest.raises(hf.CorruptCheckpointError, match=message):
        hf.load(saved)
    with pytest.raises(hf.CorruptCheckpointError, match=message):
        hf.export(saved, Path(saved.path).parent / "out.pt", to="torch")
    for command in (["show", saved.path], ["diff", saved.path, other.path]):
        result = invoke(*command, code=None)
        assert result.exit_code != 0
        assert "are not what was written" in " ".join(result.output.split()).replace(f"{name}: ", "")


def test_one_index_is_read_without_numpy(saved: hf.Checkpoint) -> None:
    """Looking into a checkpoint of one writer imports neither torch nor NumPy, which take longer than the reading."""
    code = (
        "import sys; from holdfast.storage.resolve import resolve; from holdfast.format.commit import read_manifest;"
        "from holdfast.format.contents import ContentsReader;"
        f"storage = resolve({str(saved.path)!r}); manifest = read_manifest(storage, '');"
        "print(sorted(ContentsReader(storage, manifest).tensors().entries), {'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['model/bias', 'model/weight'] set()"


def test_the_files_of_a_store_are_read_side_by_side() -> None:
    """What is noted ahead is read once; what is dropped is not kept."""
    saved = hf.save("memory://contents/one", {"model": nn.Linear(2, 3), "step": 41})
    manifest = saved.manifest
    contents = ContentsReader(saved.storage.child(saved.directory), manifest)
    entries = [entry for entry in manifest.files if entry.role in ("index", "state", "digests")]
    contents.read_ahead([*entries, *entries])
    assert [len(contents.read(entry)) for entry in entries] == [entry.size for entry in entries]
    contents.read_ahead(entries)
    contents.drop_ahead()
    assert sorted(contents.tensors().entries) == ["model/bias", "model/weight"]
