"""Plain data survives with exact types and bits; everything else is refused by name."""

from __future__ import annotations

import collections
import copy
import datetime as dt
import decimal
import enum
import math
import pathlib
import pickle
import random
import struct
import sys
import zoneinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UnsupportedStateError
from holdfast.format.codec import MAX_NESTING, decode, dumps, encode, loads

Point = collections.namedtuple("Point", "x y")


def trip(value):
    return decode(loads(dumps(encode(value))))


def same(one, two):
    """Compare types and bits all the way down; == alone calls True and 1 the same."""
    if type(one) is not type(two) and not (hasattr(one, "_fields") and hasattr(two, "_fields")):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", two)
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, dict):
        return len(one) == len(two) and all(same(a, b) and same(one[a], two[b]) for a, b in zip(one, two, strict=True))
    if isinstance(one, collections.deque) and one.maxlen != two.maxlen:
        return False
    if isinstance(one, (dt.datetime, dt.time)) and one.fold != two.fold:
        return False  # == does not see it
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, (set, frozenset)):
        return len(one) == len(two) and {(type(a), repr(a)) for a in one} == {(type(b), repr(b)) for b in two}
    return one == two


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    -(2**64),
    10**617,
    10**5000,
    -(10**5000),
    1.5,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    1 + 2j,
    complex(-0.0, math.nan),
    "",
    "text",
    "é\U0001f600",
    "\ud800",
    "\ud83d\ude00",
    "\0",
    b"",
    b"\0\xff",
    bytearray(b"x"),
    [],
    [1, [2.0, "3", None, True]],
    (),
    (1,),
    (1, (2, [3])),
    range(1, 9, 2),
    slice(1, None, 2.5),
    {},
    {"a": 1},
    {"$": 1},
    {"$ref": 1},
    {1: "a", "1": "b"},
    {True: 1, None: 2, 2.5: 3, (1, ("a", None)): 4},
    {"\ud83d\ude00": 1},
    {math.inf: 1},
    {b"k": 1, frozenset({1}): 2},
    {dt.date(2024, 1, 1): 1},
    collections.OrderedDict(b=1, a=2),
    collections.Counter("hello"),
    collections.Counter(),
    collections.deque([1, 2]),
    collections.deque([1], maxlen=3),
    set(),
    {1, 2},
    {"b", "a"},
    {1, "a", None, (1, 2)},
    frozenset({frozenset({1}), frozenset()}),
    {math.nan, 1.0},
    dt.datetime(2024, 2, 29, 1, 2, 3, 4),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.date(1, 1, 1),
    dt.time(23, 59, 59, 999999, tzinfo=dt.timezone(dt.timedelta(hours=-3), "X")),
    dt.time(1, fold=1),
    dt.timedelta(-1, 3, 5),
    dt.timedelta.max,
    dt.timezone.utc,
    zoneinfo.ZoneInfo("UTC"),
    pathlib.Path("/a/b c"),
    pathlib.Path("\udc80"),
    pathlib.PurePosixPath("x"),
    pathlib.PureWindowsPath("C:\\x"),
    random.Random(3).getstate(),
    random.getstate(),
]


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{number}-{type(value).__name__}" for number, value in enumerate(VALUES)]
)
def test_plain_data_comes_back_with_its_exact_type_and_bits(value):
    """Every kind of plain data of the public contract round-trips, alone and inside of containers."""
    assert same(trip(value), value)
    assert same(trip({"k": [value, (value,)]}), {"k": [value, (value,)]})


def test_defaultdict_keeps_a_builtin_factory_and_refuses_any_other():
    """A factory of the user's would be code; the message names it."""
    for factory in (int, float, list, dict, set, str, bool, tuple, None):
        value = collections.defaultdict(factory, a=1)
        back = trip(value)
        assert type(back) is collections.defaultdict
        assert back.default_factory is factory
        assert back == value
    with pytest.raises(UnsupportedStateError, match=r"state\['d'\].*<lambda>"):
        encode({"d": collections.defaultdict(lambda: 0)})
    with pytest.raises(UnsupportedStateError, match="OrderedDict"):
        encode(collections.defaultdict(collections.OrderedDict))


