"""Readers of formats whose records are ranges of bytes of a file."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from holdfast.data.readers.files import DataFile, OpenFile, open_file, refuse_compressed
from holdfast.data.readers.index import FileBlocks
from holdfast.data.readers.progress import IndexProgress
from holdfast.data.readers.reader import IndexedReader

Loaded = TypeVar("Loaded")


class ByteReader(IndexedReader[OpenFile, Loaded]):
    """Opens plain files; subclasses find the records in them."""

    def _open(self, file: DataFile) -> OpenFile:
        return open_file(file)

    def _blocks(self, file: DataFile, progress: IndexProgress) -> FileBlocks:
        opened = open_file(file)
        try:
            refuse_compressed(opened)
            return self._find_blocks(opened, progress)
        finally:
            opened.close()

    @abstractmethod
    def _find_blocks(self, opened: OpenFile, progress: IndexProgress) -> FileBlocks:
        """Find the blocks of a file that is open."""
