"""Clears what torch remembers of process groups, so that they can be made anew under the same names.

Torch keeps the groups themselves in `distributed_c10d`, their names in C++, and groups or meshes that
hold them in the caches of DTensor, symmetric memory and DDP. All of this is private to torch and
differs between versions, so each piece is cleared if it is there. Modules that were not imported cannot
remember anything, and are not imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_WORLD_RECORDS = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
    *("pg_to_tag", "tags_to_pg", "pg_coalesce_state", "comms"),
)
_CACHES = (
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh"),
    ("torch.distributed.tensor._ops.single_dim_strategy", "_cached_create_expanded_strategy"),
    (
        "torch.distributed.tensor._api",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache",
    ),
)
"""Functions with a cache whose keys or values hold meshes."""
_TABLES = (
    ("torch.distributed._symmetric_memory", "_group_name_to_store"),
    ("torch.distributed._symmetric_memory", "_group_name_to_workspace_tensor"),
)
_REFERENCES = (
    (_C10D, "_backend"),
    (_C10D, "_default_pg_init_method"),
    ("torch.distributed.tensor._random", "_rng_tracker"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module"),
)
"""What is None as long as no group was made."""
_HOOK = "init_process_group.<locals>._distributed_excepthook"


def groups() -> list[Any]:
    """Return the process groups that torch knows in this process."""
    c10d = sys.modules.get(_C10D)
    return [] if c10d is None else list(c10d._world.pg_map)


def clear() -> None:
    """Make torch forget all process groups and meshes."""
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None:
        return
    c10d._update_default_pg(None)
    for name in _WORLD_RECORDS:
        record = getattr(c10d._world, name, None)
        if record is not None:
            record.clear()
    c10d._world.group_count = 0
    c10d._unregister_all_process_groups()
    for clear_one in _derived():
        clear_one()
    _unwrap_excepthook()


def _derived() -> Iterator[Callable[[], object]]:
    """Return what clears the records that are derived from groups."""
    for module, path in _CACHES:
        cached = _find(module, path)
        if cached is not None:
            yield cached.cache_clear
    for module, path in _TABLES:
        table = _find(module, path)
        if table is not None:
            yield table.clear
    for module, path in _REFERENCES:
        owner, _, name = path.rpartition(".")
        holder = _find(module, owner)
        if holder is not None and getattr(holder, name, None) is not None:
            setattr(holder, name, None)
    meshes = _find("torch.distributed.device_mesh", "_mesh_resources")
    for record in list(vars(meshes).values()) if meshes is not None else []:
        if isinstance(record, (dict, list)):
            yield record.clear
    native = _find("torch._C", "_clear_DTensor_sharding_propagator_cache")
    if native is not None and "torch.distributed.tensor._api" in sys.modules:
        yield native


def _find(module: str, path: str) -> Any:
    """Return what a module, if it was imported, has under a dotted name; None if nothing."""
    found = sys.modules.get(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found


def _unwrap_excepthook() -> None:
    """Take off what each `init_process_group` wraps around the hook for uncaught exceptions."""
    while getattr(sys.excepthook, "__qualname__", "") == _HOOK:
        code, cells = sys.excepthook.__code__, sys.excepthook.__closure__ or ()
        inner = dict(zip(code.co_freevars, cells, strict=True)).get("old_hook")
        if inner is None:
            return
        sys.excepthook = inner.cell_contents
