"""A rank handed to a standby cannot tell: everything is as in a fresh `python train.py`.

One script looks at all it can see of its process and writes that down. It is run by plain python, as
a rank of the first round, and as a rank that a standby took over; the three must agree. So they must if
the standby had imported not only torch but what else the script does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Run
from .test_preloading import until_better_standbys

LOOK = r"""
    import sys
    _main = sorted(vars(sys.modules["__main__"]))
    import gc
    seen = {
        "main": _main,
        "name": __name__, "file": __file__, "doc": __doc__, "package": __package__,
        "spec": repr(__spec__), "loader": type(__loader__).__name__, "cached": repr(__cached__)
        if "__cached__" in globals() else "none",
        "builtins": repr(__builtins__), "annotations": __annotations__,
        "argv": sys.argv, "path": sys.path, "flags": repr(sys.flags), "orig_argv": sys.orig_argv,
        "executable": sys.executable, "prefix": sys.prefix, "warnoptions": sys.warnoptions,
        "recursion_limit": sys.getrecursionlimit(), "switch_interval": sys.getswitchinterval(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "displayhook": sys.displayhook is sys.__displayhook__,
        "trace": repr((sys.gettrace(), sys.getprofile())),
        "asyncgen_hooks": repr(sys.get_asyncgen_hooks()),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug(),
               len(gc.callbacks)],
    }
    import asyncio, json, locale, logging, multiprocessing
    import os, random, resource, signal, stat, threading, warnings
    def threads():
        # Threads of the process; the one that beats for Holdfast names itself, and is not the script's.
        tasks = os.listdir("/proc/self/task")
        names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
        if os.environ["SEEN"] != "plain" and "holdfast-beat" not in names:
            return None
        return len([name for name in names if name != "holdfast-beat"])
    def tasks():
        while (count := threads()) is None:
            os.sched_yield()
        return count
    def kind(fd):
        mode = os.fstat(fd).st_mode
        return next(n for n in ("ISREG ISCHR ISFIFO ISSOCK ISDIR").split()
                    if getattr(stat, "S_" + n)(mode))
    def status(*names):
        lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
        return {name: lines[name].strip() for name in names}
    seen |= {
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "handlers": {n.name: repr(signal.getsignal(n)).split(" at 0x")[0]
                     for n in signal.valid_signals() if isinstance(n, signal.Signals)},
        # Without the two signals that the C library keeps to itself, the one by which a rank is asked
        # for its stacks where nobody else may look at them, and those of crashes, whose line it notes.
        "signals": {k: hex(int(v, 16) & ~(3 << 31) & ~(1 << (signal.SIGRTMAX - 4)) & ~0x4e8)
                    for k, v in status("SigBlk", "SigIgn", "SigCgt").items()},
        "wakeup_fd": signal.set_wakeup_fd(-1),
        "timers": [signal.getitimer(n) for n in (0, 1, 2)],
        "limits": {name: resource.getrlimit(getattr(resource, name))
                   for name in dir(resource) if name.startswith("RLIMIT_")},
        "nice": os.nice(0), "policy": os.sched_getscheduler(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "umask": os.umask(0o22),
        "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
        "no_new_privs": status("NoNewPrivs", "Seccomp", "CapEff"),
        "fds": sorted((fd, kind(fd)) for fd in map(int, os.listdir("/proc/self/fd"))
                      if os.path.exists(f"/proc/self/fd/{fd}") and fd < 1000),
        "cloexec": [os.get_inheritable(fd) for fd in (0, 1, 2)],
        "streams": {name: [s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode,
                           s.newlines, s.isatty(), s.seekable(), s.readable(), s.writable(),
                           s.closed, type(s.buffer).__name__, s is getattr(sys, f"__{name}__")]
                    for name in ("stdin", "stdout", "stderr") for s in [getattr(sys, name)]},
        "stdin": sys.stdin.read(),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False),
                   sys.getfilesystemencoding()],
        "threads": [t.name for t in threading.enumerate()],
        "main_thread": threading.main_thread().ident == threading.get_ident()
                       and threading.get_native_id() == os.getpid(),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "logging": [logging.root.level, repr(logging.root.handlers), logging.root.disabled],
        "no_loop": repr(asyncio._get_running_loop()),
        "leads_its_group": os.getpgid(0) == os.getpid(),
        "oom_score_adj": open("/proc/self/oom_score_adj").read(),
        "comm": open("/proc/self/comm").read(),
        "cmdline_ends": open("/proc/self/cmdline").read().split("\0")[-len(sys.argv) - 1:],
    }
    import numpy, torch
    import torch.distributed, torch.optim
    seen |= {
        "tasks": tasks() if os.environ.get("OMP_NUM_THREADS") else "",
        # Torch's optimizers import sympy, so a rehearsal does, and restores the filters afterwards.
        "warnings": sorted(repr(f) for f in warnings.filters if "sympy" not in repr(f)),
        "torch_rng_is_untouched": torch.equal(
            torch.get_rng_state(), torch.Generator().manual_seed(torch.initial_seed()).get_state()),
        "torch_threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch_defaults": repr([torch.get_default_dtype(), torch.get_default_device(),
                                torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
                                torch.are_deterministic_algorithms_enabled(),
                                torch.is_autocast_enabled("cpu"),
                                torch.autograd.is_multithreading_enabled()]),
        "numpy_errors": numpy.geterr(), "numpy_print": repr(numpy.get_printoptions()),
    }
    numpy.ones((512, 512)) @ numpy.ones((512, 512))
    torch.ones(512, 512) @ torch.ones(512, 512)
    seen["tasks_after_work"] = tasks()
    own = {"torch": torch.rand(1).item(), "seed": torch.initial_seed(),
           "python": random.random(), "gaussian": random.gauss(0, 1),
           "numpy": float(numpy.random.random()),
           "default_rng": float(numpy.random.default_rng().random())}
    name = os.environ["SEEN"] + os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    rank = os.environ.get("RANK", "0")
    with open(f"{name}.{rank}.new", "w") as file:
        json.dump({"seen": seen, "own": own}, file, default=repr)
    os.rename(f"{name}.{rank}.new", f"{name}.{rank}.json")

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    import time
    while os.environ["SEEN"] != "plain" and not os.path.exists("end"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.005)
