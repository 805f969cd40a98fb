"""Quantised products against their meaning in torch, across instruction sets, and in any company of rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import CheckpointError
from outrider.ops.native_kernels import Kernels, build_kernels
from outrider.ops.packed_matrix import GROUP, PackedMatrix, WeightFormat, quantise_rows, reference_linear

SHAPES = ((16, 32), (48, 576), (5, 40), (33, 7), (192, 96))  # outputs, inputs: whole and ragged panels and groups
FORMATS = tuple(WeightFormat)


def random(*shape: int, seed: int) -> Tensor:
    """Of very different size by column, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(torch.randn(shape[-1], generator=generator))


def packed(
    kernels: Kernels, weight: Tensor, weight_format: WeightFormat, order: Sequence[int] | None = None
) -> PackedMatrix:
    return PackedMatrix.pack(kernels, weight, None, weight_format=weight_format, name="weight", order=order)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_is_as_fine_as_its_grid(kernels: Kernels, shape: tuple[int, int], weight_format: WeightFormat) -> None:
    weight = random(*shape, seed=1)
    matrix = packed(kernels, weight, weight_format)
    found = matrix.dequantised()
    lost = (found - weight).abs()
    padded = F.pad(weight, (0, -shape[1] % GROUP)).view(shape[0], -1, GROUP)
    reach = padded.abs().amax(-1) if weight_format is WeightFormat.INT8 else padded.amax(-1) - padded.amin(-1)
    step = (reach / (127 if weight_format is WeightFormat.INT8 else 15))[..., None].expand(-1, -1, GROUP)
    # half a step, what binary16 rounds off the scales, and the step around zero that may fit a group better in squares
    slack = 0.02 * padded.abs().amax(-1, keepdim=True).expand_as(step)
    assert bool((lost <= (1.2 * step + slack).flatten(1)[:, : shape[1]]).all())
    assert matrix.error == pytest.approx(float(lost.square().sum() / weight.square().sum()), rel=1e-3)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_the_reference(kernels: Kernels, shape: tuple[int, int], weight_format: WeightFormat) -> None:
    matrix = packed(kernels, random(*shape, seed=2), weight_format)
    x = random(19, shape[1], seed=3)
    expected = reference_linear(matrix, x)
    found = matrix.linear(kernels, x)
    same = found == expected  # the reference's float64 sums round twice, once in many thousands of elements
    assert float(same.float().mean()) > 0.98
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6 * float(expected.abs().max()))