def test_named_tuples_come_back_as_a_named_tuple_type_without_importing_or_compiling():
    """The type is rebuilt from its names, works as one, and nothing is compiled on the way."""
    tree = loads(dumps(encode(Point(1, [2]))))
    events = []
    watching = [True]
    sys.addaudithook(lambda name, args: events.append(name) if watching[0] else None)
    value = decode(tree)
    watching[0] = False
    assert not {"compile", "exec", "import"} & set(events)
    assert (value.x, value.y, value) == (1, [2], (1, [2]))
    assert repr(value) == "Point(x=1, y=[2])"
    assert type(value) is type(decode(tree))
    assert value._replace(x=5) == (5, [2])
    assert value._asdict() == {"x": 1, "y": [2]}
    assert type(value)(1, y=2) == (1, 2)
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == value
    with pytest.raises(TypeError):
        type(value)(1)


@pytest.mark.parametrize("name", ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64", "complex128"])
def test_numpy_numbers_keep_their_dtype_and_bits(name):
    """A NumPy scalar is not the Python number it equals."""
    np = pytest.importorskip("numpy")
    value = np.dtype(name).type(1)
    back = trip(value)
    assert type(back) is type(value)
    assert back.tobytes() == value.tobytes()


def test_numpy_dates_and_text_round_trip_and_long_double_is_refused():
    """datetime64 keeps its unit; long double differs between machines, so it is refused with what to do."""
    np = pytest.importorskip("numpy")
    for value in (
        np.datetime64("2024-01-01T00:00", "ns"),
        np.timedelta64(3, "D"),
        np.datetime64("NaT"),
        np.str_("é\0"),
        np.str_(""),
        np.bytes_(b"a"),
        np.float64("nan"),
    ):
        back = trip(value)
        assert type(back) is type(value)
        assert back.tobytes() == value.tobytes()
        assert back.dtype == value.dtype
    with pytest.raises(UnsupportedStateError, match=r"state\['x'\].*longdouble"):
        encode({"x": np.longdouble(1)})
    with pytest.raises(UnsupportedStateError, match="cannot be saved"):
        encode(np.zeros(1, dtype="i4,f4")[0])


class Color(enum.IntEnum):
    RED = 1


class Stopper:
    """Stops early, in the usual way: numbers in attributes."""

    def __init__(self):
        self._model, self.best, self.bad, self.mode, self.patience = None, 1.5, 0, "min", 3


class MyConfig:
    pass


class MyDict(dict):
    pass


class Slotted:
    __slots__ = ("_cache", "count", "total")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"callbacks": [0, 1, {"cfg": MyConfig()}]},
            ["state['callbacks'][2]['cfg']: MyConfig", "state_dict()", "drop"],
        ),
        ({"c": Color.RED}, ["state['c']: Color", ".value"]),
        ({"f": len, "g": 1}, ["state['f']"]),
        ({"f": trip}, ["state['f']", "trip", "code is not stored"]),
        ({"d": MyDict()}, ["state['d']: MyDict", "dict(...)"]),
        ({"p": Point(1, MyConfig())}, ["state['p'].y: MyConfig"]),
        ({"k": {MyConfig(): 1}}, ["MyConfig", "dict key"]),
        ({"s": Stopper()}, ["state_dict()", "holdfast.attrs(it, 'best', 'bad', 'mode', ...), or convert"]),
        ({"s": Slotted()}, ["holdfast.attrs(it, 'count', 'total'), or convert"]),
        ({"d": decimal.Decimal(1)}, ["state['d']: Decimal", "str(it)"]),
        ([(1, object())], ["state[0][1]: object"]),
    ],
)
def test_what_is_not_plain_is_refused_with_path_type_and_advice(value, words):
    """The message says where, what, and what to do."""
    with pytest.raises(UnsupportedStateError) as caught:
        encode(value)
    for word in words:
        assert word in str(caught.value)


