"""Standbys have imported what the script imports: what its first life loaded, the next need not load.

A package that counts as installed, in a virtual environment of the test, writes down each process that
executes it; so it is known who had to import it, and who found it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from .harness import TRAINER, Run, wait_for

PACKAGE = """
import os, time
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{os.getpid()}\\n")
began = time.process_time()
while time.process_time() - began < 1.0:
    pass
"""
"""Takes a second of CPU time to import, and notes who did."""


def installed(run: Run, name: str, text: str = PACKAGE) -> dict[str, str]:
    """The environment in which this package is installed beside everything that this Python has."""
    root = run.folder / "venv"
    if not root.exists():
        venv.create(root, symlinks=True)
    (packages,) = root.glob("lib/python3*/site-packages")
    (packages / f"{name}.py").write_text(text)
    others = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in others]
    (packages / "others.pth").write_text("\n".join(lines) + "\n")
    return {"PYTHON_EXEC": str(root / "bin" / "python"), "IMPORTED": str(run.folder / "imported")}


def importers(run: Run) -> list[int]:
    """The processes that have executed the package."""
    path = run.folder / "imported"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def until_better_standbys(run: Run, count: int) -> list[int]:
    """Wait until the standbys of the first nursery are all replaced; the pids of the new ones.

    There are never fewer meanwhile.
    """
    run.until_standbys(count)
    wait_for((run.job_home / "imports.json").exists, "a nursery that has imported the package")

    def replaced() -> list[int]:
        nursery, found = run.nursery(), run.standbys()
        # A look takes a while: in one, all may have gone that were there, and others come.
        assert len(found) >= count or len(run.standbys()) >= count
        with contextlib.suppress(ProcessLookupError):
            own = [pid for pid in found if os.getpgid(pid) == nursery]
            return found if len(own) == len(found) >= count else []
        return []

    return wait_for(replaced, "standbys of the second nursery")


def test_a_rank_that_comes_back_finds_the_scripts_packages_imported(run: Run) -> None:
    env = installed(run, "slow_package")
    script = "    import slow_package\n" + TRAINER
    run.train("--standby", "2", script=script, env=env)
    run.until_stepping()
    first = importers(run)
    assert sorted(first) == sorted(run.rank_pid(rank) for rank in (0, 1))
    standbys = until_better_standbys(run, 2)
    before = importers(run)
    assert len(before) == 3, "the second nursery, once"
    run.kill_rank(0)
    run.until_stepping(round=2)
    assert importers(run) == before
    assert {run.rank_pid(rank) for rank in (0, 1)} == set(standbys)
    run.end()
    assert run.code() == 0


def test_a_job_that_is_queued_again_has_them_from_the_start(make_run: Callable[[], Run]) -> None:
    first = make_run()
    env = installed(first, "slow_package")
    script = "    import slow_package\n" + TRAINER
    first.train("--standby", "2", script=script, env=env, job="again")
    first.job = "again"
    first.job_home = first.home / "jobs" / "again"
    first.until_stepping()
    until_better_standbys(first, 2)
    first.end()
    assert first.code() == 0
    (first.folder / "end").unlink()
    (first.folder / "imported").unlink()

    second = make_run()
    second.job = "again"
    second.job_home = second.home / "jobs" / "again"
    second.train("--standby", "2", script=script, env=env, job="again")
    second.until_stepping()
    assert importers(second) == [second.nursery()]
    second.end()
    assert second.code() == 0


def test_the_users_own_files_are_imported_by_their_ranks_alone(run: Run) -> None:
    env = installed(
        run,
        "slow_package",
        "import time\nbegan = time.process_time()\nwhile time.process_time() - began < 1.0: pass\n",
    )
    run.write(PACKAGE, "own_module.py")
    run.train("--standby", "2", script="    import slow_package, own_module\n" + TRAINER, env=env)
    run.until_stepping()
    until_better_standbys(run, 2)
    assert len(importers(run)) == 2
    run.kill_rank(1)
    run.until_stepping(round=2)
    assert len(importers(run)) == 4
    run.end()
    assert run.code() == 0


def test_a_package_that_reads_its_rank_is_imported_by_the_ranks_alone(run: Run) -> None:
    env = installed(run, "slow_package", PACKAGE + "rank = int(os.environ.get('RANK', -1))\n")
    env |= installed(run, "good_package")
    script = """
    import slow_package, good_package
    with open(f"rank_{slow_package.rank}", "a") as file:
        print("here", file=file)
    """
    run.train("--standby", "2", script=script + TRAINER, env=env)
    run.until_stepping()
    until_better_standbys(run, 2)
    run.kill_rank(1)
    run.until_stepping(round=2)
    assert {path.name for path in Path(run.folder).glob("rank_*")} == {"rank_0", "rank_1"}
    known = json.loads((run.job_home / "imports.json").read_text())
    assert known["refused"] == {"slow_package": "it reads RANK"}
    run.end()
    assert run.code() == 0


def test_a_rank_that_comes_back_finds_what_it_uses_of_holdfast_imported(run: Run) -> None:
    script = """
    import sys  # The word torch has the nursery import before it forks.
    before = "holdfast.data.order" in sys.modules, "holdfast.data.client" in sys.modules
    from holdfast.data import Order
    with open("before", "a") as file:
        print(*before, file=file)
    """
    run.train("--standby", "2", script=script + TRAINER)
    run.until_stepping()
    run.until_standbys(2)
    (run.folder / "before").unlink()
    run.kill_rank(0)
    run.until_stepping(round=2)
    told = (run.folder / "before").read_text().split("\n")
    assert set(told) - {""} == {"True False"}


PLAIN = """
    import sys
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        torch.autograd.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    print("imported:", "torch._" "dynamo" in sys.modules)
"""


def test_a_script_that_does_not_compile_never_imports_the_compiler(run: Run) -> None:
    run.start(run.write(PLAIN), nproc=1)
    assert run.code() == 0
    assert "imported: False" in run.out


def test_a_script_that_compiles_without_a_hint_in_its_text_gets_the_compiler(run: Run) -> None:
    more = """
    getattr(torch, "com" "pile")(step, backend="eager")()
    print("then:", "torch._" "dynamo" in sys.modules)
    """
    run.start(run.write(PLAIN + more), nproc=1)
    assert run.code() == 0
    assert "imported: False" in run.out
    assert "then: True" in run.out
