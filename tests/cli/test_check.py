from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main as cli

GPU = {"index": 0, "uuid": "GPU-0", "pci": "0000:4e:00.0", "recovery": 0, "ecc_uncorrected": 0}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake machine with one healthy GPU, and a current directory without surprises."""
    place = tmp_path / "node"
    place.mkdir()
    monkeypatch.setenv("HOLDFAST_FAKE_NODE", str(place))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    describe(place)
    return place


def describe(place: Path, **gpu: Any) -> None:
    (place / "nvml.json").write_text(json.dumps({"driver": "570.1", "gpus": [{**GPU, **gpu}]}))


def check(*words: str) -> int:
    return cli.main(["check", *words])


def heed_ctrl_c() -> None:
    """A test run in the background of a shell would hand down that it is to be ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def as_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_a_healthy_node_ends_with_0(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--only", "gpu-recovery", "--json") == 0
    content = as_json(capsys)
    assert content["verdict"] == "pass"
    [result] = content["results"]
    assert sorted(result) == ["check", "facts", "reason", "seconds", "verdict"]


def test_a_sick_node_ends_with_1_and_says_why(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(node, recovery=2)
    assert check("--only", "gpu-recovery") == 1
    out = capsys.readouterr().out
    assert "1 fail" in out.splitlines()[0]
    assert "gpu-recovery\tfail\t" in out
    assert "GPU 0 (0000:4e:00.0) needs the node rebooted" in out


def test_what_is_unknown_ends_with_0(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (node / "nvml.json").unlink()
    assert check("--only", "gpu", "--json") == 0
    assert as_json(capsys)["verdict"] == "unknown"


def test_everything_can_be_checked_at_once(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_to_check.py").write_text("def fan(): return 'fail', 'fan 3 [rear] is slow'")
    words = ["--path", "node", "--service", f"unix:{tmp_path}/none", "--check", "mine_to_check:fan"]
    assert check(*words, "--skip", "disk,cpu-compute", "--json") == 1
    results = {result["check"]: result for result in as_json(capsys)["results"]}
    assert {name for name in results if name.startswith("storage")} == {
        f"storage:{tmp_path}/home",
        f"storage:{node}",
    }
    assert results[f"storage:{node}"]["verdict"] == "pass"
    assert results["service"]["verdict"] == "unknown"
    assert results["mine_to_check:fan"]["reason"] == "fan 3 [rear] is slow"
    assert "cpu-cores" in results
    assert not {name for name in results if name.startswith(("disk", "cpu-compute"))}
    assert not (tmp_path / "home").exists()


def test_an_absent_service_can_be_made_to_count(node: Path, tmp_path: Path) -> None:
    words = ["--only", "service", "--service", f"{tmp_path}/none"]
    assert check(*words, "--service-unreachable", "fail") == 1


def test_a_baseline_tells_what_changed(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only", "gpu-ecc", "--baseline", str(tmp_path / "seen.json")]
    describe(node, ecc_uncorrected=1)
    assert check(*words) == 0
    describe(node, ecc_uncorrected=2)
    assert check(*words) == 1
    assert "1 uncorrected memory error just now" in capsys.readouterr().out
    assert check(*words) == 0
    assert [p.name for p in tmp_path.glob("*seen*")] == ["seen.json"]


def test_the_list_names_every_check_and_runs_none(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("--list", "--path", "/hangs/for/ever") == 0
    names = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert "gpu-memory" in names
    assert "storage:/hangs/for/ever" in names
    assert check("--list", "--json") == 0
    assert "nic" in [each["check"] for each in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "gpus"], "no check is called 'gpus'"),
        (["--skip", "nothing"], "no check is called 'nothing'"),
        (["--only", "service"], "nothing is left to check"),
        (["--only", ","], "nothing is left to check"),
        (["--deadline", "0"], "--deadline 0: more than 0 seconds"),
        (["--watch", "often"], "--watch often: a number of seconds"),
        (["--service", "node0"], "node0: a service is http://"),
        (["--check", "fan"], "--check fan: MODULE:FUNCTION is needed"),
        (["--check", "no_such_module_here:f"], "no module no_such_module_here here"),
        (["--path", "\udcff"], "only paths in printable UTF-8"),
        (["--baseline", "."], "cannot be read"),
        (["--nonsense"], "see `holdfast check --help`"),
    ],
)
def test_what_makes_no_sense_ends_with_2_and_one_line(
    node: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert check(*words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_the_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check("--help")
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("holdfast check --") >= 6


def test_a_terminals_table_shows_brackets_as_they_are(
    node: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_in_brackets.py").write_text("def f(): return 'warn', 'see [/etc] and [red]'")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert check("--only", "own", "--check", "mine_in_brackets:f") == 0
    assert "see [/etc] and [red]" in capsys.readouterr().out


def test_watching_looks_again_and_ends_with_the_last_look(node: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = ["check", "--only", "gpu-recovery", "--watch", "0.01", "--json"]
    command = [sys.executable, "-m", "holdfast", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_ctrl_c
    ) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["verdict"] == "pass"
        describe(node, recovery=1)
        while json.loads(watching.stdout.readline())["verdict"] != "fail":
            pass
        watching.send_signal(signal.SIGINT)
        _, error = watching.communicate(timeout=200)
    assert watching.returncode == 1
    assert "Traceback" not in error


def test_watching_ends_when_nobody_reads_the_results_any_more(node: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = ["check", "--only", "gpu-recovery", "--watch", "3600", "--json"]
    command = [sys.executable, "-m", "holdfast", *words]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        watching.stdout.readline()
        watching.stdout.close()
        assert watching.wait(timeout=200) == 0
