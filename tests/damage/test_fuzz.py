"""Damaged and hostile checkpoints by the thousand: what is raised is Holdfast's own, in bounded time; see fuzz_kit."""

from __future__ import annotations

import io
import json
import pickle
import random
import time
import zipfile

import fuzz_kit
import pytest
import torch

import holdfast as hf
from holdfast.format.codec import decode
from holdfast.format.strict_json import loads

# Cases that once came through as something else, by file and number (of the fuzzer as it is).
FOUND: list[tuple[str, int]] = [
    ("state", 4), ("state", 10), ("state", 18), ("state", 30), ("state", 41), ("rank", 42), ("rank", 54), ("rank", 344),
    ("state", 2154), ("index", 136), ("reports", 11),
]  # fmt: skip
FEW = 20  # of each kind of file, in the main suite
MANY = 2600  # 8 * 2600 = 20 800 with every use of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with something of everything; everything in it can be loaded."""
    run = fuzz_kit.make(tmp_path_factory.mktemp("fuzz"))
    assert set(fuzz_kit.use(run)) == {"done"}
    return run


def attack(run, tmp_path, what, numbers):
    """Use a run once for each number; list those that end in another way than they may."""
    wrong = []
    for number in numbers:
        case = fuzz_kit.copy_of(run, tmp_path / f"{what}-{number}")
        try:
            fuzz_kit.fuzz(case, what, number)
            fuzz_kit.use(case, what)
        except Exception as error:  # all findings are listed
            wrong.append((what, number, repr(error)[:200]))
        fuzz_kit.forget(case)
    assert not wrong


@pytest.mark.parametrize("what", fuzz_kit.FILES)
def test_some_changes(run, tmp_path, what):
    """A few of each kind of file, and all that were ever found."""
    attack(run, tmp_path, what, [*range(FEW), *(number for kind, number in FOUND if kind == what)])


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.long if part else pytest.mark.slow) for part in range(8)]
)
@pytest.mark.parametrize("what", fuzz_kit.FILES)
def test_many_changes(run, tmp_path, what, part):
    """Twenty thousand."""
    share = MANY // 8
    attack(run, tmp_path, what, range(1000 + part * share, 1000 + (part + 1) * share))


def attack_absurd(run, tmp_path, cases, *, commands):
    """Use a run once for each absurd value; list those that end in another way than they may."""
    wrong = []
    for number, one in enumerate(cases):
        case = fuzz_kit.copy_of(run, tmp_path / f"absurd-{number}")
        try:
            fuzz_kit.absurd(case, *one)
            fuzz_kit.use(case, commands=commands)
        except Exception as error:  # all findings are listed
            wrong.append((str(one)[:80], repr(error)[:200]))
        fuzz_kit.forget(case)
    assert not wrong


def test_some_absurd_values(run, tmp_path):
    """Signed indexes and manifests that say what cannot be: loads, commands and verify put it into words."""
    index = [case for case in fuzz_kit.ABSURD if case[0] in ("shape", "pieces", "dtype")]
    manifest = [case for case in fuzz_kit.ABSURD if case[0] in ("field", "entry")]
    chance = random.Random(1)
    attack_absurd(run, tmp_path, [*index[::3], *chance.sample(manifest, 10)], commands=False)
    attack_absurd(run, tmp_path, chance.sample(fuzz_kit.ABSURD, 2), commands=True)


