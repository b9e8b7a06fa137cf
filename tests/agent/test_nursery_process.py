"""A nursery that somebody else's module harms is thrown away, and the module is known."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from holdfast.agent import nursery_process
from holdfast.agent.nursery_process import Nursery, NurseryTerms
from holdfast.agent.processes import Exit, ProcessTable
from holdfast.messages.local import UNFIT, ImportPlan

LIMIT_S = 60.0


def outcome(folder: Path, *modules: str) -> tuple[Exit | None, Nursery]:
    """How a nursery that imports these modules ended, or None if it became warm."""
    (folder / "torch.py").write_text("raise ImportError('this test goes without torch')\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HOLDFAST_FIRST_PATH": str(folder),
    }

    async def scenario() -> tuple[Exit | None, Nursery]:
        known: asyncio.Future[Exit | None] = asyncio.get_running_loop().create_future()
        gone = asyncio.Event()

        def exited(_: Nursery, end: Exit) -> None:
            gone.set()
            if not known.done():
                known.set_result(end)

        command = [sys.executable, "-u", "-m", "holdfast.worker", "train.py"]
        nursery = Nursery(
            NurseryTerms(ProcessTable(), command, env, folder / "nursery.log"),
            ImportPlan(modules, (), {"RANK": ""}, 1 << 40),
            eager=True,
            on_warm=lambda _: known.set_result(None),
            on_exit=exited,
            keep=lambda _: None,
        )
        try:
            return await asyncio.wait_for(known, LIMIT_S), nursery
        finally:
            nursery.kill()
            await gone.wait()

    return asyncio.run(scenario())


def test_a_list_without_fault_makes_a_warm_nursery(tmp_path: Path) -> None:
    (tmp_path / "well.py").write_text("")
    end, nursery = outcome(tmp_path, "well", "json")
    assert end is None
    assert nursery.warm is not None
    assert nursery.unfit == {}


def test_a_nursery_that_is_unfit_says_why_and_ends(tmp_path: Path) -> None:
    (tmp_path / "ill.py").write_text("import os\nrank = os.environ.get('RANK')")
    (tmp_path / "importer.py").write_text("import ill")
    end, nursery = outcome(tmp_path, "importer", "ill", "json")
    assert end == Exit(code=UNFIT)
    assert nursery.unfit == {"ill": "it reads RANK", "importer": "it imports ill"}


@pytest.mark.parametrize("way", ["os.abort()", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_module_whose_import_ends_the_process_is_known(tmp_path: Path, way: str) -> None:
    (tmp_path / "well.py").write_text("")
    (tmp_path / "ill.py").write_text(f"import os\n{way}")
    _, nursery = outcome(tmp_path, "well", "ill", "json")
    assert nursery.unfit == {"ill": "its import ended the process"}


def test_a_module_whose_import_hangs_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery_process, "LOOK_EVERY_S", 0.3)
    (tmp_path / "ill.py").write_text("import threading\nthreading.Event().wait()")
    _, nursery = outcome(tmp_path, "ill")
    assert nursery.unfit == {"ill": "its import hangs"}


def test_a_module_that_works_for_long_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery_process, "LOOK_EVERY_S", 0.3)
    monkeypatch.setattr(nursery_process, "WORKS_S", 0.0)
    (tmp_path / "busy.py").write_text("import time\nwhile time.process_time() < 1.5: pass")
    end, nursery = outcome(tmp_path, "busy")
    assert end is None, nursery.unfit
