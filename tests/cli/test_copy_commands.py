"""`push`, `pull` and `cp`: what lands where, what a second time does, what is refused, what is printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from catalog_kit import catalog_of, hold, index_of
from checkpoint_kit import Shape, build, small
from test_cli import as_json, flip, invoke, run  # noqa: F401 - a fixture

from holdfast import Checkpoint
from holdfast.storage import LocalStorage, resolve

pytestmark = pytest.mark.usefixtures("_arguments")


@pytest.fixture(name="_arguments")
def _argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["holdfast"])


@pytest.fixture
def remote(request) -> str:
    return f"memory://{request.node.name}/runs"


def rows(document: dict) -> dict[str, dict]:
    return {row["name"]: row for row in document["checkpoints"]}


def names(storage) -> set[str]:
    return {info.path.split("/")[0] for info in storage.list()}


def test_a_run_is_pushed_and_pulled_back_whole(run, remote, tmp_path) -> None:  # noqa: F811
    """Newest first, each named with its bytes; what never committed or is set aside is left out, and that is said."""
    found = as_json("push", run, remote)
    assert (found["kind"], found["ok"], found["target"]) == ("run", True, f"{remote}/run")
    assert list(rows(found)) == ["step_20", "step_10", "notes"]
    assert [row["state"] for row in found["checkpoints"]] == ["ok", "ok", "foreign"]
    assert {left["name"] for left in found["left_out"]} == {"step_30", "step_40"}
    assert found["bytes_sent"] == sum(row["bytes_sent"] for row in found["checkpoints"])
    assert found["bytes_copied"] == sum(row["bytes_copied"] for row in found["checkpoints"])
    there = resolve(f"{remote}/run")
    assert names(there) == {"step_10", "step_20", "notes", "reports", "run.json", "lease.json"}
    old, new = catalog_of(run), catalog_of(there)
    assert [record.name for record in new.records()] == [record.name for record in old.records()]
    assert (new.index.run_id, new.index.attempts, new.record("step_20").pinned) == (
        old.index.run_id, old.index.attempts, True,
    )  # fmt: skip
    back = as_json("pull", f"{remote}/run", tmp_path / "back", "--verify")
    assert (back["ok"], back["verified"]) == (True, True)
    assert Checkpoint(tmp_path / "back" / "run" / "step_10").verify().ok
    assert index_of(tmp_path / "back" / "run").run_id == old.index.run_id


def test_the_same_command_again_sends_only_what_is_new(run, remote) -> None:  # noqa: F811
    """What is complete stays; late metrics and a new checkpoint come along."""
    as_json("push", run, remote)
    storage = LocalStorage(run)
    catalog = catalog_of(storage)
    small(storage, "step_50", run_id=catalog.index.run_id, attempt=1, step=50)
    catalog.set_metrics("step_10", {"late": 1})
    again = rows(as_json("push", run, remote))
    assert again["step_50"]["bytes_sent"] > 0
    assert again["step_10"]["bytes_sent"] == again["step_20"]["bytes_sent"] == 0
    assert again["step_10"]["bytes_there"] == Checkpoint(run / "step_10").size_bytes
    assert catalog_of(f"{remote}/run").record("step_10").metrics["late"] == 1


def test_where_things_land_does_not_depend_on_what_is_there(tmp_path, remote) -> None:
    """`cp A B` makes B, `cp A B/` makes B/A, before and after; push and pull always make a directory of the name."""
    small(LocalStorage(tmp_path), "c", step=1)
    for _ in range(2):
        invoke("cp", tmp_path / "c", f"{remote}/plain")
        invoke("cp", tmp_path / "c", f"{remote}/into/")
        invoke("push", tmp_path / "c", f"{remote}/push")
        invoke("pull", f"{remote}/plain", f"{tmp_path}/pulled/")
    manifests = {info.path for info in resolve(remote).list() if info.path.endswith("manifest.json")}
    assert manifests == {"plain/manifest.json", "into/c/manifest.json", "push/c/manifest.json"}
    assert Checkpoint(tmp_path / "pulled" / "plain").step == 1
    assert os.listdir(tmp_path / "pulled") == ["plain"]


def test_pull_goes_to_the_current_directory(tmp_path, remote, monkeypatch) -> None:
    """Without a second argument."""
    small(resolve(remote), "c", step=1)
    monkeypatch.chdir(tmp_path)
    document = as_json("pull", f"{remote}/c")
    assert (document["kind"], document["target"]) == ("checkpoint", str(tmp_path / "c"))
    assert Checkpoint("c").verify().ok


def test_wrong_usage_is_said_with_status_two(run, tmp_path, remote) -> None:  # noqa: F811
    """Directions that make no sense, nothing there, and a copy into itself."""
    assert "cp" in invoke("push", run, tmp_path / "x", code=2).output
    assert "cp" in invoke("pull", run, tmp_path / "x", code=2).output
    assert "nothing at" in invoke("cp", tmp_path / "none", tmp_path / "x", code=2).output
    assert "lies in the other" in invoke("cp", run, run / "backup", code=2).output
    assert "lies in the other" in invoke("cp", run / "step_10", run / "step_10", code=2).output


def test_a_living_run_at_the_destination_is_left_alone(run, tmp_path) -> None:  # noqa: F811
    """Its trainer would not expect new checkpoints; the lease of the source does not matter, and ours is given back."""
    target = LocalStorage(tmp_path / "target")
    with_lease = hold(target)
    try:
        found = as_json("cp", run, tmp_path / "target", code=1)
        assert found["error"] == "RunBusyError"
        assert names(target) == {"lease.json", ".lease.lock"}
    finally:
        with_lease.release()
    busy = hold(run)
    assert as_json("cp", run, tmp_path / "target")["ok"]
    busy.release()
    assert "lease.json" not in names(target)


def test_one_checkpoint_goes_into_a_run_under_its_lease(run, tmp_path) -> None:  # noqa: F811
    """A start would sweep what is under way; so the copy waits for nobody, and is refused while somebody trains."""
    as_json("cp", run / "step_20", tmp_path / "backup" / "step_20")
    flip(run, "step_20")
    index_of(run).quarantine("step_20", "rot")
    busy = hold(run)
    assert as_json("cp", tmp_path / "backup" / "step_20", run / "step_20", code=1)["error"] == "RunBusyError"
    busy.release()
    (tmp_path / "starting").mkdir()
    busy = hold(tmp_path / "starting")  # it has a lease, and no run.json yet
    target = tmp_path / "starting" / "step_20"
    assert as_json("cp", tmp_path / "backup" / "step_20", target, code=1)["error"] == "RunBusyError"
    busy.release()
    as_json("cp", tmp_path / "backup" / "step_20", target)
    assert sorted(os.listdir(tmp_path / "starting")) == ["step_20"]
    found = as_json("cp", tmp_path / "backup" / "step_20", run / "step_20", code=1)
    assert (found["error"], "--overwrite" in found["message"]) == ("CheckpointExistsError", True)
    assert as_json("cp", tmp_path / "backup" / "step_20", run / "step_20", "--overwrite")["ok"]
    assert catalog_of(run).newest_sound().name == "step_20"
    assert Checkpoint(run / "step_20").verify(deep=True).ok
    assert "lease.json" not in names(LocalStorage(run))


def test_another_run_and_a_run_that_went_on_are_not_mixed(run, tmp_path) -> None:  # noqa: F811
    """Two runs in one directory, or attempts that would be forgotten, are refused."""
    other = LocalStorage(tmp_path / "other")
    index_of(other).register_attempt("bbbbbbbb", host="h", pid=1)
    assert "another run" in as_json("cp", run, tmp_path / "other", code=1)["message"]
    as_json("cp", run, tmp_path / "copy")
    index_of(tmp_path / "copy").register_attempt("cccccccc", host="h", pid=1)
    assert "by itself" in as_json("cp", run, tmp_path / "copy", code=1)["message"]
    assert as_json("cp", run, tmp_path / "copy", "--overwrite")["ok"]


def test_another_run_is_known_without_its_index(run, tmp_path) -> None:  # noqa: F811
    """A run whose run.json is lost is told by its checkpoints; what is left of a copy is no other run."""
    other = LocalStorage(tmp_path / "other")
    build(other, "step_1", run_id="b" * 16, step=1)
    assert "another run" in as_json("cp", run, tmp_path / "other", code=1)["message"]
    assert names(other) == {"step_1"}
    as_json("cp", run, tmp_path / "copy")
    (tmp_path / "copy" / "run.json").unlink()
    assert as_json("cp", run, tmp_path / "copy")["ok"]
    assert (tmp_path / "copy" / "run.json").exists()


def test_what_is_quarantined_at_the_destination_stays_so(run, tmp_path) -> None:  # noqa: F811
    """Copying again neither forgets it nor takes the damaged files for whole; `--overwrite` sends them anew."""
    copy = tmp_path / "copy"
    as_json("cp", run, copy)
    flip(copy, "step_20")
    build(LocalStorage(copy), "step_5", run_id=index_of(run).run_id, step=5)
    there = catalog_of(copy).index
    there.quarantine("step_20", "rot")
    there.quarantine("step_5", "of earlier")
    found = as_json("cp", run, copy, code=1)
    assert rows(found)["step_20"]["state"] == "failed"
    assert "--overwrite" in rows(found)["step_20"]["problems"][0]
    assert rows(found)["step_10"]["state"] == "ok"
    assert {"step_20", "step_5"} <= index_of(copy).quarantined.keys()
    assert as_json("cp", run, copy, "--overwrite")["ok"]
    index = index_of(copy)
    assert "step_20" not in index.quarantined
    assert "step_5" in index.quarantined
    assert Checkpoint(copy / "step_20").verify(deep=True).ok


def test_what_is_set_aside_at_the_source_is_sound_at_the_destination(run, tmp_path) -> None:  # noqa: F811
    """The disk of the source rots, and a start sets the newest aside there: the backup keeps and resumes its own."""
    copy = tmp_path / "copy"
    as_json("cp", run, copy)
    flip(run, "step_20")
    index_of(run).quarantine("step_20", "rot")
    found = as_json("cp", run, copy)
    assert "step_20" in {left["name"] for left in found["left_out"]}
    catalog = catalog_of(copy)
    assert (catalog.newest_sound().name, catalog.bad()) == ("step_20", {})
    assert as_json("cp", copy, run, "--overwrite")["ok"]
    assert "step_20" not in index_of(run).quarantined
    assert Checkpoint(run / "step_20").verify(deep=True).ok


def test_a_damaged_index_does_not_go_over_a_sound_one(run, tmp_path) -> None:  # noqa: F811
    """It is the one thing that nobody has a second time; the checkpoints come all the same."""
    copy = tmp_path / "copy"
    as_json("cp", run, copy)
    sound = (copy / "run.json").read_bytes()
    (run / "run.json").write_bytes(sound.replace(b"attempt", b"attmept"))
    assert as_json("cp", run, copy)["ok"]
    assert (copy / "run.json").read_bytes() == sound


def test_two_damaged_copies_are_made_one_sound_one(run, tmp_path) -> None:  # noqa: F811
    """A quarantined destination keeps what it has of it until there is something better, whatever the source is."""
    copy = tmp_path / "copy"
    as_json("cp", run, copy)
    index_of(copy).quarantine("step_20", "rot")
    before = {path.name: path.read_bytes() for path in (copy / "step_20").iterdir()}
    flip(run, "step_20")
    assert as_json("cp", run, copy, "--overwrite")["ok"]
    assert {path.name: path.read_bytes() for path in (copy / "step_20").iterdir()} == before
    assert Checkpoint(copy / "step_20").verify(deep=True).ok
    index_of(copy).quarantine("step_20", "rot")
    flip(copy, "step_20")
    before = {path.name: path.read_bytes() for path in (copy / "step_20").iterdir()}
    found = as_json("cp", run, copy, "--overwrite", code=1)
    assert "digest differs" in rows(found)["step_20"]["problems"][0]
    assert {path.name: path.read_bytes() for path in (copy / "step_20").iterdir()} == before
    assert "step_20" in index_of(copy).quarantined


def test_loose_files_of_others_stay(run, tmp_path, remote) -> None:  # noqa: F811
    """A file that somebody has written at the destination is named and stays; one that changed at the source comes."""
    for place, target in ((tmp_path / "copy", LocalStorage(tmp_path / "copy")), (remote, resolve(remote))):
        (run / "notes.txt").write_text("first machine\n")
        (run / "train.log").write_text("epoch 1\n")
        (run / "state.json").write_text('{"epoch": 1}')
        as_json("cp", run, place)
        (run / "state.json").write_text('{"epoch": 2}')
        assert as_json("cp", run, place)["ok"]
        assert target.read("state.json") == b'{"epoch": 2}'
        target.put("notes.txt", b"three weeks of notes, written here")
        (run / "train.log").write_text("epoch 1\nepoch 2\n")
        found = as_json("cp", run, place, code=1)
        assert (rows(found)["notes.txt"]["state"], rows(found)["step_20"]["state"]) == ("failed", "ok")
        assert "--overwrite" in rows(found)["notes.txt"]["problems"][0]
        assert target.read("notes.txt") == b"three weeks of notes, written here"
        assert target.read("train.log") == b"epoch 1\nepoch 2\n"
        assert as_json("cp", run, place, "--overwrite")["ok"]
        assert target.read("notes.txt") == b"first machine\n"


def test_a_big_loose_file_passes_through_little_memory(run, tmp_path) -> None:  # noqa: F811
    """A log of gigabytes beside the run is copied in windows."""
    with (run / "train.log").open("wb") as log:
        log.truncate(40 << 20)
    peak = []
    real = LocalStorage.put

    def put(self, path, data, **options):
        peak.append(len(data))
        return real(self, path, data, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "put", put)
        as_json("cp", run, tmp_path / "copy")
    assert (tmp_path / "copy" / "train.log").stat().st_size == 40 << 20
    assert max(peak) <= 8 << 20


def test_what_is_left_out_beside_a_run_is_said(run, tmp_path) -> None:  # noqa: F811
    """Hidden directories and links that lead out of the run; a link to a checkpoint of the run is one name more."""
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text("lr: 1")
    (tmp_path / "data").mkdir()
    (run / "data").symlink_to(tmp_path / "data")
    (run / "best").symlink_to("step_10")
    (run / ".tmp-notes").write_text("mine")
    found = as_json("cp", run, tmp_path / "copy")
    assert {left["name"] for left in found["left_out"]} == {"step_30", "step_40", ".hydra", "data", ".tmp-notes"}


def test_another_checkpoint_without_a_manifest_is_not_replaced(tmp_path) -> None:
    """As for checkpoints of ours and for single files: only with `--overwrite`."""
    for name, text in (("epoch10", "worse"), ("best", "the best model of the week")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_text(text)
    found = as_json("cp", tmp_path / "epoch10", tmp_path / "best", code=1)
    assert (found["error"], "model.pt" in found["message"]) == ("CheckpointExistsError", True)
    assert (tmp_path / "best" / "model.pt").read_text() == "the best model of the week"
    assert as_json("cp", tmp_path / "epoch10", tmp_path / "best", "--overwrite")["ok"]
    assert as_json("cp", tmp_path / "epoch10", tmp_path / "best")["bytes_there"] == 5


def test_damage_is_found_and_the_others_are_copied(run, tmp_path) -> None:  # noqa: F811
    """A checkpoint whose bytes differ fails by name, with status 1; `--overwrite` decides about one in the way."""
    flip(run, "step_20")
    found = as_json("cp", run, tmp_path / "copy", code=1)
    states = {name: row["state"] for name, row in rows(found).items()}
    assert states == {"step_20": "failed", "step_10": "ok", "notes": "foreign"}
    assert "digest differs" in rows(found)["step_20"]["problems"][0]
    small(LocalStorage(tmp_path), "single", step=1)
    assert as_json("cp", tmp_path / "single", tmp_path / "copy" / "step_10", code=1)["error"] == "CheckpointExistsError"
    assert as_json("cp", tmp_path / "single", tmp_path / "copy" / "step_10", "--overwrite")["ok"]
    assert Checkpoint(tmp_path / "copy" / "step_10").step == 1


def test_verify_reads_the_destination_again(run, remote) -> None:  # noqa: F811
    """A destination that does not keep what it was given is found out."""
    as_json("cp", run, remote)
    storage = resolve(remote)
    path = next(info.path for info in storage.list("step_10") if info.path.endswith(".safetensors"))
    storage.put(path, bytes(storage.stat(path).size))
    assert as_json("cp", run, remote)["ok"]
    found = as_json("cp", run, remote, "--verify", code=1)
    assert "not what was written" in rows(found)["step_10"]["problems"][0]


def test_files_and_foreign_directories(tmp_path, remote) -> None:
    """They are copied as they are, and it is said that there was nothing to check."""
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "a.bin").write_bytes(b"1")
    (tmp_path / "d" / "sub" / "b.bin").write_bytes(b"22")
    (tmp_path / "model.pt").write_bytes(b"weights")
    assert "nothing to check against" in invoke("push", tmp_path / "d", remote).stdout
    invoke("push", tmp_path / "model.pt", remote)
    assert resolve(remote).read("model.pt") == b"weights"
    assert as_json("pull", f"{remote}/d", tmp_path / "back")["checkpoints"][0]["state"] == "foreign"
    assert (tmp_path / "back" / "d" / "sub" / "b.bin").read_bytes() == b"22"


def test_another_file_is_not_replaced_without_being_asked(tmp_path) -> None:
    """A single file in the way stays without `--overwrite`; the same one is not sent again."""
    one, other, place = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "c.pt"
    one.write_bytes(b"one"), other.write_bytes(b"two")
    assert as_json("cp", one, place)["bytes_sent"] == 3
    assert as_json("cp", one, place)["bytes_there"] == 3
    assert as_json("cp", other, place, code=1)["error"] == "CheckpointExistsError"
    assert place.read_bytes() == b"one"
    assert as_json("cp", other, place, "--overwrite")["ok"]
    assert place.read_bytes() == b"two"


def test_a_file_that_was_half_copied_is_finished(tmp_path) -> None:
    """A killed copy leaves the beginning of the file: the same command again replaces it without `--overwrite`."""
    one, place = tmp_path / "a.pt", tmp_path / "c.pt"
    one.write_bytes(b"one" * 4_000_000)
    for done in (0, 4096, 11_000_000):
        place.write_bytes(one.read_bytes()[:done])
        assert as_json("cp", one, place)["bytes_sent"] == 12_000_000
        assert place.read_bytes() == one.read_bytes()
    for other in (one.read_bytes() + b"more", one.read_bytes()[:9_000_000] + b"other"):
        place.write_bytes(other)
        assert as_json("cp", one, place, code=1)["error"] == "CheckpointExistsError"
        assert place.read_bytes() == other


def test_a_directory_of_runs_is_not_taken_for_a_run(run, tmp_path) -> None:  # noqa: F811
    """One level too high: nothing is copied, and it says what to do."""
    found = as_json("cp", run.parent, tmp_path.parent / f"{tmp_path.name}-copy", code=1)
    assert found["left_out"] == [{"name": "run", "why": "a run of its own: copy it by itself"}]


def test_what_people_read(run, tmp_path) -> None:  # noqa: F811
    """A line for each checkpoint, the reasons of what was left out, the sum."""
    lines = invoke("cp", run, tmp_path / "copy").stdout.splitlines()
    assert lines[0].startswith("step_20  ok")
    assert any(line.startswith("step_40") and "never committed" in line for line in lines)
    assert "digests checked" in lines[-1]


def test_ctrl_c_leaves_what_the_same_command_finishes(tmp_path) -> None:
    """An interrupt in the middle says what is missing, ends with 1, and the second time sends only the rest."""
    big = tuple(Shape(f"{item}/w", (4, 1_000_000)) for item in ("model", "ema", "optimizer"))
    source = LocalStorage(tmp_path / "source")
    made = build(source, "c", tensors=big)
    script = (
        "import itertools, os\n"
        "from holdfast.copying import sending as _sending\n"
        "from holdfast.cli.main import main\n"
        "settled, numbers = _sending.Sender.settled, itertools.count(1)\n"
        "def slow(self, nbytes):\n"
        "    settled(self, nbytes); os.write(2, b'window\\n')\n"
        "    if next(numbers) >= 5: self._halt.wait(60)\n"
        "_sending.Sender.settled = slow\n"
        "main()\n"
    )
    arguments = ["cp", str(tmp_path / "source" / "c"), str(tmp_path / "copy"), "--json"]
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(5):
        assert process.stderr.readline() == "window\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    document = json.loads(output)
    assert (document["interrupted"], document["ok"], document["not_reached"]) == (True, False, ["copy"])
    assert not (tmp_path / "copy" / "manifest.json").exists()
    again = as_json("cp", tmp_path / "source" / "c", tmp_path / "copy")
    assert again["bytes_there"] > 0
    assert again["bytes_sent"] + again["bytes_there"] == made.total_bytes
    assert Checkpoint(tmp_path / "copy").verify().ok


def test_the_bar_is_on_stderr_and_json_on_stdout(tmp_path) -> None:
    """Under a terminal a bar is drawn; what is on stdout stays one document."""
    build(LocalStorage(tmp_path), "c", tensors=(Shape("model/w", (3, 1_000_000)),))
    controller, terminal = os.openpty()
    code = "from holdfast.cli.main import main; main()"
    command = [sys.executable, "-c", code, "cp", str(tmp_path / "c"), str(tmp_path / "copy"), "--json"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "99"},
    )
    os.close(terminal)
    drawn = b""
    with os.fdopen(controller, "rb", buffering=0) as screen:
        while True:
            try:
                piece = screen.read(4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            drawn += piece
    output, _ = process.communicate(timeout=60)
    assert json.loads(output)["ok"]
    assert b"copy c" in drawn
    assert b"/s" in drawn
