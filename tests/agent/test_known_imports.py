"""What standbys import is learnt, proven and kept, and only used where it was learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.agent.known_imports import MOST_TRIES, RANK_VARIABLES, KnownImports
from holdfast.agent.starting import rank_environment
from holdfast.cli.flags import parse_run
from holdfast.config.settings import RunSettings
from holdfast.messages.local import ImportPlan, Loaded
from holdfast.messages.records import Part
from holdfast.messages.units import Rank, RoundNumber

PYTHON = "/usr/bin/python3"


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    (tmp_path / "train.py").write_text("import transformers\n")
    return parse_run([str(tmp_path / "train.py")])


def loaded(*modules: str, **variables: str) -> Loaded:
    return Loaded(modules=modules, variables=variables)


def modules(known: KnownImports) -> tuple[str, ...]:
    return known.plan(1 << 30).modules


def test_what_is_learnt_keeps_its_order_and_is_not_learnt_twice(
    tmp_path: Path, settings: RunSettings
) -> None:
    known = KnownImports(tmp_path / "imports.json", settings, PYTHON)
    assert modules(known) == ()
    known.learn(loaded("transformers", "accelerate"))
    known.learn(loaded("safetensors", "transformers", HF_HOME="digest"))
    plan = known.plan(7)
    assert plan.modules == ("transformers", "accelerate", "safetensors")
    assert plan.most_bytes == 7
    assert plan.variables["HF_HOME"] == "digest"
    assert plan.variables["RANK"] == ""


def test_a_module_at_fault_is_left_out_for_good(tmp_path: Path, settings: RunSettings) -> None:
    known = KnownImports(tmp_path / "imports.json", settings, PYTHON)
    known.learn(loaded("good", "bad"))
    known.refuse({"bad": "it reads RANK"})
    known.learn(loaded("bad"))
    assert known.plan(0).modules == ("good",)
    assert known.plan(0).refused == ("bad",)


def test_after_some_tries_in_vain_nothing_is_preloaded_until_there_is_news(
    tmp_path: Path, settings: RunSettings
) -> None:
    known = KnownImports(tmp_path / "imports.json", settings, PYTHON)
    known.learn(loaded(*map(str, range(20))))
    for number in range(MOST_TRIES):
        known.refuse({str(number): "it hangs"})
    assert known.plan(0) == ImportPlan()
    known.learn(loaded("news"))
    assert "news" in modules(known)


def test_a_later_agent_starts_from_what_has_worked_and_from_nothing_else(
    tmp_path: Path, settings: RunSettings
) -> None:
    path = tmp_path / "imports.json"
    known = KnownImports(path, settings, PYTHON)
    known.learn(loaded("good", "bad"))
    assert modules(KnownImports(path, settings, PYTHON)) == ()
    known.refuse({"bad": "it hangs"})
    known.remember()
    later = KnownImports(path, settings, PYTHON)
    assert later.plan(0) == known.plan(0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_script_or_environment_starts_afresh(
    tmp_path: Path, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "imports.json"
    known = KnownImports(path, settings, PYTHON)
    known.learn(loaded("good"))
    known.remember()
    others = replace(settings, script_args=("--other",))
    assert modules(KnownImports(path, others, PYTHON)) == ()
    assert modules(KnownImports(path, settings, "/opt/python")) == ()
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", "/elsewhere")
        assert modules(KnownImports(path, settings, PYTHON)) == ()
    assert modules(KnownImports(path, settings, PYTHON)) == ("good",)
    Path(settings.script).write_text("import lightning\n")
    assert modules(KnownImports(path, settings, PYTHON)) == ()


def test_a_package_that_was_installed_since_makes_a_new_environment(
    tmp_path: Path, settings: RunSettings
) -> None:
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    python, path = str(tmp_path / "venv" / "bin" / "python"), tmp_path / "imports.json"
    known = KnownImports(path, settings, python)
    known.learn(loaded("good"))
    known.remember()
    assert modules(KnownImports(path, settings, python)) == ("good",)
    (packages / "more").mkdir()
    assert modules(KnownImports(path, settings, python)) == ()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": 3}'])
def test_a_damaged_file_is_learnt_again(
    tmp_path: Path, settings: RunSettings, content: bytes
) -> None:
    path = tmp_path / "imports.json"
    path.write_bytes(content)
    assert modules(KnownImports(path, settings, PYTHON)) == ()


def test_every_variable_of_a_rank_is_known_as_such(settings: RunSettings) -> None:
    part = Part(
        round=RoundNumber(1),
        first_rank=Rank(0),
        slots=1,
        group_rank=0,
        group_world_size=1,
        world_size=1,
        first_role_rank=0,
        role_size=1,
        store_address="127.0.0.1",
        store_port=1,
        restarts=0,
        max_restarts=0,
    )
    virtual = replace(settings, virtual_local_rank=True)
    assert set(rank_environment(virtual, part, 0, "run", Path("error"))) == set(RANK_VARIABLES)
    shared = KnownImports(Path("none"), settings, PYTHON).plan(0).variables
    assert "CUDA_VISIBLE_DEVICES" not in shared
    own = KnownImports(Path("none"), virtual, PYTHON).plan(0).variables
    assert "CUDA_VISIBLE_DEVICES" in own
