"""Implements `holdfast.store()`, a torch `Store` whose keys the coordinator keeps.

Torch calls it as much as scripts do: `init_process_group(store=...)`, a `PrefixStore` around it and a
process group's own threads reach it from C++. As of torch 2.13 that means:

- C++ looks up some methods by its own names (`getNumKeys`, `deleteKey`) and others by Python's
  (`compare_set`, `multi_get`, `has_extended_api`), so both names exist.
- `wait` is called with one argument or two; values are bytes from C++ and str from scripts.
- Queues (`queue_push` etc.) and `list_keys` cannot be reached from C++; they raise NotImplementedError,
  as in other stores without them.
- C++ keeps only the C++ half of a store alive. A store that Python does not hold fails with "pure
  virtual function" on the next call. So the runtime holds the process's only one, which is
  thread-safe, and `clone` returns it.
- A Python exception passes through C++ unchanged. A timeout is a `DistStoreError` too, as code written
  for torch's own stores expects.

As with torch's stores, `get` and `multi_get` wait up to `store.timeout` for their keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from holdfast.errors import RequestTimeout
from holdfast.messages import requests as messages
from holdfast.messages.requests import MAX_KEYS, StoreRequest, Total, Truth, Values
from holdfast.worker.requests import SLACK_S, RequestClient

LONGEST_S = 1e9
Text = str | bytes
T = TypeVar("T")


class StoreTimeout(RequestTimeout, dist.DistStoreError):  # type: ignore[misc]
    """A key that did not appear in time."""


class CoordinatorStore(dist.Store):  # type: ignore[misc]
    """The store of this round."""

    def __init__(self, requests: RequestClient) -> None:
        super().__init__()
        self._requests = requests

    def set(self, key: str, value: Text) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return self._ask(messages.Add(key=key, amount=amount), Total).number

    def compare_set(self, key: str, expected: Text, desired: Text) -> bytes:
        """Return the value afterwards; `expected` if the key is missing, as torch's stores do."""
        expected = _bytes(expected)
        request = messages.CompareSet(key=key, expected=expected, desired=_bytes(desired))
        (value,) = self._ask(request, Values).values
        return expected if value is None else value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, _seconds(timeout or self.timeout))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask(messages.CheckKeys(keys=some), Truth).so for some in _batches(keys))

    def delete_key(self, key: str) -> bool:
        return self._ask(messages.Delete(key=key), Truth).so

    def num_keys(self) -> int:
        return self._ask(messages.CountKeys(), Total).number

    def append(self, key: str, value: Text) -> None:
        self._ask(messages.Append(key=key, value=_bytes(value)), object)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        deadline = time.monotonic() + _seconds(self.timeout)
        found: list[bytes] = []
        while len(found) < len(keys):
            some = tuple(keys[len(found) : len(found) + MAX_KEYS])
            values = self._ask(messages.Get(keys=some), Values).values
            there = values[: values.index(None)] if None in values else values
            found += [value for value in there if value is not None]
            if len(there) < len(values):
                self._wait(keys[len(found) :], max(0.0, deadline - time.monotonic()))
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys and {len(values)} values")
        if keys:
            items = tuple(zip(keys, map(_bytes, values), strict=True))
            self._ask(messages.Set(items=items), object)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> CoordinatorStore:
        return self

    # The names that C++ looks up.
    getNumKeys = num_keys
    deleteKey = delete_key

    def _wait(self, keys: Sequence[str], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        with _torch_timeouts():
            for some in _batches(keys):
                request = messages.WaitForKeys(keys=some, timeout_s=limit_s)
                self._requests.ask(request, limit_s + SLACK_S)
                limit_s = max(0.0, deadline - time.monotonic())

    def _ask(self, request: StoreRequest, kind: Callable[..., T]) -> T:
        with _torch_timeouts():
            answer = self._requests.ask(request, _seconds(self.timeout) + SLACK_S)
        assert isinstance(answer, kind)  # type: ignore[arg-type]
        return answer  # type: ignore[return-value]


@contextmanager
def _torch_timeouts() -> Iterator[None]:
    try:
        yield
    except RequestTimeout as error:
        raise StoreTimeout(str(error)) from None


def _batches(keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for first in range(0, len(keys), MAX_KEYS):
        yield tuple(keys[first : first + MAX_KEYS])


def _bytes(value: Text) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _seconds(duration: timedelta) -> float:
    return min(max(0.0, duration.total_seconds()), LONGEST_S)
