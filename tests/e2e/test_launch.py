"""`holdfast run` where one typed `torchrun`: what the script is given and what the user gets back."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .harness import PATIENCE_S, TRAINER, Run, wait_for

SHOW_ARGUMENTS = "import sys; print('got', sys.argv[1:])\n"


def test_the_scripts_own_arguments_arrive_untouched(run: Run) -> None:
    words = ["--nproc-per-node", "7", "--", "-m", "", "a b", "--help"]
    run.start("--standby", "0", run.write(SHOW_ARGUMENTS), *words, nproc=1)
    assert run.code() == 0
    assert f"got {words}" in run.out


def test_flags_may_be_spelt_with_underscores(run: Run) -> None:
    script = run.write("import os; print('of', os.environ['WORLD_SIZE'])\n")
    words = ["run", "--nproc_per_node=3", "--max_restarts", "1", "--standby", "0", script]
    run.start_raw([sys.executable, "-m", "holdfast", *words])
    assert run.code() == 0
    assert run.out.count("of 3") == 3


def test_a_module_is_run_as_python_would(run: Run) -> None:
    run.write("", "package/__init__.py")
    run.write(
        "import sys; print(__name__, __spec__.name, sys.argv[1:], repr(sys.path[0]))\n",
        "package/train.py",
    )
    run.start("--standby", "0", "-m", "package.train", "--lr", "1", nproc=1)
    assert run.code() == 0
    assert f"__main__ package.train ['--lr', '1'] '{run.folder}'" in run.out


def test_a_command_that_cannot_be_run_ends_the_job_at_once_and_says_why(run: Run) -> None:
    run.write("neither a script nor a program", "junk")
    (run.folder / "junk").chmod(0o755)
    run.start("--no-python", "./junk", nproc=2)
    assert run.code() == 1
    assert "Exec format error" in run.err


def test_a_command_that_is_no_python_is_a_rank_too(run: Run) -> None:
    run.start("--no-python", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE in $PWD"')
    assert run.code() == 0
    assert "[default0]:rank 0 of 2 in" in run.out
    assert "[default1]:rank 1 of 2 in" in run.out


def test_a_commands_exit_code_is_told(run: Run) -> None:
    run.start("--no-python", "sh", "-c", "echo oh no >&2; exit 3", nproc=1)
    assert run.code() == 1
    assert "rank 0: exit code 3, before the first step" in run.err
    assert b"oh no" in run.log(0)


def test_run_path_runs_the_script_as_main(run: Run) -> None:
    script = run.write("print(__name__, __file__, __import__('sys').argv)\n")
    run.start("--standby", "0", "--run-path", script, "x", nproc=1)
    assert run.code() == 0
    assert "__main__ train.py ['train.py', 'x']" in run.out


def test_a_script_in_another_directory_finds_its_neighbours(run: Run) -> None:
    run.write("WHERE = 'beside the script'\n", "code/neighbour.py")
    run.write("import neighbour; print(neighbour.WHERE)\n", "code/train.py")
    run.start("--standby", "0", "code/train.py", nproc=1)
    assert run.code() == 0
    assert "beside the script" in run.out


def test_what_is_preloaded_is_found_beside_the_script(run: Run) -> None:
    run.without_torch()
    run.write("import os; print('loaded in', os.getpid())\n", "code/heavy.py")
    run.write(TRAINER, "code/train.py")
    run.start("--preload", "heavy", "--standby", "1", "code/train.py", nproc=1)
    run.until_standbys(1)
    run.end()
    assert run.code() == 0
    assert "loaded in" in _nursery_log(run)


def _nursery_log(run: Run) -> str:
    return "".join(path.read_text() for path in run.job_home.glob("logs/nursery*.log"))


# ---- output ------------------------------------------------------------------------------------

TALK = """
    import os, sys
    print("to stdout"); print("to stderr", file=sys.stderr)
