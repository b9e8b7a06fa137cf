"""What `import holdfast` promises: names, laziness, documentation, and answers without a launcher."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_page import MADE_BY_USERS, PAGE, field_docs, methods, parameters, render

import holdfast
from holdfast.errors import HoldfastError, NotUnderHoldfast, UsageError
from holdfast.worker import runtime
from holdfast.worker.api import RankInfo

SURFACE = {
    *("Checkpointer", "ElasticTrainer", "KeepAll", "KeepEvery", "KeepLatest", "Ticket", "Result"),
    *("Finding", "RankInfo", "Tally", "__version__", "data", "errors"),
    *(
        "barrier",
        "evaluating",
        "exclude_this_node",
        "heartbeat",
        "is_active",
        "on_straggler",
        "progress",
    ),
    "inprocess",
    *("rank_info", "restarts", "round", "scale", "section", "stop_job", "store", "track", "vote"),
}
LAUNCHER = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
LAUNCHER += ["GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def test_the_public_names_are_these() -> None:
    assert set(holdfast.__all__) == SURFACE
    assert set(holdfast.__all__) == {n for n in dir(holdfast) if n[:2] != "__"} | {"__version__"}
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse(inspect.getsource(holdfast))
    (checking,) = (n for n in tree.body if isinstance(n, ast.If))
    aliases = [a for n in checking.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert {alias.asname for alias in aliases} == SURFACE - {"__version__"}


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Runtime'"):
        _ = holdfast.Runtime


def test_errors_are_reachable_without_importing_them() -> None:
    code = "import holdfast; print(holdfast.errors.HoldfastError.__name__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "HoldfastError\n"


def test_the_errors_are_drawn_as_they_are() -> None:
    """The tree at the top of errors.py has every class, below its base."""
    lines = [line for line in (holdfast.errors.__doc__ or "").splitlines() if line[:4] == "    "]
    stack: list[str] = []
    drawn = {}
    for line in lines:
        rest = line.lstrip(" │├└─")
        depth, name = (len(line) - len(rest) - 4) // 4, rest.split()[0]
        stack[depth:] = [name]
        drawn[name] = stack[depth - 1] if depth else "Exception"
    defined = inspect.getmembers(holdfast.errors, inspect.isclass)
    assert drawn == {name: cls.__mro__[1].__name__ for name, cls in defined}
    assert all(issubclass(cls, HoldfastError) for _, cls in defined)


# ---- documentation -------------------------------------------------------------------------------


def test_the_page_lists_what_there_is() -> None:
    assert PAGE.read_text() == render(), "run: python tests/api_page.py"


def documented() -> list[tuple[str, Any, str]]:
    """Public functions, methods and classes, each with the docstring that must explain it."""
    found: list[tuple[str, Any, str]] = []
    modules = {"data", "errors", "inprocess"}
    listed = {name: getattr(holdfast, name) for name in SURFACE - modules - {"__version__"}}
    listed |= {f"data.{name}": getattr(holdfast.data, name) for name in holdfast.data.__all__}
    names = set(holdfast.inprocess.__all__) - {"assignment"}
    listed |= {f"inprocess.{name}": getattr(holdfast.inprocess, name) for name in names}
    assignment = holdfast.inprocess.assignment
    functions = {name: getattr(assignment, name) for name in assignment.__all__}
    listed |= {
        f"inprocess.assignment.{name}": value
        for name, value in functions.items()
        if inspect.isfunction(value) or inspect.isclass(value)
    }
    for name, value in sorted(listed.items()):
        found.append((name, value, inspect.getdoc(value) or ""))
        if inspect.isclass(value):
            own = methods(value).items()
            found += [(f"{name}.{n}", method, inspect.getdoc(method) or "") for n, method in own]
    return found


@pytest.mark.parametrize(
    ("name", "value", "text"), documented(), ids=[name for name, _, _ in documented()]
)
def test_every_option_is_in_a_docstring(name: str, value: Any, text: str) -> None:
    assert text, f"{name} has no docstring"
    if inspect.isclass(value) and name not in MADE_BY_USERS:
        fields = field_docs(value)
        missing = [field for field, said in fields.items() if not said and f"`{field}`" not in text]
    else:
        missing = [p.name for p in parameters(value) if f"`{p.name}" not in text]
    assert not missing, f"the docstring of {name} does not explain {missing}"


# ---- without `holdfast run` ----------------------------------------------------------------------


def test_a_bare_process_is_rank_0_of_1() -> None:
    alone = RankInfo(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        node_count=1,
        round=0,
        restarts=0,
        run_id="",
        active=False,
    )
    assert holdfast.rank_info() == alone
    assert (holdfast.is_active(), holdfast.round(), holdfast.restarts()) == (False, 0, 0)


def test_under_another_launcher_ranks_are_that_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(zip(LAUNCHER, ["5", "1", "8", "4", "1", "2", "3", "run"], strict=True))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    info = holdfast.rank_info()
    assert (info.rank, info.local_rank, info.world_size, info.local_world_size) == (5, 1, 8, 4)
    assert (info.node_rank, info.node_count, info.run_id) == (1, 2, "run")
    assert (info.restarts, info.round, info.active) == (3, 0, False)


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK=first"):
        holdfast.rank_info()


def test_what_only_reports_does_nothing() -> None:
    holdfast.progress(3)
    holdfast.heartbeat()
    with holdfast.section("upload"), holdfast.evaluating():
        pass
    with pytest.raises(TypeError, match="integer from 0 on"):
        holdfast.progress(-1)


def test_what_needs_the_coordinator_says_so() -> None:
    calls = {
        "barrier": lambda: holdfast.barrier(),
        "vote": lambda: holdfast.vote("stop?", True),
        "store": lambda: holdfast.store(),
        "stop_job": lambda: holdfast.stop_job("converged"),
        "exclude_this_node": lambda: holdfast.exclude_this_node("hot"),
        "on_straggler": lambda: holdfast.on_straggler(print),
    }
    for name, call in calls.items():
        with pytest.raises(NotUnderHoldfast, match=rf"holdfast.{name}\(\)"):
            call()


# ---- in a worker ---------------------------------------------------------------------------------

WORKER = """
import json, os, socket, sys
import holdfast
from holdfast.shm.rank_page import RankPage, create_page
from holdfast.worker import runtime
from holdfast.worker.channel import Channel

_, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
page = RankPage(create_page())
runtime.install(runtime.Runtime(Channel(far.detach()), page, round=7))

def told():
    print(json.dumps([holdfast.is_active(), holdfast.round(), holdfast.rank_info().active]), flush=True)

told()
if os.fork() == 0:
    told()
    os._exit(0)
os.wait()
"""


def test_a_worker_is_active_and_what_it_forks_is_not() -> None:
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, check=True, env=env
    )
    worker, forked = map(json.loads, done.stdout.splitlines())
    assert worker == [True, 7, True]
    assert forked == [False, 7, False]


def test_this_process_has_no_runtime() -> None:
    """The tests above rest on that."""
    assert runtime.current() is None
    assert Path(holdfast.__file__).with_name("py.typed").exists()
