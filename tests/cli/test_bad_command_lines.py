"""Bad command lines: each is one line that says what is wrong, exit code 2, and nothing is started.

The commands run in this process, which is cheap; a launcher that would start its children fails the
test. A few run as processes of their own, because some of them are about the process.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast import jobhome
from holdfast.cli import coordinator
from holdfast.cli.flags import parse_run
from holdfast.cli.main import main
from holdfast.coordinator.journal import Journal
from holdfast.core.replay import Entry
from holdfast.errors import UsageError
from holdfast.launch import machine
from holdfast.launch.process import Launcher
from holdfast.messages.events import JobOpened
from holdfast.messages.records import Terms
from holdfast.messages.units import Time

LONG = "x" * 101

BAD = """
run                                                             | no script given
run --standalone                                                | no script given
run gone.py                                                     | gone.py: no such file
run ''                                                          | no such file
run pkg                                                         | is a directory without a __main__.py
run --run-path gone.py                                          | gone.py: no such file
run -m gone                                                     | -m gone: no such module
run -m json.gone                                                | -m json.gone: no such module
run -m pkg.gone                                                 | -m pkg.gone: no such module
run -m train.gone                                               | -m train.gone: no such module
run -m pkg                                                      | -m pkg: is a package without
run -m train/py                                                 | no such module
run -m ''                                                       | no such module
run --no-python no-such-command                                 | no such command
run --no-python ./train.py                                      | not executable
run -m --no-python json                                         | leave one of them out
run --no-python --standby 2 sh                                  | --standby 2: a command
run --nproc_per_nodes 2 train.py                                | did you mean --nproc-per-node?
run --xyzzy train.py                                            | unknown flag --xyzzy
run --nproc-per-node                                            | N is missing after it
run --standalone=1 train.py                                     | takes no value
run --nproc-per-node 0 train.py                                 | at least one rank
run --nproc-per-node -1 train.py                                | at least one rank
run --nproc-per-node two train.py                               | auto, cpu, gpu or a number
run --nproc-per-node 1.5 train.py                               | auto, cpu, gpu or a number
run --nproc-per-node 1e9 train.py                               | auto, cpu, gpu or a number
run --nproc-per-node 1000000000 train.py                        | is the most
run --nproc-per-node 50000 train.py                             | is the most
run --nproc-per-node xpu train.py                               | cannot count XPUs
run --nnodes 0 train.py                                         | at least one node
run --nnodes -1 train.py                                        | a number of nodes or MIN:MAX
run --nnodes few train.py                                       | a number of nodes or MIN:MAX
run --nnodes 1:2:3 train.py                                     | a number of nodes or MIN:MAX
run --nnodes 3:2 train.py                                       | did you mean 2:3?
run --nnodes 1:999999999 train.py                               | is the most
run --nnodes 3 --node-unit 2 train.py                           | no number of nodes from 3 to 3
run --nnodes 2 --node-unit 3 train.py                           | a number from 1 to --nnodes (2)
run --nnodes 3 --segment 2 train.py                             | no number of nodes from 3 to 3
run --nnodes 5:7 --node-unit 2 --segment 4 train.py             | no number of nodes from 5 to 7
run --node-unit 0 train.py                                      | a number from 1 to --nnodes (1)
run --segment -2 train.py                                       | a whole number
run --spares -1 train.py                                        | a whole number
run --spares 1e9 train.py                                       | a whole number
run --spares 999999999 train.py                                 | is the most
run --copies two train.py                                       | a whole number
run --copies 999999999 train.py                                 | is the most
run --max-restarts -1 train.py                                  | a whole number
run --max-restarts 99999999999 train.py                         | a whole number
run --standby x train.py                                        | auto or a number of standbys
run --standby -1 train.py                                       | auto or a number of standbys
run --standby 999999999 train.py                                | is the most
run --hang-after 0 train.py                                     | more than 0 seconds
run --hang-after nan train.py                                   | a number of seconds
run --hang-after inf train.py                                   | a number of seconds
run --hang-after -5 train.py                                    | a number of seconds
run --hang-after 1e300 train.py                                 | a number of seconds
run --hang-after soon train.py                                  | a number of seconds
run --save-deadline NaN train.py                                | a number of seconds
run --safety-factor 0.5 train.py                                | a number, 1 or more
run --rank-heartbeat-timeout 0 train.py                         | more than 0 seconds
run --rank-section-timeouts step train.py                       | NAME:SECONDS
run --rank-section-timeouts step:x train.py                     | a number of seconds
run --rank-section-timeouts :5 train.py                         | NAME:SECONDS
run --shutdown-timeout -3 train.py                              | a number of seconds
run --rdzv-conf join_timeout train.py                           | KEY=VALUE
run --rdzv-conf join_timeout=x train.py                         | a number of seconds
run --rdzv-conf last_call_timeout=nan train.py                  | a number of seconds
run --rdzv-backend c10d --rdzv-endpoint localhost:7 --rdzv-conf is_host=maybe train.py | 1 or 0 is
run --rdzv-backend etcd --rdzv-endpoint localhost:7 train.py    | takes the place of this backend
run --rdzv-endpoint badhost:1 train.py                          | badhost
run --rdzv-backend c10d --rdzv-endpoint badhost:1 train.py      | badhost
run --rdzv-backend c10d --rdzv-endpoint badhost:1 --nnodes 2 train.py | badhost
run --rdzv-backend c10d --rdzv-endpoint 1.2.3.4:29400 train.py  | 1.2.3.4 is not an address of
run --rdzv-endpoint localhost:99999 train.py                    | HOST or HOST:PORT
run --rdzv-endpoint :1 train.py                                 | HOST or HOST:PORT
run --rdzv-endpoint 'a b:1' train.py                            | HOST or HOST:PORT
run --rdzv-endpoint [::1 train.py                               | HOST or HOST:PORT
run --rdzv-backend c10d --nnodes 2 --rdzv-endpoint localhost:0 train.py | port 0
run --nnodes 2 --master-addr badhost train.py                   | badhost
run --nnodes 2 --master-addr 'a b' train.py                     | a b
run --nnodes 2 --master-addr 1.2.3.4 --node-rank 0 train.py     | 1.2.3.4 is not an address of
run --master-port 99999 train.py                                | a port from 0 to 65535
run --master-port -1 train.py                                   | a port from 0 to 65535
run --master-port http train.py                                 | a port from 0 to 65535
run --local-addr 1.2.3.4 train.py                               | not an address of this machine
run --local-addr badhost train.py                               | badhost
run --local-addr '' train.py                                    | --local-addr
run --node-rank 1 train.py                                      | 0 only, since there is one node
run --node-rank -1 train.py                                     | a whole number
run --node-rank x train.py                                      | a whole number
run --job . train.py                                            | a job's name
run --job .. train.py                                           | a job's name
run --job /tmp/x train.py                                       | a job's name
run --job a/b train.py                                          | a job's name
run --job '' train.py                                           | a job's name
run --job $'' train.py                                          | a job's name
run --job LONG train.py                                         | a job's name
run --rdzv-id . train.py                                        | a name is needed, not a path
run --rdzv-id .. train.py                                       | a name is needed, not a path
run --rdzv-id /etc train.py                                     | a name is needed, not a path
run --rdzv-id a/b train.py                                      | a name is needed, not a path
run --rdzv-id 'a\x07b' train.py                                 | a name is needed, not a path
run --rdzv-id LONG train.py                                     | a name is needed, not a path
run --log-dir /proc/nope train.py                               | --log-dir /proc/nope
run --log-dir train.py train.py                                 | is a file
run --log-dir train.py/x train.py                               | --log-dir train.py/x
run --image-dir /proc/nope train.py                             | /proc/nope
run --image-dir train.py train.py                               | is a file
run --token-file gone train.py                                  | --token-file gone
run --token-file empty train.py                                 | is empty
run --token-file pkg train.py                                   | --token-file pkg
run --token-file binary train.py                                | is no text
run --tls-cert empty train.py                                   | go together
run --tls-cert gone --tls-key gone --tls-ca gone train.py       | --tls-cert gone: no such file
run --tls-cert empty --tls-key empty --tls-ca empty train.py    | is no certificate
run --coordinator localhost train.py                            | HOST:PORT is needed
run --coordinator localhost:0 train.py                          | HOST:PORT is needed
run --coordinator localhost:http train.py                       | HOST:PORT is needed
run --coordinator badhost:1 train.py                            | badhost
run --standalone --nnodes 2 train.py                            | leave one of them out
run --standalone --coordinator localhost:1 train.py             | leave out
run --redirects 4 train.py                                      | 0 (none), 1 (stdout)
run --tee 0:9 train.py                                          | 0 (none), 1 (stdout)
run --local-ranks-filter a train.py                             | local ranks separated by commas
run --signals-to-handle SIGFOO train.py                         | no such signal
run --signals-to-handle SIGKILL train.py                        | no process can handle
run --signals-to-handle , train.py                              | name at least one signal
run --numa-binding wrong train.py                               | one of node
run --chaos explode@step=1 train.py                             | no fault is called explode
run --chaos kill train.py                                       | say when
run --chaos kill@step=0 train.py                                | a whole number from 1 on
run --chaos kill@when=3 train.py                                | is not understood
run --preload no_such_module train.py                           | no such module
run --config gone.toml train.py                                 | gone.toml: No such file
run --config pkg train.py                                       | Is a directory
run --config binary train.py                                    | not a TOML file
run --config torn.toml train.py                                 | not a TOML file
run --config unknown.toml train.py                              | no such setting
run --config types.toml train.py                                | a text, a number or true/false
run --config home.toml train.py                                 | cannot be set in a file
run --config nul.toml train.py                                  | nul.toml:1: log-dir
HOLDFAST_NNODES=few run train.py                                | HOLDFAST_NNODES few
PET_NPROC_PER_NODE=many run train.py                            | PET_NPROC_PER_NODE many
HOLDFAST_STANDBY=-1 run train.py                                | HOLDFAST_STANDBY -1
HOLDFAST_NODE_CHECK=maybe run train.py                          | HOLDFAST_NODE_CHECK maybe
HOLDFAST_INFRA_RANK=first run train.py                          | HOLDFAST_INFRA_RANK
HOLDFAST_RANK_FROM_NODENAME=maybe run train.py                  | HOLDFAST_RANK_FROM_NODENAME
HOLDFAST_STOPPED_LIMIT=x run train.py                           | HOLDFAST_STOPPED_LIMIT
HOLDFAST_TOKEN= run train.py                                    | HOLDFAST_TOKEN: is empty
HOLDFAST_CONFIG=gone.toml run train.py                          | HOLDFAST_CONFIG gone.toml
HOLDFAST_HOME=/proc/nope run train.py                           | /proc/nope
HOLDFAST_HOME=train.py run train.py                             | set HOLDFAST_HOME
TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x run train.py                   | TORCH_ELASTIC_SHUTDOWN_TIMEOUT x
SLURM_PROCID=x run train.py                                     | SLURM_PROCID
CUDA_VISIBLE_DEVICES= run --nproc-per-node gpu train.py         | no GPU is visible
nope                                                            | no command 'nope'
--nope                                                          | no command '--nope'
status --bogus                                                  | --bogus
status a b                                                      | unrecognized arguments
status ..                                                       | a name is needed, not a path
status /etc                                                     | a name is needed, not a path
status LONG                                                     | a name is needed, not a path
goodput ../x                                                    | a name is needed, not a path
incidents a b c                                                 | a job and a number
incidents --story                                               | the number of an incident
incidents ../x 1                                                | a name is needed, not a path
why /etc/passwd                                                 | a name is needed, not a path
why llm --incident -1                                           | --incident
why llm --incident x                                            | --incident
why llm --incident ''                                           | --incident
hang                                                            | required
hang llm now                                                    | --rank
hang llm --rank -1 now                                          | --rank
hang llm --rank x now                                           | --rank
hang llm --rank 0 maybe                                         | maybe
hang ../x --rank 0 now                                          | a name is needed, not a path
chaos llm                                                       | FAULT
chaos llm explode                                               | no fault is called explode
chaos llm kill --rank -1                                        | rank -1
chaos llm kill --rank x                                         | rank x
chaos llm kill --at-step 0                                      | a whole number from 1 on
chaos ../x kill                                                 | a name is needed, not a path
coordinator                                                     | give --job NAME
coordinator --job ..                                            | a job's name
coordinator --job llm --listen localhost:99999                  | HOST or HOST:PORT
coordinator --job llm --listen badhost:1                        | badhost
coordinator --job llm --listen 1.2.3.4:1                        | 1.2.3.4
coordinator --job llm --token-file gone                         | --token-file gone
coordinator --job llm --tls-cert gone --tls-key gone --tls-ca gone | no such file
ckpt nope                                                       | no command 'nope'
ckpt ls                                                         | DIR
ckpt verify . --step x                                          | --step
ckpt export .                                                   | --to
check --only nothing                                            | nothing
check --deadline 0                                              | more than 0 seconds
check --watch x                                                 | a number of seconds
check --service ftp://x                                         | ftp://x
check --check x                                                 | MODULE:FUNCTION
check --bogus                                                   | --bogus
sim --nodes -1                                                  | --nodes -1: a whole number
sim --nodes x                                                   | --nodes x: a whole number
sim --nodes 0                                                   | --nodes 0: at least 1
sim --spares -3                                                 | --spares -3: a whole number
sim --seed x                                                    | --seed x: a whole number
sim --seeds x                                                   | --seeds x: a range A..B
sim --seeds 5..2                                                | --seeds 5..2: a range A..B
sim --hours nan                                                 | --hours nan: a number, 0 or more
sim --hours 0                                                   | --hours 0: more than 0 hours
sim --fault-rate x                                              | --fault-rate x: a number, 0 or more
sim --log gone/log --nodes 2                                    | --log gone/log: cannot be written
sim --nodes 3 --min-nodes 5                                     | --min-nodes 5 is more
config --nnodes 3:2                                             | did you mean 2:3?
config --local-addr 1.2.3.4 train.py                            | not an address of this machine
"""


class Line(NamedTuple):
    env: dict[str, str]
    argv: list[str]
    says: str


def _read(text: str) -> Line:
    command, _, says = text.rpartition("|")
    words = shlex.split(command.replace("LONG", LONG).replace(r"\x07", "\x07"))
    env = {}
    while words and "=" in words[0] and words[0][0].isupper():
        name, _, env[name] = words.pop(0).partition("=")
    return Line(env, words, says.strip())


LINES = [
    pytest.param(_read(text), id=" ".join(text.rpartition("|")[0].split()))
    for text in BAD.strip().splitlines()
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with scripts and files, and no job anywhere."""
    folder = tmp_path / "place"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").touch()
    (folder / "train.py").touch()
    (folder / "empty").touch()
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "torn.toml").write_text("nnodes = [1,")
    (folder / "unknown.toml").write_text("colour = 'red'")
    (folder / "types.toml").write_text("nnodes = 1979-05-27")
    (folder / "home.toml").write_text("home = '/tmp'")
    (folder / "nul.toml").write_text(r'log-dir = "a\u0000b"')
    monkeypatch.chdir(folder)
    foreign = ("PET_", "TORCH", "HOLDFAST_", "SLURM", "GROUP_RANK", "CROSS_SLURM")
    for name in [name for name in os.environ if name.startswith(foreign)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr(Launcher, "run", started)
    monkeypatch.setattr(coordinator, "run_coordinator", started)
    monkeypatch.setattr(machine, "HOST_LIMIT_S", 0.0)


def test_there_are_more_than_a_hundred() -> None:
    assert len(LINES) > 100


@pytest.mark.parametrize("line", LINES)
def test_a_bad_command_line_is_one_line_and_nothing_is_started(
    line: Line,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in line.env.items():
        monkeypatch.setenv(name, value)
    before = sorted(place.rglob("*"))
    code = main(line.argv)
    told = capsys.readouterr().err.splitlines()
    assert (code, len(told)) == (2, 1), told
    assert told[0].startswith("holdfast")
    assert line.says in told[0]
    assert told[0].isprintable()
    assert not (place.parent / "home").exists()
    assert sorted(place.rglob("*")) == before


def as_process(words: list[str], *before: str) -> tuple[int, str]:
    """A command in a process of its own: its exit code, and what it said."""
    done = subprocess.run(
        [*before, sys.executable, "-m", "holdfast", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "run --local-addr 1.2.3.4 train.py",
        "run --log-dir /proc/nope train.py",
        "run --rdzv-endpoint badhost:1 train.py",
        "run --nnodes 3:2 train.py",
        "run -m json.gone",
        "coordinator --job /tmp/x",
    ],
)
def test_as_a_process_it_is_the_same(command: str, place: Path) -> None:
    code, told = as_process(shlex.split(command))
    assert (code, told.count("\n")) == (2, 1), told
    assert not (place.parent / "home").exists()


@pytest.mark.parametrize(
    "words", [["train.py"], ["--token-file", "locked", "train.py"], ["--config", "locked", "x"]]
)
def test_a_file_that_this_user_cannot_read_is_named(place: Path, words: list[str]) -> None:
    (place / "locked").write_text("abc")
    for name in ("locked", "train.py"):
        (place / name).chmod(0)
    before: list[str] = []
    if os.getuid() == 0:  # Root reads everything, unless it gives up that right.
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not installed")
        before = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    code, told = as_process(["run", *words], *before)
    assert (code, told.count("\n")) == (2, 1), told
    assert "not readable" in told or "Permission denied" in told
    assert not (place.parent / "home").exists()


def test_the_name_of_another_machine_may_become_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known, asked = socket.getaddrinfo, []

    def slow_to_know(host: str, *words: Any, **more: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", *words, **more)

    monkeypatch.setattr(machine, "HOST_LIMIT_S", 60.0)
    monkeypatch.setattr(machine, "HOST_RETRY_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", slow_to_know)
    caplog.set_level("INFO")
    words = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=pod-0.svc:29400", "train.py"]
    machine.check_machine(parse_run(words))
    assert asked == ["pod-0.svc"] * 3
    assert caplog.messages == ["the host pod-0.svc is not known yet; trying for 60 s"]
    asked.clear()
    with pytest.raises(
        UsageError, match=r"pod-0\.svc is not known"
    ):  # Only this machine can be it.
        machine.check_machine(parse_run(["--nnodes=1", *words[1:]]))
    assert len(asked) == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--local-addr", "127.0.0.1"],
        ["--local-addr", "localhost"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:7"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:7", "--nnodes=2"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=1.2.3.4:7", "--nnodes=2"],
        ["--nnodes=2", "--master-addr=1.2.3.4", "--node-rank=1"],
        ["--coordinator=1.2.3.4:7"],
        ["--nnodes=4:7", "--node-unit=2", "--segment=4"],
        ["--standalone", "--rdzv-endpoint=badhost:1", "--rdzv-id=../x"],
    ],
)
def test_what_is_right_passes(words: list[str]) -> None:
    machine.check_machine(parse_run([*words, "train.py"]))


DAMAGED = {"empty": b"", "binary": bytes(range(256)), "types": b'{"port": "x"}'}


@pytest.mark.parametrize("how", [*DAMAGED, "directory"])
@pytest.mark.parametrize(
    "command",
    ["why llm", "hang llm --rank 0 now", "chaos llm kill", "why", "coordinator --job stopped"],
)
def test_a_damaged_job_file_is_one_line_for_every_command(
    how: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("llm", "stopped"):
        home = jobhome.create(name, "x")
        journal = Journal(home.journal)
        opened = JobOpened(at=Time(1.0), job=name, terms=Terms())
        journal.append([Entry(Time(1.0), opened)])
        journal.close()
        path = home.path / "job.json"
        path.mkdir() if how == "directory" else path.write_bytes(DAMAGED[how])
        os.utime(path, (1e9, 1e9 if name == "stopped" else 2e9))
        if name == "stopped":
            os.close(home._lock_fd)
    code = main(shlex.split(command))
    told = capsys.readouterr().err
    assert (code, told.count("\n")) == (1, 1), told
    assert "job.json is damaged" in told or "job.json cannot be read" in told
