"""docs/json.md names the fields of each command's ``--json``: those that real outputs have, and no others."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_kit import invoke
from test_cli import run  # noqa: F401 - a fixture

import holdfast as hf
from holdfast import Checkpoint
from holdfast.cli.main import cli
from holdfast.run.catalog import upkeep
from holdfast.storage import LocalStorage

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
ELSEWHERE = {"page", "run", "stats"}  # what they print is described on pages of their own


def documented() -> dict[str, dict[str, bool]]:
    """Section -> field -> whether every output has it."""
    found: dict[str, dict[str, bool]] = {}
    for title, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        cells = " ".join(re.findall(r"^\| ([^|]+) \|", body, re.MULTILINE))
        fields = {name: not sometimes for name, sometimes in re.findall(r"`([\w.\[\]{}]+)`( \(not always\))?", cells)}
        if fields:
            found[title.replace("`", "")] = fields
    return found


DOCUMENTED = documented()


def check(section: str, *documents: object) -> None:
    """Compare what a section names with what documents of its command have."""
    known = DOCUMENTED[section]
    seen: list[set[str]] = []
    for document in documents:
        here: set[str] = set()
        walk(document, "", known, here)
        seen.append(here)
    unknown = {name for name in set.union(*seen) if name.rstrip("!") not in known}
    assert unknown == set(), f"docs/json.md: {section} does not name them"
    for name, always in known.items():
        parent = name.rpartition(".")[0]
        parent += "!" if parent.endswith("[]") else ""
        outputs = [here for here in seen if not parent or parent in here]
        if always:
            assert outputs, f"docs/json.md: {section}: no output has {name}"
            assert all(name in here for here in outputs), f"docs/json.md: {section}: not every output has {name}"


def walk(value: object, path: str, known: dict[str, bool], seen: set[str]) -> None:
    """Collect the fields of a document; what a page calls ``name{}`` has keys that nobody knows before."""
    if path:
        name = next((one for one in (f"{path}[]", f"{path}{{}}") if one in known), path)
        seen.add(name)
        if isinstance(value, list) and name.endswith("[]") and value:
            seen.add(f"{name}!")
            for item in value:
                walk_items(item, name, known, seen)
        if name in known and not any(one.startswith(f"{path}.") for one in known):
            return
    walk_items(value, path, known, seen)


def walk_items(value: object, path: str, known: dict[str, bool], seen: set[str]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            walk(item, f"{path}.{key}" if path else key, known, seen)
    elif isinstance(value, list):
        for item in value:
            walk_items(item, path, known, seen)


@pytest.fixture(autouse=True)
def _arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["holdfast", "--json"])


def told(*arguments: object, code: int = 0) -> dict:
    return json.loads(invoke(*arguments, code=code).stdout)


@pytest.fixture
def trained(tmp_path) -> Path:
    """A finished run of a real loop."""
    model = torch.nn.Linear(2, 1)
    with hf.Checkpointer(tmp_path / "runs" / "one", {"model": model}, every=2, keep=hf.Keep(last=2)) as ck:
        for number in range(4):
            with torch.no_grad():
                model.bias.fill_(number)
            ck.step(loss=1.0 / (number + 1))
    return tmp_path / "runs" / "one"


def test_every_command_has_a_section() -> None:
    """Whoever adds a command with --json describes it."""
    names = {title.split()[0].rstrip(",") for title in DOCUMENTED} | {
        name for title in DOCUMENTED for name in title.split(", ")
    }
    assert set(cli.commands) - names - ELSEWHERE == set()


def test_looking(run, trained) -> None:  # noqa: F811
    """Of a run with good, quarantined, unfinished and foreign ones, of a folder, of one checkpoint."""
    check("ls of a run", told("ls", run, "--json"), told("ls", trained, "--json"))
    check("ls of a folder of runs", told("ls", trained.parent, "--json"), told("ls", run.parent, "--json"))
    incomplete = told("show", run / "step_40", "--json", code=1)
    foreign = told("show", run / "notes", "--json")
    whole = [told("show", trained, "--tensors", "--json"), told("show", run / "step_30", "--json", code=1)]
    check("show", *whole, told("show", run / "step_20", "--json"), incomplete, foreign)
    with upkeep(LocalStorage(trained)) as catalog:
        catalog.index.journal.take([{"what": "died", "time": 1.0, "attempt": 1, "why": "killed by SIGKILL"}])
    check("log", told("log", trained, "--json"))
    check("latest, best", told("latest", run, "--json"), told("best", run, "--metric", "val", "--json"))
    check("verify", told("verify", run, "--json", code=0), told("verify", run / "step_20", "--json"))
    missing = told("show", trained / "nowhere", "--json", code=2)
    check(
        "errors", missing, told("log", trained, "--tail", "-5", "--json", code=2), told("diff", run, "--json", code=2)
    )


def test_keeping(run) -> None:  # noqa: F811
    """What stays and what goes."""
    check("pin, unpin", told("pin", run / "step_10", "--json"), told("unpin", run / "step_10", "--json"))
    check("prune", told("prune", run, "--keep", "last=1", "--json"))
    check("rm", told("rm", run / "step_10", "--json"), told("rm", run / "step_20", "--json", code=1))


def test_moving(run, trained, tmp_path, monkeypatch) -> None:  # noqa: F811
    """Copies of a run and of a checkpoint, and unfinished uploads."""
    documents = [told("cp", run, tmp_path / "copy", "--json"), told("cp", trained, tmp_path / "two", "--json")]
    check("push, pull, cp", *documents, told("cp", run / "step_20", tmp_path / "one", "--json", "--verify"))

    class Uploads:
        def __init__(self, storage):
            pass

        def find(self):
            return [SimpleNamespace(path="a/b", started=1.0, upload_id="x")]

    monkeypatch.setattr("holdfast.storage.object.client.UnfinishedUploads", Uploads)
    check("sweep", told("sweep", "memory://bucket", "--json"))


def test_comparing(trained, tmp_path) -> None:
    """A difference of each kind; an average; other formats."""
    state = {"model": {"w": torch.ones(3), "q": torch.ones(2, dtype=torch.int8)}, "note": 1, "x": 2, "odd": 5}
    a = hf.save(tmp_path / "a", state, metrics={"m": 1.0})
    a.set_metadata({"who": "me"})
    other = {"model": {"w": torch.zeros(3), "q": torch.zeros(2, dtype=torch.int8)}, "note": 2, "y": 2}
    hf.save(tmp_path / "b", {**other, "odd": torch.ones(1)})
    check("diff", told("diff", tmp_path / "a", tmp_path / "b", "--json", code=1))
    check("average", told("average", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "mean", "--json"))
    check("export", told("export", tmp_path / "a", tmp_path / "w.safetensors", "--to", "safetensors", "--json"))
    torch.save({"model": {"w": torch.ones(2)}, "odd": {1, print}}, tmp_path / "a.pt")
    check("import", told("import", tmp_path / "a.pt", tmp_path / "taken", "--json"))


def test_probing(tmp_path) -> None:
    """A disk."""
    check("doctor", told("doctor", tmp_path, "--bytes", "0", "--json"))


def test_following(trained) -> None:
    """One document a line."""
    result = invoke("watch", trained, "--exec", "echo '{\"v\": 1}'", "--report", "--json", code=None)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    check("watch", *rows)
    assert Checkpoint(rows[-1]["checkpoint"]).metrics["v"] == 1


SCRIPT = """
import sys, torch, holdfast as hf
model = torch.nn.Linear(1, 1)
with hf.Checkpointer("run", {"model": model}, every=1) as ck:
    while (ck.global_step or 0) < 4:
        if sys.argv[1:] == ["odd"]:
            with torch.no_grad():
                model.bias.fill_(id(ck) % 1000 + torch.seed() % 1000)
        ck.step()
