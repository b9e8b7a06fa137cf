"""The few words of pickle that we write.

`torch.load` and `torch.distributed.checkpoint` read pickles, and whoever assembles a checkpoint here
has no torch whose objects could be pickled. So the pickle is written opcode by opcode: a pickle is a
program for a stack machine, and every function here answers with a piece of such a program that
leaves one thing on the stack. Nothing of ours is ever read this way.

All of it is protocol 2, the one torch writes, because its `weights_only` reader knows no other.
"""

from __future__ import annotations

from struct import pack
from typing import Final

BEGIN: Final = b"\x80\x02"
END: Final = b"."

NONE: Final = b"N"
TRUE: Final = b"\x88"
FALSE: Final = b"\x89"

MARK: Final = b"("
EMPTY_TUPLE: Final = b")"
EMPTY_LIST: Final = b"]"
EMPTY_DICT: Final = b"}"

TUPLE: Final = b"t"
"""Of all that is above the mark."""
TUPLE_1: Final = b"\x85"
TUPLE_2: Final = b"\x86"
TUPLE_3: Final = b"\x87"
APPENDS: Final = b"e"
SETITEMS: Final = b"u"

CALL: Final = b"R"
"""Call the thing below with the tuple on top."""
BUILD: Final = b"b"
"""Give the thing below the state on top."""
PERSISTENT: Final = b"Q"
"""Ask the reader for what the tuple on top stands for: torch gives its storages this way."""

DROP: Final = b"0"
"""Forget what is on top."""

_TUPLES: Final = (EMPTY_TUPLE, TUPLE_1, TUPLE_2, TUPLE_3)


def whole(number: int) -> bytes:
    """A whole number, in as few bytes as it takes."""
    if 0 <= number < 0x100:
        return b"K%c" % number
    if 0 <= number < 0x10000:
        return pack("<cH", b"M", number)
    if -0x80000000 <= number < 0x80000000:
        return pack("<ci", b"J", number)
    size = number.bit_length() // 8 + 1
    return b"\x8a%c%b" % (size, number.to_bytes(size, "little", signed=True))


def text(string: str) -> bytes:
    data = string.encode("utf-8", "surrogatepass")
    return pack("<cI", b"X", len(data)) + data


def named(module: str, name: str) -> bytes:
    """Something that the reader imports."""
    return f"c{module}\n{name}\n".encode()


def tuple_of(*things: bytes) -> bytes:
    if len(things) < len(_TUPLES):
        return b"".join(things) + _TUPLES[len(things)]
    return MARK + b"".join(things) + TUPLE


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + tuple_of(*arguments) + CALL


def dict_of(*pairs: tuple[str, bytes]) -> bytes:
    return EMPTY_DICT + MARK + b"".join(text(key) + value for key, value in pairs) + SETITEMS


def list_of(*things: bytes) -> bytes:
    return EMPTY_LIST + MARK + b"".join(things) + APPENDS


def put(number: int) -> bytes:
    """Remember what is on top of the stack under that number."""
    return b"q%c" % number if number < 0x100 else pack("<cI", b"r", number)


def get(number: int) -> bytes:
    return b"h%c" % number if number < 0x100 else pack("<cI", b"j", number)
