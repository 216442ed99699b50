"""`holdfast verify-resume` of scripts without Holdfast: wrong resumes are named, and no right one is called wrong."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time

import pytest
import torch
from resume_scripts import BASE, HEALTHY, WRONG, forked, script

from holdfast.errors import ConfigError
from holdfast.testing import NothingToVerifyError, ResumeDivergedError, assert_resumes
from holdfast.verify.lives import Life, LifeFailedError
from holdfast.verify.matching import Finding, compare_fresh, find_state, from_checkpoint, match_life
from holdfast.verify.report import Report, advice
from holdfast.verify.scripts import verify_script
from holdfast.verify.trace import Record, saves_after


def verified(tmp_path, text: str, *, starter=forked, **options) -> Report:
    (tmp_path / "train.py").write_text(text)
    return verify_script(["python", "train.py"], cwd=tmp_path, timeout_s=60, starter=starter, **options)


def test_an_error_of_several_lines_is_said_with_its_first(tmp_path):
    """That has its class; torch names what does not fit in later lines. Without an error it is the last line."""

    def last_line(text: str) -> str:
        (tmp_path / "output").write_text(text)
        return Life(plan=None, rows=[], killed=False, output=tmp_path / "output", seconds=1.0, status=1).last_line()

    frames = 'begins\n\nTraceback (most recent call last):\n  File "train.py", line 1, in <module>\n    load()\n'
    assert last_line(f"{frames}ValueError: one line\n") == "ValueError: one line"
    assert last_line(f"{frames}RuntimeError: Error(s):\n\ta\n\tsize of b\n") == "RuntimeError: Error(s): ... size of b"
    assert last_line("begins\nno checkpoint\n\n") == "no checkpoint"
    assert last_line("") == "it printed nothing"


QUICK = (
    "does not look for its checkpoint",
    "names of checkpoints are sorted as text",
    "optimizer is not saved",
    "epoch begins again in its middle",
)


@pytest.mark.parametrize("name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in WRONG])
def test_a_wrong_resume_is_named(tmp_path, name):
    """Verdict and first cause are those of the fault that the script has."""
    text, verdict, kind = WRONG[name]
    report = verified(tmp_path, text)
    said = "\n".join(report.lines())
    assert report.verdict == verdict, said
    assert report.kinds[0] == kind, said
    assert report.causes[0].without, said
    assert report.causes[0].with_holdfast, said
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["train.py"], "it ran in copies"


@pytest.mark.parametrize(
    "name", [one if one == "base" else pytest.param(one, marks=pytest.mark.slow) for one in HEALTHY]
)
def test_a_right_resume_is_exact(tmp_path, name):
    """No false verdict, whatever models the process that forks the lives has in memory, and drops meanwhile."""
    models = [torch.nn.Linear(2, 2) for _ in range(20)]

    def starter(*told):
        models.pop()
        return forked(*told)

    report = verified(tmp_path, HEALTHY[name], starter=starter)
    assert report.exact, "\n".join(report.lines())
    assert any(life.killed_after is not None for life in report.lives)
    early = [note for note in report.notes if "before it loads its checkpoint" in note]
    assert bool(early) == (name.startswith(("warms up", "measures")) or "before it is loaded" in name)


def test_without_a_loader_nothing_is_said_of_epochs():
    """Data of the beginning again, by an order of the script's own: its generator is named, no DataLoader."""
    facts = {"drawn": ["torch"], "place": 0, "epochs": [], "epoch_began": 0, "loaders": {}}
    own = advice(Finding(kind="data again", step=12, facts={**facts, "loader_seen": False}))
    assert "generator of torch" in own.why
    assert "DataLoader" not in own.why + own.without
    loader = advice(Finding(kind="data again", step=12, facts={**facts, "loader_seen": True}))
    assert "in the middle of an epoch" in loader.why


