"""Reads topics of Kafka as streams: partitions, each read from an offset on.

What was read is part of the model's state, so offsets are kept in checkpoints and nowhere else: no
consumer group is joined and nothing is committed to the broker. The broker still decides what there is
to read: records that its retention has deleted are an error, never skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Literal, NamedTuple

from holdfast.errors import DataError, UsageError

BATCH = 500
"""Most records that are taken from the client library at once."""
LOOK_SECONDS = 0.2
"""Longest time until an iterator that waits for records notices `stop`."""
OURS = {
    "enable.auto.commit",
    "enable.auto.offset.store",
    "auto.offset.reset",
    "enable.partition.eof",
}
"""Settings of the client that exactness depends on."""


class KafkaRecord(NamedTuple):
    value: bytes | None
    key: bytes | None
    timestamp: int | None
    """Milliseconds since 1970; None if the broker keeps none."""
    offset: int


class KafkaStream:
    """A topic as a stream, for `ElasticIterableDataset` or a loop of one's own.

    `start` says where a partition begins that has no offset yet: "earliest", "latest", or offsets by
    partition. With `follow=False` a partition ends where it ended when its reading began. `options` are
    those of librdkafka, for security and tuning; `timeout` is how many seconds brokers may be silent.
    """

    def __init__(
        self,
        topic: str,
        servers: str,
        *,
        start: Literal["earliest", "latest"] | Mapping[str, int] = "earliest",
        follow: bool = True,
        timeout: float = 30.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not (start in ("earliest", "latest") or isinstance(start, Mapping)):
            raise UsageError(f'start must be "earliest", "latest" or offsets, not {start!r}')
        refused = sorted(OURS & set(options or {}))
        if refused:
            raise UsageError(
                f"options may not have {', '.join(refused)}: offsets are in checkpoints"
            )
        self._topic = topic
        self._servers = servers
        self._start = start
        self._follow = follow
        self._timeout = timeout
        self._options = dict(options or {})
        self._stopped = threading.Event()

    def partitions(self) -> tuple[str, ...]:
        """Ask the broker for the names of the topic's partitions: "0", "1", ..."""
        with closing(PartitionClient(self)) as client:
            return client.partitions()

    def first_offset(self, partition: str) -> int:
        """Ask the broker where a partition begins that was not read before."""
        with closing(PartitionClient(self)) as client:
            return self._first_offset(client, partition)

    def read(self, partition: str, offset: int | None = None) -> Iterator[KafkaRecord]:
        """Read a partition's records in order, from an offset on, or from its start.

        The connection is made when the first record is asked for, in the process that asks, and closed
        with the iterator.
        """
        with closing(PartitionClient(self)) as client:
            if partition not in client.partitions():
                raise DataError(
                    f"topic {self._topic} has no partition {partition}; it has"
                    f" {', '.join(client.partitions())}"
                )
            begin = self._first_offset(client, partition) if offset is None else offset
            end = client.check_offset(partition, begin)
            yield from client.records(partition, begin, None if self._follow else end)

    def stop(self) -> None:
        """End all iterators of this process, also those that wait for records."""
        self._stopped.set()

    def _first_offset(self, client: PartitionClient, partition: str) -> int:
        if isinstance(self._start, Mapping):
            if partition not in self._start:
                raise DataError(
                    f"topic {self._topic}: start has no offset for partition {partition}. Add one"
                )
            return self._start[partition]
        low, high = client.bounds(partition)
        return low if self._start == "earliest" else high

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_stopped"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stopped = threading.Event()


