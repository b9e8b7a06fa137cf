"""Tells which of Holdfast's own modules a script will import, judged by its text.

They take a fifth of a second, more than all the rest of a recovery, and too little to replace a
nursery for what was learnt of it (`holdfast.worker.loaded_modules`). So the first nursery imports them:
the modules of those public names that the script mentions. A name that it gets some other way is
imported by the script, as ever.
"""

from __future__ import annotations

from pathlib import Path

import holdfast
import holdfast.data
import holdfast.inprocess


def own_modules(script: str) -> list[str]:
    """Return modules that the script imports from Holdfast; all of them if it cannot be read."""
    homes = {**holdfast._HOMES, **holdfast.data._HOMES, **holdfast.inprocess._HOMES}
    try:
        text = Path(script).read_bytes()
    except OSError:  # A module, or a command that is no file.
        return sorted(set(homes.values()))
    if b"holdfast" not in text:
        return []
    return sorted({home for name, home in homes.items() if name.encode() in text})
