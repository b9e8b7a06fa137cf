"""Tensors and values as `torch.load` wants to see them, made without torch.

A `.distcp` file of `torch.distributed.checkpoint` is a row of things that `torch.save` wrote. Torch
has two forms for that. Its zip archives have the raw bytes in the middle and a checksum after them;
the older form, which every torch still reads, has the raw bytes last:

    magic number, protocol version, system info,      pickles
    the tensor, its storage named by a key,           a pickle
    the list of keys                                  a pickle
    how many elements follow                          8 bytes
    the raw bytes

So a tensor is a header that depends only on its dtype and sizes, and then its bytes as they are in
memory. Headers are padded to a multiple of 64 bytes (with a string in the system info, which nobody
reads): a tensor that begins aligned has its raw bytes aligned.

Torch itself cannot read back what it writes in this form for dtypes younger than its typed storages
(float8, uint16, ...): it looks for the dtype of an untyped storage, which has none. We give it the
bytes in a storage of bytes instead, and name the dtype where the tensor is rebuilt; every reader
since torch 2.3 takes that.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from math import prod
from struct import pack
from typing import Final

from holdfast.checkpoint.dcp import opcodes as op
from holdfast.checkpoint.state.layout import aligned
from holdfast.errors import CheckpointError

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
"""Dtypes that have a storage class of their own, its name, and the bytes of an element."""

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
"""All dtypes that can be saved, as torch spells them, and the bytes of an element."""

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_VERSION: Final = 1001

_KEY: Final = op.text("0")


def _whole_pickle(program: bytes) -> bytes:
    return op.BEGIN + program + op.END


def _preamble(padding: int) -> bytes:
    """What comes before the object, whatever it is."""
    system = op.dict_of(
        ("protocol_version", op.whole(_VERSION)),
        ("little_endian", op.TRUE),
        ("padding", op.text(" " * padding)),
    )
    return b"".join(map(_whole_pickle, (op.whole(_MAGIC), op.whole(_VERSION), system)))


def element_bytes(dtype: str) -> int:
    """How many bytes an element of that dtype has; refuses dtypes that cannot be saved."""
    try:
        return ELEMENT_BYTES[dtype]
    except KeyError:
        raise CheckpointError(
            f"tensors of dtype {dtype} cannot be saved: convert them to one of "
            f"{', '.join(ELEMENT_BYTES)} first"
        ) from None


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor: how many elements lie between neighbours in each dimension."""
    return tuple(prod(max(size, 1) for size in sizes[at + 1 :]) for at in range(len(sizes)))


def _shape(sizes: tuple[int, ...]) -> bytes:
    return op.tuple_of(*map(op.whole, sizes))


def _storage(kind: str, elements: int) -> bytes:
    """The storage that the raw bytes at the end fill."""
    where = (op.text("storage"), op.named("torch", kind), _KEY, op.text("cpu"))
    return op.tuple_of(*where, op.whole(elements), op.NONE) + op.PERSISTENT


@lru_cache(maxsize=1 << 14)
def tensor_header(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """What stands before the raw bytes of a contiguous tensor; a multiple of 64 bytes long."""
    size = element_bytes(dtype)
    kind, elements = "ByteStorage", prod(sizes) * size
    rebuild, its_dtype = "_rebuild_tensor_v3", [op.named("torch", dtype)]
    if dtype in _TYPED:
        kind, elements = _TYPED[dtype][0], prod(sizes)
        rebuild, its_dtype = "_rebuild_tensor_v2", []
    tensor = op.call(
        op.named("torch._utils", rebuild),
        _storage(kind, elements),
        op.whole(0),
        _shape(sizes),
        _shape(_strides(sizes)),
        op.FALSE,
        op.NONE,  # no hooks
        *its_dtype,
    )
    rest = _whole_pickle(tensor) + _whole_pickle(op.list_of(_KEY)) + pack("<q", elements)
    bare = len(_preamble(0)) + len(rest)
    return _preamble(aligned(bare) - bare) + rest


_BEFORE_VALUE: Final = _preamble(0)
_AFTER_VALUE: Final = _whole_pickle(op.EMPTY_LIST)


def value_bytes(value: object) -> bytes:
    """A value as `torch.save` would write it, for readers that know nothing of us.

    Builtins are read by every `torch.load`; what names a class (a numpy scalar) needs a reader with
    `weights_only=False`, which `torch.distributed.checkpoint` is.
    """
    try:
        pickled = pickle.dumps(value, 2)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(f"a {kind} cannot be saved as a value: {error}") from error
    return _BEFORE_VALUE + pickled + _AFTER_VALUE
