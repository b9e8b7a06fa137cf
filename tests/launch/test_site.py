"""Where a launcher hosts its coordinator, or which one it joins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.flags import parse_run
from holdfast.errors import JobError, UsageError
from holdfast.launch import site as sites
from holdfast.launch.site import PortTaken, Site, find_site, given_token, listen

Find = Callable[..., Site]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Find]:
    """Finds the site for some flags; closes the listeners in the end."""
    for name in [n for n in os.environ if n.startswith(("PET_", "HOLDFAST_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    found: list[Site] = []

    def find(*flags: str) -> Site:
        found.append(find_site(parse_run([*flags, __file__])))
        return found[-1]

    yield find
    for site in found:
        if site.listener is not None:
            site.listener.close()


def free_port() -> int:
    with listen("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_one_node_hosts_its_coordinator_on_loopback(find: Find) -> None:
    site = find()
    assert site.listener is not None
    assert (site.host, site.port) == site.listener.getsockname()
    assert site.host == "127.0.0.1"
    assert site.home.read_job_file().token == site.token


def test_of_two_launchers_at_one_endpoint_the_second_joins_the_first(find: Find) -> None:
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    first, second = find(*words), find(*words)
    assert first.listener is not None
    assert second.listener is None
    assert (second.host, second.port, second.token) == (first.host, first.port, first.token)
    assert second.home.path == first.home.path


def test_node_0_hosts_and_the_others_join_at_the_masters_address(find: Find) -> None:
    words = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    assert find(*words, "--node-rank=0").listener is not None
    assert find(*words, "--node-rank=1").listener is None


def test_a_coordinator_of_another_job_is_not_joined(find: Find) -> None:
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    find(*words, "--job=one")
    with pytest.raises(JobError, match="belongs to job one, not to two"):
        find(*words, "--job=two")


def test_without_a_token_no_coordinator_is_joined(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "JOB_FILE_LIMIT_S", 0.0)
    with pytest.raises(JobError, match="no token for the coordinator at node0:7"):
        find("--coordinator=node0:7")
    monkeypatch.setenv("HOLDFAST_TOKEN", "abc")
    assert find("--coordinator=node0:7").token == "abc"


def test_a_single_node_does_not_join_a_stranger_on_its_port(find: Find) -> None:
    with listen("127.0.0.1", 0) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1:{port}"):
            find("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")


def test_a_token_file_wins_over_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("from file\n")
    monkeypatch.setenv("HOLDFAST_TOKEN", "from variable")
    assert given_token(str(tmp_path / "token")) == "from file"
    assert given_token(None) == "from variable"
    with pytest.raises(UsageError, match=r"--token-file .*gone: No such file"):
        given_token(str(tmp_path / "gone"))


@pytest.mark.parametrize("text", ["", "  \n", "\n"])
def test_an_empty_token_is_refused_before_anything_is_made(
    find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"--token-file .*token: is empty; .*leave it out"):
        find(f"--token-file={file}")
    monkeypatch.setenv("HOLDFAST_TOKEN", text.strip("\n"))
    with pytest.raises(UsageError, match="HOLDFAST_TOKEN: is empty"):
        find()
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize("content", [b'{\n "token": "s3cret"\n}', b"\xff\xfe", b"s3cret" * 1000])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(UsageError, match=r"token: is no t(oken|ext); ") as refused:
        given_token(str(tmp_path / "token"))
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("mode", "lines"), [(0o600, 0), (0o400, 0), (0o640, 1), (0o604, 1), (0o644, 1)]
)
def test_a_token_file_that_others_can_read_is_warned_of_once(
    find: Find, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, lines: int
) -> None:
    (tmp_path / "token").write_text("abc")
    (tmp_path / "token").chmod(mode)
    assert find(f"--token-file={tmp_path / 'token'}").token == "abc"
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == lines
    assert all("can be read by other users" in line and "abc" not in line for line in warned)
