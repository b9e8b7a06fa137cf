"""Watches imports for effects that would make a process unfit to be forked into ranks.

A module that was imported before there was a rank must be the module that the rank would have
imported. So while modules are executed, one by one, it is watched what each of them does:

    it reads a variable that ranks or the script set, or sys.argv   its values would be wrong
    it starts a thread or leaves a child process behind             a fork does not have them
    it opens a device, a socket, a pipe or a file to write          forks would share it
    it connects to another process                                  a rank would not do so again
    it changes what a script can see or sets for itself: signal     the script would find it changed
    handlers, environment, working directory, random state,         before its own first line
    torch's defaults, the root logger, locale, and the like

A variable that was not set may be added, as some packages do for themselves: the script finds it set
when it has imported them in any case. If the script's process had it with that value too, the module is
what set it there, and others may read it.

The innermost module that is executed at that moment is at fault. Modules that import it cannot be
preloaded either, so the import ends there, with an exception that is no `Exception`: code that does
without an optional module must not mistake it for one that is not installed. From then on the process
is of no use, but it goes on to find further modules at fault.

Nothing of the watch is left in a process in which no module was at fault: the patches are removed.
"""

from __future__ import annotations

import builtins
import fcntl
import gc
import importlib
import locale
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import ModuleType
from typing import Any

from holdfast import proc
from holdfast.worker.loaded_modules import digest

State = dict[str, object]

_LOADERS = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LONGEST_REASON = 120
_OF_C_LIBRARY = 1 << 31 | 1 << 32
_LOOKS_FOR_THREADS = 20
_BETWEEN_LOOKS_S = 0.002
_ENVIRON: Any = type(os.environ)


class ImportRefused(BaseException):
    """A module at fault is being imported."""


class ImportWatch:
    """A context in which imports are watched."""

    def __init__(self, refused: Collection[str], variables: Mapping[str, str]) -> None:
        self.at_fault: dict[str, str] = {}
        """Modules that must not be preloaded, and why."""
        self._refused = set(refused)
        self._variables = dict(variables)
        """Variables that must not be read, with the digests of their values in the script's process."""
        self._reads: list[tuple[str, str]] = []
        """Modules that have read one of them since the last check, and which."""
        self._looking = False
        self._running: list[str] = []
        """Modules that are being executed, the innermost last."""
        self._finder = _Finder(self)
        self._argv = _Arguments(self, sys.argv)
        self._state: State = {}
        self._environ = dict(os.environ)

    def refuses(self, name: str) -> bool:
        return name in self._refused

    def __enter__(self) -> ImportWatch:
        self._script_argv = sys.argv
        sys.argv = self._argv
        sys.meta_path.insert(0, self._finder)
        self._patch_environ()
        self._patch_connect()
        self._state = self._look()
        return self

    def __exit__(self, *_: object) -> None:
        sys.argv = self._script_argv
        sys.meta_path.remove(self._finder)
        _ENVIRON.__getitem__ = self._real_getitem
        del socket.socket.connect

    def _patch_environ(self) -> None:
        real = self._real_getitem = _ENVIRON.__getitem__

        def getitem(environ: Any, key: Any) -> Any:
            if key in self._variables and self._running and not self._looking:
                self._reads.append((self._running[-1], key))
            return real(environ, key)

        _ENVIRON.__getitem__ = getitem

    def _patch_connect(self) -> None:
        """Watch connections: Python's own class inherits `connect`, so that ours can be deleted."""

        def connect(connection: socket.socket, address: Any) -> None:
            self.blame("it connects to another process")
            super(socket.socket, connection).connect(address)

        socket.socket.connect = connect  # type: ignore[assignment, method-assign]

    # ---- importing ----

    def import_module(self, name: str) -> None:
        """Import a module and note who was at fault, the module itself if its import fails."""
        self._running = [name]
        try:
            importlib.import_module(name)
        except ImportRefused:
            pass
        except (
            BaseException
        ) as error:  # Also SystemExit: other people's code, in a process to spare.
            if not self.at_fault:
                self.blame(f"it cannot be imported ({type(error).__name__}: {error})")
        self.check()
        self._running = []

    @contextmanager
    def executing(self, name: str) -> Iterator[None]:
        """Watch the execution of one module."""
        self._refuse_if_at_fault(name)
        self.check()
        self._running.append(name)
        try:
            yield
        finally:
            self.check()
            self._running.pop()
        self._refuse_if_at_fault(name)

    def _refuse_if_at_fault(self, name: str) -> None:
        if name in self._refused:
            for importer in self._running:
                if importer != name:
                    self._note(importer, f"it imports {name}")
            raise ImportRefused(name)

    def check(self) -> None:
        """Blame the running module for what has changed, and others for what they have read."""
        self._looking = True
        before, self._state = self._state, self._look()
        self._check_environment()
        self._looking = False
        for what, value in self._state.items():
            if before[what] is not None and before[what] != value:
                self.blame(f"it changes {what}")
        reads, self._reads = self._reads, []
        for module, variable in reads:
            if variable in self._variables:
                self._note(module, f"it reads {variable}")

    def _check_environment(self) -> None:
        before, now = self._environ, dict(os.environ)
        for name, value in before.items():
            if now.get(name) != value:
                self.blame(f"it changes the environment variable {name}")
        for name in now.keys() - before.keys():
            if self._variables.get(name) == digest(now[name]):
                del self._variables[name]
        self._environ = now

    def blame(self, why: str) -> None:
        """Note that the innermost running module is at fault."""
        if self._running:
            self._note(self._running[-1], why)

    def _note(self, name: str, why: str) -> None:
        self.at_fault.setdefault(name, why[:_LONGEST_REASON])
        self._refused.add(name)

    # ---- what must not change ----

    def _look(self) -> State:
        """Return what imports must not change; None where there is nothing yet."""
        pid = os.getpid()
        return {
            "the threads": _threads(pid, self._state.get("the threads")),
            "the child processes": proc.children(pid),
            "open files": _open_files(),
            "the working directory": os.getcwd(),
            "signal handlers": [
                *map(signal.getsignal, signal.valid_signals()),
                *_masks(pid),
            ],
            "the root logger": _logging(),
            "the locale": locale.setlocale(locale.LC_ALL),
            "sys.path": list(sys.path),
            "sys.argv": sys.getrefcount(self._argv),
            "hooks of the interpreter": _hooks(),
            "multiprocessing's start method": _start_method(),
            "random numbers": _of_loaded("random", lambda random: random.getstate()),
            "numpy's random numbers": _of_loaded("numpy.random", _numpy_random),
            "numpy's error handling": _of_loaded("numpy", lambda numpy: numpy.geterr()),
            "torch's defaults": _of_loaded("torch", _torch),
        }


