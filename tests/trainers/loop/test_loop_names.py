"""Names that savers give: which are possible, what is filled in, what lies in their way."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from loop_kit import names, plain

import holdfast as hf
from holdfast.callbacks import CheckpointSaver
from holdfast.loggers import RemoteUploaderDownloader
from holdfast.storage import LocalStorage
from holdfast.trainers.loop.saving.folder import link_latest


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
    counts, found = ["0-4-4-24-24-0-0", "1-8-2-46-12-0-0"], names(folder)
    for name, count in zip(found, counts, strict=True):
        assert re.fullmatch(rf"{count}-\d+-\d+-\d+\.pt", name)  # three times in seconds, which are the machine's
    assert [os.readlink(folder / f"newest-r-{epoch}") for epoch in (0, 1)] == found
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


@pytest.mark.parametrize(
    "name", ["run.json", "lease.json", "reports", "logs/a", ".tmp-a", "deep/.tmp-a", "a/manifest.json", "a.PT"]
)
def test_names_that_mean_something_else(tmp_path: Path, name: str) -> None:
    """Names of a run's own files, of unfinished ones, and suffixes in capitals are no names of checkpoints."""
    with pytest.raises(hf.ConfigError, match="save_filename"):
        plain(tmp_path, save_filename=name)
    if not name.endswith(".PT"):
        with pytest.raises(hf.ConfigError, match="save_latest_filename"):
            plain(tmp_path, save_latest_filename=name)


@pytest.mark.parametrize("how", ["autoresume", "load_path", "damaged"])
def test_a_link_with_the_suffix_of_files(tmp_path: Path, how: str) -> None:
    """Composer's own name of the link, "latest-rank0.pt", is no checkpoint of its own to the next lives."""
    options: dict[str, Any] = {"save_filename": "ep{epoch}.pt", "save_latest_filename": "latest-rank{rank}.pt"}
    plain(tmp_path, **options).fit()
    if how == "damaged":
        os.truncate(tmp_path / "ep2.pt", 1000)
    source = {"load_path": tmp_path / "latest-rank0.pt"} if how == "load_path" else {"autoresume": True}
    with plain(tmp_path, max_duration="3ep", **options, **source) as trainer:
        assert int(trainer.state.timestamp.epoch) == (1 if how == "damaged" else 2)
        trainer.fit()
        assert trainer.saved_checkpoints == [str(tmp_path / name) for name in ("ep1.pt", "ep2.pt", "ep3.pt")]
    assert os.readlink(tmp_path / "latest-rank0.pt") == "ep3.pt"


def test_a_saver_names_its_link_itself(tmp_path: Path) -> None:
    """The link `latest` of a run is not made beside it; a saver's own of that name leads to what that saver saved."""
    plain(tmp_path / "a", save_filename="b{batch}", max_duration="1ba").fit()
    assert [path.name for path in (tmp_path / "a").iterdir() if path.is_symlink()] == ["latest-rank0"]
    plain(tmp_path / "b", save_filename="b{batch}", save_latest_filename="latest", max_duration="1ba").fit()
    assert os.readlink(tmp_path / "b" / "latest") == "b1"


def test_a_link_that_leads_out_of_the_folder_is_said(tmp_path: Path) -> None:
    """A checkpoint behind a link to another folder is never passed over for an older one in silence."""
    options: dict[str, Any] = {"save_filename": "ep{epoch}.pt", "autoresume": True}
    plain(tmp_path / "a", **options).fit()
    (tmp_path / "a" / "ep2.pt").rename(tmp_path / "elsewhere.pt")
    (tmp_path / "a" / "ep2.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(hf.StorageError, match="symbolic link"):
        plain(tmp_path / "a", **options)


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_what_is_in_the_way_of_the_link(tmp_path: Path, suffix: str) -> None:
    """A copy of a folder in which the link became what it leads to: said before training, resumed all the same.

    A link that leads nowhere, or was deleted, is put right; what a killed process has left of one is removed.
    """
    options: dict[str, Any] = {"save_filename": "b{batch}" + suffix, "autoresume": True}
    plain(tmp_path, max_duration="1ep", **options).fit()
    link = tmp_path / "latest-rank0"
    link.unlink()
    left = tmp_path / ".tmp-1-0123456789ab"
    left.symlink_to("b3")
    os.utime(left, (1, 1), follow_symlinks=False)
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


def test_only_what_a_dead_life_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old probes and links of ours go; young ones may be in use, other names are the user's.

    Nor does it matter that some cannot be deleted: they may be another user's.
    """
    (stuck := tmp_path / ".probe-aaaaaaaa").touch()
    old, young = [stuck, tmp_path / ".probe-01234567"], [tmp_path / ".probe-89abcdef"]
    users = [tmp_path / ".probe-1", tmp_path / ".probe-notes.txt", tmp_path / ".probe-fedcba98"]
    links = [tmp_path / ".tmp-1-0123456789ab", tmp_path / ".tmp-1-0123456789cd", tmp_path / ".tmp-mine"]
    for path in (*old, *young, *users):
        path.write_bytes(b"a user's" if path is users[-1] else b"")
    for path in links:
        path.symlink_to("somewhere")
    for path in (*old, *users, links[0], links[2]):
        os.utime(path, (1, 1), follow_symlinks=False)
    delete = LocalStorage.delete

    def delete_but_one(self: LocalStorage, path: str) -> None:
        if path == stuck.name:
            raise hf.StorageError("another user's")
        delete(self, path)

    monkeypatch.setattr(LocalStorage, "delete", delete_but_one)
    plain(tmp_path, save_filename="b{batch}.pt", max_duration="1ba").fit()
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith((".tmp", ".probe"))}
    assert left == {path.name for path in (stuck, *young, *users, *links[1:])}


def test_a_link_that_somebody_cleans_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is gone before it has its name is made again."""
    (tmp_path / "a").mkdir()
    replace, times = os.replace, []

    def replace_later(source: Any, target: Any, **where: Any) -> None:
        times.append(source)
        if len(times) == 1:
            os.unlink(source, dir_fd=where.get("src_dir_fd"))
        replace(source, target, **where)

    monkeypatch.setattr(os, "replace", replace_later)
    link_latest(LocalStorage(str(tmp_path)), "latest", "a")
    assert os.readlink(tmp_path / "latest") == "a"
    assert len(times) == 2


@pytest.mark.parametrize(
    "name",
    ["b{batch:>6}", "{run_name!r}-b{batch}", "b{batch:+d}", "b{batch:x}", "b{batch:,}", "b{batch:g}", "{epoch}{batch}",
        "b{batch:03}-{batch}",
     "b{batch:0{world_size}d}", "b{batch}-{total_wct:>9.1f}"],
)  # fmt: skip
def test_names_that_nobody_could_read_back(name: str) -> None:
    """A later start goes by the counters in names: a format that hides them is refused, for uploads as well."""
    for options in ({"filename": name}, {"remote_file_name": name}):
        with pytest.raises(hf.ConfigError, match=r"file_?name="):
            CheckpointSaver(**options)


@pytest.mark.parametrize(
    "name",
    ["b{batch:08d}", "b{batch}-{batch}", "{epoch!s}-{batch:d}-{total_wct:.1f}", "{run_name:_>6}{rank:+d}-b{batch}"],
)
def test_names_that_can_be_read_back(name: str) -> None:
    """Formats that show the whole number are taken; a link to the newest is not read, so it may have any."""
    CheckpointSaver(filename=name, latest_filename="latest{batch:>6}")