"""


def test_lines_have_a_rank_prefix_on_the_terminal_and_none_in_the_log(run: Run) -> None:
    run.start("--standby", "0", run.write(TALK))
    assert run.code() == 0
    for rank in (0, 1):
        assert f"[default{rank}]:to stdout\n" in run.out
        assert f"[default{rank}]:to stderr\n" in run.err
        assert sorted(run.log(rank).splitlines()) == [b"to stderr", b"to stdout"]


def test_redirected_streams_stay_off_the_terminal_and_teed_ones_come_back(run: Run) -> None:
    flags = ["--redirects", "0:1,1:3", "--tee", "1:2"]
    run.start("--standby", "0", *flags, run.write(TALK))
    assert run.code() == 0
    assert "to stdout" not in run.out
    assert {line for line in run.err.splitlines() if "to stderr" in line} == {
        "[default0]:to stderr",
        "[default1]:to stderr",
    }
    assert b"to stdout" in run.log(0)
    assert b"to stdout" in run.log(1)


def test_logs_go_where_log_dir_says(run: Run) -> None:
    run.start("--standby", "0", "--log-dir", "elsewhere", run.write(TALK), nproc=1)
    assert run.code() == 0
    logs = list((run.folder / "elsewhere").rglob("rank_0.log"))
    assert len(logs) == 1
    assert b"to stdout" in logs[0].read_bytes()


def test_a_last_line_without_newline_is_shown(run: Run) -> None:
    run.start("--standby", "0", run.write("print('no newline', end='')\n"), nproc=1)
    assert run.code() == 0
    assert run.out == "[default0]:no newline\n"
    assert run.log(0) == b"no newline"


# ---- a script that cannot work -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.py"], "holdfast run: missing.py: no such file"),
        (["--nproc-per-node", "0", "train.py"], "holdfast run: --nproc-per-node 0: "),
        (["--nproc-per-node", "many", "train.py"], "holdfast run: --nproc-per-node many: "),
        (["--nproc-per-nods", "2", "train.py"], "holdfast run: unknown flag --nproc-per-nods; "),
        (["--max-restarts"], "holdfast run: --max-restarts: N is missing"),
        ([], "holdfast run: no script given"),
    ],
)
def test_what_makes_no_sense_gets_one_line_and_exit_code_2(
    run: Run, words: list[str], says: str
) -> None:
    run.write("")
    run.start_raw([sys.executable, "-m", "holdfast", "run", *words])
    assert run.code() == 2
    assert run.out == ""
    assert run.err.startswith(says)
    assert run.err.count("\n") == 1
    assert not run.home.exists()


def test_a_syntax_error_ends_with_1_and_only_the_users_traceback(run: Run) -> None:
    script = run.write("import os\nif True print('x')\n")
    run.start("--standby", "0", script, nproc=1)
    assert run.code() == 1
    plain = subprocess.run([sys.executable, script], cwd=run.folder, capture_output=True)
    assert run.log(0) == plain.stderr
    assert "SyntaxError at train.py:2, before the first step" in run.err


RAISE = """
    def deep():
        raise ValueError("a bug of the user's")
    def main():
        deep()
    main()
