"""What tests of snapshots share."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keepers import NewNode, Node, keepers

REMOVAL_LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests share the cores with others; and a fork of a process with threads is none to rely on."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in shared memory, as images are in; nothing of it is left."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="hf-test-", dir=root))
    try:
        yield directory
    finally:
        deadline = time.monotonic() + REMOVAL_LIMIT_S
        while directory.exists():  # A keeper that ends beside this may still write there.
            assert time.monotonic() < deadline, f"{directory} is being written to"
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def new_node() -> Iterator[NewNode]:
    with keepers() as new:
        yield new


@pytest.fixture
def here(new_node: NewNode) -> Node:
    return new_node()


@pytest.fixture
def there(new_node: NewNode) -> Node:
    return new_node()
