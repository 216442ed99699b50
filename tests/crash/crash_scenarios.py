"""What the crash sweeps kill, and what they check afterwards. Runs in children of a fork server."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from pathlib import Path

import safetensors
import torch
import torch._dynamo

import holdfast as hf
from holdfast.errors import CheckpointNotFoundError, HoldfastError
from holdfast.format.commit import read_manifest
from holdfast.run import index as runindex
from holdfast.run.catalog import Catalog
from holdfast.run.index import RunIndex
from holdfast.storage import LocalStorage
from holdfast.testing import ArmedOps, FaultyStorage, assert_state_equal

KEEP = hf.Keep(last=2)
MODEL_FILES = hf.ModelFiles(
    files={"config.json": "{}", "tokens/vocab.txt": "a b c"}, indexes={"model.safetensors.index.json": "model"}
)
SIDECARS = (".metrics.json", ".metadata.json")


class Note:
    """A user's object with state."""

    def __init__(self):
        self.log = []

    def state_dict(self):
        return {"log": list(self.log)}

    def load_state_dict(self, state):
        self.log = list(state["log"])


def state_at(step):
    """The state after ``step`` steps, made from nothing: what a checkpoint of that step must hold."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    frozen = torch.nn.Linear(40, 40)
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "frozen": frozen, "optimizer": optimizer, "note": Note()}
    for _ in range(step):
        advance(state)
    return state


def advance(state):
    number = len(state["note"].log) + 1
    state["optimizer"].zero_grad()
    state["model"](torch.full((2, 8), number / 7)).pow(2).sum().backward()
    state["optimizer"].step()
    state["note"].log.append(number)


def threaded(root):
    """The directory with the writer as a thread: saves the start of a process."""
    return FaultyStorage(root, ops=ArmedOps())


def checkpointer(storage, state, **options):
    return hf.Checkpointer(storage, state, **{"every": None, "keep": KEEP, **options})


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def one_step(ck, state):
    advance(state)
    ck.step(loss=float(ck.global_step))


# ---- what there is before a case


FOREIGN = {
    "notes.txt": b"mine",
    "data/part.bin": b"\0\1" * 500,
    "exports/manifest.json": b"{}",
    "step_model/weights.safetensors": b"not a checkpoint of yours",
    ".hidden/x": b"h",
}


def prepare_empty(root):
    """A directory with files of somebody else."""
    for path, data in FOREIGN.items():
        target = Path(root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def prepare_run(root):
    """Three saved steps of one finished life, the oldest deleted by retention, and foreign files everywhere."""
    prepare_empty(root)
    hf.save(Path(root, "mine"), {"weights": torch.arange(5)})
    for saves in (2, 1):  # two lives: the second writes step 3 anew, so that step 4 may link to it
        state = state_at(0)
        with quiet(), checkpointer(threaded(root), state) as ck:
            for _ in range(saves):
                one_step(ck, state)
                ck.save()
    for step in (2, 3):
        Path(root, f"step_{step:08d}", "README.txt").write_text("read me")


def prepare_one(root):
    """One checkpoint saved on its own."""
    prepare_empty(root)
    hf.save(hf.Checkpoint.at(threaded(root), "best"), state_at(1))


# ---- what is killed. Each returns the number of operations counted from `arm` on.


class Diary:
    """Promises, written to a file of the test's own as they are made."""

    def __init__(self, path):
        self.path = path

    def promise(self, **what):
        with open(self.path, "a") as out:
            out.write(json.dumps(what) + "\n")

    @staticmethod
    def read(path):
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for line in Path(path).read_text().splitlines():
                found.update(json.loads(line))
        return found


def faulty(root, diary, crash_after, *, armed=True):
    ops = ArmedOps()
    if armed:
        ops.arm(crash_after=crash_after)
    return FaultyStorage(root, ops=ops), ops, Diary(diary)


def first_save(root, diary, crash_after=None, **options):
    storage, ops, notes = faulty(root, diary, crash_after)
    state = state_at(0)
    with checkpointer(storage, state, **options) as ck:
        one_step(ck, state)
        ck.save()
        ck.wait()
        notes.promise(durable=1)
    notes.promise(closed=True)
    return ops.since


