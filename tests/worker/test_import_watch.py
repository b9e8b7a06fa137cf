"""What must not be imported before there is a rank is found, whatever gives it away.

Packages lie in a directory of the test; each script runs in a process of its own, which has torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]

BEFORE = """
import os, socket, sys
sys.path.insert(0, os.getcwd())
sys.argv = ["train.py", "--flag"]
from holdfast import proc
from holdfast.messages.local import ImportPlan
from holdfast.worker.loaded_modules import digest
from holdfast.worker.preloading import preload

def watched(*modules, refused=(), most_bytes=1 << 40, **variables):
    plan = ImportPlan(modules, refused, {"RANK": "", **variables}, most_bytes)
    return preload(plan, lambda message: None)
"""

MISBEHAVIOUR = {
    "reads RANK": "import os\nrank = int(os.environ.get('RANK', 0))",
    "reads RANK (getenv)": "import os\nrank = os.getenv('RANK')",
    "reads RANK (in)": "import os\nranked = 'RANK' in os.environ",
    "reads sys.argv": "import sys\nflags = sys.argv[1:]",
    "reads sys.argv (loop)": "import sys\nflags = [word for word in sys.argv]",
    "changes sys.argv": "from sys import argv",
    "changes the threads": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
    "changes the child processes": "import subprocess\nchild = subprocess.Popen(['sleep', '60'])",
    "changes open files (socket)": "import socket\nkept = socket.socket()",
    "changes open files (device)": "kept = open('/dev/full', 'rb')",
    "changes open files (log)": "kept = open('log.txt', 'a')",
    "changes open files (pipe)": "import os\nkept = os.pipe()",
    "connects": (
        "from socket import AF_UNIX, socket\nwith socket(AF_UNIX) as there, socket(AF_UNIX) as here:"
        "\n    there.bind('there')\n    there.listen()\n    here.connect('there')"
    ),
    "changes the working directory": "import os\nos.chdir('/')",
    "changes the environment variable PATH": "import os\nos.environ['PATH'] += ':/opt'",
    "changes the environment variable HOME": "import os\ndel os.environ['HOME']",
    "changes signal handlers": "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)",
    "changes the root logger": "import logging\nlogging.basicConfig(level=logging.INFO)",
    "changes the locale": "import locale\nlocale.setlocale(locale.LC_ALL, 'C.UTF-8')",
    "changes sys.path": "import sys\nsys.path.append('/opt')",
    "changes hooks of the interpreter": "import sys\nsys.excepthook = print",
    "changes hooks of the interpreter (gc)": "import gc\ngc.disable()",
    "changes multiprocessing's start method": (
        "import multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)"
    ),
    "changes random numbers": "import random\nrandom.seed(0)",
    "changes numpy's random numbers": "import numpy\nnumpy.random.seed(0)",
    "changes numpy's error handling": "import numpy\nnumpy.seterr(all='ignore')",
    "changes torch's defaults (seed)": "import torch\ntorch.manual_seed(0)",
    "changes torch's defaults (type)": "import torch\ntorch.set_default_dtype(torch.float64)",
    "changes torch's defaults (threads)": "import torch\ntorch.set_num_threads(2)",
    "cannot be imported": "raise RuntimeError('not here')",
    "cannot be imported (exit)": "import sys\nsys.exit(3)",
}

HARMLESS = {
    "a process that has ended": "import subprocess\nsubprocess.run(['true'], check=True)",
    "a socket that is closed": "import socket\nsocket.create_server(('127.0.0.1', 0)).close()",
    "a thread that has ended": (
        "import threading\none = threading.Thread(target=int)\none.start()\none.join()"
    ),
    "a file to read": "kept = open(__file__)",
    "a variable of its own": "import os\nos.environ['KEPT_BY_WELL'] = '1'",
    "a variable that all ranks share": "import os\nhome = os.environ['HOME']",
    "a logger of its own": (
        "import logging\nlogging.getLogger('well').addHandler(logging.StreamHandler())"
    ),
    "a warning filter": "import warnings\nwarnings.filterwarnings('ignore', module='well')",
    "an optional module": "try:\n    import not_installed_at_all\nexcept ImportError:\n    pass",
}


@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_a_module_that_misbehaves_is_at_fault(with_torch: Run, tmp_path: Path, what: str) -> None:
    (tmp_path / "ill.py").write_text(MISBEHAVIOUR[what])
    script = f"""
    found = watched("ill")
    for child in proc.children(os.getpid()):
        os.kill(child, 9)
    assert found.keys() == {{"ill"}}, found
    assert {what.partition(" (")[0]!r} in found["ill"], found
    """
    with_torch(BEFORE, script)


@pytest.mark.parametrize("what", HARMLESS)
def test_a_module_that_does_no_harm_is_imported(with_torch: Run, tmp_path: Path, what: str) -> None:
    (tmp_path / "well.py").write_text(HARMLESS[what])
    script = """
    found = watched("well")
    assert found == {}, found
    assert "well" in sys.modules
    """
    with_torch(BEFORE, script)


def test_nothing_of_the_watch_is_left(with_torch: Run, tmp_path: Path) -> None:
    (tmp_path / "well.py").write_text("loader = __loader__\nseen = dict(vars(__loader__))\n")
    script = """
    before = list(sys.meta_path), sys.argv, type(os.environ).__getitem__, set(vars(socket.socket))
    assert watched("well") == {}
    after = list(sys.meta_path), sys.argv, type(os.environ).__getitem__, set(vars(socket.socket))
    assert after == before and after[1] is before[1]
    import well
    assert well.seen.keys() == vars(well.loader).keys() == {"name", "path"}
    """
    with_torch(BEFORE, script)


def test_whoever_imports_a_module_at_fault_cannot_be_preloaded_and_others_can(
    with_torch: Run, tmp_path: Path
) -> None:
    (tmp_path / "ill.py").write_text("import os\nrank = os.environ.get('RANK')")
    (tmp_path / "optional.py").write_text("try:\n    import ill\nexcept Exception:\n    ill = None")
    (tmp_path / "above.py").write_text("import well\nimport optional")
    (tmp_path / "later.py").write_text("import ill")
    (tmp_path / "well.py").write_text("value = 1")
    script = """
    names = "above", "well", "optional", "ill", "later"
    found = watched(*names)
    assert found == {
        "ill": "it reads RANK",
        "optional": "it imports ill",
        "above": "it imports ill",
        "later": "it imports ill",
    }, found
    for name in names:
        sys.modules.pop(name, None)
    assert watched(*names, refused=tuple(found)) == {}
    assert [name for name in names if name in sys.modules] == ["well"]
    """
    with_torch(BEFORE, script)


def test_a_module_at_fault_is_blamed_and_not_the_one_that_it_imports_afterwards(
    with_torch: Run, tmp_path: Path
) -> None:
    (tmp_path / "ill.py").write_text("import os\nos.chdir('/')\nimport well")
    (tmp_path / "well.py").write_text("")
    with_torch(BEFORE, 'found = watched("ill", "well"); assert found.keys() == {"ill"}, found')


def test_a_variable_that_a_module_has_set_in_the_script_too_may_be_read(
    with_torch: Run, tmp_path: Path
) -> None:
    (tmp_path / "sets.py").write_text("import os\nos.environ.setdefault('CHECK', '1')")
    (tmp_path / "reads.py").write_text("import os\nchecks = os.environ.get('CHECK')")
    script = """
    assert watched("sets", "reads", CHECK=digest("1")) == {}
    for name in ("sets", "reads"):
        del sys.modules[name]
    del os.environ["CHECK"]
    found = watched("sets", "reads", CHECK=digest("2"))
    assert found == {"sets": "it reads CHECK", "reads": "it reads CHECK"}, found
    """
    with_torch(BEFORE, script)


def test_too_much_memory_ends_the_list_early(with_torch: Run, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text("")
    script = """
    assert watched("first", "second", most_bytes=1) == {}
    assert "first" in sys.modules and "second" not in sys.modules
    """
    with_torch(BEFORE, script)
