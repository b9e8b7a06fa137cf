"""`holdfast run`'s command line: torchrun's, with one-line errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.cli.flags import flagged, parse_run
from holdfast.config.settings import RunSettings
from holdfast.errors import UsageError
from holdfast.messages.records import Script, Terms


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script and a package, and an environment without torchrun's variables."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "TORCH", "HOLDFAST_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def run(*words: str) -> RunSettings:
    return parse_run([*words, "train.py"])


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse_run(argv)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_the_short_flags_of_torchrun_are_known() -> None:
    short = {setting.short: setting.flag for setting in flagged() if setting.short}
    assert short == {"-m": "--module", "-r": "--redirects", "-t": "--tee"}


def test_the_defaults_are_one_rank_on_one_node_with_nothing_demanded() -> None:
    settings = run()
    assert (settings.script, settings.script_args, settings.entry) == ("train.py", (), "script")
    assert (settings.nproc, replace(settings.terms, script=None)) == (1, Terms())
    assert (settings.job, settings.standby) == (None, None)
    assert settings.rendezvous == type(settings.rendezvous)()
    assert settings.terminal.log_line_prefix_template == "[${role_name}${local_rank}]:"
    assert settings.warnings == ()


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node"])
@pytest.mark.parametrize("joint", [False, True])
def test_both_spellings_of_a_flag_mean_the_same(flag: str, joint: bool) -> None:
    words = [f"{flag}=3"] if joint else [flag, "3"]
    assert run(*words).nproc == 3


def test_a_variable_of_torchrun_stands_in_for_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert run().nproc == 4


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert run("--nproc-per-node", "2").nproc == 2


def test_an_error_in_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "few")
    assert refusal("train.py").startswith("PET_NNODES few: ")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("0", False), ("", False)])
def test_a_switch_may_be_a_variable(
    monkeypatch: pytest.MonkeyPatch, text: str, value: bool
) -> None:
    monkeypatch.setenv("PET_VIRTUAL_LOCAL_RANK", text)
    assert run().virtual_local_rank is value


def test_the_other_variables_of_torchrun_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${rank}|")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    settings = run()
    assert settings.terminal.log_line_prefix_template == "${rank}|"
    assert settings.terms.grace_s == 7


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["-h"],
        ["--", "x"],
        ["x", "--"],
        ["--nproc-per-node", "8", "-m", "--unknown=1", "-r3"],
        ["--no", "-", "", "-1", "a b", "--a b"],
    ],
)
def test_all_after_the_script_is_the_scripts(words: list[str]) -> None:
    settings = parse_run(["--nproc-per-node", "2", "train.py", *words])
    assert (settings.script, settings.script_args, settings.nproc) == ("train.py", tuple(words), 2)


def test_two_dashes_may_stand_before_the_script() -> None:
    settings = parse_run(["--nproc-per-node", "2", "--", "train.py", "--", "x"])
    assert (settings.script, settings.script_args) == ("train.py", ("--", "x"))


def test_an_unknown_flag_gets_the_nearest_known_one() -> None:
    line = refusal("--nproc_per_nodes", "2", "train.py")
    assert line == "unknown flag --nproc_per_nodes; did you mean --nproc-per-node?"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--nproc", "3"], ["--nproc-per-node", "3"]),
        (["--nproc_per=3"], ["--nproc-per-node", "3"]),
        (["--redirect", "3"], ["--redirects", "3"]),
        (["--max=3"], ["--max-restarts", "3"]),
        (["--t", "3"], ["--tee", "3"]),  # Ours are --tls-cert and --token-file.
        (["--stand"], ["--standalone"]),  # Ours is --standby.
        (["--virtual"], ["--virtual-local-rank"]),
        (["--hang", "9"], ["--hang-after", "9"]),
    ],
)
def test_a_flag_may_be_abbreviated(words: list[str], meant: list[str]) -> None:
    assert run(*words) == run(*meant)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--master", "--master is ambiguous: --master-addr, --master-port"),
        ("--tls=x", "--tls is ambiguous: --tls-cert, --tls-key, --tls-ca"),
        ("--dup", "--dup is ambiguous: --duplicate-stdout-filters, --duplicate-stderr-filters"),
    ],
)
def test_an_ambiguous_abbreviation_is_refused(word: str, line: str) -> None:
    assert refusal(word, "3", "train.py") == line


def test_an_abbreviation_without_its_value_is_told_by_its_full_name() -> None:
    assert refusal("--nproc") == "--nproc-per-node: N is missing after it"
    assert refusal("--t") == "--tee: MASK is missing after it"


def test_an_unknown_flag_like_no_other_gets_the_help() -> None:
    assert refusal("--xyzzy", "train.py") == (
        "unknown flag --xyzzy; `holdfast run --help` lists them"
    )


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "no script given; try `holdfast run train.py`"),
        (["--standalone"], "no script given; try `holdfast run train.py`"),
        (["--nproc-per-node"], "--nproc-per-node: N is missing after it"),
        (["-r"], "--redirects: MASK is missing after it"),
        (["--standalone=1", "train.py"], "--standalone: takes no value"),
        (["--foo"], "unknown flag --foo; `holdfast run --help` lists them"),
        (["gone.py"], "gone.py: no such file"),
        (["--run-path", "gone.py"], "gone.py: no such file"),
        (["my"], "my: is a directory without a __main__.py; name the script in it"),
        (["-m", "gone.train"], "-m gone.train: no such module here or in this Python"),
        (["-m", "train/py"], "-m train/py: no such module here or in this Python"),
        (["--no-python", "no-such-cmd"], "no-such-cmd: no such command"),
        (["--no-python", "./train.py"], "./train.py: not executable"),
        (
            ["--nproc-per-node", "0", "train.py"],
            "--nproc-per-node 0: at least one rank per node is needed",
        ),
        (["--nnodes", "3:2", "train.py"], "--nnodes 3:2: MIN is above MAX; did you mean 2:3?"),
        (
            ["--max-restarts=-1", "train.py"],
            "--max-restarts -1: a whole number, 0 or more, is needed",
        ),
    ],
)
def test_a_mistake_gets_one_clear_line(argv: list[str], line: str) -> None:
    assert refusal(*argv) == line


@pytest.mark.parametrize(
    ("words", "entry"),
    [
        (["train.py"], "script"),
        (["-m", "my.train"], "module"),
        (["--module", "json.tool"], "module"),
        (["--run-path", "train.py"], "path"),
        (["--run_path", "--no-python", "train.py"], "path"),
        (["--no-python", "sh"], "command"),
    ],
)
def test_the_flags_say_how_the_script_is_started(words: list[str], entry: str) -> None:
    assert parse_run(words).entry == entry


def test_a_module_needs_python() -> None:
    assert "leave one of them out" in refusal("-m", "--no-python", "json")


def test_a_command_has_no_standbys() -> None:
    assert parse_run(["--no-python", "sh"]).standby == 0


def test_standbys_demanded_for_a_command_are_refused() -> None:
    assert refusal("--no-python", "--standby", "2", "sh").startswith("--standby 2: ")


@pytest.mark.parametrize(("text", "count"), [("auto", None), ("0", 0), ("3", 3)])
def test_standbys_are_counted_or_left_to_us(text: str, count: int | None) -> None:
    assert run("--standby", text).standby == count


def test_modules_to_preload_are_collected() -> None:
    assert run("--preload", "json,csv", "--preload=my.train").preload == ("json", "csv", "my.train")


def test_a_module_to_preload_may_lie_beside_the_script(place: Path) -> None:
    (place / "my" / "parts.py").write_text("")
    assert parse_run(["--preload", "parts", "my/train.py"]).preload == ("parts",)


def test_a_missing_module_to_preload_is_refused() -> None:
    assert refusal("--preload", "jsonn", "train.py").startswith("--preload jsonn: no such module")


def test_our_own_flags_arrive() -> None:
    settings = run("--job", "llm", "--spares", "2", "--node-check", "--quiet")
    assert (settings.job, settings.terms.spares, settings.terms.node_check) == ("llm", 2, True)
    assert settings.terminal.quiet


def test_masks_and_filters_arrive() -> None:
    terminal = run(
        *("--nproc-per-node", "2", "-r", "3", "-t0:1", "--local-ranks-filter", "1,0"),
        *("--duplicate-stdout-filters", "loss,acc", "--duplicate_stderr_filters", "warn"),
    ).terminal
    assert (terminal.redirects, terminal.tee) == ({0: 3, 1: 3}, {0: 1, 1: 0})
    assert terminal.local_ranks_filter == (0, 1)
    assert (terminal.stdout_filters, terminal.stderr_filters) == (("loss", "acc"), ("warn",))


def test_the_rest_of_torchruns_flags_arrive() -> None:
    settings = run(
        *("--role", "trainer", "--log-dir", "logs", "--shutdown-timeout", "5"),
        *("--signals-to-handle", "SIGTERM,SIGUSR1", "--numa-binding", "node"),
        *("--virtual-local-rank", "--max-restarts", "3", "--local-addr", "n0"),
    )
    assert (settings.role, settings.log_dir, settings.terms.grace_s) == ("trainer", "logs", 5)
    assert settings.signals_to_handle == ("SIGTERM", "SIGUSR1")
    assert (settings.numa_binding, settings.virtual_local_rank) == ("node", True)
    assert (settings.terms.max_restarts, settings.rendezvous.local_addr) == (3, "n0")


def test_flags_without_effect_change_nothing() -> None:
    assert run() == run(
        *("--monitor-interval", "5", "--start-method", "fork"),
        *("--event-log-handler", "null"),
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--start-method", "teleport"],
        ["--logs-specs", "nobodys"],
        ["--event-log-handler", "carrier-pigeon"],
        ["--monitor-interval", "often"],
        ["--numa-binding", "moon"],
    ],
)
def test_a_value_that_torchrun_refuses_is_refused_even_without_effect(words: list[str]) -> None:
    assert refusal(*words, "train.py").startswith(" ".join(words))


def test_virtual_local_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert run("--virtual-local-rank", "--nproc-per-node", "2").virtual_local_rank
    line = refusal("--virtual-local-rank", "--nproc-per-node", "3", "train.py")
    assert line.startswith("--virtual-local-rank: 3 ranks need as many GPUs")


def test_standalone_sets_aside_what_was_said_about_meeting() -> None:
    settings = run(
        *("--standalone", "--nnodes", "1:4", "--node-rank", "3", "--rdzv-id", "x"),
        *("--rdzv-backend", "etcd", "--rdzv-endpoint", "node0:1"),
    )
    assert (settings.terms.max_nodes, settings.node_rank) == (1, None)
    assert settings.rendezvous == type(settings.rendezvous)()


@pytest.mark.parametrize("words", [["--nnodes", "2"], ["--coordinator", "node0:1"]])
def test_standalone_is_not_for_company(words: list[str]) -> None:
    assert "leave" in refusal("--standalone", *words, "train.py")


@pytest.mark.parametrize(
    ("words", "coordinator", "hosts"),
    [
        (["--coordinator", "node0:1234"], "node0:1234", False),
        (["--rdzv-backend", "c10d"], None, None),
        (["--rdzv-backend", "c10d", "--nnodes", "2"], "localhost:29400", None),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=node0"], "node0:29400", None),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:7"], "[::1]:7", None),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], None, None),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=n:7", "--rdzv-conf=is_host=1"], "n:7", True),
        (["--rdzv-endpoint=node0:7"], None, None),
        (["--coordinator=n:7", "--rdzv-backend=etcd"], "n:7", False),
    ],
)
def test_nodes_meet_at_the_coordinator_that_was_named(
    words: list[str], coordinator: str | None, hosts: bool | None
) -> None:
    rendezvous = run(*words).rendezvous
    assert (rendezvous.coordinator, rendezvous.hosts_coordinator) == (coordinator, hosts)


@pytest.mark.parametrize(
    ("words", "master"),
    [
        ([], (None, None)),
        (["--master-port", "29501"], ("127.0.0.1", 29501)),
        (["--master_addr", "node0", "--master_port", "7"], ("node0", 7)),
        (["--nnodes", "2", "--master-addr", "node0"], ("node0", 29500)),
        (["--rdzv-endpoint", "node0:7"], ("node0", 7)),
        (["--rdzv-backend", "static", "--rdzv-endpoint", "node0"], ("node0", 29500)),
    ],
)
def test_the_masters_address_follows_torchruns_rules(
    words: list[str], master: tuple[str | None, int | None]
) -> None:
    rendezvous = run(*words).rendezvous
    assert (rendezvous.master_addr, rendezvous.master_port) == master


@pytest.mark.parametrize(
    "words",
    [
        ["--rdzv-backend", "c10d", "--master-addr", "node0"],
        ["--master-addr", "node0"],
        ["--coordinator", "n:7", "--rdzv-endpoint", "m:8"],
        ["--rdzv-conf", "close_timeout=3"],
        ["--rdzv-conf", "joint_timeout=3"],
    ],
)
def test_what_is_set_aside_is_said(words: list[str]) -> None:
    assert len(run(*words).warnings) == 1


def test_timeouts_of_the_rendezvous_arrive() -> None:
    terms = run("--rdzv-conf", "join_timeout=60, last_call_timeout=5").terms
    assert (terms.join_limit_s, terms.last_call_s) == (60, 5)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2", "zeus"])
def test_a_foreign_rendezvous_is_refused_with_the_way_out(backend: str) -> None:
    line = refusal("--rdzv-backend", backend, "--rdzv-endpoint", "node0:2379", "train.py")
    assert line.startswith(f"--rdzv-backend {backend}: ")
    assert "--coordinator HOST:PORT" in line


def test_many_nodes_cannot_meet_at_any_free_port() -> None:
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:0"]
    assert "port 0" in refusal(*words, "train.py")


@pytest.mark.parametrize(("rank", "spares", "fits"), [(1, 0, True), (2, 0, False), (2, 1, True)])
def test_a_node_rank_must_have_a_place(rank: int, spares: int, fits: bool) -> None:
    words = ["--nnodes", "2", "--spares", str(spares), "--node-rank", str(rank)]
    if fits:
        assert run(*words).node_rank == rank
    else:
        assert refusal(*words, "train.py") == "--node-rank 2: node ranks go up to 1"


def test_the_help_names_every_flag_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_run(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert [setting.flag for setting in flagged() if setting.flag not in text] == []


def test_the_help_loads_neither_torch_nor_msgspec() -> None:
    code = (
        "import sys\n"
        "from holdfast.cli.flags import parse_run\n"
        "try: parse_run(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'msgspec', 'holdfast.config.settings'} & set(sys.modules)))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_nodes_compare_the_scripts_name_content_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    for folder, text in (("here", "a = 1"), ("there", "a = 1")):
        (tmp_path / folder / "train.py").write_text(text)

    def script(folder: str, *arguments: str) -> Script:
        found = parse_run([str(tmp_path / folder / "train.py"), *arguments]).terms.script
        assert found is not None
        return found

    assert script("here") == script("there")
    assert script("here").name == "train.py"
    assert script("here", "--lr", "1").arguments != script("here", "--lr", "2").arguments
    (tmp_path / "there" / "train.py").write_text("a = 2")
    assert script("here").content != script("there").content