def first_model(root, diary, crash_after=None):
    """Files whose names do not tell whose they are come with the tensors."""
    return first_save(root, diary, crash_after, model_files=MODEL_FILES)


def next_model(root, diary, crash_after=None):
    return next_save(root, diary, crash_after, model_files=MODEL_FILES)


def next_save(root, diary, crash_after=None, **options):
    storage, ops, notes = faulty(root, diary, crash_after, armed=False)
    state = state_at(0)
    notes.promise(durable=3)
    with checkpointer(storage, state, **options) as ck:
        ops.arm(crash_after=crash_after)
        one_step(ck, state)
        ck.save(acc=0.5)
        ck.wait()
        notes.promise(durable=4, deleted=2, reused=ck.stats.bytes_reused)
    notes.promise(closed=True)
    return ops.since


def resume(root, diary, crash_after=None):
    storage, ops, notes = faulty(root, diary, crash_after)
    notes.promise(durable=3)
    state = state_at(0)
    with checkpointer(storage, state):
        assert_state_equal(state, state_at(3))
    notes.promise(closed=True)
    return ops.since


def many_rows():
    """Let two rows be many: the index is written in two files then, and put together again every other save."""
    runindex._FEW_BYTES, runindex._MANY_BYTES = 100, 400


def index_grows(root, diary, crash_after=None):
    """Saves of a run with many checkpoints: changes beside run.json, then in it, while old ones go."""
    many_rows()
    storage, ops, notes = faulty(root, diary, crash_after, armed=False)
    state = state_at(0)
    notes.promise(durable=3)
    with checkpointer(storage, state, keep=hf.Keep(last=3)) as ck:
        ops.arm(crash_after=crash_after)
        for step in (4, 5):
            one_step(ck, state)
            ck.save(acc=0.5)
            ck.wait()
            notes.promise(durable=step)
    notes.promise(closed=True)
    return ops.since


def late_metrics(root, diary, crash_after=None):
    storage, ops, notes = faulty(root, diary, crash_after, armed=False)
    state = state_at(0)
    notes.promise(durable=3)
    with checkpointer(storage, state) as ck:
        ops.arm(crash_after=crash_after)
        ck.report(val_loss=0.25)
        ck.wait()
        notes.promise(metrics={"val_loss": 0.25})
    return ops.since


def pin(root, diary, crash_after=None):
    storage, ops, notes = faulty(root, diary, crash_after)
    notes.promise(durable=3)
    hf.Checkpoint.at(storage, "step_00000002").pin()
    notes.promise(pinned=True)
    return ops.since


def overwrite(root, diary, crash_after=None):
    storage, ops, notes = faulty(root, diary, crash_after)
    notes.promise(durable=1)
    hf.save(hf.Checkpoint.at(storage, "best"), state_at(2), overwrite=True)
    notes.promise(durable=2)
    return ops.since


# ---- what must be true afterwards


def digest_of(path):
    return hashlib.blake2b(Path(path).read_bytes()).hexdigest()


def files_under(root):
    return {os.path.relpath(os.path.join(base, name), root) for base, _, names in os.walk(root) for name in names}


def directories_under(root):
    return {os.path.relpath(os.path.join(base, name), root) for base, names, _ in os.walk(root) for name in names
            if not os.path.islink(os.path.join(base, name))}  # fmt: skip


def check_foreign(root):
    expected = dict(FOREIGN)
    for path, data in expected.items():
        assert Path(root, path).read_bytes() == data, f"foreign file {path} was touched"
    if Path(root, "mine").exists():
        assert hf.load(Path(root, "mine"))["weights"].tolist() == [0, 1, 2, 3, 4]


def committed(root):
    """Committed checkpoints by name, each verified byte by byte."""
    found = {}
    for child in sorted(Path(root).iterdir()):
        hidden = child.name.startswith(".") or child.is_symlink()  # a probe; the link to the newest
        if child.is_dir() and (child / "manifest.json").exists() and child.name != "exports" and not hidden:
            result = hf.Checkpoint(child).verify()
            assert result.ok, f"{child.name}: {result.problems}"
            found[child.name] = hf.Checkpoint(child)
    return found