def test_drop_leaves_out_entries_and_lists_them():
    """Entries and items go, a tuple goes as a whole, the paths are recorded."""
    dropped = []
    state = {"a": object(), "b": [1, object(), 2], "t": (1, object()), "n": {1: object(), 2: 3}, "ok": 1}
    assert decode(encode(state, dropped=dropped)) == {"b": [1, 2], "n": {2: 3}, "ok": 1}
    assert dropped == ["state['a']", "state['b'][1]", "state['t']", "state['n'][1]"]
    with pytest.raises(UnsupportedStateError):
        encode(object(), dropped=[])


def test_cycles_and_too_deep_nesting_are_refused_by_path():
    """Neither overflows the stack, and a value that merely occurs twice is fine."""
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(UnsupportedStateError, match=r"state\['a'\]\[0\]: this dict contains itself"):
        encode(loop)
    shared = [1]
    assert trip([shared, shared]) == [[1], [1]]
    deep = []
    for _ in range(MAX_NESTING):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="200 levels"):
        encode(deep)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: {"a": x},
        lambda x: {1: x},
        lambda x: (x,),
        lambda x: collections.OrderedDict(a=x),
        lambda x: Point(x, 1),
        lambda x: collections.deque([x]),
    ],
)
def test_the_deepest_nesting_that_is_stored_can_be_read(wrap):
    """Whatever encode takes, loads and decode give back."""
    deep = wrap(0)
    for _ in range(MAX_NESTING - 1):
        deep = wrap(deep)
    back = trip(deep)
    for _ in range(MAX_NESTING - 1):
        back = next(iter(back.values() if isinstance(back, dict) else back))
    assert same(back, wrap(0))


def test_leaf_is_asked_for_values_that_are_not_plain():
    """The state layer puts its tensors in, and gets its nodes back."""
    asked = []

    def leaf(value, path):
        asked.append(path)
        return {"$": "thing", "n": 7} if isinstance(value, MyConfig) else NotImplemented

    tree = encode({"a": [1, MyConfig()], "b": (Point(1, 2),)}, leaf)
    assert asked == ["state['a'][1]", "state['b'][0]"]
    assert decode(tree, lambda tag, node: (tag, node["n"]))["a"] == [1, ("thing", 7)]
    assert decode(tree)["a"][1] == {"$": "thing", "n": 7}


def test_bytes_do_not_depend_on_the_order_of_sets():
    """Two equal sets are written alike, so unchanged state is byte-equal."""
    one, two = {f"k{i}" for i in range(50)}, {f"k{i}" for i in reversed(range(50))}
    assert dumps(encode(one)) == dumps(encode(two))
    members = [0, 1 << 20, "a", None]  # both numbers have one place in a small table
    mixed, other = set(), set()
    for member in members:
        mixed.add(member)
    for member in reversed(members):
        other.add(member)
    assert list(mixed) != list(other)
    assert dumps(encode(mixed)) == dumps(encode(other))


def test_encode_takes_a_snapshot():
    """Changing the state afterwards does not change the tree."""
    state = {"a": [1, 2], "b": {"c": 1}}
    tree = encode(state)
    state["a"].append(3)
    state["b"]["c"] = 2
    assert decode(tree) == {"a": [1, 2], "b": {"c": 1}}


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers()
    | st.dates()
    | st.datetimes()
    | st.timedeltas(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.text(), st.integers()), inner)
        | st.lists(inner).map(collections.deque)
        | st.frozensets(st.integers() | st.text())
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150)
@given(PLAIN)
def test_any_plain_value_round_trips(value):
    """Generated values come back with their types and bits."""
    assert same(trip(value), value)
