"""All readers of files: the record with a number is always the same, however it is asked for."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from data_samples import FORMATS, SIZES, Sample, make, records_of

from holdfast.data.readers import JsonlReader, ParquetReader, TarReader
from holdfast.errors import DataError


def test_every_index_gives_what_a_naive_reading_gives(sample: Sample) -> None:
    reader = sample.format.open(sample.folder)
    assert len(reader) == len(sample.records) == sum(SIZES)
    order = random.Random(5).sample(range(len(reader)), len(reader))
    assert [reader[index] for index in order] == [sample.records[index] for index in order]


def test_reading_in_order_gives_all_records(sample: Sample) -> None:
    assert list(sample.format.open(sample.folder)) == sample.records


def test_a_batch_of_indices_gives_their_records_in_their_order(sample: Sample) -> None:
    reader = sample.format.open(sample.folder)
    chance = random.Random(3)
    for _ in range(20):
        indices = chance.choices(range(len(reader)), k=37)
        assert reader.__getitems__(indices) == [sample.records[index] for index in indices]
    run = list(range(90, 130))
    assert reader.__getitems__(run) == sample.records[90:130]
    assert reader.__getitems__([]) == []


def test_records_that_are_returned_are_not_shared(sample: Sample) -> None:
    reader = sample.format.open(sample.folder)
    first, second = reader.__getitems__([5, 5])
    first["changed"] = True
    assert "changed" not in second
    assert "changed" not in reader[5]


def test_indices_count_from_the_end_and_end_at_the_end(sample: Sample) -> None:
    reader = sample.format.open(sample.folder)
    assert reader[-1] == sample.records[-1]
    for outside in (len(reader), -len(reader) - 1):
        with pytest.raises(IndexError):
            reader[outside]
        with pytest.raises(IndexError):
            reader.__getitems__([0, outside])


def test_files_are_found_by_folder_pattern_and_list_and_sorted(sample: Sample) -> None:
    (sample.folder / "_SUCCESS").write_text("")
    (sample.folder / f".hidden{sample.format.suffix}").write_text("garbage")
    pattern = str(sample.folder / f"part-*{sample.format.suffix}")
    backwards = list(reversed(sample.files))
    readers = [sample.format.open(each) for each in (sample.folder, pattern, backwards)]
    assert [list(reader) for reader in readers] == [sample.records] * 3
    assert len({reader.fingerprint() for reader in readers}) == 1


def test_a_reader_of_a_url_gives_the_same_records(sample: Sample) -> None:
    reader = sample.format.open(f"file://{sample.folder}")
    indices = [0, 3, 500, 3, len(reader) - 1]
    assert reader.__getitems__(indices) == [sample.records[index] for index in indices]


def test_a_store_without_local_files_can_be_read() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe_file("/readers/a.jsonl", b'{"n": 1}\n{"n": 2}\n')
    memory.pipe_file("/readers/b.jsonl", b'{"n": 3}\n')
    try:
        reader = JsonlReader("memory://readers/*.jsonl")
        assert [each["n"] for each in reader] == [1, 2, 3]
        memory.pipe_file("/readers/b.jsonl", b'{"n": 3}\n{"n": 4}\n')
        with pytest.raises(DataError, match=r"memory:/.*/b\.jsonl grew .*9 to 18 bytes"):
            pickle.loads(pickle.dumps(reader))[2]
    finally:
        memory.rm("/readers", recursive=True)


def test_many_small_files_do_not_use_up_file_descriptors(sample: Sample, tmp_path: Path) -> None:
    name = next(key for key, each in FORMATS.items() if each == sample.format)
    (tmp_path / "many").mkdir()
    many = make(name, tmp_path / "many", [1, 2] * 100)
    reader = many.format.open(many.folder)
    before = len(os.listdir("/proc/self/fd"))
    order = random.Random(1).sample(range(300), 300)
    assert [reader[index] for index in order] == [many.records[index] for index in order]
    assert len(os.listdir("/proc/self/fd")) - before <= 100


def test_a_reader_that_is_dropped_leaves_no_file_open(sample: Sample) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    reader = sample.format.open(sample.folder)
    assert list(reader)
    del reader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- processes ----------------------------------------------------------------------------------


def read_all(reader: Any, queue: Any, seed: int) -> None:
    order = random.Random(seed).sample(range(len(reader)), len(reader))
    queue.put({index: reader[index] for index in order})


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_share_a_reader_do_not_disturb_each_other(
    sample: Sample, method: str
) -> None:
    reader = sample.format.open(sample.folder)
    assert reader[1] == sample.records[1]  # Files are open when the processes begin.
    context = multiprocessing.get_context(method)
    queue: Any = context.Queue()
    processes = [context.Process(target=read_all, args=(reader, queue, n)) for n in range(2)]
    for process in processes:
        process.start()
    here = [reader[index] for index in range(len(reader))]
    results = [queue.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()
    assert here == sample.records
    for result in results:
        assert [result[index] for index in range(len(reader))] == sample.records


def test_threads_that_share_a_reader_do_not_disturb_each_other(sample: Sample) -> None:
    reader = sample.format.open(sample.folder)
    results: list[Any] = []

    def read(seed: int) -> None:
        order = random.Random(seed).sample(range(len(reader)), len(reader))
        results.append([reader[index] for index in order] == [sample.records[i] for i in order])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_loader_processes_of_torch_that_are_forked_give_every_record_once(sample: Sample) -> None:
    from torch.utils.data import DataLoader

    reader = sample.format.open(sample.folder)
    assert reader[0] == sample.records[0]
    loader = DataLoader(
        reader, batch_size=64, num_workers=2, multiprocessing_context="fork", collate_fn=list
    )
    assert [record for batch in loader for record in batch] == sample.records


def test_loader_processes_of_torch_that_are_spawned_give_every_record_once(tmp_path: Path) -> None:
    """All formats in one, because a spawned process needs seconds to import torch."""
    from torch.utils.data import ConcatDataset, DataLoader

    samples = []
    for name in FORMATS:
        (tmp_path / name).mkdir()
        samples.append(make(name, tmp_path / name))
    readers = [each.format.open(each.folder) for each in samples]
    for reader in readers:
        reader[0]
    loader = DataLoader(
        ConcatDataset(readers),
        batch_size=64,
        num_workers=2,
        multiprocessing_context="spawn",
        collate_fn=list,
    )
    expected = [record for each in samples for record in each.records]
    assert [record for batch in loader for record in batch] == expected


def test_a_pickled_reader_is_small_and_reads_the_same(sample: Sample) -> None:
    reader = sample.format.open(sample.folder)
    reader[0]
    packed = pickle.dumps(reader)
    assert len(packed) < 6_000 + 24 * len(reader)
    copy = pickle.loads(packed)
    assert copy.__getitems__(range(len(copy))) == sample.records
    assert copy.fingerprint() == reader.fingerprint()


# ---- indices and fingerprints -------------------------------------------------------------------


def test_an_index_of_lines_costs_less_than_a_byte_a_record(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"number": {n}}}\n' for n in range(100_000)))
    reader = JsonlReader(path)
    assert reader[77_777] == {"number": 77_777}
    assert reader._index_of_records.memory_bytes() < len(reader)


def test_a_stored_index_is_used_as_long_as_files_are_the_same(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "the.index"
    first = sample.format.open(sample.folder, index=index)
    kind = type(first)
    indexed: list[str] = []
    blocks = kind._blocks

    def counted(self: Any, file: Any, progress: Any) -> Any:
        indexed.append(file.path)
        return blocks(self, file, progress)

    monkeypatch.setattr(kind, "_blocks", counted)
    second = sample.format.open(sample.folder, index=index)
    assert not indexed
    assert list(second) == sample.records
    assert second.fingerprint() == first.fingerprint()

    sample.format.write(sample.files[0], records_of(2, 99))
    third = sample.format.open(sample.folder, index=index)
    assert len(indexed) == len(sample.files)
    assert len(third) == len(first) + 2
    assert third[0] == sample.format.naive(records_of(2, 99))[0]


def test_a_damaged_index_is_built_anew(tmp_path: Path) -> None:
    sample = make("csv", tmp_path)
    index = tmp_path / "the.index"
    index.write_bytes(b"\x00garbage")
    assert list(sample.format.open(sample.folder, index=index)) == sample.records
    index.write_bytes(index.read_bytes()[:-20])
    assert list(sample.format.open(sample.folder, index=index)) == sample.records


def test_an_index_of_other_options_is_not_used(tmp_path: Path) -> None:
    sample = make("parquet", tmp_path)
    index = tmp_path / "the.index"
    ParquetReader(sample.folder, index=index)
    reader = ParquetReader(sample.folder, ["id"], index=index)
    assert reader[0] == {"id": sample.records[0]["id"]}


def test_an_index_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    sample = make("jsonl", tmp_path)
    with pytest.raises(DataError, match=r"nowhere/the\.index cannot be written"):
        JsonlReader(sample.folder, index=tmp_path / "nowhere" / "the.index")


def test_nothing_is_written_beside_the_data(sample: Sample) -> None:
    before = sorted(sample.folder.iterdir())
    list(sample.format.open(sample.folder))
    assert sorted(sample.folder.iterdir()) == before


def test_a_fingerprint_stays_when_data_is_moved_and_changes_when_it_grows(
    sample: Sample, tmp_path: Path
) -> None:
    before = sample.format.open(sample.folder).fingerprint()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in sample.files:
        path.rename(moved / path.name)
    assert sample.format.open(moved).fingerprint() == before
    sample.format.write(moved / sample.files[0].name, records_of(5, 1))
    after = sample.format.open(moved).fingerprint()
    assert after != before
    assert after.startswith(f"{len(sample.records) + 5} records, {len(sample.files)} files")


def test_a_long_pass_over_files_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = make("tar", tmp_path, [20, 20])
    TarReader(sample.folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("holdfast.data.readers.progress.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("holdfast.data.readers.progress.EVERY_SECONDS", 0.0)
    TarReader(sample.folder)
    said = capsys.readouterr().err.splitlines()
    assert "holdfast: indexing data: " in said[0]
    assert any("file 2 of 2" in line for line in said)
    assert "40 records in 2 files" in said[-1]
