"""The Slurm platform without a Slurm: what it reads, and what it says to Slurm's commands."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import ALLOCATION, FakeJob, FakeSlurm, FakeStep
from machine import avoid, wish

from holdfast.cli import submit, submit_slurm
from holdfast.cli.flags import parse_run
from holdfast.core.supply.reasons import reason_of
from holdfast.errors import PlatformError, UsageError
from holdfast.messages.supply import Sighting
from holdfast.platforms import slurm_environment
from holdfast.platforms.opening import own_host
from holdfast.platforms.slurm import SRUN_FAILED, further_options
from holdfast.platforms.slurm_commands import (
    MEANINGS,
    QueuedJob,
    SlurmCommands,
    exit_code,
    failure,
    flags,
    meaning,
    queue,
    records,
)

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "my llm!",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURMD_NODENAME": "n1",
}
SCONTROL = """#!/bin/sh
case "$2 $4" in
  "hostnames ") printf 'n1\\nn2\\nn3\\n' ;;
  "node n1") echo "NodeName=n1 NodeAddr=127.0.0.1 State=IDLE" ;;
  *) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
esac
"""


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in PATH with programs that are called as Slurm's are."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "sbatch", "squeue", "scancel"):
        put(folder, name, "#!/bin/sh\nexit 0\n")
    put(folder, "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def in_step(programs: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


# ---- srun holdfast run ----


def test_a_step_says_how_many_nodes_meet_where_and_under_which_name(
    in_step: pytest.MonkeyPatch,
) -> None:
    settings = parse_run([__file__])
    meeting = settings.rendezvous
    assert (settings.terms.min_nodes, settings.terms.max_nodes) == (3, 3)
    assert settings.job == "my-llm--17"
    assert (meeting.coordinator, meeting.hosts_coordinator) == ("127.0.0.1:20119", True)
    in_step.setenv("SLURMD_NODENAME", "n2")
    assert parse_run([__file__]).rendezvous.hosts_coordinator is False
    assert not settings.requeued
    in_step.setenv("SLURM_RESTART_COUNT", "2")
    assert parse_run([__file__]).requeued


def test_steps_of_one_job_differ_in_name_and_port(in_step: pytest.MonkeyPatch) -> None:
    in_step.setenv("SLURM_STEP_ID", "4")
    settings = parse_run([__file__])
    assert settings.job == "my-llm--17.4"
    assert settings.rendezvous.coordinator == "127.0.0.1:20123"


def test_what_the_user_says_wins_over_slurm(in_step: pytest.MonkeyPatch) -> None:
    settings = parse_run(["--nnodes", "1:2", "--job", "mine", "--coordinator", "h:1", __file__])
    assert (settings.terms.min_nodes, settings.terms.max_nodes) == (1, 2)
    assert settings.job == "mine"
    assert settings.rendezvous.coordinator == "h:1"
    in_step.setenv("PET_NNODES", "2")
    assert parse_run(["--standalone", "--nnodes", "1", __file__]).terms.max_nodes == 1


def test_spares_are_some_of_the_steps_nodes(in_step: pytest.MonkeyPatch) -> None:
    assert parse_run(["--spares", "1", __file__]).terms.max_nodes == 2
    with pytest.raises(UsageError, match=r"--spares 3: Slurm's step has 3 nodes"):
        parse_run(["--spares", "3", __file__])


def test_several_tasks_on_a_node_are_refused(in_step: pytest.MonkeyPatch) -> None:
    in_step.setenv("SLURM_STEP_NUM_TASKS", "6")
    with pytest.raises(UsageError, match=r"6 tasks on 3 nodes.*--ntasks-per-node=1"):
        parse_run([__file__])


def test_one_node_needs_no_meeting_place(in_step: pytest.MonkeyPatch) -> None:
    in_step.setenv("SLURM_STEP_NUM_NODES", "1")
    in_step.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert parse_run([__file__]).rendezvous.coordinator is None


def test_outside_of_a_step_the_idle_nodes_are_told(in_step: pytest.MonkeyPatch) -> None:
    in_step.delenv("SLURM_STEP_ID")
    in_step.setenv("SLURM_JOB_NUM_NODES", "3")
    settings = parse_run([__file__])
    assert settings.terms.max_nodes == 1
    assert any("`srun holdfast run` uses all" in line for line in settings.warnings)


def test_a_rank_that_starts_a_job_of_its_own_is_no_part_of_the_step(
    in_step: pytest.MonkeyPatch,
) -> None:
    in_step.setenv("TORCHELASTIC_RUN_ID", "x")
    assert parse_run([__file__]).terms.max_nodes == 1


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SLURM_STEP_NUM_NODES", "many", "Slurm sets it to a number"),
        ("PATH", "/nowhere", "Slurm's commands are not in PATH"),
    ],
)
def test_a_broken_environment_is_one_sentence(
    in_step: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    in_step.setenv(variable, value)
    with pytest.raises(UsageError, match=said):
        parse_run([__file__])


def test_a_host_that_neither_dns_nor_slurm_knows_is_told(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(programs, "scontrol", "#!/bin/sh\necho NodeName=n9 NodeAddr=n9.invalid State=IDLE\n")
    assert slurm_environment.address_of("n9.invalid.") == "n9.invalid"
    put(programs, "scontrol", "#!/bin/sh\necho NodeName=n9 State=IDLE\n")
    with pytest.raises(UsageError, match="Slurm has no address for it"):
        slurm_environment.address_of("n9.invalid.")


def test_without_an_allocation_up_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="`holdfast submit slurm`"):
        own_host("slurm", {})


@pytest.mark.parametrize(
    ("fields", "queued"),
    [
        ("JobState=RUNNING NodeList=n2 BatchHost=n9", True),
        ("JobState=RUNNING NodeList=n2 BatchHost=n2", False),
        ("JobState=COMPLETING NodeList=n2 BatchHost=n9", False),
        ("JobState=PENDING NodeList= BatchHost=n9", False),
    ],
)
def test_a_node_queues_a_job_again_whose_script_died_with_its_node(
    programs: Path, tmp_path: Path, fields: str, queued: bool
) -> None:
    log = tmp_path / "log"
    put(
        programs,
        "scontrol",
        f"""#!/bin/sh
