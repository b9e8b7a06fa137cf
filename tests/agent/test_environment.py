"""The environment of a rank is torchrun's, no more and no less."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.starting import node_environment, rank_environment
from holdfast.cli.flags import parse_run
from holdfast.config.settings import RunSettings
from holdfast.messages.records import Part
from holdfast.messages.units import Rank, RoundNumber

PART = Part(
    round=RoundNumber(4),
    first_rank=Rank(6),
    slots=2,
    group_rank=3,
    group_world_size=5,
    world_size=10,
    first_role_rank=4,
    role_size=6,
    store_address="10.0.0.7",
    store_port=12345,
    restarts=2,
    max_restarts=9,
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.touch()
    return path


def settings(script: Path, *flags: str) -> RunSettings:
    return parse_run([*flags, str(script)])


def environment(chosen: RunSettings, local_rank: int = 1, **environ: str) -> dict[str, str]:
    node = node_environment(chosen, environ)
    own = rank_environment(chosen, PART, local_rank, "run-7", Path("/e.json"), node)
    return {**node, **own}


def test_a_rank_has_torchruns_variables_and_no_others(script: Path) -> None:
    assert environment(settings(script, "--nproc-per-node", "2", "--role", "trainer")) == {
        "RANK": "7",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "3",
        "ROLE_RANK": "5",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "10",
        "GROUP_WORLD_SIZE": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "12345",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "9",
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/e.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def _torchruns_own_names() -> set[str]:
    """The keys of the dictionary that torchrun's agent gives a worker, read from its source."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "distributed/elastic/agent/server/local_elastic_agent.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "worker_env"
            and isinstance(node.value, ast.Dict)
        ):
            return {str(ast.literal_eval(key)) for key in node.value.keys if key is not None}
    raise AssertionError("torchrun does it differently now")


def test_nothing_that_this_torchs_torchrun_sets_is_missing(script: Path) -> None:
    ours = environment(settings(script))
    assert _torchruns_own_names() <= set(ours)


def test_one_rank_alone_keeps_its_threads(script: Path) -> None:
    assert "OMP_NUM_THREADS" not in environment(settings(script))


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"])
def test_what_the_user_set_is_kept(script: Path, name: str) -> None:
    chosen = settings(script, "--nproc-per-node", "2")
    assert environment(chosen, **{name: "5"})[name] == "5"


def test_what_torchrun_overwrites_is_overwritten(script: Path) -> None:
    assert environment(settings(script), RANK="99", WORLD_SIZE="99")["RANK"] == "7"


@pytest.mark.parametrize(
    ("visible", "device"), [({}, "1"), ({"CUDA_VISIBLE_DEVICES": "4, 6"}, "6")]
)
def test_a_virtual_local_rank_sees_one_device(
    script: Path, visible: dict[str, Any], device: str
) -> None:
    env = environment(settings(script, "--virtual-local-rank"), **visible)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", device)
