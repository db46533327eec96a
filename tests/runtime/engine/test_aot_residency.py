"""Reading XLA's schedule of fetches: what is under a product, what is not, and what is no fetch."""

from runtime.engine.aot_residency import Fetches, read_fetches

# Shortened from a program for an H200: one branch that fetches under the product, one loop that must wait.
HLO = """
%branch (p: (bf16[8,4,2], s32[])) -> bf16[1,4,2] {
  %store = bf16[8,4,2]{2,1,0:S(5)} get-tuple-element(%p), index=0
  %dynamic-slice-start.4.0 = ((bf16[8,4,2]{2,1,0:S(5)}, s32[]), bf16[1,4,2]{2,1,0}, u32[]) fusion-start(%store, %i), kind=kLoop, calls=%a
  %dynamic-slice-start.4 = ((bf16[8,4,2]{2,1,0:S(5)}, s32[]), bf16[1,4,2]{2,1,0}, u32[]) fusion-start(%store, %i), kind=kLoop, calls=%b
  %dynamic-slice-done.4 = bf16[1,4,2]{2,1,0} fusion-done(%dynamic-slice-start.4)
  %product = bf16[8,4] custom-call(%x), custom_call_target="mosaic_gpu_v2"
  ROOT %dynamic-slice-done.4.0 = bf16[1,4,2]{2,1,0} fusion-done(%dynamic-slice-start.4.0)
}

%body (p: (bf16[8,4,2], s32[])) -> bf16[1,4,2] {
  %dynamic-slice-start.5 = ((bf16[8,4,2]{2,1,0:S(5)}, s32[]), bf16[1,4,2]{2,1,0}, u32[]) fusion-start(%store, %i), kind=kLoop, calls=%c
  %other-start = ((bf16[8,4,2]{2,1,0}, s32[]), bf16[1,4,2]{2,1,0}, u32[]) fusion-start(%slots, %i), kind=kLoop, calls=%d
  %dynamic-slice-done.5 = bf16[1,4,2]{2,1,0} fusion-done(%dynamic-slice-start.5)
  ROOT %product = bf16[8,4] custom-call(%x), custom_call_target="mosaic_gpu_v2"
}
"""  # noqa: E501


def test_only_copies_from_the_host_count_and_only_a_product_between_covers() -> None:
    assert read_fetches(HLO) == Fetches(covered=1, uncovered=2)


def test_a_program_without_fetches_has_none() -> None:
    assert read_fetches(
        "\nENTRY %main (a: f32[1]) -> f32[1] {\n  ROOT %a = f32[1] parameter(0)\n}\n"
    ) == Fetches(0, 0)
