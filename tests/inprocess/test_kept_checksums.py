"""Checksums of tensors, on the host and as a device computes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.inprocess.kept import checksums
from holdfast.inprocess.kept.checksums import bytes_of, checksum, weighted_sum

Sum = Callable[[list[torch.Tensor]], int]


def as_on_a_device(tensors: list[torch.Tensor]) -> int:
    return int(weighted_sum([bytes_of(one) for one in tensors]))


SUMS = pytest.mark.parametrize("of", [checksum, as_on_a_device], ids=["host", "device"])


@SUMS
def test_any_flipped_bit_changes_it(of: Sum) -> None:
    tensor = torch.randn(5, 3)
    before, raw = of([tensor]), tensor.view(-1).view(torch.uint8)
    for number in range(raw.numel() * 8):
        raw[number // 8] ^= 1 << number % 8
        assert of([tensor]) != before, number
        raw[number // 8] ^= 1 << number % 8
    assert of([tensor]) == before


@SUMS
def test_any_two_exchanged_elements_change_it(of: Sum) -> None:
    tensor = torch.arange(12, dtype=torch.float32)
    sums = {of([tensor])}
    for one in range(12):
        for other in range(one):
            order = list(range(12))
            order[one], order[other] = other, one
            sums.add(of([tensor[order]]))
    assert len(sums) == 1 + 12 * 11 // 2


@SUMS
def test_bits_count_and_not_values(of: Sum) -> None:
    zero, other = torch.tensor([0.0]), torch.tensor([-0.0])
    assert of([zero]) != of([other])
    nan = torch.tensor([float("nan")])
    assert of([nan]) == of([nan.clone()])


@SUMS
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.complex64])
def test_it_is_that_of_the_elements_whatever_their_strides(of: Sum, dtype: torch.dtype) -> None:
    tensor = torch.randn(4, 6).to(dtype)
    assert of([tensor.t()]) == of([tensor.t().contiguous()])
    assert of([tensor[:0], tensor[0, 0]]) == of([tensor[:0], tensor[0, 0].clone()])


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 6))
def test_on_a_device_all_bytes_count_however_they_are_cut(sizes: list[int], words: int) -> None:
    tensors = [torch.arange(size, dtype=torch.uint8) for size in sizes if size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "CHUNK_BYTES", words * 4)
        before = as_on_a_device(tensors) if tensors else 0
        for tensor in tensors:
            tensor[-1] ^= 0x80
            assert as_on_a_device(tensors) != before
            tensor[-1] ^= 0x80
