"""Runs the user's program as `python train.py` would.

The script must not notice that the process existed before: `__main__`, `sys.argv`, `sys.path`, the
traceback of an exception and the exit status are those of a process of its own.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable

from holdfast.diagnosis.exceptions import describe, users_part
from holdfast.messages.local import Entry
from holdfast.messages.records import Raised


def run(entry: Entry, argv: list[str], died: Callable[[Raised], object]) -> int:
    """Run the program `argv` and return its exit status; report an exception before printing it."""
    try:
        _enter(entry, argv)
        return 0
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _print(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    except BaseException as error:  # The edge of the process: Python itself would end here.
        died(describe(error))
        _print(error)
        return 1


def _enter(entry: Entry, argv: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    script = argv[0]
    sys.argv = list(argv)
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if entry == "module" else []), *argv]
    if entry == "module":
        set_first_path(os.getcwd())
        runpy._run_module_as_main(script)  # type: ignore[attr-defined]
    elif entry == "path":
        runpy.run_path(script, run_name="__main__")
    else:
        set_first_path(os.path.dirname(os.path.realpath(script)))
        _exec_file(_absolute(script), main)


def set_first_path(path: str) -> None:
    """Set the `sys.path` entry that Python adds itself, except in safe-path mode."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = path


def _absolute(path: str) -> str:
    """Return a script's name as Python has it in `__file__` and tracebacks."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path.removeprefix("./"))


def _exec_file(path: str, main: types.ModuleType) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _print(error: BaseException) -> None:
    tb = users_part(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(tb), tb)
