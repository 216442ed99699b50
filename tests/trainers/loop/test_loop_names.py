"""Names that savers give: which are possible, what is filled in, what lies in their way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from loop_kit import names, plain

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.loggers import RemoteUploaderDownloader
from holdfast.storage.resolve import resolve


def test_a_remote_folder_is_cleaned_when_asked(tmp_path: Path) -> None:
    """A number to keep is about local folders; a Keep cleans a remote one too, and what goes there is gone."""
    uri = f"memory://cleaned-{os.getpid()}"
    savers = [
        CheckpointSaver(f"{uri}/a", "ba{batch}", save_interval="3ba", keep=hf.Keep(last=2)),
        CheckpointSaver(f"{uri}/b", "ba{batch}.pt", save_interval="3ba", num_checkpoints_to_keep=2),
    ]
    plain(None, callbacks=savers).fit()
    stored = {info.path.split("/")[0] for info in resolve(f"{uri}/a").list() if info.path.startswith("ba")}
    assert stored == {"ba9", "ba12"}
    assert [info.path for info in resolve(f"{uri}/b").list() if info.path.startswith("ba")] == [
        "ba12.pt", "ba3.pt", "ba6.pt", "ba9.pt",
    ]  # fmt: skip


def test_every_variable_in_every_name(tmp_path: Path) -> None:
    """Those of the run are filled in in folders, those of progress in files, links and uploads as well."""
    everything = "{epoch}-{batch}-{batch_in_epoch}-{sample}-{sample_in_epoch}-{token}-{token_in_epoch}"
    of_run = "{run_name}-{rank}-{local_rank}-{world_size}-{local_world_size}-{node_rank}"
    saver = CheckpointSaver(
        f"{tmp_path}/{of_run}", everything + "-{total_wct:.0f}-{epoch_wct:.0f}-{batch_wct:.0f}.pt", save_interval="4ba",
        latest_filename="newest-{run_name}-{epoch}", remote_file_name=f"{of_run}/{everything}.pt",
        latest_remote_file_name="latest-{run_name}-{epoch}",
    )  # fmt: skip
    remote = RemoteUploaderDownloader(str(tmp_path / "remote"), file_path_format_string="all/{remote_file_name}")
    with plain(None, callbacks=saver, max_duration="8ba", run_name="r", loggers=remote) as trainer:
        trainer.fit()
    folder = tmp_path / "r-0-0-1-1-0"
    assert names(folder) == ["0-4-4-24-24-0-0-0-0-0.pt", "1-8-2-46-12-0-0-0-0-0.pt"]
    assert os.readlink(folder / "newest-r-0") == "0-4-4-24-24-0-0-0-0-0.pt"
    assert os.readlink(folder / "newest-r-1") == "1-8-2-46-12-0-0-0-0-0.pt"
    there = {str(path.relative_to(tmp_path / "remote")) for path in (tmp_path / "remote").rglob("*") if path.is_file()}
    files = {f"all/r-0-0-1-1-0/{one}.pt" for one in ("0-4-4-24-24-0-0", "1-8-2-46-12-0-0")}
    assert there == files | {"all/latest-r-0.symlink", "all/latest-r-1.symlink"}


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_names_with_folders_of_the_run(tmp_path: Path, suffix: str) -> None:
    """A name of a run with a slash in it makes sub-folders, and is found again there; it cannot leave the folder."""
    options: dict[str, Any] = {"save_filename": "{run_name}-b{batch}" + suffix, "run_name": "team/x"}
    plain(tmp_path, max_duration="1ep", **options).fit()
    assert int(plain(tmp_path, autoresume=True, **options).state.timestamp.batch) == 6
    with pytest.raises(hf.CheckpointExistsError):
        plain(tmp_path, **options).fit()
    with pytest.raises(hf.ConfigError, match="inside of save_folder"):
        plain(tmp_path, **{**options, "run_name": "../x"})


@pytest.mark.parametrize("name", ["run.json", "lease.json", "reports", "logs/a", ".tmp-a", "deep/.tmp-a", "a.PT"])
def test_names_that_mean_something_else(tmp_path: Path, name: str) -> None:
    """Names of a run's own files, of unfinished ones, and suffixes in capitals are no names of checkpoints."""
    with pytest.raises(hf.ConfigError, match="save_filename"):
        plain(tmp_path, save_filename=name)
    if not name.endswith(".PT"):
        with pytest.raises(hf.ConfigError, match="save_latest_filename"):
            plain(tmp_path, save_latest_filename=name)


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_what_is_in_the_way_of_the_link(tmp_path: Path, suffix: str) -> None:
    """A copy of a folder in which the link became what it leads to: said before training, resumed all the same.

    A link that leads nowhere, or was deleted, is put right; what a killed process has left of one is removed.
    """
    options: dict[str, Any] = {"save_filename": "b{batch}" + suffix, "autoresume": True}
    plain(tmp_path, max_duration="1ep", **options).fit()
    link = tmp_path / "latest-rank0"
    link.unlink()
    (tmp_path / ".tmp-1-abc").symlink_to("b3")
    if suffix:  # where there is no writer a probe of the trainer's own tells whether the folder can be written to
        (tmp_path / ".probe-1").touch()
    link.mkdir() if not suffix else link.touch()
    again = plain(tmp_path, **options)
    assert int(again.state.timestamp.batch) == 6
    with pytest.raises(hf.ConfigError, match="no link can be made"):
        again.fit()
    assert int(again.state.timestamp.batch) == 6
    link.rmdir() if not suffix else link.unlink()
    for target in ("b3", "latest-rank0", None):
        if target is not None:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        with plain(tmp_path, max_duration="1ep", **options) as finished:
            finished.fit()
        assert os.readlink(link) == f"b6{suffix}"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".tmp", ".probe"))] == []
