"""Shards for a script's own loop: each record once, through failures, states and restarts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data import ShardClient
from holdfast.errors import DataError, NotUnderHoldfast, UsageError


def client(**more: Any) -> ShardClient:
    return ShardClient("d", **{"size": 25, "shard": 10, **more})


def test_each_record_comes_once_an_epoch_and_the_last_shard_is_short() -> None:
    shards = [(shard.epoch, shard.start, shard.stop, list(shard)) for shard in client(epochs=2)]
    assert [shard[:3] for shard in shards] == [
        *((0, 0, 10), (0, 10, 20), (0, 20, 25)),
        *((1, 0, 10), (1, 10, 20), (1, 20, 25)),
    ]
    for epoch in range(2):
        records = [record for shard in shards if shard[0] == epoch for record in shard[3]]
        assert records == list(range(25))


@pytest.mark.parametrize("shuffle", [True, "shards"])
def test_a_shuffled_epoch_has_an_order_of_its_own(shuffle: Any) -> None:
    records = list(client(shuffle=shuffle, epochs=2, size=100, seed=4).records())
    first, second = records[:100], records[100:]
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first != sorted(first)


def test_no_shard_lies_in_two_sub_epochs() -> None:
    parts = [(shard.sub_epoch, shard.start, shard.stop) for shard in client(sub_epochs=2)]
    assert parts == [(0, 0, 10), (0, 10, 12), (1, 12, 22), (1, 22, 25)]


def test_without_an_end_there_is_always_another_epoch() -> None:
    shards = iter(client(epochs=0))
    epochs = {next(shards).epoch for _ in range(3000)}
    assert max(epochs) == 999


def test_a_stream_has_offsets_for_each_of_its_partitions() -> None:
    stream = ShardClient("s", partitions=["a", "b"], shard=5)
    shards = iter(stream)
    found = [(shard.partition, list(shard)) for shard in (next(shards) for _ in range(4))]
    first, second = list(range(5)), list(range(5, 10))
    assert found == [("a", first), ("b", first), ("a", second), ("b", second)]
    again = ShardClient("s", partitions=["a", "b"], shard=5)
    again.load_state_dict(stream.state_dict())
    shards = iter(again)
    assert [next(shards).start for _ in range(2)] == [10, 10]


# ---- states ------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_what_was_handed_out_before_a_state_was_saved_never_comes_again(
    size: int, shard: int, data: Any
) -> None:
    seen: Counter[int] = Counter()
    state = None
    for life in range(1, 20):
        now = ShardClient("d", size=size, shard=shard, shuffle=True, seed=3)
        if state is not None:
            now.load_state_dict(state)
        records = now.records()
        most = size if life == 19 else data.draw(st.integers(0, size))
        seen.update(record for _, record in zip(range(most), records, strict=False))
        state = now.state_dict()
        for _ in range(data.draw(st.integers(0, 3))):  # Lost with the process: they come again.
            next(records, None)
        if sum(seen.values()) == size:
            break
    assert seen == Counter(range(size))


def test_the_state_of_all_ranks_is_the_union_of_their_parts() -> None:
    parts = []
    for rank in range(2):
        part = client(size=40)
        shards = [part.fetch() for _ in range(rank + 1)]
        assert all(shards)
        shards[-1].finish()  # type: ignore[union-attr]
        parts.append({**part.state_dict(), "rank": rank, "of": 2})
    whole = client(size=40)
    whole.load_state_dict(whole.merge_state_dicts(parts))
    assert sorted(whole.records()) == list(range(20, 40))
    with pytest.raises(DataError, match="what rank 1 of 2 has used"):
        whole.load_state_dict(parts[1])
    with pytest.raises(DataError, match="2 ranks saved parts"):
        whole.merge_state_dicts(parts[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 24}, "its size was 25 when the state was saved, and is 24 now"),
        ({"seed": 9}, "its seed was 0"),
        ({"shuffle": True}, "its order was 'plain'"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any], message: str) -> None:
    state = client().state_dict()
    with pytest.raises(DataError, match=message):
        client(**change).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"format": 9}, None, [1]])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(DataError, match="not the state of a ShardClient"):
        client().load_state_dict(state)
    broken = {**client().state_dict(), "used": b"x"}
    with pytest.raises(DataError, match="cannot be read"):
        client().load_state_dict(broken)


# ---- failures ----------------------------------------------------------------------------------


def test_a_shard_that_fails_three_times_stops_the_script_and_is_named() -> None:
    with pytest.raises(
        DataError, match=r"'d': the shard of positions 10 to 19 of epoch 0 failed 3"
    ):
        read(client())


def test_or_it_is_left_out() -> None:
    assert read(client(skip=True)) == [*range(10), *range(20, 25)]


def read(reader: ShardClient) -> list[int]:
    """Read all that can be read."""
    found: list[int] = []
    for shard in reader:
        try:
            with shard:
                if shard.start == 10:
                    raise OSError("bad sector")
                found += shard
        except OSError:
            continue
    return found


def test_a_shard_that_is_given_back_is_lent_again_without_what_was_used() -> None:
    reader = client()
    shard = reader.fetch()
    assert shard is not None
    shard.advance(4)
    shard.give_back()
    assert sorted(reader.records()) == list(range(4, 25))


# ---- misuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": -1},
        {"size": None},
        {"partitions": ["a"]},
        {"shard": 0},
        {"epochs": -1},
        {"sub_epochs": 0},
        {"failures": 0},
        {"seed": -1},
        {"task": "train"},
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="ShardClient 'd'"):
        client(**wrong)


def test_several_ranks_need_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(NotUnderHoldfast, match="shared among 4 ranks by the coordinator"):
        client().fetch()


def test_more_records_than_a_shard_has_cannot_be_used() -> None:
    shard = client().fetch()
    assert shard is not None
    with pytest.raises(UsageError, match="has 10 records left, not 11"):
        shard.advance(11)
    shard.finish()
    with pytest.raises(UsageError, match="finished, failed or given back before"):
        shard.advance(1)


@pytest.mark.parametrize("lacking", ["name", "size", "seed", "used"])
def test_a_state_that_lacks_something_is_an_error_of_the_data(lacking: str) -> None:
    client = ShardClient("x", size=10, shard=3)
    state = client.state_dict()
    del state[lacking]
    with pytest.raises(DataError, match=f"data set 'x'.*{lacking}"):
        client.load_state_dict(state)
