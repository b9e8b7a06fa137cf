"""Fixtures for tests of readers."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_samples import FORMATS, Sample, make


@pytest.fixture(params=FORMATS)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Sample:
    """A data set of each format."""
    return make(request.param, tmp_path)