@pytest.mark.slow
def test_all_absurd_values(run, tmp_path):
    """A share of every absurd value in every field, another one each day."""
    share = int(time.time() // 86400) % 20
    attack_absurd(run, tmp_path, fuzz_kit.ABSURD[share::20], commands=True)


# -- cases of their own


@pytest.mark.parametrize("shape", [[2**50], [0, 2**61, 2**61], [4, 4, 2**50], [8, 4]])
def test_verify_says_what_no_load_can_use(run, tmp_path, shape):
    """A signed index whose tensor has other elements than are stored: `verify` finds it, and a load says so."""
    case = fuzz_kit.copy_of(run, tmp_path / "case")
    fuzz_kit.absurd(case, "shape", 0, shape)
    found = hf.Checkpoint(fuzz_kit.newest(case)).verify()
    assert not found.ok
    assert "tensor" in found.problems[0]
    with pytest.raises(hf.CorruptCheckpointError, match="tensor"):
        hf.load(fuzz_kit.newest(case))


@pytest.mark.parametrize(
    ("pieces", "words"), [([], "16 of its 16 elements are missing"), ([[0, 0, 32, [0, 0], [2, 4]]], "8 of")]
)
def test_verify_checks_that_tensors_are_whole(run, tmp_path, pieces, words):
    """Every digest is right and a tensor is not there, or half of it: `verify` says so, and so does a load."""
    case = fuzz_kit.copy_of(run, tmp_path / "case")
    row = next(
        number
        for number, one in enumerate(json.loads(next(fuzz_kit.newest(case).glob("index-*")).read_bytes())["tensors"])
        if one[2] == [4, 4]
    )
    fuzz_kit.absurd(case, "pieces", row, pieces)
    found = hf.Checkpoint(fuzz_kit.newest(case)).verify()
    assert words in found.problems[0]
    with pytest.raises(hf.CorruptCheckpointError, match="elements are missing"):
        hf.load(fuzz_kit.newest(case))


def test_verify_misses_a_tensor_of_the_structure(run, tmp_path):
    """The structure names a tensor that no index lists: `verify` names both."""
    case = fuzz_kit.copy_of(run, tmp_path / "case")
    fuzz_kit.replace(case, "state", lambda tree: {**tree, "more": {"$": "tensor", "n": "more/gone"}})
    found = hf.Checkpoint(fuzz_kit.newest(case)).verify()
    assert any("'more/gone' that no index lists" in problem for problem in found.problems)


def test_names_forge_no_lines(tmp_path):
    """Line breaks, escape codes and marks of direction in names make no line of output, and reach no terminal."""
    evil = "x\nstep_00000009  ok\x1b[2J\u202e"
    with hf.Checkpointer(tmp_path / "run", {f"w{evil}": torch.zeros(2), "p": {f"k{evil}": 1}}, every=1) as ck:
        ck.step(**{f"loss{evil}": 1.0})
        ck.step(**{f"loss{evil}": 2.0})
    ck.latest().set_metadata({f"m{evil}": evil})
    older = min(path for path in (tmp_path / "run").iterdir() if path.name.startswith("step_"))
    for arguments in fuzz_kit.commands_of(tmp_path / "run", older):
        said = fuzz_kit.command(*arguments)
        assert not any(line.lstrip().startswith("step_00000009") for line in said.split("\n")), (arguments, said)
        assert "\x1b" not in said
        assert "\u202e" not in said
    with pytest.raises(hf.StateMismatchError) as caught:
        hf.load(older, into={"v": torch.zeros(2)})
    assert "\x1b" not in str(caught.value)


def test_the_message_names_file_and_place(run, tmp_path):
    """A malformed node is found again by what the error says."""
    case = fuzz_kit.copy_of(run, tmp_path / "case")
    fuzz_kit.replace(case, "state", lambda tree: {**tree, "plain": {"deep": [1, {"$": "tuple", "v": 3}]}})
    with pytest.raises(hf.CorruptCheckpointError, match=r"state-.*, at 'plain/deep/1'") as caught:
        hf.load(fuzz_kit.newest(case))
    assert caught.value.file.startswith("state-")


def test_what_an_optimizer_keeps_of_no_parameter_is_a_mapping(run, tmp_path):
    """Anything else is damage, said before the live optimizer is touched."""
    case = fuzz_kit.copy_of(run, tmp_path / "case")

    def forged(tree):
        kept = tree["optimizer"]
        return {**tree, "optimizer": {**kept, "state": {**kept["state"], "other_state": ["k", 3]}}}

    fuzz_kit.replace(case, "state", forged)
    with pytest.raises(hf.CorruptCheckpointError, match="optimizer"):
        hf.load(fuzz_kit.newest(case), only="optimizer")


def test_a_range_is_not_walked(tmp_path):
    """`range(10**11)` saves, loads, and loads into a state, at once."""
    with fuzz_kit.limit(10):
        hf.save(tmp_path / "ck", {"r": range(10**11), "o": {"r": [range(10**11)]}})
        assert hf.load(tmp_path / "ck")["r"] == range(10**11)
        back = hf.load(tmp_path / "ck", into={"r": range(1), "o": {"r": [range(2)]}})
    assert back == {"r": range(10**11), "o": {"r": [range(10**11)]}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: json.dumps({"$": "dict", "v": [[k * (2**61 - 1), 0] for k in range(60_000)]}),
        lambda: json.dumps({"$": "set", "v": [k * (2**61 - 1) for k in range(60_000)]}),
        lambda: json.dumps({"$": "counter", "v": [[{"$": "tuple", "v": [k * (2**61 - 1)]}, 0] for k in range(60_000)]}),
        lambda: "[" + "[]," * 2_000_000 + "1]",
        lambda: "[" + "{}," * 2_000_000 + "1]",
    ],
    ids=["keys", "set", "tuples", "lists", "objects"],
)
def test_what_a_small_file_could_make_of_itself(make):
    """Colliding numbers take no minutes, empty lists no gigabytes."""
    data = make().encode()
    with fuzz_kit.limit(10), pytest.raises(hf.CorruptCheckpointError):
        decode(loads(data))


