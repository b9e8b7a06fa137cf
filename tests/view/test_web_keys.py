"""The links of `holdfast web` outlive it, and nobody else can have them."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.view.web.guard import Secrets
from holdfast.view.web.keyfile import FILE, WebKey
from holdfast.view.web.server import WebSettings, listener_of, ports_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / FILE


def test_links_and_cookies_are_the_same_after_a_restart(path: Path) -> None:
    before, after = Secrets(WebKey(path)), Secrets(WebKey(path))
    assert before.tokens == after.tokens
    assert before.cookies(8800) == after.cookies(8800)
    secrets = {*before.tokens.values(), *before.cookies(8800).values()}
    assert len(secrets) == 4
    assert not any(secret in path.read_text() for secret in secrets)


def test_a_cookie_is_good_for_its_port_alone(path: Path) -> None:
    secrets = Secrets(WebKey(path))
    cookie = secrets.cookies(8800)["all"]
    assert secrets.role_of_cookie(cookie, 8800) == "all"
    assert secrets.role_of_cookie(cookie, 8801) is None
    assert secrets.role_of_token(cookie) is None


def test_only_this_user_can_read_the_key_whatever_the_umask(path: Path) -> None:
    umask = os.umask(0)
    try:
        WebKey(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == [FILE]


def test_new_tokens_end_the_old_ones_in_servers_that_run_too(path: Path) -> None:
    running = Secrets(WebKey(path))
    old = running.tokens
    renewed = Secrets(WebKey(path, renew=True))
    assert renewed.tokens != old
    assert running.tokens == renewed.tokens
    assert running.role_of_token(old["all"]) is None


def test_servers_that_start_at_once_agree_on_one_key(path: Path) -> None:
    found: list[dict[str, str]] = []
    gate = threading.Barrier(16)

    def start() -> None:
        gate.wait()
        found.append(dict(Secrets(WebKey(path)).tokens))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert all(tokens == found[0] for tokens in found)


def test_of_servers_that_renew_at_once_the_last_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, later = os.replace, []

    def overtaken(new: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        replace(new, target)
        later.append(WebKey(path, renew=True))

    monkeypatch.setattr(os, "replace", overtaken)
    first = WebKey(path, renew=True)
    assert first.current() == later[0].current() == WebKey(path).current()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"00" * 31, b"zz" * 32, b"00" * 40])
def test_a_damaged_file_is_replaced_and_that_is_told(path: Path, content: bytes) -> None:
    WebKey(path)
    path.write_bytes(content)
    key = WebKey(path)
    assert key.notice is not None
    assert "damaged" in key.notice
    assert WebKey(path).notice is None
    assert WebKey(path).current() == key.current()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_is_open_to_others_is_refused_until_it_is_renewed(
    path: Path, mode: int
) -> None:
    old = WebKey(path).current()
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*--new-tokens"):
        WebKey(path)
    assert WebKey(path, renew=True).current() != old
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    WebKey(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(UsageError, match="another user"):
        WebKey(path)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "directory", "socket"])
def test_what_is_no_plain_file_is_refused(path: Path, kind: str) -> None:
    path.parent.mkdir(mode=0o700)
    if kind.endswith("link"):
        target = path.with_name("elsewhere")
        if kind == "link":
            target.write_text("00" * 32)
            target.chmod(0o600)
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.mkdir(mode=0o700)
    with pytest.raises(UsageError, match=FILE):
        WebKey(path)


def test_where_no_file_can_be_kept_the_links_are_of_this_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    first, second = WebKey(home / FILE), WebKey(home / FILE)
    assert first.notice is not None
    assert "this run alone" in first.notice
    assert first.current() != second.current()
    with pytest.raises(UsageError, match="stay good"):
        WebKey(home / FILE, renew=True)


def test_a_file_that_cannot_be_replaced_leaves_no_key_beside_it(path: Path) -> None:
    path.mkdir(parents=True, mode=0o700)
    with pytest.raises(UsageError, match="cannot be replaced"):
        WebKey(path, renew=True)
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_file_that_cannot_be_replaced_does_not_keep_the_server_from_starting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WebKey(path)
    path.write_bytes(b"")

    def refuse(*paths: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    key = WebKey(path)
    assert key.notice is not None
    assert "this run alone" in key.notice
    assert "Read-only" in key.notice
    assert len(key.current()) == 32


def test_a_file_system_without_owners_keeps_no_key(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a share that maps root to nobody: the file would be refused at the next start."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    key = WebKey(path)
    assert key.notice is not None
    assert "owners and modes" in key.notice
    assert list(path.parent.iterdir()) == []


def test_a_home_gets_its_ports_again(tmp_path: Path) -> None:
    settings = WebSettings(home=tmp_path, host="127.0.0.1", port=None)
    with listener_of(settings) as first:
        port = first.getsockname()[1]
        assert port in ports_of(tmp_path)
        with listener_of(settings) as second:
            assert second.getsockname()[1] != port
    with listener_of(settings) as again:
        assert again.getsockname()[1] == port
