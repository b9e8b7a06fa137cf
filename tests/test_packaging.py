"""Wheel and sdist: they hold what they should, and what is installed from them works.

The sdist is built from a copy of the tree, the wheel from the unpacked sdist; nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import holdfast

TREE = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"


def run(*command: str, cwd: Path, **environ: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**env, **environ}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, tree: Path, out: Path) -> Path:
    said = run(sys.executable, "-c", BUILD.format(kind), str(out), cwd=tree)
    return out / said.split()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and a wheel that was made from it."""
    here = tmp_path_factory.mktemp("packaging")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "bench", "build", "dist", "*.egg-info")
    shutil.copytree(TREE, here / "tree", ignore=ignored)
    shutil.copy(TREE / ".pre-commit-config.yaml", here / "tree")
    sdist = build("sdist", here / "tree", here)
    with tarfile.open(sdist) as archive:
        archive.extractall(here / "unpacked", filter="data")
    (source,) = (here / "unpacked").iterdir()
    return sdist, build("wheel", source, here)


def test_the_wheel_has_every_module_and_nothing_else(built: tuple[Path, Path]) -> None:
    package = TREE / "holdfast"
    modules = {str(path.relative_to(TREE)) for path in package.rglob("*.py")}
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
    found = {name for name in names if ".dist-info/" not in name}
    page = (package / "view" / "web" / "static").iterdir()
    static = {str(path.relative_to(TREE)) for path in page}
    assert found == modules | static | {"holdfast/py.typed"}
    info = f"holdfast-{holdfast.__version__}.dist-info"
    assert {f"{info}/licenses/LICENSE", f"{info}/METADATA", f"{info}/entry_points.txt"} <= names


def test_the_sdist_has_what_a_packager_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml"} <= names
    assert {"tests/test_packaging.py", "tests/data/schema.json", "docs/api.md"} <= names


def test_metadata_says_license_and_version(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        info = f"holdfast-{holdfast.__version__}.dist-info/METADATA"
        lines = wheel.read(info).decode().splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert f"Version: {holdfast.__version__}" in lines
    assert "Classifier: Typing :: Typed" in lines


def test_what_is_installed_from_the_wheel_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    run(*pip, "--disable-pip-version-check", "--target", str(target), str(built[1]), cwd=tmp_path)
    where = run(
        sys.executable,
        "-c",
        "import holdfast; print(holdfast.__file__)",
        cwd=tmp_path,
        PYTHONPATH=str(target),
    )
    assert Path(where.strip()).is_relative_to(target)
    command = str(target / "bin" / "holdfast")
    assert "usage: holdfast" in run(command, "--help", cwd=tmp_path, PYTHONPATH=str(target))
    sim = run(
        command, "sim", "--nodes", "4", "--hours", "0.01", cwd=tmp_path, PYTHONPATH=str(target)
    )
    assert "invariants" in sim
