"""Keeps Python's garbage collector out of a save.

Dismantling a state makes tens of thousands of small objects that live for a moment. They are no
garbage, but so many at once make the collector look through the whole process, which may take longer
than the copy.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
