"""Nodes and coordinators that disagree about TLS, as processes: one line on each side, and no loop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.wire.tls import TlsFiles

from .harness import PATIENCE_S, Run, wait_for

TOKEN = "a-token"


def flags(files: TlsFiles | None) -> list[str]:
    if files is None:
        return []
    return ["--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca]


def coordinator(run: Run, files: TlsFiles | None) -> int:
    """Start a coordinator alone; return its port."""
    command = [sys.executable, "-m", "holdfast", "coordinator", "--job", run.job]
    run.start_raw([*command, *flags(files)], {"HOLDFAST_TOKEN": TOKEN})
    wait_for(lambda: run.out.endswith("\n"), "the coordinator")
    return int(run.out.rpartition(":")[2])


def node(run: Run, port: int, files: TlsFiles | None) -> Run:
    run.without_torch()
    where = ["--coordinator", f"127.0.0.1:{port}", "--standby", "0"]
    script = run.write("import holdfast; holdfast.progress(1)\n")
    return run.start(*where, *flags(files), script, nproc=1, env={"HOLDFAST_TOKEN": TOKEN})


def test_with_certificates_of_one_authority_a_job_runs_and_is_asked(
    make_run: Callable[[], Run], certificates: TlsFiles
) -> None:
    first, second = make_run(), make_run()
    port = coordinator(first, certificates)
    assert node(second, port, certificates).code() == 0
    assert first.code() == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "at_the_node", "at_the_coordinator"),
    [
        (
            "good",
            None,
            "this coordinator requires TLS; give --tls-cert",
            "it does not use TLS, and",
        ),
        (
            None,
            "good",
            "it does not use TLS; give --tls-cert",
            "it uses TLS, and this job does not",
        ),
        ("good", "other", "its certificate is rejected (", "it broke off the TLS handshake; "),
    ],
    ids=["plain node", "plain coordinator", "another authority"],
)
def test_a_node_that_differs_about_tls_is_turned_away_with_one_line_on_each_side(
    make_run: Callable[[], Run],
    certificates: TlsFiles,
    other_certificates: TlsFiles,
    theirs: str | None,
    ours: str | None,
    at_the_node: str,
    at_the_coordinator: str,
) -> None:
    files = {"good": certificates, "other": other_certificates, None: None}
    first, second = make_run(), make_run()
    port = coordinator(first, files[theirs])
    assert node(second, port, files[ours]).code() == 2
    (line,) = second.err.splitlines()
    assert line.startswith("holdfast: the coordinator refused this node: ")
    assert at_the_node in line
    (logged,) = first.err.splitlines()
    assert at_the_coordinator in logged


def test_a_command_that_differs_about_tls_says_so_in_one_line(
    make_run: Callable[[], Run], certificates: TlsFiles, other_certificates: TlsFiles
) -> None:
    run = make_run()
    run.train("--standby", "0", *flags(certificates), nproc=1)
    run.until_stepping()

    def why(files: TlsFiles | None) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "why", run.job, *flags(files)],
            env=run.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stderr

    told = {name: why(files) for name, files in (("none", None), ("other", other_certificates))}
    good = why(certificates)
    run.end()
    assert run.code() == 0
    assert good == (0, "")
    for name, says in (("none", "requires TLS; give --tls-cert"), ("other", "is rejected (")):
        code, text = told[name]
        assert (code, text.count("\n")) == (1, 1), text
        assert says in text
    assert "Traceback" not in run.err


def test_a_key_that_vanishes_ends_the_job_instead_of_a_loop_of_restarts(
    run: Run, new_authority: Callable[..., TlsFiles]
) -> None:
    """A coordinator that dies needs its files again."""
    files = new_authority()
    run.train("--standby", "0", *flags(files), nproc=1)
    run.until_stepping()
    Path(files.key).unlink()
    run.kill(run.coordinator())
    assert run.code() == 1
    assert run.err.count(f"--tls-key {files.key}: no such file") == 1
    assert run.err.count("starting it again") == 1
    assert "Traceback" not in run.err
