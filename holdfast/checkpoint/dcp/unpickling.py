"""A reader of foreign pickles that can build data and nothing else.

A pickle is a program, and Python's own unpickler imports and calls what the program names. This one
imports nothing: names are looked up in a table of ours, and what is not in it is refused. Calling a
name gives what our function for it gives, from plain data, mostly a `Record`: the arguments and the
state that the pickle has for an object of some class. Opcodes without use here are refused as well.

Nor can a small file cost much: a length is checked against what is left of the file before anything
is allocated, what the program remembers is kept in a dict and not in an array that one large number
would blow up, and only what `as_key` gives is ever hashed (the hash of a tuple in a tuple in a tuple
... is a call in a call in a call). So there is no more than one object for a byte of the file.
"""

from __future__ import annotations

import pickle as p
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

from holdfast.errors import CheckpointError

Stack = list[Any]


class Record:
    """An object of a foreign class, as the pickle has it."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[object, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: object = None


class Named:
    """What may be called: a function of ours, in place of the one that the pickle names."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[tuple[Any, ...]], object]) -> None:
        self.function = function


def unpickled(
    data: bytes, table: Mapping[str, object], as_key: Callable[[object], Hashable]
) -> object:
    """What the pickle holds; a `CheckpointError` if it is damaged or has anything not in the table."""
    machine = _Machine(data, table, as_key)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"no pickle: {error!r:.200} at byte {machine.at}") from error


class _Machine:
    def __init__(
        self, data: bytes, table: Mapping[str, object], as_key: Callable[[object], Hashable]
    ) -> None:
        self.at = 0
        self._data = data
        self._table = table
        self._as_key = as_key
        self._stack: Stack = []
        self._marked: list[Stack] = []
        """The stacks below the marks that were set."""
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        data = self._data
        while (code := data[self.at]) != _STOP:
            self.at += 1
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise CheckpointError(f"opcode {code:#04x} at byte {self.at - 1} is refused")
            operation(self)
        return self._stack.pop()

    # ---- what the program is made of ----

    def _take(self, size: int) -> bytes:
        begin = self.at
        self.at = end = begin + size
        if end > len(self._data):
            raise ValueError("it ends too early")
        return self._data[begin:end]

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _line(self) -> str:
        end = self._data.index(b"\n", self.at)
        line = self._take(end - self.at).decode()
        self.at += 1
        return line

    def _above_mark(self) -> Stack:
        above = self._stack
        self._stack = self._marked.pop()
        return above

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    # ---- plain things ----

    def _push(self, thing: object) -> None:
        self._stack.append(thing)

    def _long(self) -> None:
        self._push(self._number(self._byte(), signed=True))

    def _text(self, length: int) -> None:
        self._push(self._take(length).decode("utf-8", "surrogatepass"))

    def _tuple(self, size: int) -> None:
        self._stack[len(self._stack) - size :] = [self._last(size)]

    def _last(self, size: int) -> tuple[object, ...]:
        if size > len(self._stack):
            raise IndexError("nothing on the stack")
        return tuple(self._stack[-size:])

    def _tuple_above_mark(self) -> None:
        above = tuple(self._above_mark())
        self._push(above)

    def _extend(self, things: Stack) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("no list to append to")
        target += things

    def _set(self, things: Stack) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise TypeError("no dict to set items of")
        for key, value in zip(things[::2], things[1::2], strict=True):
            target[key if type(key) is str else self._as_key(key)] = value

    def _set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    # ---- objects ----

    def _name(self, module: object, name: object) -> None:
        full = f"{module!s:.200}.{name!s:.200}"
        if full not in self._table:
            raise CheckpointError(f"it names {full!r}, which has no place here: refused")
        self._push(self._table[full])

    def _name_from_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a name that is no string")
        self._name(module, name)

    def _call(self) -> None:
        arguments, named = self._stack.pop(), self._stack.pop()
        if type(named) is not Named or type(arguments) is not tuple:
            raise TypeError("a call of what cannot be called")
        self._push(named.function(arguments))

    def _build(self) -> None:
        state, record = self._stack.pop(), self._stack[-1]
        if type(record) is not Record:
            raise TypeError("state for what has none")
        record.state = state


_STOP: Final = p.STOP[0]
_OPERATIONS: Final[dict[int, Callable[[_Machine], object]]] = {
    code[0]: operation
    for code, operation in (
        (p.PROTO, lambda m: m._take(1)),
        (p.FRAME, lambda m: m._take(8)),
        (p.MARK, _Machine._mark),
        (p.POP, lambda m: m._stack.pop()),
        (p.NONE, lambda m: m._stack.append(None)),
        (p.NEWTRUE, lambda m: m._push(True)),
        (p.NEWFALSE, lambda m: m._push(False)),
        (p.BININT, lambda m: m._push(m._number(4, signed=True))),
        (p.BININT1, lambda m: m._stack.append(m._byte())),
        (p.BININT2, lambda m: m._push(m._number(2))),
        (p.LONG1, _Machine._long),
        (p.SHORT_BINUNICODE, lambda m: m._text(m._byte())),
        (p.BINUNICODE, lambda m: m._text(m._number(4))),
        (p.EMPTY_TUPLE, lambda m: m._stack.append(())),
        (p.EMPTY_LIST, lambda m: m._stack.append([])),
        (p.EMPTY_DICT, lambda m: m._stack.append({})),
        (p.TUPLE, _Machine._tuple_above_mark),
        (p.TUPLE1, lambda m: m._tuple(1)),
        (p.TUPLE2, lambda m: m._tuple(2)),
        (p.TUPLE3, lambda m: m._tuple(3)),
        (p.APPEND, lambda m: m._extend([m._stack.pop()])),
        (p.APPENDS, lambda m: m._extend(m._above_mark())),
        (p.SETITEM, _Machine._set_one),
        (p.SETITEMS, lambda m: m._set(m._above_mark())),
        (p.GLOBAL, lambda m: m._name(m._line(), m._line())),
        (p.STACK_GLOBAL, _Machine._name_from_stack),
        (p.NEWOBJ, _Machine._call),
        (p.REDUCE, _Machine._call),
        (p.BUILD, _Machine._build),
        (p.MEMOIZE, lambda m: m._put(len(m._memo))),
        (p.BINPUT, lambda m: m._put(m._byte())),
        (p.LONG_BINPUT, lambda m: m._put(m._number(4))),
        (p.BINGET, lambda m: m._stack.append(m._memo[m._byte()])),
        (p.LONG_BINGET, lambda m: m._push(m._memo[m._number(4)])),
    )
}
