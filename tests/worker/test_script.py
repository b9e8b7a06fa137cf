"""A script runs as under plain python: the same output, traceback and exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.messages.local import PACKET_BYTES, Died
from holdfast.worker.script import describe

RUNNER = """
import sys
sys.path.insert(0, "")
from holdfast.worker import script
entry, name, *args = sys.argv[1:]
def died(raised):
    print("DIED", raised.type, raised.message, raised.where, file=sys.stderr)
sys.exit(script.run(entry, [name, *args], died))
"""


def ours(
    cwd: Path, name: str, *args: str, entry: str = "script"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUNNER, entry, name, *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def plain(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def without_notice(stderr: str) -> str:
    return "".join(line for line in stderr.splitlines(True) if not line.startswith("DIED"))


SCRIPTS = {
    "plain": "print('hello')",
    "arguments": "import sys; print(sys.argv)",
    "main": "print(__name__, __file__, __doc__, __package__, __spec__)",
    "path": "import sys; print(sys.path[0])",
    "annotations": "x: int = 3\nprint(__annotations__)",
    "exception": "def f():\n    raise ValueError('no')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "in a library": "import json\njson.loads('{')",
    "syntax error": "print('a')\nif True\n    pass",
    "no import": "import there_is_no_such_module",
    "exit 3": "import sys; sys.exit(3)",
    "exit 0": "import sys; sys.exit(0)",
    "exit none": "import sys; sys.exit()",
    "exit text": "import sys; sys.exit('the reason')",
    "exit true": "import sys; sys.exit(True)",
    "interrupt": "raise KeyboardInterrupt",
    "base exception": "class E(BaseException): pass\nraise E('x')",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0])\n1/0",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('hi')",
    "pickle": (
        "import pickle\nclass A:\n    def __init__(self): self.x = 1\n"
        "print(pickle.loads(pickle.dumps(A())).x, A.__module__)"
    ),
    "dataclass": (
        "from __future__ import annotations\nimport dataclasses, typing\n"
        "@dataclasses.dataclass\nclass A:\n    x: int\nprint(typing.get_type_hints(A))"
    ),
    "source": "import inspect\ndef f(): pass\nprint(inspect.getsource(f))",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "os exit": "import os; os._exit(7)",
    "not utf-8": "# -*- coding: latin-1 -*-\nprint('plain')",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_cannot_be_told_from_one_under_plain_python(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    one, other = ours(tmp_path, "train.py", "--a", "b"), plain(tmp_path, "train.py", "--a", "b")
    assert one.stdout == other.stdout
    assert without_notice(one.stderr) == other.stderr
    assert one.returncode == other.returncode


@pytest.mark.parametrize("body", ["import sys; print(__name__, sys.argv[1:])", "1/0"])
def test_a_module_runs_as_with_dash_m(body: str, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(body)
    one = ours(tmp_path, "pack.train", "x", entry="module")
    other = plain(tmp_path, "-m", "pack.train", "x")
    frames = [line for line in other.stderr.splitlines(True) if "<frozen runpy>" not in line]
    assert (one.stdout, one.returncode) == (other.stdout, other.returncode)
    assert without_notice(one.stderr) == "".join(frames)


def test_a_module_that_is_not_there_says_so(tmp_path: Path) -> None:
    done = ours(tmp_path, "no_such_module", entry="module")
    assert done.returncode != 0
    assert "no_such_module" in done.stderr
    assert "holdfast" not in done.stderr.replace(str(tmp_path), "")


def test_a_run_path_script_is_main(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(__name__)")
    assert ours(tmp_path, "train.py", entry="path").stdout == "__main__\n"


def test_a_traceback_has_none_of_our_frames(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError('no')\nf()")
    done = ours(tmp_path, "train.py")
    assert "holdfast" not in done.stderr.replace(str(tmp_path), "")
    assert "DIED ValueError no train.py:2" in done.stderr


@pytest.mark.parametrize(
    ("body", "where"),
    [("import json\njson.loads('{')", "train.py:2"), ("x = (\n", "train.py:1")],
)
def test_a_failure_is_placed_in_the_users_own_code(body: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(body)
    assert f" {where}\n" in ours(tmp_path, "train.py").stderr


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(), min_size=1), st.integers(1, 40_000))
def test_any_exception_fits_into_one_packet(text: str, times: int) -> None:
    try:
        raise ValueError(text * times)
    except ValueError as error:
        packet = msgspec.msgpack.encode(Died(raised=describe(error), at=1.0))
    assert len(packet) < PACKET_BYTES


def test_an_exception_that_cannot_be_printed_can_be_described() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Odd()).type == "Odd"


def test_an_exception_about_an_undecodable_file_name_can_be_sent() -> None:
    error = FileNotFoundError(os.fsdecode(b"/data/\xff.bin"))
    msgspec.msgpack.encode(describe(error))
