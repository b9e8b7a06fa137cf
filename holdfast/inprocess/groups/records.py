"""Clears what torch remembers of process groups, so that they can be made anew under the same names.

Torch keeps the groups themselves in `distributed_c10d`, their names in C++, and groups or meshes that
hold them in the caches of DTensor, symmetric memory and DDP; accelerate remembers that it has made one.
All of this is private and differs between versions, so each piece is cleared if it is there. Modules
that were not imported cannot remember anything, and are not imported here.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from functools import _lru_cache_wrapper
from typing import Any

_log = logging.getLogger(__name__)

_C10D = "torch.distributed.distributed_c10d"
_WORLD_RECORDS = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
    *("pg_to_tag", "tags_to_pg", "pg_coalesce_state", "comms"),
)
_CACHED = "torch.distributed.tensor"
"""The package in whose caches meshes are keys and values."""
_CACHE = "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache"
_TABLES = (
    ("torch.distributed._symmetric_memory", "_group_name_to_store"),
    ("torch.distributed._symmetric_memory", "_group_name_to_workspace_tensor"),
    ("torch.distributed.tensor._redistribute", "_planner_cache"),
)
_REFERENCES = (
    (_C10D, "_backend"),
    (_C10D, "_default_pg_init_method"),
    ("torch.distributed.tensor._random", "_rng_tracker"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module"),
)
"""What is None as long as no group was made."""
_SHARED_STATES = ("PartialState", "AcceleratorState", "GradientState")
"""Classes of accelerate whose instances share a dict: it says that there is a group, and never asks."""
_WORLD_DEFAULTS = (
    ("torch.distributed.nn.functional", ""),
    ("torch.distributed.optim.zero_redundancy_optimizer", ""),
    ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
)
"""Places of functions whose default group was looked up when they were defined. Where that was before
`init_process_group` it is None, as it should be; torch imports some of them later."""
_HOOK = "init_process_group.<locals>._distributed_excepthook"


def groups() -> list[Any]:
    """Return the process groups that torch knows in this process."""
    c10d = sys.modules.get(_C10D)
    return [] if c10d is None else list(c10d._world.pg_map)


def release_works() -> None:
    """Let go of functional collectives that nobody has waited for.

    Torch keeps each, and its group with it, until its tensor is waited for. The tensors are found among
    all objects of the process: they must still exist.
    """
    torch: Any = sys.modules.get("torch")
    count = _find("torch._C._distributed_c10d", "_get_work_registry_size")
    if count is None or count() == 0:
        return
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            # It was aborted, or the tensor is of a kind that cannot be waited for: any error will do.
            try:
                torch.ops._c10d_functional.wait_tensor(getattr(one, "elem", one))
            except Exception:
                continue
    _log_leftovers(count())


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
    for module, path in _WORLD_DEFAULTS:
        _drop_defaults(_find(module, path), c10d.ProcessGroup)
    _unwrap_excepthook()


def _log_leftovers(count: int) -> None:
    if count:
        _log.warning(
            "%d collectives were dropped before anybody waited for them; their groups stay in memory",
            count,
        )


def _derived() -> Iterator[Callable[[], object]]:
    """Return what clears the records that are derived from groups."""
    for cache in _caches():
        yield cache.cache_clear
    for module, path in _TABLES:
        table = _find(module, path)
        if table is not None:
            yield table.clear
    for name in _SHARED_STATES:
        shared = _find("accelerate.state", f"{name}._shared_state")
        if shared is not None:
            yield shared.clear
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


def _caches() -> Iterator[Any]:
    """Return the functions with a cache that keeps meshes."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_CACHED):
            owners = [module, *(one for one in vars(module).values() if isinstance(one, type))]
            for owner in owners:
                for value in list(vars(owner).values()):
                    function = getattr(value, "__func__", value)  # Of a static method.
                    if isinstance(function, _lru_cache_wrapper):
                        yield function
    cache = _find("torch.distributed.tensor._api", _CACHE)
    if cache is not None:
        yield cache


def _drop_defaults(owner: object, group: type) -> None:
    """Have functions use the default group of the time of their call."""
    for function in list(getattr(owner, "__dict__", {}).values()):
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, group) for value in defaults):
            function.__defaults__ = tuple(
                None if isinstance(value, group) else value for value in defaults
            )


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