class PartitionClient:
    """A connection to the brokers, for one iterator."""

    def __init__(self, stream: KafkaStream) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise DataError(
                "KafkaStream needs confluent-kafka: pip install 'holdfast[kafka]'"
            ) from error
        self._kafka = confluent_kafka
        self._topic = stream._topic
        self._servers = stream._servers
        self._timeout = stream._timeout
        self._stopped = stream._stopped
        self._all_down = False
        """Whether the library has reported, since the last record, that no broker answers."""
        settings = {
            # The library wants a group, though one that only assigns partitions joins none.
            "group.id": "holdfast",
            **stream._options,
            "bootstrap.servers": stream._servers,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "error_cb": self._on_error,
            # What the library would print is in our errors.
            "log_level": stream._options.get("log_level", 0),
        }
        try:
            self._consumer = confluent_kafka.Consumer(settings)
        except confluent_kafka.KafkaException as error:
            raise DataError(f"Kafka at {self._servers}: {error.args[0].str()}") from error

    def close(self) -> None:
        self._consumer.close()

    def partitions(self) -> tuple[str, ...]:
        try:
            found = self._consumer.list_topics(self._topic, timeout=self._timeout)
        except self._kafka.KafkaException as error:
            raise self._unreachable(error) from error
        topic = found.topics[self._topic]
        if topic.error is not None or not topic.partitions:
            why = "no partitions" if topic.error is None else topic.error.str()
            raise DataError(
                f"topic {self._topic} at {self._servers}: {why}. Check its name, and the right to read"
                f" it"
            )
        return tuple(map(str, sorted(topic.partitions)))

    def bounds(self, partition: str) -> tuple[int, int]:
        """Ask for the first offset that a partition still has, and the one that comes next."""
        place = self._kafka.TopicPartition(self._topic, int(partition))
        try:
            low, high = self._consumer.get_watermark_offsets(place, timeout=self._timeout)
        except self._kafka.KafkaException as error:
            raise self._unreachable(error) from error
        return low, high

    def check_offset(self, partition: str, offset: int) -> int:
        """Raise unless the partition can be read from an offset on; return where it ends."""
        low, high = self.bounds(partition)
        if not low <= offset <= high:
            raise self._out_of_range(partition, offset, low, high)
        return int(high)

    def records(self, partition: str, begin: int, end: int | None) -> Iterator[KafkaRecord]:
        """Read from an offset on; up to an end, or until the stream is stopped."""
        place = self._kafka.TopicPartition(self._topic, int(partition), begin)
        self._consumer.assign([place])
        position = begin
        while (end is None or position < end) and not self._stopped.is_set():
            for message in self._consumer.consume(BATCH, timeout=LOOK_SECONDS):
                if message.error() is not None:
                    position = max(position, self._after_error(message, partition, position))
                    continue
                if end is not None and message.offset() >= end:
                    return
                position = message.offset() + 1
                self._all_down = False
                yield _record(message)
            if self._all_down:
                self._look_for_brokers()

    def _after_error(self, message: Any, partition: str, position: int) -> int:
        """Return the offset that comes next, or raise."""
        error = message.error()
        code = error.code()
        if code == self._kafka.KafkaError._PARTITION_EOF:
            # Also past what transactions and compaction have left out at the end.
            return int(message.offset())
        if code in (
            self._kafka.KafkaError._AUTO_OFFSET_RESET,
            self._kafka.KafkaError.OFFSET_OUT_OF_RANGE,
        ):
            raise self._out_of_range(partition, position, *self.bounds(partition))
        if error.retriable() or code == self._kafka.KafkaError._ALL_BROKERS_DOWN:
            return position
        raise DataError(
            f"topic {self._topic}, partition {partition}, offset {position}: {error.str()}. Repair the"
            f" topic, or start from another offset"
        )

    def _on_error(self, error: Any) -> None:
        if error.code() == self._kafka.KafkaError._ALL_BROKERS_DOWN:
            self._all_down = True

    def _look_for_brokers(self) -> None:
        """Wait until a broker answers again, or raise."""
        self._all_down = False
        self.partitions()

    def _unreachable(self, error: Any) -> DataError:
        return DataError(
            f"topic {self._topic}: no answer from Kafka at {self._servers} within {self._timeout:g} s"
            f" ({error.args[0].str()}). Check the address, the network and the options"
        )

    def _out_of_range(self, partition: str, offset: int, low: int, high: int) -> DataError:
        why = "its retention has passed" if offset < low else "the topic was made anew or cut"
        rest = f"offsets {low} to {high - 1}" if high > low else "nothing"
        return DataError(
            f"topic {self._topic}, partition {partition}: offset {offset} is not there ({why}); what"
            f" remains is {rest}. Go on from {low}, which leaves out what is lost, or restore the topic"
        )


def _record(message: Any) -> KafkaRecord:
    kind, timestamp = message.timestamp()
    return KafkaRecord(
        message.value(), message.key(), timestamp if kind else None, message.offset()
    )
