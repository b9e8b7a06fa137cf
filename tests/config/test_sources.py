"""Where a setting's value comes from, and what is said about a mistake in it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.flags import parse_run
from holdfast.config.schema import (
    SET_FOR_WORKERS,
    OfTheMachine,
    Said,
    Setting,
    Settings,
    all_settings,
    settings_of,
)
from holdfast.config.sources import collect, from_environment
from holdfast.errors import UsageError

PACKAGE = Path(__file__).parents[2] / "holdfast"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, and an environment without settings."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("PET_", "TORCH", "HOLDFAST_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def write(folder: Path, text: str, name: str = "holdfast.toml") -> None:
    (folder / name).write_text(text)


def refusal(environ: dict[str, str] | None = None, **flags: str) -> str:
    with pytest.raises(UsageError) as refused:
        collect({name: Said(text, f"--{name}") for name, text in flags.items()}, environ or {})
    assert "\n" not in str(refused.value)
    return str(refused.value)


SOURCES = ["--nnodes", "HOLDFAST_NNODES", "PET_NNODES", "holdfast.toml:1: nnodes", None]


@pytest.mark.parametrize("strongest", range(len(SOURCES)))
def test_the_strongest_source_counts(folder: Path, strongest: int) -> None:
    left = SOURCES[strongest:]
    if SOURCES[3] in left:
        write(folder, "nnodes = 4\n")
    flags = {"nnodes": Said("1", "--nnodes")} if SOURCES[0] in left else {}
    environ = {"HOLDFAST_NNODES": "2", "PET_NNODES": "3"}
    given = collect(flags, {name: text for name, text in environ.items() if name in left})
    count = strongest + 1 if left[0] else 1
    assert given.nnodes == (count, count)
    assert given.said["nnodes"].source == left[0] if left[0] else "nnodes" not in given.said


def test_a_variable_may_turn_off_what_the_file_turns_on(folder: Path) -> None:
    write(folder, "node-check = true\n")
    assert collect({}, {}).node_check
    assert not collect({}, {"HOLDFAST_NODE_CHECK": "0"}).node_check


def test_an_empty_variable_counts_as_not_set(folder: Path) -> None:
    write(folder, 'role = "trainer"\n')
    assert collect({}, {"HOLDFAST_ROLE": "", "PET_ROLE": ""}).role == "trainer"


@pytest.mark.parametrize("key", ["nproc-per-node", "nproc_per_node", '"nproc-per-node"'])
def test_a_key_is_spelt_as_its_flag(folder: Path, key: str) -> None:
    write(folder, f"\n# ranks\n{key} = 2\n")
    given = collect({}, {})
    assert given.nproc_per_node == 2
    assert given.said["nproc_per_node"].source == f"holdfast.toml:3: {key.strip(chr(34))}"


FILE = """
nnodes = "2:4"
save-deadline = 1.5
quiet = true
standalone = false
preload = ["json", "my.data"]
signals-to-handle = ["SIGTERM", "SIGUSR1"]
local-ranks-filter = [1, 0]
chaos = ["kill@step=5", "hang@every=100,seed=7"]
rdzv-conf.join_timeout = 60

[rank-section-timeouts]
checkpointing = 600
evaluation = 1.5

