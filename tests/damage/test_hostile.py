"""A checkpoint made to do harm is refused, and nothing of it runs or leads outside."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.errors import CheckpointError, CorruptCheckpointError
from holdfast.format.digest import bytes_digest, chunk_digests, file_digest
from holdfast.format.manifest import Manifest
from holdfast.state.load.restore import load_state
from holdfast.storage import LocalStorage


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch HARMED",)


def make(home):
    hf.save(home, {"model": torch.nn.Linear(4, 4), "plain": {"a": [1, 2]}, "when": (1, 2)})
    return home


# ---- tools: change a file and make every digest right again


def manifest_of(home):
    return json.loads((home / "manifest.json").read_text())


def write_manifest(home, tree=None, *, text=None):
    """Write a manifest with a correct closing digest, whatever it says."""
    if text is None:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in tree.items() if key != "body_digest"]
        text = "{\n" + ",\n".join(lines)
    body = text.encode()
    (home / "manifest.json").write_bytes(body + f',\n"body_digest": "{bytes_digest(body)}"\n}}\n'.encode())


def role(home, name):
    return next(one for one in manifest_of(home)["files"] if one["role"] == name)


def replace_file(home, entry, data):
    """Replace a small file, and its size and digest in the manifest."""
    tree = manifest_of(home)
    (home / entry["path"]).write_bytes(data)
    table = chunk_digests(data)
    for one in tree["files"]:
        if one["path"] == entry["path"]:
            one["size"], one["digest"] = len(data), file_digest(table)
            if one.get("chunks"):
                digests = next(other for other in tree["files"] if other["path"] == one["chunks"][0])
                stored = bytearray((home / digests["path"]).read_bytes())
                stored[one["chunks"][1] : one["chunks"][1] + len(table)] = table
                (home / digests["path"]).write_bytes(stored)
                digests["digest"], digests["size"] = bytes_digest(bytes(stored)), len(stored)
    write_manifest(home, tree)


def edit_json(home, entry, change):
    data = (home / entry["path"]).read_bytes()
    replace_file(home, entry, change(data.decode()).encode())


# ---- attacks: each makes the checkpoint at `home` hostile; `outside` is a directory beside it


def path_in_manifest(new):
    def attack(home, outside):
        tree = manifest_of(home)
        target = new.replace("OUTSIDE", str(outside))
        old = tree["files"][0]["path"]
        tree = json.loads(json.dumps(tree).replace(old, target))
        write_manifest(home, tree)

    return attack


def symlink_file(home, outside):
    path = home / role(home, "tensors")["path"]
    secret = outside / "secret.safetensors"
    shutil.move(path, secret)
    path.symlink_to(secret)


def symlink_state(home, outside):
    path = home / role(home, "state")["path"]
    shutil.move(path, outside / "state.json")
    path.symlink_to(os.path.relpath(outside / "state.json", home))


def symlink_manifest(home, outside):
    shutil.move(home / "manifest.json", outside / "manifest.json")
    (home / "manifest.json").symlink_to(outside / "manifest.json")


def giant_header(home, _):
    entry = role(home, "tensors")
    data = bytearray((home / entry["path"]).read_bytes())
    data[:8] = (1 << 62).to_bytes(8, "little")
    replace_file(home, entry, bytes(data))
    index = role(home, "index")
    edit_json(home, index, lambda text: text.replace("4096", str(1 << 61)))


def overlapping(home, _):
    def change(text):
        tree = json.loads(text)
        return json.dumps({**tree, "tensors": overlap(tree["tensors"])})

    edit_json(home, role(home, "index"), change)


def overlap(rows):
    """Give every piece the offset of the first one."""
    first = rows[0][3][0]
    return [
        [name, dtype, shape, [[piece[0], first[1], *piece[2:]] for piece in pieces], *rest]
        for name, dtype, shape, pieces, *rest in rows
    ]


def duplicate_keys(home, _):
    text = (home / "manifest.json").read_text().rpartition(',\n"body_digest"')[0]
    write_manifest(home, text=text + ',\n"run_id": "another"')


def duplicate_in_state(home, _):
    edit_json(home, role(home, "state"), lambda text: '{"plain":1,' + text[1:])


def deep_manifest(home, _):
    text = (home / "manifest.json").read_text().rpartition(',\n"body_digest"')[0]
    write_manifest(home, text=text + ',\n"deep": ' + "[" * 200_000 + "]" * 200_000)


def deep_state(home, _):
    edit_json(home, role(home, "state"), lambda _: '{"plain":' + "[" * 100_000 + "]" * 100_000 + "}")


def nan_size(home, _):
    tree = manifest_of(home)
    tree["files"][0]["size"] = float("nan")
    write_manifest(home, tree)


def huge_size(home, _):
    tree = manifest_of(home)
    tree["files"][0]["size"] = 1 << 80
    write_manifest(home, tree)


def negative_size(home, _):
    tree = manifest_of(home)
    tree["files"][0]["size"] = -1
    write_manifest(home, tree)


def infinite_shape(home, _):
    edit_json(home, role(home, "index"), lambda text: text.replace("[4,4]", "[4294967296,4294967296]"))


def pickle_as_manifest(home, _):
    (home / "manifest.json").write_bytes(pickle.dumps(Bomb()))


def pickle_as_state(home, _):
    replace_file(home, role(home, "state"), pickle.dumps(Bomb()))


def pickle_as_index(home, _):
    replace_file(home, role(home, "index"), pickle.dumps(Bomb()))


def pickle_as_tensors(home, _):
    entry = role(home, "tensors")
    (home / entry["path"]).write_bytes(pickle.dumps(Bomb()))


def evil_type(home, _):
    edit_json(home, role(home, "state"), lambda _: '{"plain":{"$":"ddict","f":"os.system","v":[]}}')


def evil_tag(home, _):
    tag = '{"plain":{"$":"python/object/apply:os.system","args":["touch HARMED"]}}'
    edit_json(home, role(home, "state"), lambda _: tag)


def evil_named_tuple(home, _):
    edit_json(
        home,
        role(home, "state"),
        lambda _: '{"plain":{"$":"namedtuple","n":"X; import os; os.system(\'touch HARMED\')","f":["a"],"v":[1]}}',
    )


ATTACKS = {
    "dots": path_in_manifest("../victim.txt"),
    "inner dots": path_in_manifest("a/../../victim.txt"),
    "absolute": path_in_manifest("OUTSIDE/victim.txt"),
    "backslashes": path_in_manifest("..\\\\victim.txt"),
    "drive": path_in_manifest("C:/victim.txt"),
    "empty path": path_in_manifest(""),
    "symlink out": symlink_file,
    "relative symlink out": symlink_state,
    "manifest symlink": symlink_manifest,
    "giant header": giant_header,
    "overlap": overlapping,
    "duplicate keys": duplicate_keys,
    "duplicate keys in the state": duplicate_in_state,
    "deep manifest": deep_manifest,
    "deep state": deep_state,
    "NaN size": nan_size,
    "huge size": huge_size,
    "negative size": negative_size,
    "infinite shape": infinite_shape,
    "pickle as manifest": pickle_as_manifest,
    "pickle as state": pickle_as_state,
    "pickle as index": pickle_as_index,
    "pickle as tensors": pickle_as_tensors,
    "factory": evil_type,
    "unknown tag": evil_tag,
    "named tuple": evil_named_tuple,
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """Every hostile checkpoint, made once."""
    base = tmp_path_factory.mktemp("hostile")
    original = make(base / "original")
    for name, attack in ATTACKS.items():
        home, outside = base / name / "checkpoint", base / name / "outside"
        shutil.copytree(original, home)
        outside.mkdir()
        (outside / "victim.txt").write_text("secret")
        (base / name / "victim.txt").write_text("secret")
        attack(home, outside)
    return base


@pytest.mark.parametrize("attack", ATTACKS)
def test_refused(attacked, attack, tmp_path, monkeypatch):
    """Load raises CorruptCheckpointError and leaves the live state alone."""
    monkeypatch.chdir(tmp_path)
    home = attacked / attack / "checkpoint"
    with pytest.raises(CorruptCheckpointError):
        hf.load(home)
    live = {"model": torch.nn.Linear(4, 4), "plain": {"a": [0, 0]}, "when": (0, 0)}
    before = {name: value.clone() for name, value in live["model"].state_dict().items()}
    with pytest.raises(CheckpointError):
        hf.load(home, into=live)
    assert all(torch.equal(value, before[name]) for name, value in live["model"].state_dict().items())
    assert not Path("HARMED").exists()


def test_places_of_a_rank_s_own_values_that_are_none(tmp_path):
    """The rank is given the values of rank 0, and nothing else is touched."""
    home = Path(shutil.copytree(Path(__file__).parents[1] / "data" / "1.0-ranks", tmp_path / "copy"))
    entry = next(one for one in manifest_of(home)["files"] if one["path"].startswith("rank-00001"))
    before = '"position":10'
    numbers = ["9" * 5000, "\u00b2", "-1", "0/x"]
    for where in ("", "/", "nowhere/x", "position/0", "model/0", *(f"plain/numbers/{number}" for number in numbers)):
        after = f"{json.dumps(where)}:10"
        edit_json(home, entry, lambda text, old=before, new=after: text.replace(old, new))
        before = after
        found = load_state(LocalStorage(home), rank=1, world_size=2).state
        assert (found["position"], found["plain"]["numbers"][0]) == (0, 1)
    no_text = '"own values":{"$":"dict","v":[[1,2]]},"rest":{'
    edit_json(home, entry, lambda text: text.replace('"own values":{', no_text))
    assert load_state(LocalStorage(home), rank=1, world_size=2).state["average"]["total"].item() == 0.5


# What is wrong with the structure only shows to who decodes it: the digests of these are right.
DECODED = {"overlap", "duplicate keys in the state", "deep state", "infinite shape", "giant header", "factory",
           "unknown tag", "named tuple", "pickle as state", "pickle as index"}  # fmt: skip


@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - DECODED))
def test_verify_sees_it(attacked, attack):
    """`verify` finds it too, without an exception."""
    assert not hf.Checkpoint(attacked / attack / "checkpoint").verify().ok


def test_the_original_is_fine(attacked):
    """The tools above make no damage of their own: rewritten with the same content, everything loads."""
    home = attacked / "rewritten"
    shutil.copytree(attacked / "original", home)
    write_manifest(home, manifest_of(home))
    for name in ("index", "state"):
        edit_json(home, role(home, name), lambda text: text)
    assert Manifest.from_bytes((home / "manifest.json").read_bytes())
    assert hf.Checkpoint(home).verify().ok
    assert hf.load(home)["plain"] == {"a": [1, 2]}


AUDIT = """
import os, sys
import torch, numpy
import holdfast as hf
from holdfast.cli.main import cli
home = os.path.realpath(sys.argv[1])
hf.save(sys.argv[2], {"model": torch.nn.Linear(2, 2), "plain": {"a": (1, 2)}})
def use(where):
    try:
        hf.load(where)
        return "loaded"
    except hf.CheckpointError as error:
        said = [type(error).__name__]
    hf.Checkpoint(where).verify()
    for command in (["verify", where], ["show", where, "--tensors"], ["ls", where]):
        try:
            cli.main(args=command, prog_name="holdfast")
        except SystemExit:
            pass
    return said[0]
