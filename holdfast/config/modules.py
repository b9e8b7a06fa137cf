"""Finds modules by name without importing anything: a module that is not there is an error at the
command line, and one that is there may take seconds to import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

from holdfast.errors import UsageError


def top_level_found(name: str, *directories: str) -> bool:
    """Whether the top-level package of a module is there."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return _top_level(name.partition(".")[0], directories) is not None
    except ValueError:  # Loaded without a spec, as __main__ is: it exists.
        return True


def check_runnable(name: str) -> None:
    """Refuse a module that `python -m` would not find or could not run."""
    here = os.getcwd()
    missing = f"-m {name}: no such module here or in this Python"
    if not top_level_found(name, here):
        raise UsageError(missing)
    found, *rest = name.split(".")
    spec = _top_level(found, [here])
    for part in rest:
        spec = _within(spec, found, here, part)
        found = f"{found}.{part}"
        if spec is None:
            raise UsageError(f"{missing}: {found}" if found != name else missing)
    is_package = spec is not None and spec.submodule_search_locations is not None
    if is_package and _within(spec, name, here, "__main__") is None:
        raise UsageError(f"-m {name}: is a package without a __main__; name a module in it")


def _top_level(name: str, directories: Sequence[str]) -> ModuleSpec | None:
    return PathFinder.find_spec(name, list(directories)) or find_spec(name)


def _within(
    package: ModuleSpec | None, package_name: str, here: str, part: str
) -> ModuleSpec | None:
    """Find a module of a package, which may be spread over several directories of the path."""
    if package is None or package.submodule_search_locations is None:
        return None
    spread = (os.path.join(entry or here, *package_name.split(".")) for entry in (here, *sys.path))
    folders = [*package.submodule_search_locations, *filter(os.path.isdir, spread)]
    return PathFinder.find_spec(f"{package_name}.{part}", folders)
