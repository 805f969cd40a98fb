"""Quantised weights and their products: the packed matrix of ``native/gemm.h`` beside its meaning in torch.

``PackedMatrix.pack`` quantises in groups of 32 inputs per output. INT8: w = d * q, q in -127..127. INT4: w = d * q + m,
q in 0..15. d and m are binary16, and a group that lies on such a grid already (GGUF Q8_0, Q4_0 and Q4_1) is kept
exactly. Products quantise activations to int8 in the same groups, add each group in exact integers and the groups in
fp32 in ascending order: a row's result depends neither on other rows nor on the instruction set.

``reference_linear`` is what ``PackedMatrix.linear`` must give, bit for bit. Worst fault of this module: a group read
with another group's scale, which still gives plausible text; the tests compare bits on random groups.

Shape legend: N rows, I inputs, O outputs, G groups, P panels of 16 outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import CheckpointError
from outrider.ops.native_kernels import Kernels, MatrixStruct, address

GROUP, PANEL = 32, 16


class WeightFormat(IntEnum):
    """As the compiled code numbers them."""

    INT8 = 0
    INT4 = 1


class PackedMatrix:
    """Weights in the layout of the kernels, which the instance keeps alive as long as ``struct`` may be used."""

    def __init__(
        self, data: Tensor, bias: Tensor | None, *, weight_format: WeightFormat, outputs: int, inputs: int, error: float
    ) -> None:
        self.data = data
        self.bias = bias
        self.weight_format = weight_format
        self.outputs = outputs  # of the caller's order, -1 rows included
        self.inputs = inputs
        self.error = error  # squared, relative to the weights' squares; 0 where packing lost nothing
        self.struct = MatrixStruct(
            data=address(data, torch.uint8),
            bias=None if bias is None else address(bias, torch.float32),
            format=int(weight_format),
            panels=-(-outputs // PANEL),
            groups=-(-inputs // GROUP),
        )
        self._pointer = (MatrixStruct * 1)(self.struct)

    @staticmethod
    def pack(
        kernels: Kernels,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        *,
        weight_format: WeightFormat,
        name: str,
        order: Sequence[int] | None = None,
    ) -> PackedMatrix:
        """``order``: the weight's rows in the order of the packed outputs, -1 for an output that is always zero.

        Raises CheckpointError, naming the tensor, where a weight is not finite or too large for a binary16 scale.
        """
        rows = torch.arange(weight_OI.shape[0]) if order is None else torch.tensor(order, dtype=torch.int64)
        outputs = rows.numel()
        panels = -(-outputs // PANEL)
        padded_X = F.pad(rows, (0, panels * PANEL - outputs), value=-1)
        data, error = kernels.pack(weight_OI.contiguous(), padded_X, format_code=int(weight_format), panels=panels)
        if error != error:
            raise CheckpointError(
                f"{name}: weights that are not finite, or beyond what a scale in binary16 can hold; "
                "quantization='none' runs them as they are"
            )
        bias = None
        if bias_O is not None:
            bias = torch.where(padded_X >= 0, bias_O.float()[padded_X.clamp(min=0)], 0.0).contiguous()
        inputs = weight_OI.shape[1]
        return PackedMatrix(data, bias, weight_format=weight_format, outputs=outputs, inputs=inputs, error=error)

    @property
    def pointer(self) -> ctypes.Array[MatrixStruct]:
        """For a field that points to this matrix; valid while the instance lives."""
        return self._pointer

    def linear(self, kernels: Kernels, x_NI: Tensor) -> Tensor:
        """fp32 [N, O]."""
        return kernels.linear(self.struct, x_NI.float().contiguous(), outputs=self.outputs)

    def groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """Integer q [O, G, 32], and d and m fp32 [O, G] with w = d * q + m (m = 0 and q signed for INT8)."""
        panels, groups = self.struct.panels, self.struct.groups
        four = self.weight_format is WeightFormat.INT4
        panel_PX = self.data.view(panels, -1)
        if four:
            group_PGX = panel_PX.view(panels, groups, 64 + 256)
            scale_PGX, quant_PGX = group_PGX[..., :64], group_PGX[..., 64:]
        else:  # by pairs of groups, the last of which may be half a pair
            pair_PX = F.pad(panel_PX, (0, groups % 2 * 512)).view(panels, -1, 64 + 2 * 512)
            scale_PGX = pair_PX[..., :64].reshape(panels, -1, 32)[:, :groups]
            quant_PGX = pair_PX[..., 64:].reshape(panels, -1, 512)[:, :groups]
        packed = quant_PGX.reshape(panels, groups, -1, 16, 4)  # quads of inputs, outputs
        q = torch.cat((packed & 15, packed >> 4), dim=2).int() if four else packed.view(torch.int8).int()
        q_OGX = q.permute(0, 3, 1, 2, 4).reshape(panels * PANEL, groups, GROUP)
        scales = scale_PGX.contiguous().view(torch.float16).float().view(panels, groups, -1, PANEL)
        d_OG = scales[:, :, 0].transpose(1, 2).reshape(-1, groups)
        m_OG = scales[:, :, 1].transpose(1, 2).reshape(-1, groups) if four else torch.zeros_like(d_OG)
        return q_OGX[: self.outputs], d_OG[: self.outputs], m_OG[: self.outputs]

    def dequantised(self) -> Tensor:
        """fp32 [O, I], in the packed order."""
        q_OGX, d_OG, m_OG = self.groups()
        return (d_OG[..., None] * q_OGX + m_OG[..., None]).flatten(1)[:, : self.inputs]


def quantise_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """int [N, G, 32] and fp32 scales [N, G], as the kernels make them."""
    x_NGX = F.pad(x_NI.float(), (0, -x_NI.shape[1] % GROUP)).view(x_NI.shape[0], -1, GROUP)
    top_NG = x_NGX.abs().amax(dim=-1)
    inverse_NG = torch.where(top_NG == 0, 0.0, 127.0 / top_NG)
    return torch.round(x_NGX * inverse_NG[..., None]).int(), top_NG / 127.0


def reference_linear(matrix: PackedMatrix, x_NI: Tensor) -> Tensor:
    """fp32 [N, O] with the kernels' roundings: products of two floats are exact in float64, and so is one more sum
    rounded to fp32 but for rare double roundings."""
    q_OGX, d_OG, m_OG = matrix.groups()
    a_NGX, scale_NG = quantise_rows(x_NI)
    out_NO = torch.zeros(x_NI.shape[0], matrix.outputs)
    for g in range(q_OGX.shape[1]):
        part_NO = a_NGX[:, g].double() @ q_OGX[:, g].double().T
        factor_NO = d_OG[:, g] * scale_NG[:, g, None]
        out_NO = (part_NO * factor_NO.double() + out_NO.double()).float()
        if matrix.weight_format is WeightFormat.INT4:
            scaled_N1 = scale_NG[:, g, None] * a_NGX[:, g].sum(-1, keepdim=True)
            out_NO = (m_OG[:, g].double() * scaled_N1.double() + out_NO.double()).float()
    return out_NO if matrix.bias is None else out_NO + matrix.bias[: matrix.outputs]
