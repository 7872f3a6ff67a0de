"""Mutations of valid messages, as JSON values and as bytes, from a seeded generator."""

import copy
from collections.abc import Iterator
from random import Random
from typing import Any

MOST_NESTED = 1100
"""Levels; Python's own parser gives up near 1000."""
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 64, 256, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, 10**40),
    *(0.0, 0.5, -0.0, 1.0, 1e308, float("inf"), float("nan")),
    *("", "x", "0", "1e9", "\ud800", "\0", "\n", "ab" * 5000),
    *([], {}, [[]], [None], [0, 0], [[], {}], {"": None}, {"op": []}, [1] * 100),
    [[["ab" * 20] * 6] * 6] * 6,  # wide and nested
)
PIECES = (
    *(b"", b"\0", b"\xff", b"\xff\xff\xff\xff", b"\0\0\0\0", b"{", b"[", b"]", b"}", b'"', b","),
    *(b":", b"null", b"NaN", b"1e999", b"-", b"9" * 30, b"9" * 5000, b"\\ud800", b"[" * 20_000),
)
Path = tuple[Any, ...]


def paths(value: Any, prefix: Path = ()) -> Iterator[Path]:
    """Where each part of a JSON value is, the whole first."""
    yield prefix
    if isinstance(value, list | dict):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*prefix, key))


def put(value: Any, path: Path, part: Any) -> Any:
    """A copy with another part at ``path``."""
    if not path:
        return part
    value = copy.copy(value)
    value[path[0]] = put(value[path[0]], path[1:], part)
    return value


def part_at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate_value(random: Random, value: Any) -> Any:
    """The value with one part replaced, removed, doubled, renamed or moved."""
    every = list(paths(value))
    path = random.choice(every)
    part = part_at(value, path)
    match random.randrange(6):
        case 0:
            return put(value, path, random.choice(JUNK))
        case 1:
            return put(value, path, part_at(value, random.choice(every)))
        case 2 if type(part) is int:
            return put(value, path, random.choice((-part, part + 1, part - 1, part << 40, [part])))
        case 2 if type(part) is str:
            text = mutate_bytes(random, part.encode(errors="replace"))[:20_000]
            return put(value, path, text.decode("latin-1"))
        case 3 if isinstance(part, dict) and part:
            key = random.choice(list(part))
            return put(value, path, {k: v for k, v in part.items() if k != key})
        case 3 if isinstance(part, list) and part:
            index = random.randrange(len(part))
            return put(value, path, [*part[:index], *part[index + 1 :]])
        case 4 if isinstance(part, dict) and part:
            name = random.choice(("", "x", "op", "error", random.choice(list(part)) + "x"))
            return put(value, path, {**part, name: random.choice((*part.values(), *JUNK))})
        case 4 if isinstance(part, list):
            return put(value, path, [*part, *part, random.choice(JUNK)])
    return put(value, path, [part])


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """The bytes with some flipped, cut, inserted or repeated."""
    for _ in range(random.randint(1, 3)):
        start, stop = sorted(random.randrange(len(data) + 1) for _ in range(2))
        match random.randrange(6):
            case 0 if start < len(data):
                flipped = data[start] ^ 1 << random.randrange(8)
                data = data[:start] + bytes([flipped]) + data[start + 1 :]
            case 1:
                data = data[:start]
            case 2:
                data = data[:start] + data[stop:]
            case 3:
                data = data[:start] + random.choice(PIECES) + data[start:]
            case 4:
                data = data[:stop] + data[start:stop] + data[stop:]
            case _:
                depth = random.randrange(MOST_NESTED)
                data = data[:start] + b"[" * depth + b"]" * depth + data[stop:]
    return data