def check_litter(root):
    """Nothing but what committed checkpoints list, the run's own files, and what is not ours."""
    allowed = {*FOREIGN, "run.json", "run-changes.json"}
    homes = set()
    for name in committed(root):
        manifest = read_manifest(LocalStorage(root), name)
        allowed |= {f"{name}/{path}" for path in ("manifest.json", *SIDECARS, *(one.path for one in manifest.files))}
        homes.add(name)
    allowed |= {f"step_{step:08d}/README.txt" for step in (2, 3)}
    allowed |= {path for path in files_under(root) if path.startswith("reports/") and path.endswith(".jsonl")}
    allowed |= {path for path in files_under(root) if path.startswith(".ledger/rank-")}  # what was trained
    litter = sorted(files_under(root) - allowed)
    assert not litter, f"litter: {litter}"
    homes |= {os.path.dirname(path) for path in files_under(root)}
    empty = sorted(directories_under(root) - homes)
    assert not empty, f"empty directories: {empty}"


def check_run(root, diary, before, go_on=False, *, at_most=None):
    """Start as a user would: exactly the previous or the new checkpoint, bit-exact; then no litter."""
    promised = Diary.read(diary)
    allowed = set(range(before, (before + 1 if at_most is None else at_most) + 1))
    least = promised.get("durable", 0)
    there = committed(root)
    state = state_at(0)
    with quiet(), checkpointer(threaded(root), state) as ck:
        step = ck.global_step
        assert step in allowed, f"resumed at {step}, not one of {allowed}"
        assert step >= least, f"step {least} was promised, {step} was found"
        assert_state_equal(state, state_at(step))
        assert (ck.resumed_from is None) == (step == 0)
        names = {one.name for one in ck.checkpoints()}
        if before:
            assert names, "retention left nothing"
            assert at_most or "step_00000003" in names, "the checkpoint before the newest must stay with last=2"
        assert names == set(there) - {"mine"}, f"{names} listed, {set(there)} on the disk"
        assert len(names) >= min(2, before), names
    check_foreign(root)
    check_litter(root)
    index = RunIndex.load(LocalStorage(root))
    assert index.damage is None
    numbers = [one.attempt for one in index.attempts]
    assert numbers == sorted(set(numbers)), numbers
    if go_on:
        state = state_at(0)
        with quiet(), checkpointer(threaded(root), state) as ck:
            for _ in range(2):
                one_step(ck, state)
                ck.save()
            assert ck.global_step == step + 2
        there = committed(root)
        assert sum(one.step == step + 2 for one in there.values() if one.step is not None) == 1
        check_foreign(root)
        check_litter(root)
    return step


def check_history(root, step):
    """The metric rows up to the checkpoint are all there, each once."""
    if not step:
        return  # a fresh start makes the rows of a lost life void with its own first row, not before
    rows = RunIndex.load(LocalStorage(root)).history()
    found = [row["step"] for row in rows if "loss" in row["metrics"]]
    assert found == list(range(1, step + 1)), f"rows of steps {found} for a checkpoint of step {step}"


def check_first_save(root, diary, go_on=False):
    step = check_run(root, diary, 0, go_on)
    if not go_on:
        check_history(root, step)
    return step