[redirects]
0 = 1
1 = 2
"""


def test_numbers_switches_lists_and_tables_of_the_file_mean_what_flags_mean(folder: Path) -> None:
    write(folder, FILE)
    given = collect({}, {})
    assert (given.nnodes, given.save_deadline) == ((2, 4), 1.5)
    assert (given.quiet, given.standalone) == (True, False)
    assert given.preload == ("json", "my.data")
    assert given.signals_to_handle == ("SIGTERM", "SIGUSR1")
    assert given.local_ranks_filter == (0, 1)
    assert [fault.kind for fault in given.chaos] == ["kill", "hang"]
    assert given.rdzv_conf == {"join_timeout": "60"}
    assert given.rank_section_timeouts == {"checkpointing": 600, "evaluation": 1.5}
    assert given.redirects == {0: 1, 1: 2}


TEXTS = {
    **{
        "nproc_per_node": "3",
        "nnodes": "2:4",
        "job": "llm",
        "max_restarts": "3",
        "standby": "auto",
    },
    **{"preload": "json,csv", "coordinator": "node0:1", "chaos": "kill@step=5", "master_port": "7"},
    **{"rank_section_timeouts": "step:1,save:2", "redirects": "0:1,1:2", "tee": "3"},
    **{"local_ranks_filter": "0,1", "rdzv_endpoint": "[::1]:7", "rdzv_conf": "is_host=1"},
    **{"signals_to_handle": "SIGTERM,SIGUSR1", "numa_binding": "node", "standby_gpu": "off"},
    **{"start_method": "fork", "event_log_handler": "console"},
}
"""Texts for the readers that do not take "2"."""


@pytest.mark.parametrize("setting", [s for s in all_settings() if s.in_file], ids=lambda s: s.name)
def test_a_setting_means_the_same_from_every_source(folder: Path, setting: Setting[object]) -> None:
    text = TEXTS.get(setting.name, "2" if setting.takes else "1")
    by_flag = collect({setting.name: Said(text, setting.flag)}, {})
    write(folder, f'{setting.key} = "{text}"\n')
    by_file = collect({}, {})
    (folder / "holdfast.toml").unlink()
    by_variables = [collect({}, {variable: text}) for variable in setting.variables]
    values = [getattr(given, setting.name) for given in (by_flag, by_file, *by_variables)]
    assert values[0] != setting.default or setting.name == "standby"
    assert all(value == values[0] for value in values)


def test_another_file_may_be_named(folder: Path) -> None:
    write(folder, 'role = "here"\n')
    write(folder, 'role = "there"\n', "other.toml")
    assert collect({}, {}).role == "here"
    assert collect({}, {"HOLDFAST_CONFIG": "other.toml"}).role == "there"
    assert collect({"config": Said("other.toml", "--config")}, {}).role == "there"


def test_run_takes_its_settings_from_the_file(folder: Path) -> None:
    write(folder, 'job = "llm"\nspares = 2\n')
    settings = parse_run(["train.py"])
    assert (settings.job, settings.terms.spares) == ("llm", 2)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nnode = 2", "holdfast.toml:1: nnode: no such setting; did you mean nnodes?"),
        ("\nxyzzy = 2", "holdfast.toml:2: xyzzy: no such setting; `holdfast config` lists them"),
        (
            'home = "/x"',
            "holdfast.toml:1: home: cannot be set in a file; set HOLDFAST_HOME instead",
        ),
        (
            "node-rank = 1\nnode_rank = 2",
            "holdfast.toml:2: node_rank: the file sets it twice; leave one of them out",
        ),
        (
            "nnodes = [1, 2]",
            "holdfast.toml:1: nnodes: a text, a number or true/false is needed, not [1, 2]",
        ),
        (
            'preload = ["json,csv"]',
            "holdfast.toml:1: preload: json,csv: write values with ',' as one string",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_its_place(
    folder: Path, text: str, line: str
) -> None:
    write(folder, text)
    assert refusal() == line


def test_a_wrong_value_in_the_file_is_named_by_its_line(folder: Path) -> None:
    write(folder, 'job = "llm"\nnnodes = "few"\n')
    with pytest.raises(UsageError, match=r"^holdfast.toml:2: nnodes few: a number of nodes"):
        parse_run(["train.py"])


@pytest.mark.parametrize("text", ["nnodes", "nnodes = ", b"\xff = 1"])
def test_a_file_that_is_no_toml_is_refused(folder: Path, text: str | bytes) -> None:
    (folder / "holdfast.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "holdfast.toml: not a TOML file: " in refusal()


def test_a_named_file_must_exist() -> None:
    assert refusal(config="gone.toml") == "--config gone.toml: No such file or directory"


def test_a_misspelt_variable_is_a_warning_with_a_suggestion() -> None:
    given = collect({}, {"HOLDFAST_NNODE": "2"})
    assert given.nnodes == (1, 1)
    assert given.warnings == (
        "HOLDFAST_NNODE is not a setting and has no effect; did you mean HOLDFAST_NNODES?",
    )


@pytest.mark.parametrize(
    "name", ["HOLDFAST_TEST_ID", "HOLDFAST_WORKER", "PET_NNODE", "HOLDFAST_HOME"]
)
def test_other_variables_are_no_matter_of_settings(name: str) -> None:
    assert collect({}, {name: "2"}).warnings == ()


def test_every_variable_of_holdfast_is_in_the_schema() -> None:
    literal = re.compile(r"\bHOLDFAST_[A-Z][A-Z_]*[A-Z]\b")
    found = {name for path in PACKAGE.rglob("*.py") for name in literal.findall(path.read_text())}
    known = {setting.variables[0] for setting in all_settings()}
    assert found - known - SET_FOR_WORKERS == set()


def test_no_setting_is_called_like_a_variable_for_workers() -> None:
    assert not SET_FOR_WORKERS & {setting.variables[0] for setting in all_settings()}


def test_names_of_settings_are_unique() -> None:
    names = [setting.name for setting in all_settings()]
    assert len(set(names)) == len(names)


def test_settings_of_the_machine_are_taken_from_variables_only(folder: Path) -> None:
    for setting in settings_of(OfTheMachine):
        write(folder, f"{setting.key} = 1\n")
        assert f"set {setting.variables[0]} instead" in refusal()


def test_a_definition_and_its_value_share_a_name() -> None:
    assert isinstance(Settings.nnodes, Setting)
    assert from_environment({"PET_NNODES": "2:3"}).nnodes == (2, 3)


@given(st.sampled_from(sorted(s.name for s in all_settings())), st.text(max_size=20))
def test_any_text_of_any_setting_is_a_value_or_an_error_of_usage(name: str, text: str) -> None:
    given = Settings({name: Said(text, "--flag")})
    with suppress(UsageError):
        getattr(given, name)