"""

GIVEN_BY_LAUNCHER = [
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "SEEN",
]

PRELOADED = ", torch._inductor.compile_fx, torch.distributed.checkpoint, sqlite3"
"""What a script may import beside torch, so much that standbys do so too."""

WHO = ("plain", "first", "standby")
Views = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def views(request: pytest.FixtureRequest) -> Iterator[Views]:
    """What the script saw each time, with that many ranks.

    The launcher sets OMP_NUM_THREADS for several ranks, so plain python gets it too; a lone rank may
    have as many threads as there are processors.
    """
    ranks, more = request.param
    yield from _views(ranks, {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}, more)


def _views(nproc: int, env: dict[str, str], more: str) -> Iterator[Views]:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        try:
            yield _look(run, nproc, env, more)
        except BaseException:
            print(run.story())
            raise
        finally:
            run.close()


def _look(run: Run, nproc: int, env: dict[str, str], more: str) -> Views:
    (run.folder / "sub").mkdir()
    script = run.write(
        LOOK.replace("import numpy, torch\n", f"import numpy, torch{more}\n"), "sub/train.py"
    )
    words = [script, "--flag", "a b"]
    # Under the launcher the streams are pipes as well, and the process leads its own session.
    with open(run.folder / "plain.log", "wb") as log:
        plain = subprocess.Popen(
            [sys.executable, "-u", *words],
            cwd=run.folder,
            env={**run.env, **env, "SEEN": "plain"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        _, said = plain.communicate(timeout=200)
        log.write(said)
    assert plain.returncode == 0, said.decode()
    nothing, writer = os.pipe()
    os.close(writer)
    try:
        run.start(*words, nproc=nproc, env={"SEEN": "holdfast"}, stdin=nothing)
        run.until_stepping()
        run.until_standbys(nproc)
        if more:
            until_better_standbys(run, nproc)
        run.kill_rank(0)
        run.until_stepping(round=2)
        run.end()
        assert run.code() == 0
    finally:
        os.close(nothing)
    run.assert_nobody_left()
    names = {"plain": ["plain"], "first": ["holdfast0"] * nproc, "standby": ["holdfast1"] * nproc}
    return {
        who: [
            json.loads((run.folder / f"{name}.{rank}.json").read_text())
            for rank, name in enumerate(files)
        ]
        for who, files in names.items()
    }


def _differences(views: Views, who: str) -> set[str]:
    """What is not as in plain python, one line for each thing."""
    plain = _flat(views["plain"][0]["seen"])
    found = set()
    for rank in views[who]:
        seen = _flat(rank["seen"])
        for key in sorted(plain.keys() | seen.keys()):
            if seen.get(key) != plain.get(key):
                found.add(f"{key}: {plain.get(key)!r} in plain python, {seen.get(key)!r} here")
    return found


def _flat(seen: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for key, value in seen.items():
        if isinstance(value, dict):
            flat |= {f"{key} {name}": part for name, part in value.items()}
        else:
            flat[key] = value
    return {k: v for k, v in flat.items() if k.removeprefix("environ ") not in GIVEN_BY_LAUNCHER}


@pytest.mark.parametrize(
    "views",
    [(1, ""), (2, ""), (2, PRELOADED)],
    indirect=True,
    ids=["one rank", "two ranks", "preloaded"],
)
def test_a_rank_sees_what_a_fresh_python_would_see(views: Views) -> None:
    found = [*_differences(views, "first"), *_differences(views, "standby")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "views", [(2, ""), (2, PRELOADED)], indirect=True, ids=["two ranks", "preloaded"]
)
def test_no_two_processes_draw_the_same_random_numbers(views: Views) -> None:
    draws = [draw for who in WHO for rank in views[who] for draw in rank["own"].values()]
    assert len(set(draws)) == len(draws)
