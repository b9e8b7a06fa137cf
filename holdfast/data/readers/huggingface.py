"""Reads a data set of Hugging Face `datasets`, which is already a map-style data set.

What is added: errors that name files and records, a fingerprint, and a clear refusal of data sets that
have no records by number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

from holdfast.errors import DataError


class HuggingFaceReader:
    """Records of a `datasets.Dataset`, with its own format (`set_format`, `set_transform`)."""

    def __init__(self, dataset: Any) -> None:
        name = type(dataset).__name__
        if isinstance(dataset, dict):
            splits = ", ".join(map(str, dataset))
            raise DataError(f"a {name} has several data sets: choose one of its splits ({splits})")
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"a {name} has no records by number, so that none can be read again after a fault:"
                f" load it without streaming=True, or write it to files"
            )
        if not len(dataset):
            raise DataError(f"the {name} has no records")
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: SupportsIndex) -> Any:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        return self._read([number])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Read several records in one go."""
        return self._read([operator.index(index) for index in indices])

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        try:
            if len(numbers) == 1:
                return [self._dataset[numbers[0]]]
            records: list[Any] = self._dataset.__getitems__(list(numbers))
            return records
        except (OSError, ValueError, UnicodeDecodeError) as error:
            # pyarrow's errors are among them.
            files = ", ".join(each["filename"] for each in self._dataset.cache_files) or "memory"
            span = f"{min(numbers)} to {max(numbers)}"
            raise DataError(
                f"records {span} of the data set in {files}: {type(error).__name__}: {error}. Load or"
                f" build the data set again"
            ) from error

    def fingerprint(self) -> str:
        """Describe the data set so that a changed one is recognised."""
        own = getattr(self._dataset, "_fingerprint", "")
        return f"{len(self)} records, {own}"
