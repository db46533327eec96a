"""What is read from a compiled program: which collectives have a kernel underneath, and which arrays are too large."""

import pytest

from pallas_kernels.aot_program import Collectives, count_collectives, dense_arrays

# As XLA prints it, shortened: a loop whose body moves rows, with a window for a kernel.
PROGRAM = """HloModule jit_step, is_scheduled=true

%fused_slice (p: bf16[4,64,64]) -> bf16[64,64] {
  %p = bf16[4,64,64]{2,1,0} parameter(0)
  ROOT %custom-call.9 = bf16[64,64]{1,0} custom-call(%p), custom_call_target="mosaic_gpu_v2"
}

%fused_add (p.1: f32[8,64]) -> f32[8,64] {
  %p.1 = f32[8,64]{1,0} parameter(0)
  %wide = f32[8,4096]{1,0} broadcast(%p.1), dimensions={0,1}
  ROOT %add = f32[8,64]{1,0} add(%p.1, %p.1)
}

%async_gather (p.2: bf16[8,64]) -> bf16[64,64] {
  %p.2 = bf16[8,64]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[64,64]{1,0} all-gather(%p.2), dimensions={0}
}

%body (arg: (s32[], bf16[8,64], bf16[4,64,64])) -> (s32[], bf16[8,64], bf16[4,64,64]) {
  %arg = (s32[], bf16[8,64]{1,0}, bf16[4,64,64]{2,1,0}) parameter(0)
  %x = bf16[8,64]{1,0} get-tuple-element(%arg), index=1
  %all-to-all-start.1 = ((bf16[8,64]{1,0}), bf16[8,64]{1,0}) all-to-all-start(%x), dimensions={0}
  %gemm_fusion = bf16[64,64]{1,0} WINDOW_1
  %all-to-all-done.1 = bf16[8,64]{1,0} all-to-all-done(%all-to-all-start.1)
  %async-start = ((bf16[8,64]{1,0}), bf16[64,64]{1,0}, u32[]) async-start(%x), calls=%async_gather
  %second = bf16[64,64]{1,0} WINDOW_2
  %async-done = bf16[64,64]{1,0} async-done(%async-start)
  %all-reduce.3 = bf16[8,64]{1,0} all-reduce(%x), to_apply=%sum
  ROOT %tuple.1 = (s32[], bf16[8,64]{1,0}, bf16[4,64,64]{2,1,0}) tuple(%i, %x, %w)
}

ENTRY %main (x.0: bf16[8,64]) -> bf16[8,64] {
  %x.0 = bf16[8,64]{1,0} parameter(0)
  %pool = bf16[4,64,64]{2,1,0} parameter(1)
  %pool.1 = bf16[4,64,64]{2,1,0} fusion(%pool), kind=kLoop, calls=%fused_slice
  %loop = (s32[], bf16[8,64]{1,0}, bf16[4,64,64]{2,1,0}) while(%t), body=%body
  %DENSE = bf16[8,16,64]{2,1,0} dot(%x.0, %w)
  ROOT %out = bf16[8,64]{1,0} get-tuple-element(%loop), index=1
}
"""
KERNEL = "fusion(%w), kind=kCustom, calls=%fused_slice"
NO_KERNEL = "fusion(%gemm_fusion), kind=kLoop, calls=%fused_add"
NAMED_GEMM = "add(%gemm, %gemm)"


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((KERNEL, KERNEL), Collectives(1, 2)),
        ((KERNEL, NO_KERNEL), Collectives(2, 1)),
        ((NO_KERNEL, NAMED_GEMM), Collectives(3, 0)),
        (('fusion(%w), backend_config={"kind":"__triton_gemm"}', KERNEL), Collectives(1, 2)),
        (('custom-call(%w), custom_call_target="__cublas$lt"', KERNEL), Collectives(1, 2)),
    ],
)
def test_a_collective_is_hidden_by_a_kernel_in_its_window(
    windows: tuple[str, str], expected: Collectives
) -> None:
    program = PROGRAM.replace("WINDOW_1", windows[0]).replace("WINDOW_2", windows[1])
    assert count_collectives(program) == expected


def test_a_kernel_after_the_end_hides_nothing() -> None:
    done = "%all-to-all-done.1 = bf16[8,64]{1,0} all-to-all-done(%all-to-all-start.1)\n"
    program = PROGRAM.replace("  " + done, "").replace("  %gemm_fusion", "  " + done + "  %gemm_fusion")
    program = program.replace("WINDOW_1", KERNEL).replace("WINDOW_2", KERNEL)
    assert count_collectives(program) == Collectives(2, 1)


COMPLETE = PROGRAM.replace("WINDOW_1", KERNEL).replace("WINDOW_2", NO_KERNEL)


def test_arrays_that_a_dense_product_writes_are_found() -> None:
    assert dense_arrays(COMPLETE, 8 * 16 * 64 + 1) == []
    (found,) = dense_arrays(COMPLETE, 8 * 16 * 64)
    assert found.startswith("DENSE = bf16[8,16,64]")
    assert found.endswith("dot")


def test_views_arguments_and_values_inside_a_fusion_are_no_dense_arrays() -> None:
    """The weights in the loop's carry, the pages that are updated in place, a broadcast that is never stored, and a dense
    array that a fusion takes as its argument does not make that shape an argument's.
    """
    taken = "%taken (p.3: bf16[8,16,64]) -> f32[8,64] {\n  %p.3 = bf16[8,16,64]{2,1,0} parameter(0)\n}\n\n"
    assert len(dense_arrays(COMPLETE.replace("%fused_add (", taken + "%fused_add (", 1), 8 * 16 * 64)) == 1
    assert not any("pool" in line or "wide" in line or "loop" in line for line in dense_arrays(COMPLETE, 1))
