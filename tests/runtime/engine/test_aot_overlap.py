"""Reading XLA's schedule: what counts as covered, and what only looks so."""

from runtime.engine.aot_overlap import read_coverage

HLO = """
%wrapped (p: bf16[8]) -> bf16[8] {
  %p = bf16[8] parameter(0)
  ROOT %call = bf16[8] custom-call(%p), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: bf16[8], gemm: bf16[8]) -> bf16[8] {
  %a = bf16[8] parameter(0)
  %gemm = bf16[8] parameter(1)
  %all-to-all-start = ((bf16[8]), bf16[8]) all-to-all-start(%a)
  %fusion.1 = bf16[8] fusion(%gemm), kind=kCustom, calls=%wrapped
  %all-to-all-done = bf16[8] all-to-all-done(%all-to-all-start)
  %all-to-all-start.1 = ((bf16[8]), bf16[8]) all-to-all-start(%all-to-all-done)
  %fusion.2 = bf16[8] fusion(%gemm), kind=kLoop, calls=%elementwise
  %all-to-all-done.1 = bf16[8] all-to-all-done(%all-to-all-start.1)
  ROOT %all-to-all.2 = bf16[8] all-to-all(%all-to-all-done.1)
}
"""


def test_a_product_between_start_and_done_covers() -> None:
    found = read_coverage(HLO)
    assert (found.covered, found.uncovered, found.synchronous) == (1, 1, 1)
    assert found.share == 1 / 3


def test_a_program_without_exchange_has_no_share() -> None:
    assert (
        read_coverage("\nENTRY %main (a: f32[1]) -> f32[1] {\n  ROOT %a = f32[1] parameter(0)\n}\n").share
        == 0
    )
