"""Training that does not stop.

    import holdfast

    holdfast.progress(step)          # this step is finished; needed only where the hook is wrong
    with holdfast.section("checkpoint"):
        ...                          # this is neither training nor lost: book it as what it is

Everything here does nothing, at no cost, in a process that `holdfast run` did not start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.worker.api import progress as progress
    from holdfast.worker.api import section as section

_LAZY = {"progress": "holdfast.worker.api", "section": "holdfast.worker.api"}

__all__ = ["__version__", "progress", "section"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