def test_honest_data_of_many_small_parts_loads():
    """The bounds above are far from what is saved."""
    pairs = [[1, 2]] * 300_000
    assert decode(loads(json.dumps(pairs, separators=(",", ":")).encode())) == pairs
    keys = {"$": "dict", "v": [[k, k] for k in range(-50_000, 50_000)]}
    assert len(decode(loads(json.dumps(keys).encode()))) == 100_000


class _Sized:
    def __reduce__(self):
        return bytearray, (20 * 10**9,)


def _torch_file(path, value):
    torch.save(value, path)
    return path


def test_pickles_that_ask_for_gigabytes(tmp_path):
    """A `bytearray` of a size, and an archive that unpacks to a thousand times its own."""
    with fuzz_kit.limit(20):
        with pytest.raises(hf.HoldfastError, match="bytearray"):
            hf.import_checkpoint(_torch_file(tmp_path / "a.pt", {"a": _Sized()}), tmp_path / "new")
        honest = zipfile.ZipFile(_torch_file(tmp_path / "b.pt", {"w": torch.ones(2)}))
        with zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
            for one in honest.infolist():
                bomb.writestr(one.filename, honest.read(one))
            bomb.writestr("b/data/1", bytes(100 << 20))
        honest.close()
        with pytest.raises(hf.CorruptCheckpointError, match="would unpack to"):
            hf.import_checkpoint(tmp_path / "c.pt", tmp_path / "new")
    made = hf.import_checkpoint(_torch_file(tmp_path / "d.pt", {"b": bytearray(b"abc")}), tmp_path / "new")
    assert hf.load(made.checkpoint)["b"] == bytearray(b"abc")


def broken(data: bytes, chance: random.Random) -> bytes:
    """Change the pickle in a file of ``torch.save``, in any of its bytes, and pack it anew."""
    old, new = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(new, "w") as archive:
        for one in old.infolist():
            body = bytearray(old.read(one))
            if one.filename.endswith("data.pkl"):
                for _ in range(chance.choice((1, 1, 2, 8))):
                    body[chance.randrange(len(body))] = chance.randrange(256)
                if chance.random() < 0.2:
                    del body[chance.randrange(len(body)) :]
            archive.writestr(one.filename, bytes(body))
    return new.getvalue()


def import_broken(tmp_path, numbers):
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3, 2), "n": {"a": [1, 2.5, "x"], "s": {1}}, "when": (1, None)}, buffer)
    wrong = []
    for number in numbers:
        (tmp_path / "x.pt").write_bytes(broken(buffer.getvalue(), random.Random(number)))
        try:
            with fuzz_kit.limit():
                hf.import_checkpoint(tmp_path / "x.pt", tmp_path / "new", overwrite=True)
        except hf.HoldfastError:
            continue
        except Exception as error:  # all findings are listed
            wrong.append((number, repr(error)[:200]))
    assert not wrong


def test_some_broken_pickles(tmp_path):
    """They are refused, or read as data; never with an error of their own making."""
    import_broken(tmp_path, range(40))


@pytest.mark.slow
def test_many_broken_pickles(tmp_path):
    """Three thousand."""
    import_broken(tmp_path, range(1000, 4000))


def test_plain_pickles_are_no_files_of_torch(tmp_path):
    """Neither is noise."""
    for number, data in enumerate(
        (pickle.dumps({"a": 1}), b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(100), bytes(1000))
    ):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(data)
        with pytest.raises(hf.HoldfastError):
            hf.import_checkpoint(path, tmp_path / "new")
