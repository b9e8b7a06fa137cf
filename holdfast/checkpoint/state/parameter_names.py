"""Names parameters as other readers know them, whatever wraps their module.

An optimizer's state dict numbers its parameters. Where the module that owns all of them is part of the
same state, their state is saved under their fully qualified names instead, as
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` has it: other readers find it, and
each parameter gets its own state back although another script lists them in another order. The numbers
stay where there is no such module, or an optimizer has a state dict of a form of its own.

`DistributedDataParallel` and `torch.compile` wrap a module, and put the wrapper's attribute (`module`,
`_orig_mod`) into the names of what it has. A fully qualified name is without. A module's state dict is
saved as the module names it; on restore and export, `unwrapped` makes the names comparable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import takewhile
from operator import is_
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import CheckpointError

_WRAPPED: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes by which wrappers of torch have the module that they wrap, and nobody else has one."""
_DATA_PARALLEL: Final = "module"
"""The attribute of `DistributedDataParallel`, which is also a plain word."""


def unwrapped(key: str) -> str:
    """Return a key of a module's state dict without the attributes of wrappers."""
    return ".".join(part for part in _inner(key.split(".")) if part != _DATA_PARALLEL)


def unwrapped_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys by their unwrapped form; without those that have it in common."""
    found: dict[str, str] = {}
    twice = set()
    for key in keys:
        plain = unwrapped(key)
        if found.setdefault(plain, key) != key:
            twice.add(plain)
    return {plain: key for plain, key in found.items() if plain not in twice}


def rewrapped(saved: dict[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state dict with the keys of a live one, where they differ by wrappers alone."""
    if saved.keys() == live.keys():
        return saved
    here, there = unwrapped_keys(live), unwrapped_keys(saved)
    if here.keys() != there.keys() or len(here) != len(live) or len(there) != len(saved):
        return saved
    renamed: Any = OrderedDict((here[unwrapped(key)], value) for key, value in saved.items())
    versions = getattr(saved, "_metadata", None)
    if versions is not None:
        renamed._metadata = _versions(versions, getattr(live, "_metadata", None) or {})
    return renamed  # type: ignore[no-any-return]


def _versions(saved: Mapping[str, Any], live: Iterable[str]) -> OrderedDict[str, Any]:
    """Return the versions of modules by their paths here. A wrapper comes before what it wraps, and has
    the same path without its attribute: the last one counts."""
    plain = {unwrapped(path): version for path, version in saved.items()}
    return OrderedDict((path, plain[unwrapped(path)]) for path in live if unwrapped(path) in plain)


def without_wrappers(state_dict: Any) -> Any:
    """Return a module's state dict with the keys that it has when nothing wraps the module; anything
    else as it is."""
    if not isinstance(state_dict, dict) or not all(isinstance(key, str) for key in state_dict):
        return state_dict
    paths = [_inner(key.split(".")) for key in state_dict]
    depth = min(map(_leading, paths), default=0)
    keys = [".".join(path[depth:]) for path in paths]
    if keys == list(state_dict) or len(set(keys)) < len(keys):
        return state_dict
    plain: Any = OrderedDict(zip(keys, state_dict.values(), strict=True))
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        inner = ((_inner(path.split(".")), version) for path, version in versions.items())
        plain._metadata = OrderedDict((".".join(path[depth:]), one) for path, one in inner)
    return plain


def _inner(path: list[str]) -> list[str]:
    return [part for part in path if part not in _WRAPPED]


def _leading(path: list[str]) -> int:
    """Return how many wrappers a path begins with; its last part is none."""
    wrapped = takewhile(lambda part: part == _DATA_PARALLEL, path[:-1])
    return sum(1 for _ in wrapped)


# ---- the parameters of optimizers ----------------------------------------------------------------


class ParameterNames:
    """Finds the names of optimizers' parameters, and remembers them from save to save."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[torch.Tensor], list[str] | None]] = {}

    def of(self, state: dict[str, Any], name: str) -> list[str] | None:
        """Return the names of the parameters of the optimizer that has that name in a state, in its
        order; None if no module there has all of them."""
        optimizer = state[name]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = self._known.get(name)
        if known is None or not _same(known[0], parameters):
            modules = [one for one in state.values() if isinstance(one, torch.nn.Module)]
            known = self._known[name] = parameters, _names(parameters, modules)
        return known[1]


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _names(parameters: list[torch.Tensor], modules: list[torch.nn.Module]) -> list[str] | None:
    for module in modules:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        if parameters and all(id(parameter) in names for parameter in parameters):
            found = [_qualified(module, names[id(parameter)]) for parameter in parameters]
            return found if len(set(found)) == len(found) else None
    return None


def _qualified(module: torch.nn.Module, name: str) -> str:
    """Return the name of a parameter without the attributes of the wrappers that it is in."""
    found: list[str] = []
    at: Any = module
    for part in name.split("."):
        wrapped = isinstance(at, DistributedDataParallel) and part == _DATA_PARALLEL
        if not wrapped and part not in _WRAPPED:
            found.append(part)
        at = getattr(at, part)
    return ".".join(found)


def by_name(state_dict: Any, names: list[str] | None) -> Any:
    """Return an optimizer's state dict with names in place of numbers; as it is, if that cannot be."""
    if names is None or not _is_numbered(state_dict, len(names)):
        return state_dict
    state = {names[number]: value for number, value in state_dict["state"].items()}
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": groups}


def _is_numbered(state_dict: Any, count: int) -> bool:
    """Return whether it has the usual form, with a number for each of so many parameters."""
    if not isinstance(state_dict, dict) or not isinstance(state_dict.get("state"), dict):
        return False
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and "params" in g for g in groups
    ):
        return False
    numbers = [number for group in groups for number in group["params"]]
    return numbers == list(range(count)) and state_dict["state"].keys() <= set(numbers)


def is_named(state_dict: Any) -> bool:
    """Return whether an optimizer's state dict has names in place of numbers."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    return isinstance(groups, list) and any(
        isinstance(group, dict) and any(isinstance(one, str) for one in group.get("params", ()))
        for group in groups
    )


def by_number(state_dict: Any, names: list[str], live: Any, where: str) -> Any:
    """Return an optimizer's state dict with the numbers that parameters have in a live one, whose
    groups may have them in another order."""
    if not _is_numbered(live, len(names)):
        raise CheckpointError(
            f"{where}: its state_dict() has another form than the one that was saved"
        )
    numbers = {name: number for number, name in enumerate(names)}
    saved = [
        {name: place for place, name in enumerate(group["params"])}
        for group in state_dict["param_groups"]
    ]
    groups = []
    for group in live["param_groups"]:
        wanted = [names[number] for number in group["params"]]
        match = next((n for n, one in enumerate(saved) if one.keys() == set(wanted)), None)
        if match is None:
            raise CheckpointError(
                f"{where}: no group of parameters was saved that consists of {_some(wanted)}; make the"
                " optimizer with the same groups"
            )
        order = [saved[match][name] for name in wanted]
        groups.append(_reordered(state_dict["param_groups"][match], order, group["params"]))
    state = {numbers[name]: value for name, value in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _reordered(group: dict[str, Any], order: list[int], numbers: list[int]) -> dict[str, Any]:
    found = {**group, "params": numbers}
    if isinstance(group.get("param_names"), list):
        found["param_names"] = [group["param_names"][place] for place in order]
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
