"""Both launchers run one script with the same flags; what it sees is compared by docs/torchrun.md."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torchrun_page import table

from .harness import Run

LOOK = r"""
    import json, os, signal, sys
    def status(name):
        lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
        return int(lines[name], 16)
    # Signals of crashes, and the one that asks a rank for its stacks, are Holdfast's to handle; the
    # C library keeps two to itself.
    watched = ~(0x4e8 | 3 << 31 | 1 << (signal.SIGRTMAX - 4))
    seen = {
        "environment": dict(os.environ),
        "arguments": sys.argv,
        "working directory": os.getcwd(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "umask": os.umask(0),
        "signal dispositions": [
            repr([signal.getsignal(n) for n in (2, 15, 1, 10, 13)]).split(" at 0x")[0],
            *(status(name) & watched for name in ("SigBlk", "SigIgn", "SigCgt")),
        ],
        "session": os.getsid(0) == os.getpid(),
    }
    with open(f"seen_{os.environ['RANK']}", "w") as file:
        json.dump(seen, file)
    print("loss 1"); print("fine"); print("warn 2", file=sys.stderr)
"""


@dataclass(frozen=True)
class Case:
    """Flags that both launchers get; as given: what they decide, where it may differ otherwise."""

    flags: list[str]
    words: list[str] = field(
        default_factory=lambda: ["train.py", "--lr", "1", "${local_rank}", "$$"]
    )
    env: dict[str, str] = field(default_factory=dict)
    as_given: tuple[str, ...] = ()
    all_teed: bool = False
    """Whether all that is shown is teed, so that torchrun has prefixes too."""


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def cases() -> dict[str, Case]:
    logs = ["--redirects", "0:1", "--tee", "1:3", "--log-dir", "logs", "--role", "trainer"]
    filters = ["--local-ranks-filter", "1", "--duplicate-stdout-filters", "loss"]
    return {
        "logs": Case(
            flags=["--standalone", "--nproc-per-node", "2", *logs, *filters],
            env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}|${rank}|"},
            all_teed=True,
        ),
        "static": Case(
            flags=[
                *("--master-addr", "localhost", "--master-port", free_port(), "--rdzv-id", "r7"),
                *("--virtual-local-rank", "--signals-to-handle", "SIGTERM,SIGUSR1"),
                *("--no-python",),
            ],
            words=[sys.executable, "train.py", "${local_rank}"],
            env={"PET_NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "4,6"},
            as_given=("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        ),
        "c10d": Case(
            flags=[
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
                *("--rdzv-id", "r8", "--max-restarts", "2", "--redirect", "3", "--module"),
            ],
            words=["train", "-x"],
            env={"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
            as_given=("TORCHELASTIC_RUN_ID",),
        ),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_a_rank_sees_what_it_would_see_under_torchrun(
    make_run: Callable[[], Run], name: str
) -> None:
    case = CASES[name]
    theirs, ours = make_run(), make_run()
    for run, who in ((theirs, "torchrun"), (ours, "holdfast")):
        launch(run, who, case)
        assert run.code() == 0
    seen = {run: [seen_by(run, rank) for rank in range(ranks(run))] for run in (theirs, ours)}
    assert len(seen[ours]) == len(seen[theirs]) >= 1
    for mine, other in zip(seen[ours], seen[theirs], strict=True):
        compare(mine, other, case)
    if case.all_teed:
        assert len(files(ours)) == 4
        assert sorted(ours.out.splitlines()) == sorted(theirs.out.splitlines()) != []
    assert files(ours) == files(theirs)


def launch(run: Run, who: str, case: Case) -> None:
    run.folder = run.folder / who
    run.folder.mkdir()
    run.write(LOOK)
    (run.folder / "typed").write_text("typed by the user")
    own = ["holdfast", "run", "--standby", "0"] if who == "holdfast" else ["torch.distributed.run"]
    with open(run.folder / "typed") as stdin:
        run.start_raw(
            [sys.executable, "-m", *own, *case.flags, *case.words],
            case.env,
            stdin=stdin,
            umask=0o027,
        )


def ranks(run: Run) -> int:
    return len(list(run.folder.glob("seen_*")))


def seen_by(run: Run, rank: int) -> dict[str, Any]:
    text = (run.folder / f"seen_{rank}").read_text()
    here = {str(run.folder): "FOLDER", str(run.home): "HOME", run.marker: "MARKER"}
    for path, name in here.items():
        text = text.replace(path, name)
    seen: dict[str, Any] = json.loads(text)
    return seen


def compare(ours: dict[str, Any], theirs: dict[str, Any], case: Case) -> None:
    """Assert that all is the same that the tables say is."""
    process = table("The process of a rank")
    for what in theirs.keys() - {"environment"}:
        assert process[what] == "same"
        assert ours[what] == theirs[what], what
    verdicts = table("Variables that ranks get")
    mine, other = ours["environment"], theirs["environment"]
    assert set(mine) == set(other)
    for name, value in other.items():
        if verdicts.get(name, "same") == "same" or name in case.as_given:
            assert mine[name] == value, name


def files(run: Run) -> dict[str, str]:
    """The files in torchrun's layout, by their path below the directory of the run."""
    found = [path for path in run.folder.glob("logs/*/attempt_*/**/*") if path.is_file()]
    return {"/".join(path.relative_to(run.folder).parts[2:]): path.read_text() for path in found}
