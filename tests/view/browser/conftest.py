"""One browser for all tests; for each test a fresh profile, and no error on its console.

Where chromium or playwright is missing the tests are skipped and say so; `make test-browser` installs
both.
Pictures of every view stay in `.browser/pictures` after a run, to be looked at.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.harness import Run

from .pretend import WEEK_S, PretendJob, PretendServer
from .sight import FLAGS, Sight

PICTURES = Path(__file__).parents[3] / ".browser" / "pictures"

TRAINER = """
    import os, time
    import torch
    import torch.distributed as dist
    import holdfast

    dist.init_process_group("gloo")
    net = torch.nn.Linear(16, 16)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    ckpt = holdfast.Checkpointer("ckpts", {"net": net}, memory_every=5, storage_every=50)
    step = ckpt.restore()
    while True:
        done = torch.tensor([float(os.path.exists("end"))])
        dist.all_reduce(done)
        if done > 0:
            break
        optim.zero_grad()
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optim.step()
        holdfast.progress(loss=loss)
        time.sleep(0.02)
        step += 1
        print("step", step, flush=True)
        ckpt.save(step)
"""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed; `make test-browser` installs it (as root)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed; `make test-browser` installs it"
    )
    PICTURES.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def sight(chromium: Any) -> Iterator[Sight]:
    """A window of 1440 × 900; errors on its console fail the test."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    sight = Sight(context.new_page(), PICTURES)
    yield sight
    context.close()
    assert sight.errors == []


@pytest.fixture
def phone(chromium: Any) -> Iterator[Sight]:
    """A phone of 390 × 844, touched with fingers; errors on its console fail the test."""
    context = chromium.new_context(
        viewport={"width": 390, "height": 844},
        device_scale_factor=2,
        has_touch=True,
        is_mobile=True,
        color_scheme="light",
    )
    sight = Sight(context.new_page(), PICTURES)
    yield sight
    context.close()
    assert sight.errors == []


@pytest.fixture
def small(sight: Sight) -> Iterator[PretendServer]:
    """A job of 32 ranks in which ranks are in every state that there is."""
    server = PretendServer(PretendJob("small", 4, 8, 7200.0, 9)).start()
    yield server
    sight.leave()
    server.stop()


@pytest.fixture
def giant(sight: Sight) -> Iterator[PretendServer]:
    """10,000 ranks, 1,000 incidents, 7 days."""
    server = PretendServer(PretendJob("giant", 1250, 8, WEEK_S, 1000)).start()
    yield server
    sight.leave()
    server.stop()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    run.env["OMP_NUM_THREADS"] = "1"
    yield run
    run.close()


@pytest.fixture
def trained(run: Run) -> Run:
    """A job of two ranks that has made its first steps."""
    run.start("--standby", "2", run.write(TRAINER))
    run.until_stepping()
    return run