def check_model(root, step):
    """A checkpoint that is there is a whole model: its small files, and an index whose files hold all tensors."""
    where = Path(root, f"step_{step:08d}")
    assert (where / "config.json").read_text() == "{}"
    assert (where / "tokens/vocab.txt").read_text() == "a b c"
    weights = json.loads((where / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in weights.items():
        with safetensors.safe_open(where / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    expected = state_at(step)["model"].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def check_first_model(root, diary, go_on=False):
    step = check_first_save(root, diary, go_on)
    if step:
        check_model(root, step)
    return step


def check_next_model(root, diary, go_on=False):
    step = check_next_save(root, diary, go_on)
    if step == 4:
        check_model(root, step)
    return step


def check_next_save(root, diary, go_on=False):
    step = check_run(root, diary, 3, go_on)
    if not go_on:
        check_history(root, step)
    promised = Diary.read(diary)
    if "deleted" in promised:
        assert promised["reused"] > 0, "the frozen part is linked"
        assert not Path(root, "step_00000002/manifest.json").exists()
        if not go_on:
            one, two = (os.stat(frozen_file(root, step)).st_ino for step in (3, 4))
            assert one == two
    return step


def frozen_file(root, step):
    name = f"step_{step:08d}"
    manifest = read_manifest(LocalStorage(root), name)
    big = max((one for one in manifest.files if one.role == "tensors"), key=lambda one: one.size)
    return Path(root, name, big.path)


def check_index_grows(root, diary, go_on=False):
    many_rows()
    there = {name: one.metrics for name, one in committed(root).items() if name != "mine"}
    before = RunIndex.load(LocalStorage(root))
    assert before.damage is None, "an index that is written in two steps is whole after each"
    names = {record.name: dict(record.metrics) for record in Catalog(LocalStorage(root)).records()}
    assert names == {name: dict(metrics) for name, metrics in there.items()}
    return check_run(root, diary, 3, go_on, at_most=5)


def check_resume(root, diary, go_on=False):
    step = check_run(root, diary, 3, go_on)
    assert step == 3
    return step


def check_late_metrics(root, diary, go_on=False):
    step = check_run(root, diary, 3, go_on)
    metrics = hf.Checkpoint(Path(root, "step_00000003")).metrics
    promised = Diary.read(diary).get("metrics")
    assert metrics.get("val_loss") in ((0.25,) if promised else (None, 0.25))
    assert metrics["loss"] == 2.0
    rows = {row["step"]: row["metrics"] for row in RunIndex.load(LocalStorage(root)).history()}
    if promised:
        assert rows[3].get("val_loss") == 0.25, rows
    return step


def check_pin(root, diary, go_on=False):
    step = check_run(root, diary, 3, go_on)
    checkpoint = hf.Checkpoint(Path(root, "step_00000002"))
    if Diary.read(diary).get("pinned"):
        assert checkpoint.is_pinned
        if go_on:
            assert checkpoint.manifest is not None, "a pinned checkpoint stays"
    return step


def check_overwrite(root, diary, go_on=False):
    promised = Diary.read(diary)
    state = state_at(0)
    hf.load(Path(root, "best"), into=state)
    step = len(state["note"].log)
    assert step in (1, 2)
    assert step >= promised["durable"]
    assert_state_equal(state, state_at(step))
    hf.save(hf.Checkpoint.at(threaded(root), "best"), state_at(3), overwrite=True)
    assert_state_equal(hf.load(Path(root, "best"), into=state_at(0))["note"].state_dict(), {"log": [1, 2, 3]})
    check_foreign(root)
    check_litter_of_one(root)
    return step


def check_litter_of_one(root):
    check_litter_allowing(root, "best")


def check_litter_allowing(root, name):
    manifest = read_manifest(LocalStorage(root), name)
    allowed = {*FOREIGN, *(f"{name}/{path}" for path in ("manifest.json", *(one.path for one in manifest.files)))}
    assert sorted(files_under(root) - allowed) == []


# ---- in the writer process


def writer_dies(root, diary, marker, crash_at, times=1):
    """A life whose writer process is killed at operation ``crash_at``, once or every time."""
    notes = Diary(diary)
    options = {"crash_at": crash_at, **({"crash_once": marker} if times == 1 else {})}
    storage = FaultyStorage(root, **options)
    state = state_at(0)
    try:
        with quiet(), checkpointer(storage, state) as ck:
            start = ck.global_step
            one_step(ck, state)
            ck.save(acc=0.5)
            ck.wait()
            notes.promise(durable=start + 1)
        notes.promise(closed=True)
    except (HoldfastError, CheckpointNotFoundError) as error:
        return {"error": str(error), "died": os.path.exists(marker)}
    return {"error": None, "died": os.path.exists(marker)}


def warm_up():
    """Import here, before any fork, what the first life imports."""
    state = state_at(1)
    with quiet(), checkpointer("memory://warm", state) as ck:
        one_step(ck, state)
    hf.load("memory://warm/step_00000001", into=state_at(0), strict=False)


warm_up()
