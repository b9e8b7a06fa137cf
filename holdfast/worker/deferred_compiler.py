"""Lets training begin without torch's compiler, as long as nothing uses it.

The first optimizer of a process imports `torch._dynamo`, which takes as long as torch itself (3 to
6 s), only to tell a compiler that does not run what it should leave alone. A script that never compiles
pays for it at each start. Three places ask for it in plain training, and each gets, until the compiler
is imported, what it would do without one:

- functions that are marked for the compiler to skip (`torch._disable_dynamo`) are called directly;
- an optimizer's step sets whether gradients are recorded, and runs;
- DDP asks how the compiler should treat it, and is told the default.

The moment anything imports `torch._dynamo`, or takes another attribute of it, all three are as torch
made them, before the import begins: a script that compiles finds no trace. If torch is built
differently than expected here, the compiler is imported as ever.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

COMPILER: Final = "torch._dynamo"
_SKIPPED: Final = "__dynamo_disable"
"""Attribute under which torch keeps what it calls instead of a function marked to be skipped."""

_WORDS: Final = (
    b"compile",
    b"_dynamo",
    b"fsdp",
    b"FSDP",
    b"FullyShardedDataParallel",
    b"fully_shard",
    b"utils.checkpoint",
    b"transformers",
    b"accelerate",
    b"lightning",
    b"deepspeed",
    b"composer",
    b"torchtitan",
)


def seems_to_compile(source: bytes) -> bool:
    """Return whether a script will need the compiler before its first step, judged by its text."""
    return any(word in source for word in _WORDS)


def defer() -> bool:
    """Let this process train without the compiler until it is imported; return whether it can."""
    torch = sys.modules.get("torch")
    if torch is None or COMPILER in sys.modules or "_dynamo" in vars(torch):
        return False
    deferral = _Deferral(torch)
    if not deferral.possible:
        return False
    deferral.begin()
    return True


class _Deferral:
    """What was changed in torch, and how to change it back."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        optimizers = sys.modules.get("torch.optim.optimizer")
        marks, steps = _inner_code(torch, "_disable_dynamo"), None
        if optimizers is not None:
            steps = _inner_code(optimizers, "_use_grad_for_differentiable")
        found = dict(_functions(code for code in (marks, steps) if code is not None))
        self._skipped = [_wrapped(one) for one, code in found.items() if code is marks]
        self._steps = [one for one, code in found.items() if code is steps]
        self._step_code = steps

    @property
    def possible(self) -> bool:
        """Whether torch is built as expected."""
        code = self._step_code
        return (
            bool(self._skipped and self._steps)
            and code is not None
            and code.co_freevars == _step_without_compiler(_nothing).__code__.co_freevars
            and all(isinstance(one, FunctionType) for one in self._skipped)
        )

    def begin(self) -> None:
        for function in self._skipped:
            setattr(function, _SKIPPED, function)
        code = _step_without_compiler(_nothing).__code__
        for step in self._steps:
            step.__code__ = code
        vars(self._torch)["_dynamo"] = _Absent()
        sys.meta_path.insert(0, _CompilerWatch(self.end))

    def end(self) -> None:
        """Make everything as torch made it."""
        assert self._step_code is not None
        for function in self._skipped:
            if getattr(function, _SKIPPED, None) is function:
                delattr(function, _SKIPPED)
        for step in self._steps:
            step.__code__ = self._step_code
        if isinstance(vars(self._torch).get("_dynamo"), _Absent):
            del vars(self._torch)["_dynamo"]


class _Absent:
    """Stands where torch has its compiler, and imports it once it is needed."""

    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    """All that DDP asks for; the default of torch's setting."""

    def __getattribute__(self, name: str) -> Any:
        if name == "utils" and sys._getframe(1).f_globals.get("__name__") == _DDP:
            return _Absent.utils
        if name == "__class__":
            return _Absent
        return getattr(importlib.import_module(COMPILER), name)


_DDP: Final = "torch.nn.parallel.distributed"


class _CompilerWatch(MetaPathFinder):
    """Import hook that tells when the compiler is about to be imported, and leaves."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != COMPILER:
            return None
        sys.meta_path.remove(self)
        self._tell()
        for finder in list(sys.meta_path):  # Whoever asks may walk the list that has just changed.
            find = getattr(finder, "find_spec", None)  # Old finders have none.
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None


def _inner_code(module: ModuleType, name: str) -> CodeType | None:
    """Return the code of the function that a decorator makes."""
    decorator = getattr(module, name, None)
    constants = getattr(getattr(decorator, "__code__", None), "co_consts", ())
    inner = [one for one in constants if isinstance(one, CodeType) and "args" in one.co_varnames]
    return inner[0] if len(inner) == 1 else None


def _functions(codes: Iterator[CodeType]) -> Iterator[tuple[FunctionType, CodeType]]:
    """Yield all functions that have one of these codes, with it."""
    for code in codes:
        for one in gc.get_referrers(code):
            if isinstance(one, FunctionType) and one.__code__ is code:
                yield one, code


def _wrapped(function: FunctionType) -> Any:
    return getattr(function, "__wrapped__", None)


def _nothing() -> None:
    pass


def _step_without_compiler(func: Callable[..., Any]) -> FunctionType:
    """Return an optimizer's step as it is without a compiler. Its code runs in torch's own functions,
    which have the same free variable, and among torch's names."""

    def step(*args: Any, **kwargs: Any) -> Any:
        recorded = torch.is_grad_enabled()  # type: ignore[name-defined]  # noqa: F821
        torch.set_grad_enabled(args[0].defaults["differentiable"])  # type: ignore[name-defined]  # noqa: F821
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(recorded)  # type: ignore[name-defined]  # noqa: F821

    return step  # type: ignore[return-value]
