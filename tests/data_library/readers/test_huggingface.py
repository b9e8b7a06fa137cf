"""Data sets of Hugging Face."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.readers import HuggingFaceReader
from holdfast.errors import DataError

datasets = pytest.importorskip("datasets", reason="the datasets library is not installed")

RECORDS = [{"n": n, "text": f"ünï{n}"} for n in range(200)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    return tmp_path / "saved"


def test_records_are_those_of_the_data_set_at_any_index(saved: Path) -> None:
    reader = HuggingFaceReader(datasets.load_from_disk(str(saved)))
    assert len(reader) == 200
    assert [reader[index] for index in (150, 3, -1)] == [RECORDS[150], RECORDS[3], RECORDS[199]]
    assert reader.__getitems__([9, 9, 0, 199]) == [RECORDS[i] for i in (9, 9, 0, 199)]
    assert list(reader) == RECORDS


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_processes_of_torch_give_every_record_once(saved: Path, method: str) -> None:
    from torch.utils.data import DataLoader

    reader = HuggingFaceReader(datasets.load_from_disk(str(saved)))
    assert reader[0] == RECORDS[0]
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}
    loader = DataLoader(reader, batch_size=16, collate_fn=list, **options)
    assert [record for batch in loader for record in batch] == RECORDS


def test_formats_of_the_data_set_apply() -> None:
    dataset = datasets.Dataset.from_list(RECORDS).with_transform(
        lambda batch: {"double": [2 * n for n in batch["n"]]}
    )
    reader = HuggingFaceReader(dataset)
    assert reader[4] == {"double": 8}
    assert reader.__getitems__([5, 6]) == [{"double": 10}, {"double": 12}]


def test_a_data_set_without_records_by_number_is_refused() -> None:
    dataset = datasets.Dataset.from_list(RECORDS)
    with pytest.raises(DataError, match=r"IterableDataset has no records by number.*streaming"):
        HuggingFaceReader(dataset.to_iterable_dataset())
    with pytest.raises(DataError, match=r"choose one of its splits \(train, test\)"):
        HuggingFaceReader(dataset.train_test_split(0.1))
    with pytest.raises(DataError, match="no records"):
        HuggingFaceReader(dataset.select([]))


def test_an_index_outside_is_an_index_error() -> None:
    reader = HuggingFaceReader(datasets.Dataset.from_list(RECORDS))
    for outside in (200, -201):
        with pytest.raises(IndexError):
            reader[outside]


def test_a_fingerprint_tells_data_sets_apart(saved: Path) -> None:
    dataset = datasets.load_from_disk(str(saved))
    reader = HuggingFaceReader(dataset)
    assert reader.fingerprint() == HuggingFaceReader(dataset).fingerprint()
    assert reader.fingerprint() != HuggingFaceReader(dataset.select(range(100))).fingerprint()
    assert reader.fingerprint() != HuggingFaceReader(dataset.shuffle(seed=1)).fingerprint()


def test_a_vanished_file_is_named(saved: Path) -> None:
    packed = pickle.dumps(HuggingFaceReader(datasets.load_from_disk(str(saved))))
    for path in saved.glob("*.arrow"):
        os.unlink(path)
    # `datasets` opens files when it is unpickled, before anything of ours is asked.
    with pytest.raises((DataError, FileNotFoundError), match=r"\.arrow"):
        pickle.loads(packed)[0]