"""


@pytest.mark.slow
def test_attacking_a_script(tmp_path) -> None:
    """One that survives, with a power cut, and one that fails."""
    (tmp_path / "train.py").write_text(
        "import time, torch, holdfast\nmodel = torch.nn.Linear(1, 1)\ntorch.nn.init.ones_(model.weight)\n"
        "torch.nn.init.zeros_(model.bias)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "with holdfast.Checkpointer('run', {'model': model, 'optimizer': optimizer}, every=2) as ck:\n"
        "    while ck.global_step < 8:\n        model(torch.ones(1, 1)).sum().backward()\n        time.sleep(0.02)\n"
        "        optimizer.step()\n        ck.step()\n"
    )
    options = ["attack", "--kills", 2, "--power-cuts", 1, "--json", "--", sys.executable, "train.py"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        whole = told(*options)
        failed = told("attack", "--json", "--cold", "--", sys.executable, "-c", "raise SystemExit(3)", code=1)
    check("attack", whole, failed)


@pytest.mark.slow
def test_verifying_a_resume(tmp_path, monkeypatch) -> None:
    """An exact one, one that is not, and a script that fails."""
    monkeypatch.chdir(tmp_path)  # the current folder is copied for each life
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["verify-resume", "--kills", 1, "--json", "--", sys.executable, tmp_path / "train.py"]
    documents = [told(*options), told(*options, "odd", code=1)]
    failed = told("verify-resume", "--json", "--", sys.executable, "-c", "raise SystemExit(3)", code=1)
    check("verify-resume", *documents, failed)
