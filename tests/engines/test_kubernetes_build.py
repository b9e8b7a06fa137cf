"""What the build script says where it cannot or need not build."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kubernetes_build.sh")


def build(engines: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HOLDFAST_ENGINES": str(engines)}
    return subprocess.run(["bash", str(SCRIPT)], env=env, capture_output=True, text=True)


def test_what_is_built_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes" / "VERSION").write_text("kubernetes 1.2.3\n")
    done = build(tmp_path)
    assert done.returncode == 0
    assert "kubernetes 1.2.3 is in" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["kubernetes"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_who_is_not_root_is_told_so(tmp_path: Path) -> None:
    script = SCRIPT.read_text()
    words = ["bash", "-c", script]
    env = {**os.environ, "HOLDFAST_ENGINES": str(tmp_path / "none")}
    done = subprocess.run(words, env=env, user=65534, cwd="/", capture_output=True, text=True)
    assert done.returncode == 1
    assert "run it as root" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="the script asks for root first")
def test_a_system_without_apt_is_named(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "id", "cat"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    env = {"PATH": str(programs), "HOME": str(tmp_path)}
    done = subprocess.run(["/bin/bash", str(SCRIPT)], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "there is no apt-get; the build needs Debian 12" in done.stderr
