"""Keys and values that ranks share, for as long as their round lasts.

The machine is a plain dictionary with two things added. Every change is one step, so an `Add` or a
`CompareSet` can never be torn apart; and whoever waits for keys is woken by the very change that
brings the last of them. A key that is missing is missing: it is never told as an empty value.

Whoever waits watches one missing key at a time. When that key comes, the next missing one is looked
for from there on, so a wait for a thousand keys that come one by one looks at each about twice. A key
may go again while others are waited for, therefore the end of the row is not the end of the search:
it is over when all keys were seen to be there at once.

All that is stored together has a limit, because the coordinator keeps it in memory and in its
journal's snapshots. The store is for addresses and small agreements, not for tensors.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.messages.requests import (
    MAX_VALUE_BYTES,
    Add,
    AnyAnswer,
    Append,
    CheckKeys,
    CompareSet,
    CountKeys,
    Delete,
    Denied,
    Get,
    Granted,
    Set,
    StoreRequest,
    Total,
    Truth,
    Values,
    WaitForKeys,
)

MAX_STORE_BYTES = 32 << 20
KEY_COST_BYTES = 64
"""What a key costs beside its own length and its value's."""
_LONGEST_NUMBER = 20
_INT64 = 1 << 63

Asker = str
"""Who waits: one lane of one rank."""


class KeyWait(Struct):
    keys: tuple[str, ...]
    position: int = 0
    """Of the missing key that is watched."""


class Store(Struct):
    items: dict[str, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    waits: dict[Asker, KeyWait] = field(default_factory=dict)
    watched: dict[str, dict[Asker, bool]] = field(default_factory=dict)
    """Who watches a missing key, in the order in which they came (the values say nothing)."""


class StoreResponse(Struct, frozen=True):
    """What a request led to."""

    answer: AnyAnswer | None
    """None when the asker has to wait."""
    woken: tuple[Asker, ...] = ()
    """Whose keys are all there by this request."""


def take(store: Store, asker: Asker, request: StoreRequest) -> StoreResponse:
    """Do what is asked, at once and as a whole; what is refused changes nothing."""
    if isinstance(request, Get):
        return StoreResponse(_values(store, request.keys))
    if isinstance(request, CheckKeys):
        return StoreResponse(Truth(so=all(key in store.items for key in request.keys)))
    if isinstance(request, CountKeys):
        return StoreResponse(Total(number=len(store.items)))
    if isinstance(request, WaitForKeys):
        return StoreResponse(None if _watch(store, asker, KeyWait(request.keys)) else Granted())
    if isinstance(request, Delete):
        return StoreResponse(Truth(so=_remove(store, request.key)))
    if isinstance(request, Set):
        return _write(store, dict(request.items), Granted())
    if isinstance(request, Add):
        return _add(store, request)
    if isinstance(request, Append):
        value = store.items.get(request.key, b"") + request.value
        return _write(store, {request.key: value}, Total(number=len(value)))
    return _compare_set(store, request)


def forget(store: Store, asker: Asker) -> None:
    """The asker does not wait any more."""
    waiting = store.waits.pop(asker, None)
    if waiting is not None:
        key = waiting.keys[waiting.position]
        del store.watched[key][asker]
        if not store.watched[key]:
            del store.watched[key]


def _values(store: Store, keys: tuple[str, ...]) -> Values:
    values: list[bytes | None] = []
    size = 0
    for key in keys:
        value = store.items.get(key)
        size += len(value or b"")
        if values and size > MAX_VALUE_BYTES:
            break
        values.append(value)
    return Values(values=tuple(values))


def _add(store: Store, request: Add) -> StoreResponse:
    written = store.items.get(request.key, b"0")
    try:
        number = int(written) if len(written) <= _LONGEST_NUMBER else None
    except ValueError:
        number = None
    if number is None:
        return StoreResponse(Denied(reason="not a number", detail=f"the value of {request.key!r}"))
    number += request.amount
    if not -_INT64 <= number < _INT64:
        detail = f"the value of {request.key!r} would not fit into 64 bits"
        return StoreResponse(Denied(reason="not a number", detail=detail))
    return _write(store, {request.key: b"%d" % number}, Total(number=number))


def _compare_set(store: Store, request: CompareSet) -> StoreResponse:
    value = store.items.get(request.key)
    if (value or b"") == request.expected:
        return _write(store, {request.key: request.desired}, Values(values=(request.desired,)))
    return StoreResponse(Values(values=(value,)))


# ---- changes -----------------------------------------------------------------------------------


def _write(store: Store, items: dict[str, bytes], answer: AnyAnswer) -> StoreResponse:
    growth = sum(_cost(k, v) - _cost(k, store.items.get(k)) for k, v in items.items())
    longest = max(map(len, items.values()))
    if longest > MAX_VALUE_BYTES:
        detail = f"a value of {longest} bytes; a value has at most {MAX_VALUE_BYTES}"
        return StoreResponse(Denied(reason="too large", detail=detail))
    if growth > 0 and store.size_bytes + growth > MAX_STORE_BYTES:
        detail = f"the store of this round is full: it holds at most {MAX_STORE_BYTES} bytes"
        return StoreResponse(Denied(reason="too large", detail=detail))
    fresh = [key for key in items if key not in store.items]
    store.items.update(items)
    store.size_bytes += growth
    woken: list[Asker] = []
    for key in fresh:
        woken += _came(store, key)
    return StoreResponse(answer, tuple(woken))


def _remove(store: Store, key: str) -> bool:
    value = store.items.pop(key, None)
    store.size_bytes -= _cost(key, value)
    return value is not None


def _cost(key: str, value: bytes | None) -> int:
    return 0 if value is None else KEY_COST_BYTES + len(key.encode()) + len(value)


# ---- waiting -----------------------------------------------------------------------------------


def _watch(store: Store, asker: Asker, waiting: KeyWait) -> bool:
    """Watch a missing key, the next one from the last on; False when there is none."""
    keys, start = waiting.keys, waiting.position
    for step in range(len(keys)):
        position = (start + step) % len(keys)
        if keys[position] not in store.items:
            waiting.position = position
            store.waits[asker] = waiting
            store.watched.setdefault(keys[position], {})[asker] = True
            return True
    return False


def _came(store: Store, key: str) -> list[Asker]:
    """Whose wait is over now that this key is there."""
    over = []
    for asker in store.watched.pop(key, {}):
        if not _watch(store, asker, store.waits[asker]):
            del store.waits[asker]
            over.append(asker)
    return over


def validate(store: Store) -> None:
    """Re-check every invariant."""
    size = sum(_cost(key, value) for key, value in store.items.items())
    assert size == store.size_bytes <= MAX_STORE_BYTES, "miscounted bytes"
    assert all(len(value) <= MAX_VALUE_BYTES for value in store.items.values()), "a large value"
    watching = {asker: key for key, askers in store.watched.items() for asker in askers}
    assert sum(map(len, store.watched.values())) == len(watching), "somebody watches two keys"
    wanted = {asker: w.keys[w.position] for asker, w in store.waits.items()}
    assert watching == wanted, "somebody watches another key than the one to wait for"
    assert not store.watched.keys() & store.items.keys(), "a key that is there is waited for"