case $2 in
  job) echo "JobId=17 {fields}" ;;
  hostnames) echo n2 ;;
  *) echo "$@" >> {log} ;;
esac
""",
    )
    environ = {"SLURM_JOB_ID": "17", "HOLDFAST_REQUEST": "1-1"}
    told = slurm_environment.queue_headless_again(environ)
    assert ("queued again" in told) is queued
    assert (log.read_text() if log.exists() else "") == ("requeue 17\n" if queued else "")
    assert slurm_environment.queue_headless_again({"SLURM_JOB_ID": "17"}) == "", "not one of ours"


# ---- what Slurm prints ----


def test_fields_with_spaces_and_without_a_value_are_read() -> None:
    text = (
        "JobId=5 JobName=a b Account=(null) QOS=normal Reason=None NodeList=n[1-2] "
        "AllocNode:Sid=login:9 Comment=x=y z NtasksPerN:B:S:C=0:0:*:* Power= \n\n"
    )
    (fields,) = records(text)
    assert fields["JobName"] == "a b"
    assert fields["NodeList"] == "n[1-2]"
    assert "Account" not in fields
    assert "Reason" not in fields
    assert "Power" not in fields


def test_lines_of_squeue_are_read_and_others_passed_over() -> None:
    text = "17|RUNNING|None|n1|llm\n18|PENDING|ReqNodeNotAvail, Down|| a|b \nslurm: warning\n\n"
    assert list(queue(text)) == [
        QueuedJob("17", "RUNNING", "None", "n1", "llm"),
        QueuedJob("18", "PENDING", "ReqNodeNotAvail, Down", "", " a|b"),
    ]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("IDLE", {"IDLE"}),
        ("MIXED+DRAIN", {"MIXED", "DRAIN"}),
        ("DOWN*", {"DOWN", "NOT_RESPONDING"}),
        ("DOWN*+DRAIN", {"DOWN", "DRAIN", "NOT_RESPONDING"}),
        ("idle~", {"IDLE"}),
    ],
)
def test_states_of_nodes_are_split(state: str, words: set[str]) -> None:
    assert flags(state) == words


@pytest.mark.parametrize(
    ("text", "code"), [("75:0", 75), ("0:9", 137), ("0:0", 0), ("", None), ("x", None)]
)
def test_exit_codes_are_read(text: str, code: int | None) -> None:
    assert exit_code(text) == code


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        ("PENDING", "pending", None),
        ("COMPLETING", "running", None),
        ("A_STATE_OF_NEXT_YEAR", "running", None),
        ("COMPLETED", "succeeded", None),
        ("FAILED", "failed", None),
        ("TIMEOUT", "failed", "preempted"),
        ("PREEMPTED", "failed", "preempted"),
        ("NODE_FAIL", "failed", "hardware"),
        ("OUT_OF_MEMORY", "failed", "oom"),
        ("CANCELLED by 0", "deleted", None),
        ("CANCELLED+", "deleted", None),
    ],
)
def test_states_of_jobs_have_a_meaning(state: str, status: str, reason: str | None) -> None:
    assert meaning(state) == (status, reason)


def test_the_page_has_the_meaning_of_each_state() -> None:
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    told = {
        name.strip(" `"): (row[2].strip(), row[3].strip())
        for row in rows
        if len(row) == 5
        for name in row[1].split(",")
        if "`" in name
    }
    for state, (status, reason) in MEANINGS.items():
        if status in ("failed", "deleted", "succeeded"):
            assert told[state][0] == status, state
            assert told[state][1].startswith(reason or ""), state


@pytest.mark.parametrize(
    ("stderr", "said", "for_good"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "invalid partition specified: nope",
            True,
        ),
        (
            "sbatch: error: Batch job submission failed: Access/permission denied",
            "Access/permission denied",
            True,
        ),
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            "controller does not answer",
            False,
        ),
        ("squeue: error: Invalid user: x\nsomething", "Invalid user", True),
        ("", "without a word", False),
    ],
)
def test_what_a_command_complains_of_is_one_line(stderr: str, said: str, for_good: bool) -> None:
    error = failure(["sbatch"], stderr)
    assert said in str(error)
    assert len(str(error).splitlines()) == 1
    assert error.for_good is for_good


def test_a_command_that_hangs_or_is_missing_is_a_platform_error(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.platforms.slurm_commands.LIMIT_S", 0.2)
    put(programs, "squeue", "#!/bin/sh\nexec sleep 1000\n")

    async def scenario() -> None:
        with pytest.raises(PlatformError, match="no answer from Slurm"):
            await SlurmCommands().run("squeue", "--me")
        with pytest.raises(PlatformError, match="No such file"):
            await SlurmCommands().run("nosuchcommand")

    run(scenario())


# ---- requests ----


def test_a_request_is_a_step_on_a_host_that_is_free_up_and_not_avoided(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path, hosts=5)
        engine.hosts["n2"] = "ALLOCATED+DRAIN"
        engine.steps["9-1"] = FakeStep("n1")
        platform = engine.open()
        await platform.ask([wish("0-1"), wish("1-1")], avoid("n3"))
        seen = {one.request: one.host for one in await platform.list()}
        assert seen == {"9-1": "n1", "0-1": "n4", "1-1": "n5"}
        assert not engine.jobs

    run(scenario())


def test_the_srun_of_a_step_takes_one_host_and_says_so_when_it_fails_itself(tmp_path: Path) -> None:
    engine = FakeSlurm(tmp_path)
    start = engine.open()._step(wish("3-2"), "n4")
    words = list(start.command)
    assert Path(words[0]).name == "srun"
    for option in ("--nodes=1", "--ntasks=1", "--nodelist=n4", "--overlap", "--job-name=3-2"):
        assert option in words
    assert words[-2:] == ["/usr/bin/holdfast", "run"]
    assert start.environ["SLURM_EXIT_ERROR"] == str(SRUN_FAILED)


def test_beyond_the_allocation_a_request_is_a_job_of_one_node_like_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path, hosts=1)
        platform = engine.open()
        await platform.ask([wish("0-1"), wish("1-1")], avoid("n8"))
        (words,) = [words for words in engine.run_words if words[0] == "sbatch"]
        for option in (
            *("--job-name=holdfast-llm-1-1", "--dependency=singleton", "--nodes=1"),
            *("--partition=gpu", "--qos=normal", "--time=1-00:00:00", "--gres=gpu:8"),
            *("--exclusive", "--exclude=n8", "--no-requeue"),
        ):
            assert option in words
        (wrapped,) = [word for word in words if word.startswith("--wrap=exec srun ")]
        assert shlex.split(wrapped)[-2:] == ["/usr/bin/holdfast", "run"]
        seen = {one.request: one for one in await platform.list()}
        assert seen["1-1"].status == "pending"
        assert "Resources" in seen["1-1"].detail
        engine.settle()
        assert {one.request: one.status for one in await platform.list()}["1-1"] == "running"

    run(scenario())


def test_a_node_that_ran_out_of_memory_gets_more_of_it_in_a_job_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path)
        more = wish("0-2")
        await engine.open().ask([type(more)(id="0-2", position=0, attempt=2, memory_mib=2)], [])
        (words,) = [words for words in engine.run_words if words[0] == "sbatch"]
        assert "--mem=2M" in words

    run(scenario())


def test_options_of_a_job_that_shares_its_nodes() -> None:
    options = further_options({"OverSubscribe": "OK", "CPUs/Task": "4", "Partition": "cpu"})
    assert "--cpus-per-task=4" in options
    assert "--exclusive" not in options


def test_of_two_jobs_under_one_name_the_older_counts_and_the_other_is_cancelled(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path)
        first, second = engine.submit("holdfast-llm-1-1"), engine.submit("holdfast-llm-1-1")
        engine.submit("holdfast-llm2-1-1")  # Another job's.
        (seen,) = await engine.open().list()
        assert seen.detail.startswith(f"Slurm job {first} ")
        assert [engine.jobs[id].leaving for id in (first, second)] == [False, True]

    run(scenario())


@pytest.mark.parametrize(
    ("state", "code", "reason"),
    [
        ("FAILED", "75:0", "preempted"),
        ("FAILED", "93:0", "fatal"),
        ("FAILED", "0:9", "killed"),
        ("TIMEOUT", "0:15", "preempted"),
        ("NODE_FAIL", "0:0", "hardware"),
        ("OUT_OF_MEMORY", "0:125", "oom"),
        ("CANCELLED", "0:15", "deleted"),
        ("COMPLETED", "0:0", "finished"),
    ],
)
def test_why_a_job_is_over_is_known(tmp_path: Path, state: str, code: str, reason: str) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path)
        engine.jobs[20] = FakeJob("holdfast-llm-0-1", state, code, "x20")
        (seen,) = await engine.open().list()
        if state == "COMPLETED":
            seen = Sighting(request="0-1", status=seen.status, code=0)
        assert reason_of(seen, joined=True) == reason

    run(scenario())


def test_a_step_that_ended_with_its_host_blames_the_host(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path)
        engine.steps = {"0-1": FakeStep("n1", 143), "1-1": FakeStep("n2", 143)}
        engine.hosts["n1"] = "DOWN*"
        seen = {one.request: one for one in await engine.open().list()}
        assert (seen["0-1"].reason, seen["1-1"].reason) == ("hardware", None)
        assert "n1 is down" in seen["0-1"].detail

    run(scenario())


def test_an_srun_that_cannot_start_its_task_is_not_taken_for_a_failed_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path)
        engine.steps = {"0-1": FakeStep("n1", SRUN_FAILED)}
        (seen,) = await engine.open().list()
        assert reason_of(seen, joined=False) == "unknown"
        assert f"see the output of Slurm job {ALLOCATION}" in seen.detail

    run(scenario())


def test_a_controller_that_is_away_makes_no_node_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path, hosts=1)
        platform = engine.open()
        await platform.ask([wish("0-1"), wish("1-1")], [])
        before = list(await platform.list())
        engine.away = True
        assert list(await platform.list()) == before
        engine.steps["0-1"].code = 137  # The guard of an srun needs no controller.
        assert {one.request: one.status for one in await platform.list()}["0-1"] == "failed"
        with pytest.raises(PlatformError, match="does not answer"):
            await (
                engine.open().list()
            )  # One that never heard of jobs cannot say that none are there.
        with pytest.raises(PlatformError) as refused:
            await platform.ask([wish("2-1")], [])
        assert refused.value.requests == ("2-1",)
        assert not refused.value.for_good

    run(scenario())


def test_a_preempted_allocation_is_asked_for_nothing_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path)
        engine.preempt_time = "2026-11-18T13:20:26"
        with pytest.raises(PlatformError, match="Slurm preempts job 17"):
            await engine.open().ask([wish("0-1")], [])
        assert not engine.steps

    run(scenario())


def test_a_step_is_told_to_leave_once_and_its_srun_killed_when_it_does_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path)
        engine.steps = {"0-1": FakeStep("n1"), "1-1": FakeStep("n2")}
        platform = engine.open()
        for _ in range(3):
            await platform.release(["1-1"])
        told = [words for words in engine.run_words if words[0] == "scancel"]
        assert told == [("scancel", "--quiet", "--signal=TERM", "17.1")]
        platform._told["1-1"] -= 1000
        await platform.release(["1-1"])
        assert engine.steps["1-1"].code == 137
        assert engine.steps["0-1"].alive

    run(scenario())


def test_blamed_hosts_are_written_down_for_a_requeue_and_drained_if_asked(tmp_path: Path) -> None:
    async def scenario(drain: bool) -> None:
        engine = FakeSlurm(tmp_path)
        flag = ["--drain"] if drain else []
        settings = parse_run([*flag, __file__])
        engine.orders = type(engine.orders)(**{**vars(engine.orders), "settings": settings})
        await engine.open().ask([wish("0-1")], avoid("n3", "n7"))
        assert (tmp_path / "avoided").read_text() == "n3,n7\n"
        drained = [words for words in engine.run_words if words[:2] == ("scontrol", "update")]
        assert [words[2] for words in drained] == (["nodename=n3", "nodename=n7"] if drain else [])
        for words in drained:
            assert words[4] == "reason=holdfast job llm: a test"

    run(scenario(drain=False))
    run(scenario(drain=True))


def test_a_host_that_this_user_may_not_drain_is_avoided_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path)
        settings = parse_run(["--drain", __file__])
        engine.orders = type(engine.orders)(**{**vars(engine.orders), "settings": settings})
        engine.operator = False
        await engine.open().ask([wish("0-1")], avoid("n1"))
        assert engine.steps["0-1"].host == "n2"

    run(scenario())


def test_nodes_are_placed_in_slurms_order_and_further_ones_after_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeSlurm(tmp_path, hosts=2)
        platform = engine.open()
        await platform.ask([wish("0-1"), wish("1-1"), wish("2-1")], [])
        places = {host: platform._step(wish("0-1"), host).environ for host in ("n1", "n2")}
        assert [one["HOLDFAST_INFRA_RANK"] for one in places.values()] == ["0", "1"]
        assert engine.environs[-1]["HOLDFAST_INFRA_RANK"] == "1000002"
        assert "SLURM_JOB_ID" not in engine.environs[-1]
        assert engine.environs[-1]["HOLDFAST_TOKEN"] == "t"

    run(scenario())


# ---- holdfast submit slurm ----


def script(*words: str) -> str:
    return submit_slurm.read(words)[0].script


def test_a_batch_script_says_all_that_was_asked_for() -> None:
    text = script(
        *("--nodes", "4:8", "--spares", "1", "--partition", "gpu", "--time", "24:00:00"),
        *("--account", "lab", "--gpus-per-node", "8", "--sbatch", "constraint=a100"),
        *("--sbatch=--exclude=n7", "--job", "llm", "--drain", __file__, "--lr", "0.1 0.2"),
    )
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        *("--job-name=llm", "--nodes=4-9", "--exclusive", "--no-kill", "--requeue"),
        *("--open-mode=append", "--output=llm-%j.out", "--signal=B:USR1@120", "--partition=gpu"),
        *("--account=lab", "--time=24:00:00", "--gpus-per-node=8", "--constraint=a100"),
        "--exclude=n7",
    ]
    for words in ("--nodes=4:8 --spares=1", "--drain", "--nproc-per-node=gpu", "--lr '0.1 0.2'"):
        assert words in text
    assert "job=llm\n" in text


def test_a_job_without_a_name_is_named_after_its_script_and_slurms_number() -> None:
    text = script("--nodes", "2", __file__)
    assert "job=test_slurm-$SLURM_JOB_ID\n" in text
    assert "#SBATCH --output=test_slurm-%j.out\n" in text
    assert "#SBATCH --nodes=2\n" in text


def test_a_batch_script_is_valid_bash() -> None:
    text = script("--nodes", "2", "--shared", "--memory", "16GiB", __file__, "it's; $(x)")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "--exclusive" not in text
    assert "#SBATCH --mem=16384M\n" in text


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [
        (75, "RUNNING", True),
        (75, "COMPLETING", False),
        (0, "RUNNING", False),
        (1, "RUNNING", False),
        (93, "RUNNING", False),
    ],
)
def test_only_75_puts_a_job_back_into_the_queue_and_only_one_that_nobody_cancelled(
    programs: Path, tmp_path: Path, code: int, state: str, requeued: bool
) -> None:
    """The script itself runs, with programs in place of Slurm's and of Python."""
    put(programs, "squeue", f"#!/bin/sh\necho {state}\n")
    put(programs, "scontrol", '#!/bin/sh\necho "$@" >> scontrol.log\n')
    put(programs, "python", f'#!/bin/sh\necho "$@" > up.log\nexit {code}\n')
    (tmp_path / "jobs/llm/nodes").mkdir(parents=True)
    (tmp_path / "jobs/llm/nodes/avoided").write_text("n3,n7\n")
    text = script("--job", "llm", __file__).replace(submit_slurm.sys.executable, "python")
    env = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}
    env["HOLDFAST_HOME"] = str(tmp_path)
    done = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=env)
    assert done.returncode == code
    assert "--requeued" in (tmp_path / "up.log").read_text()
    log = tmp_path / "scontrol.log"
    assert (log.read_text().splitlines() if log.exists() else []) == (
        ["requeue 17", "update jobid=17 excnodelist=n3,n7"] if requeued else []
    )


