"""One fixture: `puppet`, which makes processes that are ended after the test, however it went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from puppets import Puppet, puppet_of


@pytest.fixture
def puppet() -> Iterator[Callable[..., Puppet]]:
    made: list[Puppet] = []

    def make(*parts: str, **more: Any) -> Puppet:
        made.append(puppet_of(*parts, **more))
        made[-1].arrive()
        return made[-1]

    yield make
    for each in made:
        each.end()