def test_a_group_is_an_exact_integer(kernels: Kernels) -> None:
    """One group, scales of one: the product is the integer itself, extremes included."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randint(-127, 128, (32, GROUP), generator=generator)
    q[:, 0], q[0] = 127, -127
    x = torch.randint(-127, 128, (9, GROUP), generator=generator)
    x[:, 0], x[0] = 127, 127
    found = packed(kernels, q.float(), WeightFormat.INT8).linear(kernels, x.float())
    assert torch.equal(found, (x @ q.T).float())


@pytest.mark.parametrize("zero_point", ["q4_1", "q4_0"])
def test_groups_on_a_grid_are_kept_exactly(kernels: Kernels, zero_point: str) -> None:
    generator = torch.Generator().manual_seed(5)
    d = (torch.rand(24, 3, 1, generator=generator) * 0.02 + 1e-3).half().float()
    q = torch.randint(0, 16, (24, 3, GROUP), generator=generator)
    q[..., 0] = 0
    if zero_point == "q4_1":
        q[..., 1] = 15
        m = (torch.randn(24, 3, 1, generator=generator) * 0.05).half().float()
    else:
        q = q.clamp(max=13)  # the range around zero is not used up, so min and max do not give the grid
        m = -8 * d
    weight = (d * q + m).flatten(1)
    matrix = packed(kernels, weight, WeightFormat.INT4)
    torch.testing.assert_close(matrix.dequantised(), weight, rtol=1e-6, atol=1e-9)
    assert matrix.error < 1e-12

    q8 = torch.randint(-127, 128, (24, 3, GROUP), generator=generator)
    q8[..., 7] = 127
    weight = (d * q8).flatten(1)
    assert torch.equal(packed(kernels, weight, WeightFormat.INT8).dequantised(), weight)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_order_and_bias(kernels: Kernels, weight_format: WeightFormat) -> None:
    weight, bias, x = random(40, 64, seed=6), random(40, seed=7), random(3, 64, seed=8)
    order = [*range(39, -1, -1), -1, 5]
    matrix = PackedMatrix.pack(kernels, weight, bias, weight_format=weight_format, name="weight", order=order)
    plain = packed(kernels, weight, weight_format).linear(kernels, x) + bias
    found = matrix.linear(kernels, x)
    assert torch.equal(found[:, :40], plain.flip(1))
    assert torch.equal(found[:, 40], torch.zeros(3))
    assert torch.equal(found[:, 41], plain[:, 5])


def test_bf16_weights_are_read_as_they_are(kernels: Kernels) -> None:
    weight = random(20, 64, seed=9).bfloat16()
    a, b = packed(kernels, weight, WeightFormat.INT8), packed(kernels, weight.float(), WeightFormat.INT8)
    assert torch.equal(a.data, b.data)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, weight_format: WeightFormat) -> None:
    """Bit for bit: alone, among 2 to 64 rows, and in another order."""
    matrix = packed(kernels, random(80, 160, seed=10), weight_format)
    x = random(64, 160, seed=11)
    alone = torch.cat([matrix.linear(kernels, x[i : i + 1]) for i in range(64)])
    for count in range(2, 65):
        assert torch.equal(matrix.linear(kernels, x[:count]), alone[:count]), count
    order = torch.randperm(64, generator=torch.Generator().manual_seed(12))
    assert torch.equal(matrix.linear(kernels, x[order]), alone[order])


def test_what_is_not_finite_stays_so_in_its_row_alone(kernels: Kernels) -> None:
    matrix = packed(kernels, random(16, 64, seed=13), WeightFormat.INT8)
    x = random(3, 64, seed=14)
    clean = matrix.linear(kernels, x)
    for bad in (torch.nan, torch.inf):
        x[1, 40] = bad
        found = matrix.linear(kernels, x)
        assert not bool(found[1].isfinite().any())
        assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_weights_that_cannot_be_packed_are_refused(kernels: Kernels) -> None:
    for bad in (torch.nan, torch.inf, 1e8):
        weight = torch.ones(16, 32)
        weight[3, 4] = bad
        with pytest.raises(CheckpointError, match=r"blk\.7"):
            PackedMatrix.pack(kernels, weight, None, weight_format=WeightFormat.INT8, name="blk.7")


@pytest.mark.parametrize("architecture", [("-march=x86-64-v3",), ("-march=x86-64",)], ids=" ".join)
def test_every_instruction_set_gives_the_same_bits(kernels: Kernels, architecture: tuple[str, ...]) -> None:
    other = build_kernels(architecture, threads=1)
    if other is None:
        pytest.skip("this compiler builds for another family of processors")
    for weight_format in FORMATS:
        weight = random(48, 96, seed=15)
        a, b = packed(kernels, weight, weight_format), packed(other, weight, weight_format)
        assert torch.equal(a.data, b.data)
        for rows in (1, 5, 7, 11, 37):
            x = random(rows, 96, seed=16)
            assert torch.equal(a.linear(kernels, x), b.linear(other, x)), rows


def test_the_reference_quantises_to_the_nearest_step() -> None:
    q, scale = quantise_rows(torch.tensor([[127.0, -63.5, 0.5, 1.5] + [0.0] * 28]))
    assert scale.tolist() == [[1.0]]
    assert q[0, 0, :4].tolist() == [127, -64, 0, 2]