def test_a_signal_to_the_script_ends_the_job_politely_whose_code_it_has(
    programs: Path, tmp_path: Path
) -> None:
    put(programs, "squeue", "#!/bin/sh\necho RUNNING\n")
    put(programs, "scontrol", '#!/bin/sh\necho "$@" >> scontrol.log\n')
    waits = "trap 'sleep 0.2; exit 75' TERM; while :; do kill -USR1 $PPID; sleep 0.05; done"
    put(programs, "python", f"#!/bin/bash\n{waits}\n")
    text = script("--job", "llm", __file__).replace(submit_slurm.sys.executable, "python")
    env = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "17", "HOME": str(tmp_path)}
    (tmp_path / "job.sh").write_text(text)
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 75
    assert (tmp_path / "scontrol.log").read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--coordinator", "h:1", __file__), "leave it out"),
        (("--requeued", __file__), "leave it out"),
        (("--partition", "a\nb", __file__), "one line of text"),
        (("--warn-before", "soon", __file__), "a whole number"),
        (("--nodes", "0", __file__), "--nnodes"),
        (("/no/such/script.py",), "no such file"),
        ((), "no script given"),
    ],
)
def test_a_bad_submission_is_refused_before_slurm_hears_of_it(
    words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        script(*words)


def test_submitting_tells_how_to_look_at_the_job(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(programs, "sbatch", "#!/bin/sh\ncat > /dev/null\necho '23;cluster'\n")
    assert submit.main(["slurm", "--nodes", "2", __file__]) == 0
    out = capsys.readouterr().out
    for words in ("Slurm job 23", "squeue --job 23", "holdfast status test_slurm-23"):
        assert words in out


def test_a_refusal_of_slurm_is_a_usage_error_and_an_absent_controller_is_not(
    programs: Path,
) -> None:
    put(programs, "sbatch", "#!/bin/sh\necho 'sbatch: error: invalid account' >&2; exit 1\n")
    with pytest.raises(UsageError, match="Slurm refused the job: sbatch: invalid account"):
        submit.main(["slurm", __file__])
    away = "sbatch: error: Batch job submission failed: Unable to contact slurm controller"
    put(programs, "sbatch", f"#!/bin/sh\necho '{away}' >&2; exit 1\n")
    with pytest.raises(PlatformError, match=r"not submitted.*does not answer.*try again"):
        submit.main(["slurm", __file__])


def test_a_platform_that_nobody_can_submit_to_is_told() -> None:
    with pytest.raises(UsageError, match="no platform 'pbs'"):
        submit.main(["pbs"])