class _Arguments(list[str]):
    """The arguments of the process; whoever reads them is at fault."""

    def __init__(self, watch: ImportWatch, words: Sequence[str]) -> None:
        super().__init__(words)
        self._watch = watch

    def __getitem__(self, index: Any) -> Any:
        self._watch.blame("it reads sys.argv")
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self._watch.blame("it reads sys.argv")
        return super().__iter__()

    def __contains__(self, word: object) -> bool:
        self._watch.blame("it reads sys.argv")
        return super().__contains__(word)

    def __len__(self) -> int:
        self._watch.blame("it reads sys.argv")
        return super().__len__()


class _Finder(MetaPathFinder):
    """Import hook that finds nothing itself, and has the execution of each module watched."""

    def __init__(self, watch: ImportWatch) -> None:
        self._watch = watch

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)  # Old finders have none.
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if type(spec.loader) in _LOADERS:
                    self._extend(name, spec.loader)
                return spec
        return None

    def _extend(self, name: str, loader: Any) -> None:
        """Watch both steps of a load: an extension module may already act while it is created."""
        create, execute = loader.create_module, loader.exec_module

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            with self._watch.executing(name):
                module: ModuleType | None = create(spec)
                return module

        def exec_module(module: ModuleType) -> None:
            for method in ("create_module", "exec_module"):
                vars(loader).pop(method, None)  # Nothing is left for the module to see.
            with self._watch.executing(name):
                execute(module)

        loader.create_module, loader.exec_module = create_module, exec_module


def _threads(pid: int, before: object) -> object:
    """Return the number of threads that a fork leaves behind.

    Some libraries, as OpenBLAS, end their threads before a fork and start them again when needed. And
    the kernel may still have a thread that Python has already joined.
    """
    count = len(proc.threads(pid))
    if count == 1 or count == before:
        return count
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    looks = iter(range(_LOOKS_FOR_THREADS))
    while (count := len(proc.threads(pid))) not in (1, before) and next(looks, None) is not None:
        time.sleep(_BETWEEN_LOOKS_S)
    return count


def _open_files() -> set[tuple[int, str]]:
    """Return what is open beyond files that are only read."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            target, mode = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_mode
            reads = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        except OSError:  # The descriptor of the directory itself.
            continue
        if not (
            (reads and stat.S_ISREG(mode)) or stat.S_ISDIR(mode) or target in _HARMLESS_DEVICES
        ):
            found.add((fd, target))
    return found


def _masks(pid: int) -> list[int]:
    """Return the kernel's signal masks, which also tell of handlers in C code.

    Without the signals that the C library keeps to itself and handles once there is a thread.
    """
    return [int(mask or "0", 16) & ~_OF_C_LIBRARY for mask in proc.signal_masks(pid)]


def _logging() -> object:
    root = logging.root
    config = root.level, list(root.handlers), list(root.filters), root.disabled
    return config, root.manager.disable, logging.getLoggerClass(), logging.getLogRecordFactory()


def _hooks() -> object:
    streams = (sys.stdin, sys.stdout, sys.stderr)
    hooks = (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook)
    limits = (sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold())
    calls = (builtins.__import__, builtins.open, builtins.print, warnings.showwarning)
    return streams, hooks, limits, calls, sys.gettrace(), sys.getprofile()


def _start_method() -> object:
    context: Any = sys.modules.get("multiprocessing.context")
    return None if context is None else repr(context._default_context._actual_context)


def _of_loaded(name: str, state: Callable[[Any], object]) -> object:
    """Return the state of a module that is there; what comes later cannot have been changed."""
    module = sys.modules.get(name)
    return None if module is None else state(module)


def _numpy_random(random: Any) -> object:
    return random.get_state()[1].tobytes()


def _torch(torch: Any) -> object:
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.multiprocessing.get_sharing_strategy(),
        torch.cuda.is_initialized(),
        torch.get_rng_state().numpy().tobytes(),
    )
