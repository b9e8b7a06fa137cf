"""Keeps the process groups of one round away from what older rounds left in the same store.

`init_process_group()` names its keys the same every time, and torchrun's store outlives the groups: a
second group of the same name would find the addresses of the first and connect to sockets that are
gone. So between `install` and `remove` torch's own way to the store (`env://`) gets a prefix.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.errors import UsageError

Rendezvous = Callable[..., Iterator[tuple[Any, int, int]]]


class GroupFence:
    """The prefix under which this process's next groups meet."""

    def __init__(self, own_store: Any = None) -> None:
        self.prefix = ""
        self._own_store = own_store
        """Used where no launcher has set MASTER_ADDR: this process is a world of its own."""
        self._torchs: Rendezvous | None = None

    def install(self) -> None:
        handlers = _handlers()
        self._torchs = handlers["env"]
        handlers["env"] = self._meet

    def remove(self) -> None:
        handlers = _handlers()
        if self._torchs is not None and handlers.get("env") == self._meet:
            handlers["env"] = self._torchs

    def _meet(self, url: str, **arguments: Any) -> Iterator[tuple[Any, int, int]]:
        """Meet as torch does, in a part of the store that is this round's."""
        from torch.distributed import PrefixStore

        if self._own_store is not None and "MASTER_ADDR" not in os.environ:
            yield PrefixStore(self.prefix, self._own_store), 0, 1
            raise RuntimeError("a group without a launcher cannot meet again")
        assert self._torchs is not None
        meeting = self._torchs(url, **arguments)
        store, rank, world_size = next(meeting)
        yield PrefixStore(self.prefix, store), rank, world_size
        yield from meeting


def _handlers() -> dict[str, Rendezvous]:
    """Return torch's table of rendezvous schemes."""
    import torch

    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Rendezvous] | None = getattr(module, "_rendezvous_handlers", None)
    if handlers is None or "env" not in handlers:
        raise UsageError(
            f"holdfast.inprocess does not know how torch {torch.__version__} finds its store; "
            "use `holdfast run`, or another version of torch"
        )
    return handlers
