"""Reading a pickle as if it were JSON.

A pickle is a program. This runs only the part of the language that builds plain values: dict, list,
tuple, str, int, float, bool and None. There is no opcode here that names a class, calls anything or
looks an attribute up, so there is nothing to trick; an opcode that is not in the table is refused.

What is left of the danger is size. A value may stand in many places at once, so a few bytes can make
a structure that takes for ever to walk. Each value therefore knows its weight, the number of values
one meets on a walk through it, and a dump that is too heavy is refused. A list or dict is complete
before it is put into another, and cannot be changed or met inside itself afterwards, so weights are
final. Dicts have only str and int keys: hashing anything deeper is a walk too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from holdfast.errors import BadFrame

MAX_WEIGHT = 4_000_000
_PROTOCOL = 0x80
_HIGHEST_PROTOCOL = 5

Plain = dict[object, object] | list[object] | tuple[object, ...] | str | int | float | bool | None


class _Value:
    __slots__ = ("is_open", "plain", "weight")

    def __init__(self, plain: Plain, weight: int = 1, is_open: bool = False) -> None:
        self.plain = plain
        self.weight = weight
        self.is_open = is_open
        """Whether a list or dict may still be added to: until it is put somewhere."""


def load(data: bytes) -> Plain:
    """The value that a pickle of plain values holds."""
    try:
        return _Machine(data).run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"this pickle is broken: {type(error).__name__}: {error}") from error


class _Machine:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[_Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Value] = {}

    def run(self) -> Plain:
        while True:
            opcode = self._data[self._at]
            self._at += 1
            if opcode == ord("."):
                return self._stack.pop().plain
            act = _OPCODES.get(opcode)
            if act is None:
                raise BadFrame(
                    f"this pickle is no plain data: opcode {bytes([opcode])!r} at byte {self._at - 1}"
                    " is refused, nothing was executed"
                )
            act(self)

    # ---- reading ----

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise IndexError("it ends too early")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    # ---- the stack ----

    def push(self, plain: Plain, *, is_open: bool = False) -> None:
        self._stack.append(_Value(plain, is_open=is_open))

    def push_float(self) -> None:
        (value,) = struct.unpack(">d", self.take(8))
        self.push(float(value))

    def push_text(self, form: str) -> None:
        self.push(self.take(self.number(form)).decode("utf-8", "surrogatepass"))

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def since_mark(self) -> list[_Value]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def tuple_of(self, values: list[_Value]) -> None:
        self._stack.append(_Value(tuple(v.plain for v in values), self._close(values, 1)))

    def last(self, count: int) -> list[_Value]:
        if len(self._stack) < count:
            raise IndexError("the stack is empty")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def append(self, values: list[_Value]) -> None:
        target = self._stack[-1]
        if not isinstance(target.plain, list) or not target.is_open:
            raise BadFrame("this pickle adds to what is no list, or to one that is complete")
        target.weight = self._close(values, target.weight)
        target.plain.extend(value.plain for value in values)

    def set_items(self, values: list[_Value]) -> None:
        target = self._stack[-1]
        if not isinstance(target.plain, dict) or not target.is_open or len(values) % 2:
            raise BadFrame("this pickle adds to what is no dict, or to one that is complete")
        target.weight = self._close(values, target.weight)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key.plain, str | int):
                raise BadFrame(f"this pickle has a key of type {type(key.plain).__name__}")
            target.plain[key.plain] = value.plain

    @staticmethod
    def _close(values: list[_Value], weight: int) -> int:
        """These values are put somewhere: they are final. What they weigh, with what is there."""
        for value in values:
            value.is_open = False
            weight += value.weight
        if weight > MAX_WEIGHT:
            raise BadFrame(f"this pickle unfolds to more than {MAX_WEIGHT} values")
        return weight

    # ---- the memo ----

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        value = self._memo[index]
        if value.is_open:
            raise BadFrame("this pickle has a value that contains itself")
        self._stack.append(value)

    def memoize(self) -> None:
        self.put(len(self._memo))

    def skip_frame(self) -> None:
        """How much may be read ahead: all the same to us."""
        self.take(8)

    def protocol(self) -> None:
        version = self.number("<B")
        if version > _HIGHEST_PROTOCOL:
            raise BadFrame(f"this pickle is of the unknown protocol {version}")


_OPCODES: dict[int, Callable[[_Machine], None]] = {
    _PROTOCOL: _Machine.protocol,
    0x95: _Machine.skip_frame,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    0x8A: lambda m: m.push(int.from_bytes(m.take(m.number("<B")), "little", signed=True)),
    ord("G"): _Machine.push_float,
    ord("X"): lambda m: m.push_text("<I"),
    0x8C: lambda m: m.push_text("<B"),
    ord("}"): lambda m: m.push({}, is_open=True),
    ord("]"): lambda m: m.push([], is_open=True),
    ord(")"): lambda m: m.push(()),
    ord("("): _Machine.mark,
    ord("t"): lambda m: m.tuple_of(m.since_mark()),
    0x85: lambda m: m.tuple_of(m.last(1)),
    0x86: lambda m: m.tuple_of(m.last(2)),
    0x87: lambda m: m.tuple_of(m.last(3)),
    ord("a"): lambda m: m.append(m.last(1)),
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("s"): lambda m: m.set_items(m.last(2)),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("q"): lambda m: m.put(m.number("<B")),
    ord("r"): lambda m: m.put(m.number("<I")),
    0x94: _Machine.memoize,
    ord("h"): lambda m: m.get(m.number("<B")),
    ord("j"): lambda m: m.get(m.number("<I")),
}
