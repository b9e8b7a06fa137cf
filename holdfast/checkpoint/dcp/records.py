"""Writes tensors and values as `torch.load` reads them, without torch.

A `.distcp` file of `torch.distributed.checkpoint` is a sequence of objects that `torch.save` wrote.
Torch has two formats for that. Its zip archives have the raw bytes in the middle and a checksum after
them; the older format, which every torch still reads, has the raw bytes last:

    magic number, protocol version, system info,      pickles
    the tensor, its storage named by a key,           a pickle
    the list of keys                                  a pickle
    the number of elements                            8 bytes
    the raw bytes

So a tensor is a header that depends only on its dtype and sizes, followed by its bytes as they are in
memory. Headers are padded to a multiple of 64 bytes (with a string in the system info, which no reader
uses): a tensor that begins aligned has its raw bytes aligned.

Torch cannot read back what it writes in this format for dtypes younger than its typed storages
(float8, uint16, ...): it looks for the dtype of an untyped storage, which has none. Here the bytes go
into a byte storage, and the dtype is named where the tensor is rebuilt; torch 2.3 and later read that.

The pickles are written opcode by opcode, because there is no torch here whose objects could be pickled.
A pickle is a program for a stack machine; each function below returns a piece of such a program that
leaves one object on the stack. All of it is protocol 2, which torch writes: its `weights_only` reader
knows no other. Holdfast itself never reads any of it.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from math import prod
from struct import pack
from typing import Final

from holdfast.checkpoint.state.layout import aligned
from holdfast.errors import CheckpointError

# ---- pickle opcodes -----------------------------------------------------------------------------

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
"""Build a tuple of everything above the mark."""
TUPLE_1: Final = b"\x85"
TUPLE_2: Final = b"\x86"
TUPLE_3: Final = b"\x87"
APPENDS: Final = b"e"
SETITEMS: Final = b"u"

CALL: Final = b"R"
"""Call the object below with the tuple on top."""
BUILD: Final = b"b"
"""Give the object below the state on top."""
PERSISTENT: Final = b"Q"
"""Ask the reader for the object that the tuple on top identifies; torch passes storages this way."""

DROP: Final = b"0"
"""Drop the top of the stack."""

_TUPLES: Final = (EMPTY_TUPLE, TUPLE_1, TUPLE_2, TUPLE_3)


def whole(number: int) -> bytes:
    """Push an integer, in as few bytes as possible."""
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
    """Push a global that the reader imports."""
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
    """Store the top of the stack in the memo under that number."""
    return b"q%c" % number if number < 0x100 else pack("<cI", b"r", number)


def get(number: int) -> bytes:
    return b"h%c" % number if number < 0x100 else pack("<cI", b"j", number)


# ---- tensors and values -------------------------------------------------------------------------

_TYPED: Final = {
    "float64": ("DoubleStorage", 8),
    "float32": ("FloatStorage", 4),
    "float16": ("HalfStorage", 2),
    "bfloat16": ("BFloat16Storage", 2),
    "int64": ("LongStorage", 8),
    "int32": ("IntStorage", 4),
    "int16": ("ShortStorage", 2),
    "int8": ("CharStorage", 1),
    "uint8": ("ByteStorage", 1),
    "bool": ("BoolStorage", 1),
    "complex128": ("ComplexDoubleStorage", 16),
    "complex64": ("ComplexFloatStorage", 8),
}
"""Dtypes that have a storage class of their own: its name, and the bytes of an element."""

_UNTYPED: Final = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "complex32": 4,
}

ELEMENT_BYTES: Final = {name: size for name, (_, size) in _TYPED.items()} | _UNTYPED
"""All dtypes that can be saved, as torch spells them: bytes of an element."""

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001

_KEY: Final = text("0")


def _whole_pickle(program: bytes) -> bytes:
    return BEGIN + program + END


def _preamble(padding: int) -> bytes:
    """Return what precedes any object."""
    system = dict_of(
        ("protocol_version", whole(_VERSION)),
        ("little_endian", TRUE),
        ("padding", text(" " * padding)),
    )
    return b"".join(map(_whole_pickle, (whole(_MAGIC), whole(_VERSION), system)))


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of a dtype; refuse dtypes that cannot be saved."""
    try:
        return ELEMENT_BYTES[dtype]
    except KeyError:
        raise CheckpointError(
            f"tensors of dtype {dtype} cannot be saved: convert them to one of "
            f"{', '.join(ELEMENT_BYTES)} first"
        ) from None


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(prod(max(size, 1) for size in sizes[at + 1 :]) for at in range(len(sizes)))


def _shape(sizes: tuple[int, ...]) -> bytes:
    return tuple_of(*map(whole, sizes))


def _storage(kind: str, elements: int) -> bytes:
    """Push the storage that the raw bytes at the end fill."""
    where = (text("storage"), named("torch", kind), _KEY, text("cpu"))
    return tuple_of(*where, whole(elements), NONE) + PERSISTENT


@lru_cache(maxsize=1 << 14)
def tensor_header(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """Return the header of a contiguous tensor's raw bytes; its length is a multiple of 64."""
    size = element_bytes(dtype)
    kind, elements = "ByteStorage", prod(sizes) * size
    rebuild, its_dtype = "_rebuild_tensor_v3", [named("torch", dtype)]
    if dtype in _TYPED:
        kind, elements = _TYPED[dtype][0], prod(sizes)
        rebuild, its_dtype = "_rebuild_tensor_v2", []
    tensor = call(
        named("torch._utils", rebuild),
        _storage(kind, elements),
        whole(0),
        _shape(sizes),
        _shape(_strides(sizes)),
        FALSE,
        NONE,  # no hooks
        *its_dtype,
    )
    rest = _whole_pickle(tensor) + _whole_pickle(list_of(_KEY)) + pack("<q", elements)
    bare = len(_preamble(0)) + len(rest)
    return _preamble(aligned(bare) - bare) + rest


_BEFORE_VALUE: Final = _preamble(0)
_AFTER_VALUE: Final = _whole_pickle(EMPTY_LIST)


def value_bytes(value: object) -> bytes:
    """Encode a value as `torch.save` would, for readers other than Holdfast.

    Every `torch.load` reads builtins; an object of a class (a numpy scalar) needs a reader with
    `weights_only=False`, which `torch.distributed.checkpoint` is.
    """
    try:
        pickled = pickle.dumps(value, 2)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(f"a {kind} cannot be saved as a value: {error}") from error
    return _BEFORE_VALUE + pickled + _AFTER_VALUE
