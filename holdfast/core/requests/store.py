"""Keeps the keys and values that ranks share while their round lasts.

The store is a dictionary with two additions. Every request is atomic, so an `Add` or a `CompareSet` can
never interleave with another; and a waiter is woken by the very change that completes its keys. A
missing key is never reported as an empty value.

A waiter watches one missing key at a time. When that key appears, the search for the next missing one
continues from there, so a wait for a thousand keys that appear one by one looks at each about twice. A
key may be deleted while others are waited for, so the search wraps around: the wait is over when all
keys were found at once.

The total size is limited, because the coordinator keeps the store in memory and in the journal's
snapshots. It is meant for addresses and small agreements, not for tensors.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.decisions import Asker
from holdfast.messages import requests as messages
from holdfast.messages.requests import MAX_VALUE_BYTES, AnyAnswer, Denied, Granted, Total, Truth

MAX_STORE_BYTES = 32 << 20
KEY_COST_BYTES = 64
"""Cost of an entry beside the lengths of its key and value."""
_LONGEST_NUMBER = 20
_INT64 = 1 << 63


class KeyWait(Struct):
    """A wait for keys."""

    keys: tuple[str, ...]
    position: int = 0
    """Index of the missing key that is watched."""


class Store(Struct):
    """Keys and values of one round, and who waits for which keys."""

    items: dict[str, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    waits: dict[Asker, KeyWait] = field(default_factory=dict)
    watched: dict[str, dict[Asker, bool]] = field(default_factory=dict)
    """Watchers of each missing key, in order of arrival (the values have no meaning)."""


class StoreResponse(Struct, frozen=True):
    """Result of a request."""

    answer: AnyAnswer | None
    """None if the asker has to wait."""
    woken: tuple[Asker, ...] = ()
    """Askers whose wait ends with this request."""


def take(store: Store, asker: Asker, request: messages.StoreRequest) -> StoreResponse:
    """Carry out a request atomically; one that is denied changes nothing."""
    match request:
        case messages.Get(keys=keys):
            return StoreResponse(_values(store, keys))
        case messages.CheckKeys(keys=keys):
            return StoreResponse(Truth(so=all(key in store.items for key in keys)))
        case messages.CountKeys():
            return StoreResponse(Total(number=len(store.items)))
        case messages.WaitForKeys(keys=keys):
            return StoreResponse(None if _watch(store, asker, KeyWait(keys)) else Granted())
        case messages.Delete(key=key):
            return StoreResponse(Truth(so=_remove(store, key)))
        case messages.Set(items=items):
            return _write(store, dict(items), Granted())
        case messages.Add():
            return _add(store, request)
        case messages.Append(key=key, value=value):
            value = store.items.get(key, b"") + value
            return _write(store, {key: value}, Total(number=len(value)))
        case messages.CompareSet():
            return _compare_set(store, request)


def forget(store: Store, asker: Asker) -> None:
    """Drop the asker's wait, if it has one."""
    waiting = store.waits.pop(asker, None)
    if waiting is not None:
        key = waiting.keys[waiting.position]
        del store.watched[key][asker]
        if not store.watched[key]:
            del store.watched[key]


def _values(store: Store, keys: tuple[str, ...]) -> messages.Values:
    values: list[bytes | None] = []
    size = 0
    for key in keys:
        value = store.items.get(key)
        size += len(value or b"")
        if values and size > MAX_VALUE_BYTES:
            break
        values.append(value)
    return messages.Values(values=tuple(values))


def _add(store: Store, request: messages.Add) -> StoreResponse:
    written = store.items.get(request.key, b"0")
    try:
        number = int(written) if len(written) <= _LONGEST_NUMBER else None
    except ValueError:
        number = None
    if number is None:
        return _denied("not a number", f"the value of {request.key!r}")
    number += request.amount
    if not -_INT64 <= number < _INT64:
        return _denied("not a number", f"the value of {request.key!r} would not fit into 64 bits")
    return _write(store, {request.key: b"%d" % number}, Total(number=number))


def _compare_set(store: Store, request: messages.CompareSet) -> StoreResponse:
    value = store.items.get(request.key)
    if (value or b"") == request.expected:
        return _write(
            store, {request.key: request.desired}, messages.Values(values=(request.desired,))
        )
    return StoreResponse(messages.Values(values=(value,)))


def _denied(reason: messages.Reason, detail: str) -> StoreResponse:
    return StoreResponse(Denied(reason=reason, detail=detail))


# ---- changes -----------------------------------------------------------------------------------


def _write(store: Store, items: dict[str, bytes], answer: AnyAnswer) -> StoreResponse:
    growth = sum(_cost(k, v) - _cost(k, store.items.get(k)) for k, v in items.items())
    longest = max(map(len, items.values()))
    if longest > MAX_VALUE_BYTES:
        return _denied("too large", f"a value of {longest} bytes; the limit is {MAX_VALUE_BYTES}")
    if growth > 0 and store.size_bytes + growth > MAX_STORE_BYTES:
        return _denied("too large", f"the store is full: its limit is {MAX_STORE_BYTES} bytes")
    fresh = [key for key in items if key not in store.items]
    store.items.update(items)
    store.size_bytes += growth
    return StoreResponse(answer, tuple(asker for key in fresh for asker in _woken_by(store, key)))


def _remove(store: Store, key: str) -> bool:
    value = store.items.pop(key, None)
    store.size_bytes -= _cost(key, value)
    return value is not None


def _cost(key: str, value: bytes | None) -> int:
    return 0 if value is None else KEY_COST_BYTES + len(key.encode()) + len(value)


# ---- waiting -----------------------------------------------------------------------------------


def _watch(store: Store, asker: Asker, waiting: KeyWait) -> bool:
    """Watch the next missing key; return False if none is missing."""
    keys, start = waiting.keys, waiting.position
    for step in range(len(keys)):
        position = (start + step) % len(keys)
        if keys[position] not in store.items:
            waiting.position = position
            store.waits[asker] = waiting
            store.watched.setdefault(keys[position], {})[asker] = True
            return True
    return False


def _woken_by(store: Store, key: str) -> list[Asker]:
    """Return the askers whose wait ends now that this key exists."""
    over = []
    for asker in store.watched.pop(key, {}):
        if not _watch(store, asker, store.waits[asker]):
            del store.waits[asker]
            over.append(asker)
    return over


def validate(store: Store) -> None:
    """Check every invariant."""
    size = sum(_cost(key, value) for key, value in store.items.items())
    assert size == store.size_bytes <= MAX_STORE_BYTES, "miscounted bytes"
    assert all(len(value) <= MAX_VALUE_BYTES for value in store.items.values()), "a large value"
    watching = {asker: key for key, askers in store.watched.items() for asker in askers}
    assert sum(map(len, store.watched.values())) == len(watching), "an asker watches two keys"
    wanted = {asker: w.keys[w.position] for asker, w in store.waits.items()}
    assert watching == wanted, "an asker watches another key than the one it waits for"
    assert not store.watched.keys() & store.items.keys(), "a key that exists is waited for"