use(sys.argv[2])                        # everything imported
seen, watching = [], False
source = os.path.dirname(os.path.dirname(hf.__file__))
PREFIXES = (sys.prefix, sys.base_prefix, source, "/proc/", "/sys/", "/etc/", "/usr/")
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "compile")
def hook(event, args):
    if not watching:
        return
    ours = PREFIXES + ("<frozen", "<string>", "<attrs", "<__array_function__")
    if event in FORBIDDEN and not (event == "compile" and str(args[1]).startswith(ours)):
        seen.append((event, str(args)[:200]))
    if event == "compile" and b"HARMED" in (args[0] if isinstance(args[0], bytes) else str(args[0]).encode()):
        seen.append((event, str(args)[:200]))
    if event == "exec" and (not str(args[0].co_filename).startswith(ours) or "HARMED" in str(args[0].co_consts)):
        seen.append((event, str(args)[:200]))
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(args[0]))
        inside = path == current or path.startswith(current + "/")
        if not inside and not path.startswith(PREFIXES):
            seen.append((event, path))
sys.addaudithook(hook)
out = {}
for name in sorted(os.listdir(home)):
    where = os.path.join(home, name, "checkpoint")
    if not os.path.isdir(where):
        continue
    current, watching = os.path.realpath(where), True
    try:
        out[name] = use(where)
    finally:
        watching = False
print("AUDIT", __import__("json").dumps({"seen": seen, "out": out}))
"""


def test_an_audit_hook_sees_nothing(attacked, tmp_path):
    """Load, verify and the command line on every hostile checkpoint: no foreign code, nothing opened outside."""
    script = tmp_path / "audit.py"
    script.write_text(textwrap.dedent(AUDIT))
    done = subprocess.run(
        [sys.executable, str(script), str(attacked), str(tmp_path / "fine")],
        env={**os.environ, "PYTHONPATH": str(Path(hf.__file__).parents[1]), "NO_COLOR": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.split("AUDIT", 1)[1])
    assert told["out"].keys() == ATTACKS.keys()
    assert set(told["out"].values()) == {"CorruptCheckpointError"}, told["out"]
    assert told["seen"] == []
    assert not list(tmp_path.rglob("HARMED"))
