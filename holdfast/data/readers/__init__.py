"""Reads records of files by their number, for `holdfast.data` and any other map-style loader.

Names are imported when they are first used, because each format needs its own library: see
`docs/readers.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy_names import lazily

if TYPE_CHECKING:
    from holdfast.data.readers.arrow import ArrowReader as ArrowReader
    from holdfast.data.readers.csv import CsvReader as CsvReader
    from holdfast.data.readers.huggingface import HuggingFaceReader as HuggingFaceReader
    from holdfast.data.readers.jsonl import JsonlReader as JsonlReader
    from holdfast.data.readers.kafka import KafkaRecord as KafkaRecord
    from holdfast.data.readers.kafka import KafkaStream as KafkaStream
    from holdfast.data.readers.parquet import ParquetReader as ParquetReader
    from holdfast.data.readers.tar import TAR_DECODERS as TAR_DECODERS
    from holdfast.data.readers.tar import TarReader as TarReader

_HOMES = {
    "ArrowReader": "holdfast.data.readers.arrow",
    "CsvReader": "holdfast.data.readers.csv",
    "HuggingFaceReader": "holdfast.data.readers.huggingface",
    "JsonlReader": "holdfast.data.readers.jsonl",
    "KafkaRecord": "holdfast.data.readers.kafka",
    "KafkaStream": "holdfast.data.readers.kafka",
    "ParquetReader": "holdfast.data.readers.parquet",
    "TAR_DECODERS": "holdfast.data.readers.tar",
    "TarReader": "holdfast.data.readers.tar",
}
"""The module of each public name."""

__all__ = [
    "TAR_DECODERS",
    "ArrowReader",
    "CsvReader",
    "HuggingFaceReader",
    "JsonlReader",
    "KafkaRecord",
    "KafkaStream",
    "ParquetReader",
    "TarReader",
]

__getattr__, __dir__ = lazily(globals(), _HOMES)
