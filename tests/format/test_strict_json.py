"""JSON from an unknown hand is bounded before it is parsed."""

from __future__ import annotations

import gc
import threading

import pytest

from holdfast._paused_gc import paused_gc
from holdfast.errors import CorruptCheckpointError
from holdfast.format.strict_json import check_depth, dumps, loads

HOSTILE = {
    "duplicate key": b'{"a":1,"b":{"c":1,"c":2}}',
    "NaN": b'{"a":NaN}',
    "Infinity": b"[-Infinity]",
    "overflow": b"[1e999]",
    "truncated": b'{"a":[1,2',
    "not utf-8": b'"\xff"',
    "BOM": b"\xef\xbb\xbf{}",
    "utf-16": '{"a":1}'.encode("utf-16"),
    "empty": b"",
    "two values": b"{} {}",
    "huge number": b"[" + b"9" * 5000 + b"]",
    "deep array": b"[" * 100_000,
    "deep balanced": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "deep behind an escape": b'["\\"[", ' + b"[" * 5_000 + b"]" * 5_001,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_json_is_refused_by_file_name(data):
    """Each is CorruptCheckpointError that names the file, never a RecursionError or a silent guess."""
    with pytest.raises(CorruptCheckpointError, match=r"index\.json") as caught:
        loads(data, where="index.json")
    assert caught.value.file == "index.json"


def test_brackets_in_strings_do_not_count_as_depth():
    """Only nesting counts: text full of brackets, quotes and backslashes is read."""
    value = ["[{" * 1000 + '"\\', '\\"[', {"k": "]" * 1000}] * 50
    assert loads(dumps(value), max_depth=2) == value
    with pytest.raises(CorruptCheckpointError, match="nested 2 levels"):
        loads(dumps(value), max_depth=1)


@pytest.mark.parametrize(
    "text", [r'"\u00bf\"[[["', r'"\\"', r'"\/\b\f\n\r\t\\\"]]]]"', r'"\ud83d\ude00\\"', '"\u00e9[\u20ac\\"["']
)
def test_escapes_are_read_as_the_parser_reads_them(text):
    """Whatever is escaped before it, a quote that ends a text ends it for the count of levels too."""
    check_depth(f"[[{text}]]".encode() * 20, max_depth=2, where="x")
    with pytest.raises(CorruptCheckpointError, match="nested 3 levels"):
        check_depth(f"[{text},[[]]]".encode() * 20, max_depth=2, where="x")
    loads(f"[{text}]".encode())


@pytest.mark.parametrize("levels", [2, 15, 16, 17, 18, 60])
def test_depth_is_exact_however_many_levels_there_are(levels):
    """What is counted by taking pairs away, and what is counted on beyond that, come to the same."""
    deep = b'{"a":[' * (levels // 2 - 1) + b"[]" * (levels % 2) + b"1" + b"]}" * (levels // 2 - 1)
    text = b'[[],{"b":' + deep + b',"c":[[]]},[],{}]' if levels > 4 else b"[[],[],1,{}]"
    check_depth(text, max_depth=levels, where="x")
    with pytest.raises(CorruptCheckpointError, match=f"nested {levels} levels"):
        check_depth(text, max_depth=levels - 1, where="x")


def test_brackets_that_are_never_closed_are_counted():
    """Pairs taken away before them hide none of the levels that a parser would go into."""
    for text in (b"[]" * 30 + b"[" * 50, b"[[[]]]" * 9 + b"[" * 50 + b"]", b"]]]" + b"[" * 50 + b"{}"):
        with pytest.raises(CorruptCheckpointError, match="levels"):
            check_depth(text, max_depth=46, where="x")


@pytest.mark.parametrize("text", [r'"\x"', r'"\a"', r'"\1\"', '"\\ "'])
def test_a_false_escape_hides_no_depth_from_the_parser(text):
    """Behind an escape that there is not nothing is parsed, however the levels there are counted."""
    with pytest.raises(CorruptCheckpointError, match="x: "):
        loads(f"[{text},{'[' * 100_000}".encode(), where="x")


def test_size_is_bounded():
    """One byte too many is refused before parsing."""
    assert loads(b"[1]", max_bytes=3) == [1]
    with pytest.raises(CorruptCheckpointError, match="4 bytes"):
        loads(b"[1] ", max_bytes=3)


def test_dumps_writes_what_json_alone_would_refuse():
    """Lone surrogates and integers beyond the digit limit that bypass the codec are still written."""
    assert loads(dumps({"a\udc80": "\udc80"})) == {"a\udc80": "\udc80"}
    assert loads(dumps([10**5000])) == [{"$": "bigint", "v": hex(10**5000)}]


def test_the_garbage_collector_is_left_as_it_was():
    """Pausing it is undone, also after an error, and a disabled one stays disabled."""
    with pytest.raises(CorruptCheckpointError):
        loads(b"{")
    assert gc.isenabled()
    gc.disable()
    try:
        loads(b"{}")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pauses_of_the_garbage_collector_overlap():
    """Two threads pause it, the first to come is the first to go: off until both have left, and on again then."""
    came, leave = threading.Event(), threading.Event()

    def second():
        with paused_gc():
            came.set()
            leave.wait(60)

    other = threading.Thread(target=second)
    with paused_gc():
        other.start()
        came.wait(60)
    between = gc.isenabled()
    leave.set()
    other.join(60)
    assert (between, gc.isenabled()) == (False, True)
