"""Tokens to their experts in one byte a channel: quantised once a token, gathered as bytes.

A token goes to k experts: gathering bytes moves half of what bfloat16 rows would, and each token is quantised once and
not k times. For an H200 XLA makes five kernels of it: the largest of each block, the scales, the bytes, and a gather of either.
The way back, `combine` of the expert layer, is one kernel, and stays in bfloat16: its sum is what rounding would hurt.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_matmul.quantise import QuantizedRows, quantise_rows


def permute_quantised(x: Float[Array, "T D"], token_of_row: Int[Array, " R"]) -> QuantizedRows:
    """Row r holds token token_of_row[r]. Raises ValueError where D is no multiple of 128."""
    return gather_rows(quantise_rows(x), token_of_row)


def gather_rows(x: QuantizedRows, row: Int[Array, " R"]) -> QuantizedRows:
    """The rows in another order, bytes and scales alike."""
    return QuantizedRows(x.values[row], x.scales[:, row])
