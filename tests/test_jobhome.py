"""A job's home: one job at a time, nothing written over, the token for nobody else."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import jobhome
from holdfast.errors import JobError, JobHomeError, UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    return tmp_path


def job_file(*, job: str = "llm", token: str = "t", pid: int = 1) -> jobhome.JobFile:
    return jobhome.JobFile(job=job, host="127.0.0.1", port=1, token=token, pid=pid)


def finished(name: str) -> jobhome.JobHome:
    """A job of that name that ran and is over."""
    made = jobhome.create(name, "train.py")
    made.write_job_file(job_file(job=name))
    made.journal.touch()
    os.close(made._lock_fd)
    return made


def test_a_new_job_has_a_home_with_logs(home: Path) -> None:
    made = jobhome.create("llm", "train.py")
    assert made.path == home / "jobs" / "llm"
    assert made.logs.is_dir()
    assert made.alive()


def test_a_job_without_a_name_is_called_after_its_script() -> None:
    assert jobhome.create(None, "/x/my train!.py").name.startswith("my-train--")


def test_the_job_file_is_for_its_owner_alone() -> None:
    made = jobhome.create("llm", "train.py")
    old = os.umask(0)
    try:
        made.write_job_file(job_file(token="secret"))
    finally:
        os.umask(old)
    mode = stat.S_IMODE((made.path / "job.json").stat().st_mode)
    assert mode == 0o600
    assert made.read_job_file() == job_file(token="secret")


def test_the_job_file_is_written_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = jobhome.create("llm", "train.py")
    made.write_job_file(job_file(token="first"))

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(JobHomeError, match="disk full"):
        made.write_job_file(job_file(token="second"))
    assert made.read_job_file() == job_file(token="first")


def test_a_second_live_job_of_the_same_name_is_refused() -> None:
    jobhome.create("llm", "train.py")
    with pytest.raises(JobHomeError, match="running already") as caught:
        jobhome.create("llm", "train.py")
    assert caught.value.exit_code == 2


def test_the_home_of_an_older_job_is_set_aside_whole(home: Path) -> None:
    for token in ("1", "2", "3"):
        (finished("llm").path / "token").write_text(token)
    kept = {p.name: (p / "token").read_text() for p in (home / "jobs").iterdir()}
    assert kept == {"llm": "3", "llm.1": "1", "llm.2": "2"}


def test_a_job_whose_runner_was_killed_is_not_alive() -> None:
    code = (
        "import os, signal; from holdfast import jobhome\n"
        "jobhome.create('llm', 'x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=200, check=False)
    assert not jobhome.JobHome(jobhome.holdfast_home() / "jobs" / "llm").alive()
    assert jobhome.create("llm", "x").alive()


def test_looking_whether_a_job_is_alive_does_not_make_it_seem_so() -> None:
    made = finished("llm")
    fd = os.open(made.path / "lock", os.O_RDWR)
    try:
        jobhome.fcntl.flock(fd, jobhome.fcntl.LOCK_SH)  # Somebody else is just looking, too.
        assert not made.alive()
    finally:
        os.close(fd)


def _create(ready: object, answers: object) -> None:
    ready.wait()  # type: ignore[attr-defined]
    try:
        made = jobhome.create("llm", "train.py")
        made.write_job_file(job_file(pid=os.getpid()))
        answers.put(("won", os.getpid()))  # type: ignore[attr-defined]
        ready.wait()  # type: ignore[attr-defined]
    except JobHomeError as error:
        answers.put(("lost", str(error)))  # type: ignore[attr-defined]
        ready.wait()  # type: ignore[attr-defined]


def test_of_many_jobs_started_at_once_with_one_name_exactly_one_runs(home: Path) -> None:
    context = multiprocessing.get_context("fork")
    count = 8
    finished("llm")
    ready, answers = context.Barrier(count), context.Queue()
    processes = [context.Process(target=_create, args=(ready, answers)) for _ in range(count)]
    for process in processes:
        process.start()
    told = [answers.get(timeout=200) for _ in range(count)]
    for process in processes:
        process.join(30)
    winners = [pid for outcome, pid in told if outcome == "won"]
    assert len(winners) == 1
    content = json.loads((home / "jobs" / "llm" / "job.json").read_text())
    assert content["pid"] == winners[0]
    assert sorted(p.name for p in (home / "jobs").iterdir()) == ["llm", "llm.1"]


def test_a_job_that_starts_while_another_sets_the_old_home_aside_does_not_lose_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished("llm")
    code = "from holdfast import jobhome; jobhome.create('llm', 'x'); print('won', flush=True); input()"
    real = jobhome._set_aside
    others: list[subprocess.Popen[str]] = []

    def with_another_at_the_door(path: Path) -> Path:
        other = subprocess.Popen(
            [sys.executable, "-c", code],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        others.append(other)
        assert other.stdout is not None
        deadline = time.monotonic() + 20
        while not _waits_for_a_lock(other.pid) and not select.select([other.stdout], [], [], 0)[0]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return real(path)

    monkeypatch.setattr(jobhome, "_set_aside", with_another_at_the_door)
    jobhome.create("llm", "train.py")
    (other,) = others
    said, complaint = other.communicate(timeout=200)
    assert said == ""
    assert "running already" in complaint


def _waits_for_a_lock(pid: int) -> bool:
    with open("/proc/locks") as locks:
        return any("->" in line and f" {pid} " in line for line in locks)


def test_a_home_that_cannot_be_written_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "file"))
    with pytest.raises(JobHomeError, match="set HOLDFAST_HOME to another directory") as caught:
        jobhome.create("llm", "train.py")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_job_is_found_by_its_name() -> None:
    finished("one")
    finished("two")
    assert jobhome.find("one").name == "one"


def test_without_a_name_the_newest_job_is_found() -> None:
    one, two = finished("one"), finished("two")
    os.utime(one.path / "job.json", (1000, 1000))
    os.utime(two.path / "job.json", (2000, 2000))
    assert jobhome.find(None).name == "two"


def test_a_job_that_is_not_there_is_named_with_those_that_are() -> None:
    finished("one")
    with pytest.raises(JobError, match=r"no job three .*known are: one"):
        jobhome.find("three")


def test_a_misspelt_job_is_guessed() -> None:
    for name in ("llama-7b", *map(str, range(20))):
        finished(name)
    with pytest.raises(JobError, match=r"did you mean llama-7b\?"):
        jobhome.find("lama-7b")


def test_of_many_jobs_the_newest_are_named_and_the_rest_counted() -> None:
    for age, name in enumerate(("b", "e", "a", "d", "c", "f", "g")):
        home = finished(name)
        os.utime(home.path / "job.json", (1000 - age, 1000 - age))
    with pytest.raises(JobError, match=r"known are: b, e, a, d, c and 2 older ones"):
        jobhome.find("train")


def test_no_jobs_at_all_is_said_so() -> None:
    with pytest.raises(JobError, match="holdfast run"):
        jobhome.find(None)


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """One umask after another, and the old one again in the end."""
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def modes(path: Path) -> set[tuple[str, str]]:
    """What is in a directory, itself included: its kind and its mode."""
    found = [path, *path.rglob("*")]
    return {
        ("directory" if one.is_dir() else "file", oct(stat.S_IMODE(one.stat().st_mode)))
        for one in found
    }


PRIVATE = {("directory", "0o700"), ("file", "0o600")}


def test_a_home_is_for_its_user_alone_whatever_the_umask(home: Path, umask: int) -> None:
    made = finished("llm")
    jobhome.write_privately(made.memories, b"{}")
    second = jobhome.create("llm", "train.py")  # Inherits what is in pauses.json.
    assert second.memories.exists()
    assert modes(home / "jobs" / "llm") == PRIVATE
    assert oct(stat.S_IMODE((home / "jobs").stat().st_mode)) == "0o700"


def test_a_directory_of_all_jobs_that_is_there_keeps_its_mode(home: Path) -> None:
    (home / "jobs").mkdir()
    (home / "jobs").chmod(0o755)
    jobhome.create("llm", "train.py")
    assert oct(stat.S_IMODE((home / "jobs").stat().st_mode)) == "0o755"


@pytest.mark.parametrize("use", [lambda: jobhome.create("llm", "x"), lambda: jobhome.share("llm")])
def test_an_open_home_is_tightened_when_it_is_used_again(
    home: Path, use: Callable[[], object]
) -> None:
    made = finished("llm")
    (made.incidents / "1").mkdir(parents=True)
    (made.incidents / "1" / "verdict.json").touch()
    outside = home / "outside"
    outside.touch()
    (made.path / "link").symlink_to(outside)
    for path in (outside, made.path, *made.path.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    use()
    (made.path / "link").unlink(missing_ok=True)
    (home / "jobs" / "llm.1" / "link").unlink(missing_ok=True)
    assert modes(home / "jobs") == PRIVATE
    assert oct(stat.S_IMODE(outside.stat().st_mode)) == "0o666"


PATHS = [
    ".",
    "..",
    "/",
    "/etc",
    "a/b",
    "../x",
    ".hidden",
    "",
    "a\nb",
    "\x1b[2J",
    "a\x00",
    "x" * 101,
]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(
    "use", [jobhome.find, jobhome.share, lambda name: jobhome.create(name, "x")]
)
def test_a_path_is_no_name_and_nothing_is_touched(
    home: Path, use: Callable[[str], object], name: str
) -> None:
    if name == "" and use not in (jobhome.find, jobhome.share):
        return  # No name at all: one is generated.
    finished("llm")
    before = sorted(home.rglob("*"))
    with pytest.raises(UsageError) as refused:
        use(name)
    assert "a name is needed, not a path" in str(refused.value)
    assert str(refused.value).isprintable()
    assert sorted(home.rglob("*")) == before


def test_names_as_torchrun_takes_them_are_names() -> None:
    for name in ("my run: 3", "größe", "123", "-x", "a.b"):
        assert jobhome.create(name, "x").name == name


DAMAGED = {
    "empty": b"",
    "truncated": b'{"job": "llm", "host": "127.0',
    "binary": bytes(range(256)),
    "another kind": b"[1, 2]",
    "a field is missing": b'{"job": "llm", "host": "127.0.0.1", "port": 1, "pid": 1}',
    "wrong types": b'{"job": "llm", "host": 7, "port": "x", "token": {}, "pid": null}',
    "no port": b'{"job": "llm", "host": "h", "port": 99999, "token": "t", "pid": 1}',
    "empty token": b'{"job": "llm", "host": "h", "port": 1, "token": "", "pid": 1}',
    "too deep": b'{"x": ' + b"[" * 100_000,
}


def damage(made: jobhome.JobHome, how: str) -> None:
    path = made.path / "job.json"
    path.unlink()
    if how == "directory":
        path.mkdir()
    else:
        path.write_bytes(DAMAGED[how])


@pytest.mark.parametrize("how", [*DAMAGED, "directory"])
def test_a_damaged_job_file_is_one_line_that_names_it(how: str) -> None:
    made = finished("llm")
    damage(made, how)
    with pytest.raises(
        JobError, match=r"job\.json (is damaged|cannot be read) \(.*start it again"
    ) as it:
        made.read_job_file()
    assert "\n" not in str(it.value)


@pytest.mark.parametrize("how", [*DAMAGED, "directory"])
def test_a_damaged_job_file_hides_neither_its_job_nor_another(how: str) -> None:
    damaged, whole = jobhome.create("damaged", "x"), jobhome.create("whole", "x")
    for made in (damaged, whole):
        made.write_job_file(job_file(job=made.name))
        made.journal.touch()
    damage(damaged, how)
    found = jobhome.at_port(1)
    assert found is not None
    assert found.name == "whole"
    assert jobhome.find("damaged").name == "damaged"
    os.utime(damaged.path / "job.json", (4e9, 4e9))
    assert jobhome.find(None).name == "damaged"


def test_a_job_file_that_cannot_be_written_is_one_line() -> None:
    made = jobhome.create("llm", "x")
    (made.path / "job.json").mkdir()
    with pytest.raises(JobHomeError, match=r"job\.json: cannot be written"):
        made.write_job_file(job_file())


def test_a_device_in_the_place_of_a_file_keeps_its_mode(tmp_path: Path) -> None:
    """As root that would have closed /dev/full, or a pipe, to everybody else."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o622)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.close(jobhome.open_privately(pipe, os.O_WRONLY))
    os.close(reader)
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o622
