"""How the quantised products are cut."""

from dataclasses import dataclass

from pallas_kernels.grouped_matmul.tiles import BARRIER_BYTES, MAX_SHARED_BYTES, WGMMA_ROWS
from pallas_kernels.quantized_matmul.quantise import BLOCK
from pallas_kernels.tuning import TileTables

DEPTH = BLOCK  # of the contraction in one copy: what shares a scale


@dataclass(frozen=True)
class QuantizedTile:
    """One tile of the result, as `grouped_matmul`'s; depth is 128.

    rows: rows of x; 64, or a multiple of 8 up to 128 where `swap`.
    outputs: rows of w, for a gated product of each of its halves; 64 or 128.
    swap: the weights are the operand of 64 rows. Weights that are quantised alone always are: they pass through registers.
    """

    rows: int
    outputs: int
    steps: int = 4
    swap: bool = True

    def shared_bytes(self, *, row_bytes: int, is_gated: bool) -> int:
        """row_bytes: of an element of x, 1 or 2."""
        operands = (self.rows * row_bytes + self.outputs * (2 if is_gated else 1)) * DEPTH + 4 * self.rows
        return max(self.steps * operands, 2 * self.rows * self.outputs) + BARRIER_BYTES

    def check(self, outputs: int, *, row_bytes: int, is_gated: bool) -> None:
        """Raises ValueError where the tile is no tile, NotImplementedError where it does not divide the outputs."""
        allowed = range(8, 129, 8) if self.swap else (WGMMA_ROWS,)
        if self.rows not in allowed or self.outputs not in (64, 128) or self.steps < 2:
            raise ValueError(
                f"{self}: rows are 64, or a multiple of 8 up to 128 where swapped, outputs 64 or 128, steps >= 2"
            )
        needed = self.shared_bytes(row_bytes=row_bytes, is_gated=is_gated)
        if needed > MAX_SHARED_BYTES:
            raise ValueError(f"{self} needs {needed} bytes of shared memory, a block has {MAX_SHARED_BYTES}")
        if outputs % self.outputs:
            raise NotImplementedError(f"{outputs} outputs are no multiple of the tile's {self.outputs}")


def choose_quantized_tile(
    num_rows: int,
    num_experts: int,
    k: int,
    outputs: int,
    kind: str,
    *,
    is_gated: bool,
    tables: TileTables | None = None,
) -> QuantizedTile:
    """The device's table where it has this product, else a suggestion. kind: "blocks" or "outputs"."""
    rounded = 1 << max(0, num_rows - 1).bit_length()
    key = f"{kind},rows={rounded},experts={num_experts},k={k},outputs={outputs},gated={int(is_gated)}"
    found = (tables or TileTables.of_package()).look_up("quantized_matmul", key)
    return (
        QuantizedTile(**found)
        if found is not None
        else suggest_quantized_tile(num_rows, num_experts, kind, is_gated=is_gated)
    )


def suggest_quantized_tile(num_rows: int, num_experts: int, kind: str, *, is_gated: bool) -> QuantizedTile:
    """Untested on a GPU. Few rows an expert: narrow tiles, for the weights' bytes are what takes time."""
    mean_group = num_rows / num_experts
    if mean_group > 32 and kind == "blocks":
        return QuantizedTile(WGMMA_ROWS, 64 if is_gated else 128, swap=False)
    most = 64 if kind == "blocks" or is_gated else 128  # two sums of 128 rows would leave few registers
    return QuantizedTile(next((size for size in (8, 16, 32, 64) if mean_group <= size / 2), most), 64)