def test_an_epoch_that_is_trained_again_is_not_laid_to_a_generator():
    """The order of a DistributedSampler is a function of the epoch; that the generator is another one is no cause."""
    facts = {"drawn": ["torch"], "place": 0, "epochs": [8], "loader_seen": True}
    finding = Finding(kind="data again", step=8, facts={**facts, "loaders": {0: {"sampler": "DistributedSampler"}}})
    cause = advice(finding)
    assert "generator" not in cause.why + cause.without
    assert "`epoch + 1`" in cause.without


def test_workers_that_stay_are_named():
    """A resume makes them anew, which moves the generators, saved or not: the data are others."""
    loader = {"sampler": "RandomSampler", "workers": 2, "persistent": False}
    facts = {"drawn": ["torch"], "loaders": {0: loader}}
    assert "persistent_workers" not in advice(Finding(kind="other data", step=8, facts=facts)).why
    facts["loaders"] = {0: {**loader, "persistent": True}}
    cause = advice(Finding(kind="other data", step=8, facts=facts))
    assert "`persistent_workers=True`" in cause.why
    assert "`persistent_workers=False`" in cause.without


def test_of_epochs_alike_it_is_the_interrupted_one_that_begins_again():
    """Nearer to the last step of an epoch is the beginning of the next one, which has the same first batch."""
    whole, life = (stepped([*steps], [0] * 12, [0.1] * 12) for steps in (range(12), range(3, 12)))
    for record in (whole, life):
        for number, step in enumerate(record.steps):
            step |= {"x": [number % 4], "d": [[0, number % 4]], "ep": number // 4}
    (found,) = match_life(whole, life, killed_at=3, saved=True, to_end=True).findings
    assert (found.kind, found.facts["place"], found.facts["epoch_began"]) == ("data again", 0, 0)


@pytest.mark.parametrize("loop", ["for _ in range(4):\n        x = next(batches)", "for x in ahead(batches):"])
def test_an_epoch_begins_with_its_first_batch(tmp_path, loop):
    """As Lightning draws them, never to the end of an iterator, and as Accelerate does, a batch ahead of each step."""
    text = AHEAD.replace("for x in batches:", loop)
    (cause,) = verified(tmp_path, text, kills=1).causes
    assert cause.kind == "data again"
    assert "the order of the first epoch comes again, for the generator is not saved" in cause.why


AHEAD = """
import os
import torch

torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    done = saved["done"]


def ahead(batches):
    now = next(batches)
    for after in batches:
        yield now
        now = after
    yield now


for epoch in range(done, 3):
    batches = iter(loader)
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "done": epoch + 1}, "last.tmp")
    os.replace("last.tmp", "last.pt")
"""


@pytest.mark.parametrize(("has_loader", "blamed"), [(True, ["order"]), (False, ["position in the data", "order"])])
def test_an_order_that_begins_anew_is_not_taken_for_a_lost_position(has_loader: bool, blamed: list[str]):
    """Three epochs of four steps: the life goes on in the third one, at the right place, in the order of the first."""

    def record(first: int, *data: int) -> Record:
        record = rows(*range(first, first + len(data)))
        for step, value in zip(record.steps, data, strict=True):
            step |= {"x": [value], "d": [[0, value]] if has_loader else [], "gn": 1, "r": {}, "scale": []}
            step |= {"en": 1, "ep": step["w"] // 4 if has_loader else 0}
        return record

    match = match_life(record(0, *range(20, 32)), record(10, 22, 23), killed_at=10, saved=True, to_end=False)
    assert [(finding.kind, finding.step) for finding in match.findings] == [("data again", 10)]
    cause = advice(match.findings[0])
    assert "again on those of step 2" in cause.text
    assert [word for word in ("position in the data", "order") if word in cause.why] == blamed
    assert "generator" in cause.why
    assert has_loader or "`generator.get_state()`" in cause.without


def rows(*weights: int, put: int | None = None, optimizers: str = "") -> Record:
    """Steps of SGD by their weights, which something else than a step has changed before the step ``put``."""
    left = [None, *[weight if place != put else -1 for place, weight in enumerate(weights[1:], 1)]]
    numbers = map(int, optimizers or "0" * len(weights))
    steps = [
        {"w": weight, "was": was, "o": number, "s": {}, "lr": [0.1], "x": [], "g": weight, "b": 0, "e": 0, "en": 0}
        for weight, was, number in zip(weights, left, numbers, strict=True)
    ]
    return Record(rank=0, steps=steps)


def stepped(weights: list[int], averages: list[int], decays: list[float]) -> Record:
    """Steps with an averaged copy beside the weights, and options of the optimizer."""
    record = rows(*weights)
    for step, average, decay in zip(record.steps, averages, decays, strict=False):  # as many as there are steps
        step |= {"e": average, "en": 1, "opt": {"weight_decay": [decay]}}
        step |= {"x": [1], "d": [], "gn": 1, "r": {}, "scale": []}
    return record


def test_an_averaged_copy_is_blamed_only_where_the_weights_are_right():
    """It follows them: other weights are the work of the step before, by other options of the optimizer if it had such.

    Other options that leave the same weights are no difference.
    """
    whole = stepped([0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [0.1, 0.2, 0.3, 0.4, 0.5])

    def found(*life) -> list[tuple[str, int, bool]]:
        match = match_life(whole, stepped(*life), killed_at=3, saved=True, to_end=True)
        return [(finding.kind, finding.step, finding.at_resume) for finding in match.findings]

    assert found([2, 73, 74], [12, 83, 84], [0.1, 0.2, 0.3]) == [("options", 2, True)]
    assert found([2, 3, 74], [12, 13, 84], [0.3, 0.1, 0.2]) == [("options", 3, False)]
    assert found([2, 73, 74], [12, 83, 84], [0.3, 0.4, 0.5]) == [("unexplained", 3, False)]
    assert found([2, 3, 4], [12, 83, 84], [0.3, 0.4, 0.5]) == [("other modules", 3, False)]
    assert found([2, 3, 4], [12, 13, 14], [0.1, 0.2, 0.3]) == []


def test_an_evaluation_before_the_kill_is_no_batch_of_the_step_after_it():
    """Its gradients, if it has any, are thrown away; where those of two batches are gathered, one is missing."""

    def found(*inputs: list[int], first: list[int], gradient: int) -> list[str]:
        whole, life = (stepped([*weights], [0] * 4, [0.1] * 4) for weights in (range(4), range(2, 4)))
        for step, entered in zip(whole.steps, inputs, strict=True):
            step["x"] = entered
        life.steps[0] |= {"x": first, "g": gradient}
        life.steps[1]["x"] = inputs[3]
        findings = match_life(whole, life, killed_at=2, saved=True, to_end=True).findings
        return [finding.kind for finding in findings]

    assert found([1], [2], [99, 3], [4], first=[3], gradient=2) == []
    assert found([1], [2], [99, 3], [4], first=[3], gradient=77) == ["carried"]
    assert found([1, 2], [3, 4], [5, 6], [7, 8], first=[6], gradient=77) == ["fewer batches"]


def test_a_run_that_goes_on_where_it_should_begin_shares_a_place_with_the_first():
    """It finds its training finished, or has the weights that the first one has left: nothing is to be seeded."""
    whole = stepped([0, 1, 2], [0] * 3, [0.1] * 3)
    whole.end = {"w": {"0": 3}}
    lives = [(Record(rank=0), True)]
    for weights, goes_on in (([3, 4], True), ([2, 3], True), ([70, 71], False), ([0, 1], False)):
        lives.append((stepped(weights, [0] * 3, [0.1] * 3), goes_on))
    for life, goes_on in lives:
        found = compare_fresh(whole, life, to_end=True)
        assert ("outside of the working directory" in advice(found).why) == goes_on


@pytest.mark.parametrize(
    ("life", "began", "early"),
    [
        (rows(0, 1, 2), 0, 0),  # starts over
        (rows(0, 71, 72), 0, 0),  # starts over, with other data
        (rows(0, 1, 5, 6, put=2), 5, 2),  # makes two steps first
        (rows(0, 71, 5, 6, put=2), 5, 2),  # with data of its own
        (rows(0, 1, 2, put=1), 1, 1),  # makes the state of its optimizer, and loads the first save
        (rows(0, 1, 88, put=2), None, 2),  # loads a state that was never there
        (rows(0, 5, 6), 0, 0),  # nothing but its own step has made these weights
        (rows(5, 6, 2, put=2), 5, 0),  # takes back an earlier state later on
    ],
)
def test_steps_before_a_checkpoint_is_loaded_are_told_from_a_fresh_start(life, began, early):
    """By the weights: those that no step has left were loaded."""
    reference = rows(*range(10))
    rest = from_checkpoint(reference, life, killed_at=8)
    assert len(life.steps) - len(rest.steps) == early
    assert find_state(reference, rest, killed_at=8)[0] == began


def test_a_finished_training_that_begins_again_goes_on_from_its_end():
    """A script that counts nothing trains its last weights on: no step began with them, and they are a state."""
    reference = rows(*range(10))
    assert find_state(reference, rows(10, 11), killed_at=10) == (None, False)
    reference.end = {"w": {"0": 10}}
    assert find_state(reference, rows(10, 11), killed_at=10) == (10, False)
    assert find_state(reference, rows(70, 11), killed_at=10) == (None, False)


def test_what_comes_before_it_loads_is_no_training_of_another_optimizer():
    """A model that is tried out never trains again; one of two that train side by side is not lost from sight."""
    tried = rows(90, 91, *range(8), optimizers="0011111111")
    tried.steps[2]["was"] = None
    life = rows(90, 91, 5, 6, optimizers="0011")
    life.steps[2]["was"] = None
    assert len(from_checkpoint(tried, life, killed_at=8).steps) == 2
    both = rows(90, 0, 91, 1, 92, 2, 93, 3, optimizers="01010101")
    life = rows(90, 2, 91, 3, optimizers="0101")
    for step in (*both.steps[1:2], *life.steps[1:2]):
        step["was"] = None
    assert from_checkpoint(both, life, killed_at=6) is life
    life = rows(90, 0, 91, 2, 72, 3, optimizers="010101", put=3)
    assert from_checkpoint(both, life, killed_at=6) is life


def test_saves_that_a_life_passed_over_are_counted_by_kind():
    """Logs and small files count for nothing, and of two kinds of large files the one that was written less often."""
    saves = [("out/step-#.pt", step, 4000) for step in (3, 6, 9, 12)]
    assert saves_after([], 0) == 0
    assert saves_after(saves, 3) == 3
    assert saves_after([*saves, ("out/rows.bin", 13, 100)], 12) == 0
    assert saves_after([*saves, *(("out/best.pt", step, 3000) for step in range(1, 14))], 9) == 1
    assert saves_after([*saves, ("out/start.pt", 0, 8000), ("out/epoch-#.pt", 6, 4000)], 3) == 1


# ---- real processes


def run(tmp_path, *arguments: str, env=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "verify-resume", *arguments], cwd=tmp_path, capture_output=True,
        text=True, timeout=200, check=False, env={**os.environ, **(env or {})},
    )  # fmt: skip


def test_the_command(tmp_path):
    """Exit 1, one JSON document and one page; the directory, and a `sitecustomize` of one's own, stay as they are."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os; os.environ['CHAINED'] = 'yes'")
    text = WRONG["optimizer is not saved"][0]
    (tmp_path / "train.py").write_text(f"import os\nassert os.environ['CHAINED'] == 'yes'\n{text}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.pt").write_text("mine")
    ended = run(
        tmp_path, "--kills", "1", "--json", "--html", "report.html", "--", sys.executable, "train.py",
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])},
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    document = json.loads(ended.stdout)
    assert (document["verdict"], document["findings"][0]["kind"]) == ("differs", "optimizer lost")
    assert document["saves"] == [3, 6, 9, 12, 15, 18, 21], "by no clock: steps are shorter than a tick of the kernel's"
    assert [life["began"] for life in document["lives"]] == [0, 3]
    page = (tmp_path / "report.html").read_text()
    assert page.count('<div class="strip">') == 3
    assert 'class="bad' in page
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["old.pt"]


@pytest.mark.slow
def test_every_rank_is_compared(tmp_path):
    """Under torchrun: exact on two ranks, and a generator that only rank 1 loses is found on rank 1."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    (tmp_path / "train.py").write_text(RANKS)
    assert verify_script(command, cwd=tmp_path, kills=1, timeout_s=120).ranks == 2
    wrong = RANKS.replace("seed(100 * step + rank)", "seed(100 * (step - lost * rank) + rank)")
    (tmp_path / "train.py").write_text(wrong)
    report = verify_script(command, cwd=tmp_path, kills=1, timeout_s=120)
    assert report.first is not None
    assert (report.first["rank"], report.kinds[0]) in [(0, "carried"), (1, "own data"), (1, "data again")]


# At its end: threads of gloo may still hold tensors when an interpreter is taken apart, and abort it (pytorch/pytorch
# 179291): 7 of 130 did on a busy machine.
RANKS = """
import atexit, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = lost = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    lost = 2
while step < 10:
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss = model(torch.randn(8, 4, generator=generator)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    dist.barrier()
    if step % 4 == 0 and rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "last.pt")
dist.destroy_process_group()
atexit._run_exitfuncs()
os._exit(0)
"""


@pytest.mark.slow
def test_another_command_resumes(tmp_path):
    """A script that resumes only when it is told to: it starts over by the same command, and is exact by its own."""
    text = BASE.replace("if os.path.exists(path):", 'if "--resume" in __import__("sys").argv:')
    (tmp_path / "train.py").write_text(text)
    assert verified(tmp_path, text, kills=1).verdict == "starts over"
    assert verified(tmp_path, text, kills=1, resume=["python", "train.py", "--resume"]).exact


@pytest.mark.slow
def test_a_script_that_saves_when_it_is_asked_to_end(tmp_path):
    """SIGTERM comes at the step, and what the script does then counts: here it saves, and goes on from there."""
    text = BASE.replace("        # stepped", "        if asked: save(); raise SystemExit(0)").replace(
        "done = {", "import signal\nasked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\ndone = {"
    )
    report = verified(tmp_path, text, kills=1, terminate=True)
    assert report.exact, "\n".join(report.lines())
    assert report.lives[1].began == report.lives[0].steps


@pytest.mark.slow
@pytest.mark.parametrize(("starts", "verdict"), [("== 2", "exact"), (">= 2", "starts over")])
def test_a_life_that_is_killed_before_its_first_save(tmp_path, starts, verdict):
    """A script that saves by the clock begins anew then, and is right where a later life goes on from something."""
    counter = tmp_path / "counter"
    made = f"open({os.fspath(counter)!r}, 'a').write('x')\nlate = os.path.getsize({os.fspath(counter)!r}) {starts}"
    text = BASE.replace("# made", made).replace("def save():\n", "def save():\n    if late:\n        return\n")
    work = tmp_path / "work"
    work.mkdir()
    report = verified(work, text)
    assert report.verdict == verdict, "\n".join(report.lines())
    assert report.lives[1].began == 0


def test_what_is_verified_ends_with_the_verifier(tmp_path):
    """The verifier dies by SIGKILL: script, ranks and what waits to be killed end, and none waits for ever."""
    script = tmp_path / "work" / "train.py"
    script.parent.mkdir()
    script.write_text(f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nimport time\n"
                      "import torch\ntime.sleep(120)\n")  # fmt: skip
    code = (
        "import sys\nfrom pathlib import Path\nfrom holdfast.verify.scripts import verify_script\n"
        f"verify_script(['sh', '-c', {sys.executable!r} + ' train.py; true'], cwd={str(script.parent)!r})"
    )
    own = {**os.environ, "TMPDIR": os.fspath(tmp_path)}  # nobody is left to remove what it made
    verifier = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=own)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        watched = os.pidfd_open(int((tmp_path / "pid").read_text()))
    finally:
        verifier.kill()
        verifier.wait()
    try:
        assert select.select([watched], [], [], 20)[0], "it goes on without its verifier"
    finally:
        os.close(watched)


def test_a_training_that_was_finished_before_is_named(tmp_path):
    """Run by hand, then verified in the same folder: not PYTHONPATH is to be looked at first, but the checkpoint."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "last.pt").touch()
    text = "import os\nraise SystemExit(%s * os.path.exists('out/last.pt'))"
    said = "ended with status 0: if it has taken out/last.pt .* verify it in a folder without that"
    with pytest.raises(NothingToVerifyError, match=said):
        verified(tmp_path, text % 0)
    with pytest.raises(LifeFailedError, match="exit status 3, and printed nothing"):
        verified(tmp_path, text % 3)


def test_a_checkpoint_that_was_there_before_is_named_where_nothing_is_saved_since(tmp_path):
    """Trained by hand up to some steps before its end, then verified: it has loaded, whatever the steps look like."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "earlier.pt").touch()
    text = script(("def save():\n", "def save():\n    return\n"), ("< 4:", "< 1:"))
    report = verified(tmp_path, text, kills=1)
    assert report.kinds == ["starts over"]
    assert "from out/earlier.pt, which was there before" in report.causes[0].why
    assert "verify it in a folder without out/earlier.pt" in report.causes[0].without


def test_what_leads_out_of_the_working_directory_is_found_from_a_copy(tmp_path):
    """A link and the script itself by relative paths, as by hand; a pipe is no part of a copy, nor is a real file.

    Other relative paths are not: where it fails, that is said.
    """
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("hello")
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    (work / "out" / "last").write_text("mine")
    os.mkfifo(work / "pipe")
    (work / "data").symlink_to("../data")
    (work / "newest").symlink_to(work / "out" / "last")
    (work / "out" / "up").symlink_to("../out/last")
    (work / "out" / "beside").symlink_to("../../work/out/last")
    (tmp_path / "train.py").write_text(
        "import os, sys\nassert open('data/x').read() == 'hello' and not os.path.exists('pipe')\n"
        "open('newest', 'w').write('its own')\n"
        "assert open('out/up').read() == open('out/beside').read() == 'its own'\n"
        "assert os.readlink('out/up') == 'last'\nfor path in sys.argv[1:]: open(path)\n"
    )
    with pytest.raises(NothingToVerifyError, match="made 0 step"):
        verify_script(["python", "../train.py"], cwd=work, timeout_s=60, starter=forked)
    assert (work / "out" / "last").read_text() == "mine"
    with pytest.raises(LifeFailedError, match=r"\.\./data/x leads to another place: give an absolute path"):
        verify_script(["python", "../train.py", "../data/x"], cwd=work, timeout_s=60, starter=forked)


def test_a_command_with_half_a_quote_is_an_error_of_usage(tmp_path):
    """Status 2 and one line."""
    (tmp_path / "train.py").touch()
    ended = run(tmp_path, "--resume", "python 'train.py", "--", sys.executable, "train.py")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert '"python \'train.py" is no command for a shell: No closing quotation' in ended.stderr
    assert "Traceback" not in ended.stderr


def test_assert_resumes(tmp_path):
    """The same as an assertion: the error has the first difference, its cause and the fix."""
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(NothingToVerifyError, match="made 0 step"):
        assert_resumes(f"{sys.executable} train.py", cwd=tmp_path)
    (tmp_path / "large").write_bytes(b"x" * 3000)
    with pytest.raises(ConfigError, match=r"large: 2\.9 KiB.*--in-place"):
        verify_script([sys.executable, "train.py"], cwd=tmp_path, copy_limit_bytes=2000)


@pytest.mark.slow
def test_assert_resumes_raises(tmp_path):
    """The error names step and cause."""
    (tmp_path / "train.py").write_text(WRONG["optimizer is not saved"][0])
    with pytest.raises(ResumeDivergedError, match="state of AdamW is lost") as caught:
        assert_resumes([sys.executable, "train.py"], cwd=tmp_path, kills=1)
    assert caught.value.step == 3