"""


def test_an_exception_before_the_first_step_ends_with_1_at_once(run: Run) -> None:
    script = run.write(RAISE)
    run.start("--standby", "0", script, nproc=1)
    assert run.code() == 1
    plain = subprocess.run([sys.executable, script], cwd=run.folder, capture_output=True)
    assert run.log(0) == plain.stderr
    assert "rank 0: ValueError at train.py:3, before the first step" in run.err
    assert not (run.job_home / "logs" / "round_2").exists()


def test_a_module_that_raises_shows_only_the_users_traceback(run: Run) -> None:
    run.write(RAISE, "mod.py")
    run.start("--standby", "0", "-m", "mod", nproc=1)
    assert run.code() == 1
    assert b"holdfast" not in run.log(0)
    assert b"deep()" in run.log(0)


def test_an_exit_code_before_the_first_step_ends_with_1_and_names_it(run: Run) -> None:
    run.start("--standby", "0", run.write("import sys; sys.exit(17)\n"), nproc=1)
    assert run.code() == 1
    assert "rank 0: exit code 17, before the first step" in run.err


def test_the_record_decorators_error_file_reaches_the_incident(run: Run) -> None:
    run.write(
        """
        import os, subprocess, sys
        if len(sys.argv) > 1:
            from torch.distributed.elastic.multiprocessing.errors import record
            @record
            def main():
                raise ArithmeticError("told by the error file")
            main()
        """
    )
    # A command is no Python of ours: the error file is all that can tell of the exception.
    run.start("--no-python", sys.executable, "train.py", "go", nproc=1)
    assert run.code() == 1
    (incident,) = run.ask("incidents")
    assert incident["kind"] == "exception"
    assert "ArithmeticError" in incident["signature"]
    assert "told by the error file" in incident["detail"]


# ---- the job's home and its coordinator --------------------------------------------------------


def test_a_home_that_cannot_be_written_gets_one_line(run: Run) -> None:
    run.home.write_text("a file, not a directory")
    run.start("--standby", "0", run.write(TALK))
    assert run.code() == 2
    assert run.err.startswith(f"holdfast run: {run.job_home}: cannot be written (")
    assert run.err.count("\n") == 1


def test_a_port_that_is_taken_gets_one_line(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        run.start("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, run.write(TALK))
        assert run.code() == 1
    assert f"cannot listen on {endpoint} (" in run.err
    assert "Traceback" not in run.err
    assert len(run.own_lines) == 1


def test_a_master_port_that_is_taken_is_told_without_a_traceback(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run.start("--standby", "0", "--master-port", port, run.write(TALK))
        assert run.code() == 1
    assert f"port {port}" in run.err
    assert "Traceback" not in run.err


def test_two_jobs_of_one_name_do_not_run_at_once(make_run: Callable[[], Run]) -> None:
    first, second = make_run(), make_run()
    first.train()
    first.until_stepping()
    second.train(job=first.job)
    assert second.code() == 2
    assert second.err.startswith(f"holdfast run: job {first.job} is running already (")
    assert second.err.count("\n") == 1
    first.end()
    assert first.code() == 0


def test_a_name_may_be_used_again_and_the_old_home_is_kept(make_run: Callable[[], Run]) -> None:
    first, second = make_run(), make_run()
    first.train("--standby", "0", nproc=1, script="print('first')")
    assert first.code() == 0
    second.train("--standby", "0", nproc=1, script="print('second')", job=first.job)
    assert second.code() == 0
    assert first.log(0) == b"second\n"
    aside = first.job_home.with_name(f"{first.job}.1")
    assert (aside / "logs/round_1/rank_0.log").read_bytes() == b"first\n"


def test_the_token_is_nobody_elses_to_read(run: Run) -> None:
    run.train("--standby", "0", nproc=1)
    run.until_stepping()
    job_file = run.job_home / "job.json"
    assert stat.S_IMODE(job_file.stat().st_mode) == 0o600
    token = json.loads(job_file.read_text())["token"]
    for pid in run.alive():
        assert token.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    run.end()
    assert run.code() == 0


FAILS_ONCE = """
    import os, subprocess, sys, time
    import holdfast

    assert "HOLDFAST_TOKEN" not in os.environ
    assert b"HOLDFAST_TOKEN" not in open("/proc/self/environ", "rb").read()
    holdfast.progress(1)
    holdfast.barrier("both")
    if holdfast.restarts() == 0:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            file.write('{"message": "on purpose"}')
        sys.exit(1)
    with open("umask", "w") as file:
        old = os.umask(0)
        file.write(oct(old))
    nested = [sys.executable, "-m", "holdfast", "why", "--json"]
    print("why", subprocess.run(nested, stdout=subprocess.DEVNULL).returncode)
    while not os.path.exists("end"):
        time.sleep(0.01)
        holdfast.progress(2)
