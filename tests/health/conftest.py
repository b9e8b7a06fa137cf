from __future__ import annotations

from pathlib import Path

import pytest
from fakenode import FakeNode


@pytest.fixture
def fake(tmp_path: Path) -> FakeNode:
    root = tmp_path / "node"
    root.mkdir()
    return FakeNode(root)
