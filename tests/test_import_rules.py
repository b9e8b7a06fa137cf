"""The shape of the code: who may import whom, and what a command may cost.

The table is the design's layout. A rule names a part of the package and all that it may import of
ours; parts that are not in the table do not exist.
"""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "holdfast"

LEAVES = {"collecting", "errors", "kernel", "lazy_names", "proc", "sockets", "terminal_line"}
"""Modules that import nothing of ours; anybody may import them."""

SHELLS = {"coordinator", "agent", "worker", "launch"}

TOOLS = {"wire", "shm", "config", "clock", "cgroups", "jobhome", "tasks"}
"""Small parts that shells are made of."""

RULES: dict[str, set[str]] = {
    "collecting": set(),
    "errors": set(),
    "kernel": set(),
    "lazy_names": set(),
    "proc": set(),
    "sockets": set(),
    "terminal_line": set(),
    "messages": set(),
    "core": {"messages", "errors"},
    "wire": {"messages", "errors", "config", "jobhome"},
    "shm": {"kernel", "messages"},
    "cgroups": set(),
    "clock": {"messages"},
    "tasks": {"messages"},
    "config": {"errors", "messages", "wire"},
    "jobhome": {"errors", "config"},
    "coordinator": {"messages", "core", "diagnosis", *LEAVES, *TOOLS},
    "agent": {
        "messages",
        "core",
        "checkpoint",
        "diagnosis",
        "health",
        "platforms",
        *LEAVES,
        *TOOLS,
    },
    "worker": {
        *("messages", "core", "checkpoint", "data", "diagnosis", "inprocess"),
        *LEAVES,
        *TOOLS,
    },
    "launch": {
        *("coordinator", "agent", "checkpoint", "messages", "core", "platforms", "view"),
        *LEAVES,
        *TOOLS,
    },
    # Each engine's supplier is a client of the coordinator.
    "platforms": {"messages", *LEAVES, *TOOLS},
    # A script without a coordinator runs the core's commit protocol itself.
    "checkpoint": {"messages", "core", *LEAVES, *TOOLS},
    # For scripts: the worker gives it a link to the agent.
    "data": {"messages", *LEAVES},
    "inprocess": {"messages", "checkpoint", "diagnosis", *LEAVES},
    "health": {"messages", *LEAVES, *TOOLS},
    "diagnosis": {"messages", "core", "cgroups", *LEAVES},
    # The simulated coordinator is restarted from the real journal, the agents' supervisor is real.
    "sim": {"coordinator", "agent", "core", "messages", "clock", "shm", *LEAVES},
    # Viewers replay the journal through the core, and ask a coordinator what a visitor may ask.
    "view": {"messages", "core", "coordinator", *LEAVES, *TOOLS},
    # The commands that look at a job read its journal; nothing else of a shell is theirs to use.
    "cli": {
        *("launch", "coordinator", "sim", "core", "messages", "view"),
        *("checkpoint", "diagnosis", "health", "platforms"),
        # An audit translates positions into records.
        "data",
        *LEAVES,
        *TOOLS,
    },
    "__main__": {"cli"},
    # The public API is the worker's, and imported only when it is used.
    "__init__": {"worker", "checkpoint", "data", "inprocess", "messages", "errors", "lazy_names"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: "core", "framing", ..."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_by(path: Path) -> set[str]:
    """All modules of ours that a file imports, wherever in it, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("holdfast.")}


def parts_imported_by(path: Path) -> set[str]:
    names = {name.split(".")[1] for name in imported_by(path)}
    known = {part_of(module) for module in MODULES}
    return {name for name in names if name in known}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    part = part_of(path)
    assert part in RULES, f"{part} has no rule: say in RULES what it may import"
    forbidden = parts_imported_by(path) - RULES[part] - {part}
    assert not forbidden, f"{path.relative_to(PACKAGE)} imports {sorted(forbidden)}"


def test_nothing_but_the_command_line_and_the_launcher_may_import_a_shell() -> None:
    may = {part for part, allowed in RULES.items() if allowed & (SHELLS - {part})}
    assert may == {"cli", "launch", "sim", "view", "__init__"}


def test_viewers_are_leaves() -> None:
    assert {part for part, allowed in RULES.items() if "view" in allowed} <= {"cli", "launch"}


OF_SHELLS = {
    # A viewer that crashes must not take anything of the job with it: it only reads.
    "view": {"holdfast.coordinator.journal"},
    "cli": {"holdfast.coordinator.journal", "holdfast.coordinator.main"},
    "sim": {
        "holdfast.coordinator.admission",
        "holdfast.coordinator.journal",
        "holdfast.agent.function",
        "holdfast.agent.life",
        "holdfast.agent.node_sampler",
        "holdfast.agent.processes",
        "holdfast.agent.requests",
        "holdfast.agent.shards",
        "holdfast.agent.contention",
        "holdfast.agent.supervisor",
        "holdfast.agent.worker",
        "holdfast.agent.worker_monitor",
    },
}


@pytest.mark.parametrize("part", OF_SHELLS)
def test_of_a_shell_others_import_only_what_is_named_here(part: str) -> None:
    for path in MODULES:
        if part_of(path) == part:
            shells = {n for n in imported_by(path) if n.split(".")[1] in SHELLS - {"launch"}}
            modules = {name for name in shells if name.count(".") == 2}
            assert modules <= OF_SHELLS[part], path


@pytest.mark.parametrize("part", ["core", "messages"])
def test_what_decides_knows_no_clock_no_chance_and_no_outside(part: str) -> None:
    outside = {"os", "time", "random", "socket", "asyncio", "threading", "subprocess", "torch"}
    for path in MODULES:
        if part_of(path) == part:
            for node in ast.walk(ast.parse(path.read_text())):
                names = set()
                if isinstance(node, ast.Import):
                    names = {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names = {(node.module or "").split(".")[0]}
                assert not names & outside, f"{path.name} imports {names & outside}"


# ---- what a start costs ----


def modules_after(code: str) -> set[str]:
    report = "\nimport sys\nprint('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code + report],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return set(done.stdout.rpartition("MODULES ")[2].split())


HELPS = [["--help"], ["run", "--help"], ["config", "--help"]]


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
from holdfast.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
"""
    heavy = {"torch", "numpy", "msgspec", "asyncio", "sqlite3", "rich", "ssl"}
    assert not modules_after(code) & heavy


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_costs_little_more_than_to_start_python(arguments: list[str]) -> None:
    pairs = [(cpu_s("-c", "pass"), cpu_s("-m", "holdfast", *arguments)) for _ in range(5)]
    bare, helped = (min(costs) for costs in zip(*pairs, strict=True))
    assert helped < 8 * bare


def cpu_s(*words: str) -> float:
    """What a run of Python costs: the CPU's time and not the wall's, as the machine may be busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.DEVNULL,
        timeout=200,
        check=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "module", ["launch.process", "agent.main", "coordinator.main", "cli.run", "cli.status"]
)
def test_nobody_but_a_worker_imports_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import holdfast.{module}")


def test_importing_holdfast_imports_none_of_it() -> None:
    found = {m for m in modules_after("import holdfast") if m.startswith("holdfast.")}
    assert found == {"holdfast.lazy_names"}