"""


def test_a_given_token_stays_out_of_scripts_and_a_home_is_for_its_user_alone(run: Run) -> None:
    script = run.write(FAILS_ONCE)
    run.without_torch()
    run.start(script, nproc=1, env={"HOLDFAST_TOKEN": "s3cret"}, umask=0)
    run.until_stepping(round=2)
    token = json.loads((run.job_home / "job.json").read_text())["token"]
    seen = {path.name for path in _walked(run.job_home)}
    _assert_private(run.job_home)
    inherited = [b"s3cret" in Path(f"/proc/{pid}/environ").read_bytes() for pid in run.alive()]
    run.end()
    assert run.code() == 0
    assert token == "s3cret"
    assert {"journal.db-wal", "journal.db-shm", "rank_0.error.json"} <= seen
    assert sum(inherited) <= 3  # The launcher, and the agent and coordinator that it forked.
    assert "why 0" in run.out
    assert (run.folder / "umask").read_text() == "0o0"
    _assert_private(run.job_home)
    assert (run.job_home / "trace.json").exists()


def _walked(home: Path) -> list[Path]:
    return [home, *home.rglob("*")]


def _assert_private(home: Path) -> None:
    for path in _walked(home):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))


def test_a_job_on_one_node_listens_on_loopback_only(run: Run) -> None:
    run.train("--standby", "0", nproc=1)
    run.until_stepping()
    listening = _listening(run)
    run.end()
    assert run.code() == 0
    job_port = json.loads((run.job_home / "job.json").read_text())["port"]
    assert job_port in [port for _, port in listening]
    assert {address for address, _ in listening} == {"0100007F"}  # that is 127.0.0.1


def _listening(run: Run) -> list[tuple[str, int]]:
    """Addresses (as /proc/net/tcp has them) and ports on which the job's processes listen."""
    inodes = set()
    for pid in run.alive():
        for fd in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                found.append((address, int(port, 16)))
    return found


def test_a_stranger_without_the_token_is_turned_away(run: Run) -> None:
    run.train("--standby", "0", nproc=1)
    run.until_stepping()
    job = json.loads((run.job_home / "job.json").read_text())
    with socket.create_connection((job["host"], job["port"]), timeout=PATIENCE_S) as stranger:
        stranger.sendall(b"\xff\xff\xff\xffGET / HTTP/1.1\r\n\r\n")
        while stranger.recv(4096):
            pass
    run.end()
    assert run.code() == 0
    assert "Traceback" not in run.err


@pytest.mark.parametrize("how", ["script", "command"])
def test_a_rank_reads_what_is_typed_at_the_terminal(run: Run, how: str) -> None:
    """In the terminal's background it would be stopped for good; it has a session of its own."""
    script = run.write("import sys; print('got', repr(sys.stdin.readline()))\n")
    words = ["--no-python", sys.executable] if how == "command" else ["--standby", "0"]
    ours, theirs = os.openpty()
    try:
        taking = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        )
        command = (sys.executable, "-c", taking, "-m", "holdfast", "run")
        run.start(*words, script, nproc=1, command=command, stdin=theirs)
        os.write(ours, b"continue\n")
        assert run.code() == 0
    finally:
        os.close(ours)
        os.close(theirs)
    assert "got 'continue" in run.out


def test_a_rank_reads_what_is_piped_into_the_launcher(run: Run) -> None:
    script = run.write("import sys; print('got', sys.stdin.read())\n")
    reader, writer = os.pipe()
    os.write(writer, b"what was piped")
    os.close(writer)
    run.start("--standby", "0", script, nproc=1, stdin=reader)
    os.close(reader)
    assert run.code() == 0
    assert "got what was piped" in run.out


def test_a_launcher_without_standard_input_runs_as_well(run: Run) -> None:
    script = run.write("print('ran')\n")
    command = ("sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "holdfast", "run")
    run.start("--standby", "0", script, nproc=1, command=command)
    assert run.code() == 0
    assert "ran" in run.out


def test_a_coordinator_of_a_new_job_leaves_no_other_home(run: Run) -> None:
    run.start_raw([sys.executable, "-m", "holdfast", "coordinator", "--job", run.job])
    wait_for(lambda: "listens on" in run.out, "its address")
    assert [home.name for home in (run.home / "jobs").iterdir()] == [run.job]
