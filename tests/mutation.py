"""Ways to spoil a file: values of another type or size, keys that go, come or stand twice, and bytes that change."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import strategies as st

NUMBERS: list[Any] = [0, 1, -1, 2, 3, 7, 127, 4096, 10**6, 2**31, 2**63, 10**18, 10**40, -(10**18)]
NUMBERS += [0.0, -0.5, 0.5, 1e-300, 1e9, 1e308, float("inf"), float("-inf"), float("nan")]
WORDS = [
    "",
    " ",
    "x",
    "-1",
    "1e99",
    "null",
    "nan",
    "../../up",
    "/etc/passwd",
    "a\0b",
    "\x1b[31mred",
    "<script>",
    "é" * 300,
]
WORDS += ["\ud800", "🦙", "{{ 7 * 7 }}", "torch.float99", "os.system", "a,b", "=", "a=b", "%", "demo", "gpt2", "~", "."]
OTHERS: list[Any] = [None, True, False, [], {}, [1, 2], [[]], [None], {"a": 1}, {"": {}}, ["x"] * 50, [0] * 1000]
DEEP: Any = 0
for _ in range(70):
    DEEP = [DEEP]
VALUES = [NUMBERS, NUMBERS, WORDS, OTHERS, [DEEP]]
PIECES = [
    b"\0",
    b"\xff",
    b'"',
    b"{",
    b"[",
    b",",
    b"999999",
    b"-",
    b"&a *a ",
    b"\n",
    b"\xef\xbb\xbf",
    b"!!python/name:os ",
]

Place = tuple[Any, ...]
Spoil = Callable[[Random], bytes]


def places(value: Any, here: Place = ()) -> list[Place]:
    """The path of every part of a document, the whole first."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, child in children for place in places(child, (*here, key)))]


def at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def edit(document: Any, keys: list[str], random: Random) -> None:
    """Change one part; `keys` are those that may be added to the document."""
    known = places(document)[1:]
    value = copy.deepcopy(random.choice(random.choice(VALUES)))
    what = random.choice(["set", "set", "set", "drop", "add", "add", "rename", "wrap", "copy"])
    if not known or what == "add":
        document[random.choice(keys)] = value
        return
    place = random.choice(known)
    parent, key = at(document, place[:-1]), place[-1]
    if what == "drop":
        del parent[key]
    elif what == "rename" and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    elif what == "wrap":
        parent[key] = {"a": parent[key]}
    elif what == "copy":
        parent[key] = copy.deepcopy(at(document, random.choice(known)))
    else:
        parent[key] = value


def scramble(data: bytearray, random: Random) -> None:
    """Flip, cut out, put in or repeat some bytes."""
    place = random.randrange(len(data) + 1)
    what = random.choice(["flip", "digit", "cut", "end", "insert", "repeat"])
    if what == "flip" and data:
        data[place - 1] ^= 1 << random.randrange(8)
    elif what == "digit":
        digits = [i for i, c in enumerate(data) if 48 <= c <= 57]
        if digits:
            data[random.choice(digits)] = random.choice(b"0179-e.")
    elif what == "cut":
        del data[place : place + random.randint(1, 40)]
    elif what == "end":
        del data[place:]
    elif what == "insert":
        data[place:place] = random.choice(PIECES)
    else:
        data[place:place] = data[max(0, place - random.randint(1, 60)) : place]


def spoil(base: Any, keys: list[str], write: Callable[[Any], str], random: Random) -> bytes:
    """The document edited as what it is (three times in four), or as bytes."""
    if random.random() < 0.75:
        document = copy.deepcopy(base)
        for _ in range(random.randint(1, 3)):
            edit(document, keys, random)
        return write(document).encode("utf-8", "surrogatepass")
    data = bytearray(write(base), "utf-8")
    for _ in range(random.randint(1, 4)):
        scramble(data, random)
    return bytes(data)


def spoiled(base: Any, keys: list[str], write: Callable[[Any], str] = json.dumps) -> st.SearchStrategy[bytes]:
    """Contents of a file that was `base`. The dice are real ones: hypothesis's own would repeat themselves."""
    return st.randoms(use_true_random=True).map(lambda random: spoil(base, keys, write, random))
