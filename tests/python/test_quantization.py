"""Quantised rows through Python, against plain torch."""

from __future__ import annotations

import pytest
import torch

from phasekv import InvalidArgumentError, _core
from phasekv.quantization import Quantization, QuantizedRows
from quantized_reference import kept

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(tokens, heads=3, head_size=80, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, head_size, generator=generator).to(dtype)


def read(quantized, first, count, dtype, heads=3, head_size=80):
    out = torch.empty(count, heads, head_size, dtype=dtype)
    quantized.read(first, out)
    return out


@pytest.fixture(params=_core.supported_cpu_isas(), autouse=True)
def cpu_isa(request):
    before = _core.active_cpu_isa()
    _core.set_active_cpu_isa(request.param)
    yield
    _core.set_active_cpu_isa(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_equals_torch_bit_for_bit(dtype, bits, group_size):
    given = rows(75, dtype=dtype)
    given[:, 1, 7] = 0.25  # a channel that says nothing
    for axis, dim in (("tokens", 0), ("channels", 2)):
        quantized = QuantizedRows.of(given, Quantization(bits, group_size), axis)
        expected = kept(given, bits, group_size, dim)
        assert torch.equal(read(quantized, 0, 75, dtype), expected)
        assert torch.equal(read(quantized, 41, 20, dtype), expected[41:61])
        assert (expected - given).abs().max() > 0


@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_are_those_of_the_formula(bits):
    quantization = Quantization(bits, 32)
    assert quantization.bits_per_element == {2: 3.0, 4: 5.0}[bits]
    given = rows(64, heads=2, head_size=64)
    for axis in ("tokens", "channels"):
        quantized = QuantizedRows.of(given, quantization, axis)
        measured = sum(
            part.untyped_storage().nbytes()
            for part in (quantized.codes, quantized.scales, quantized.zero_points)
        )
        assert measured == quantized.nbytes == given.numel() * (bits + 32 / 32) / 8


def test_strided_rows_are_quantised_as_they_lie():
    whole = torch.randn(2, 3, 70, 96, generator=torch.Generator().manual_seed(2))
    given = whole[0].transpose(0, 1)[5:, :, 8:88]
    for axis in ("tokens", "channels"):
        quantized = QuantizedRows.of(given, Quantization(4), axis)
        assert torch.equal(
            quantized.codes, QuantizedRows.of(given.contiguous(), Quantization(4), axis).codes
        )


def test_rows_are_appended_after_full_groups():
    given = rows(100)
    for axis in ("tokens", "channels"):
        first, second, third = (
            QuantizedRows.of(given[begin:end], Quantization(2, 32), axis)
            for begin, end in ((0, 64), (64, 96), (96, 100))
        )
        joined = first.followed_by([second, third])
        whole = QuantizedRows.of(given, Quantization(2, 32), axis)
        assert joined.tokens == 100
        assert torch.equal(joined.codes, whole.codes)
        assert torch.equal(joined.scales, whole.scales)
        assert torch.equal(joined.zero_points, whole.zero_points)
    ragged = QuantizedRows.of(given[:40], Quantization(2, 32), "tokens")
    with pytest.raises(InvalidArgumentError, match="tokens = 40"):
        ragged.followed_by([ragged])


@pytest.mark.parametrize(
    ("bits", "group_size", "named"),
    [(3, 32, "bits"), (True, 32, "bits"), (2, 24, "group_size"), (4, 0, "group_size"),
     (4, 1 << 21, "group_size"), (2, 32.0, "group_size")],
)  # fmt: skip
def test_other_numbers_are_refused(bits, group_size, named):
    with pytest.raises(InvalidArgumentError, match=named):
        Quantization(bits, group_size)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"axis": "heads"}, "axis"),
        ({"bits": 8}, "bits"),
        ({"group_size": 20}, "group_size"),
        ({"group_size": 0}, "scales"),
        ({"codes": torch.zeros(1, 3, 80, dtype=torch.int32)}, "codes"),
        ({"codes": torch.zeros(3, 3, 80)}, "codes.dtype"),
        ({"scales": torch.zeros(2, 3, 80, dtype=torch.bfloat16)}, "scales.dtype"),
        ({"zero_points": torch.zeros(2, 80, 3, dtype=torch.float16).mT}, "zero_points.stride"),
        ({"first_token": 30}, "first_token"),
        ({"tokens": 80}, "codes"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(change, named):
    quantized = QuantizedRows.of(rows(40), Quantization(2, 32), "tokens")
    arguments = {
        "codes": quantized.codes,
        "scales": quantized.scales,
        "zero_points": quantized.zero_points,
        "bits": 2,
        "group_size": 32,
        "axis": "tokens",
        "tokens": 40,
        "out": torch.empty(20, 3, 80),
    }
    _core.dequantize(**arguments)
    with pytest.raises(InvalidArgumentError, match=named):
        _core.dequantize(**{**arguments, **change})
