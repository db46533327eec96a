"""Reading XLA's schedule: which products count for an exchange, and whether they are long enough."""

import pytest

from runtime.engine.overlap_times import Load, Machine, read_windows, summarise

MACHINE = Machine(flops_s=1e12, hbm_bytes_s=1e12, link_bytes_s=1e9, launch_s=1e-6)
LOAD = Load(context=100.0, grouped_rows=64, num_devices=8)
GROUPED = 'custom_call_target="mosaic_gpu_v2", operand_layout_constraints={s32[1]{0}, bf16[80,32]{1,0}, bf16[4,64,32]{2,1,0}}'


def program(half: int, *between: str) -> str:
    """An exchange of 7,000 bytes of the half, of which 7 in 8 travel, with these ops between start and done."""
    return f"""
%folded (p: bf16[8]) -> bf16[8] {{
  ROOT %call = bf16[80,32] custom-call(%p), {GROUPED}, metadata={{op_name="jit(run)/half_1/experts/expert_mlp/map"}}
}}

%gemm (a: bf16[64,32], b: bf16[96,32]) -> f32[64,96] {{
  %a = bf16[64,32]{{1,0}} parameter(0)
  %b = bf16[96,32]{{1,0}} parameter(1)
  ROOT %dot = f32[64,96]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}

ENTRY %main (x: bf16[8], gemm: bf16[8]) -> bf16[8] {{
  %x = bf16[8] parameter(0)
  %start = ((bf16[500,8]), bf16[500,8]) all-to-all-start(%x), metadata={{op_name="jit(run)/half_{half}/combine/all_to_all"}}
  {"\n  ".join(between)}
  ROOT %done = bf16[500,8] all-to-all-done(%start)
}}
"""


EXPERTS = f'%m = bf16[80,32] custom-call(%x), {GROUPED}, metadata={{op_name="jit(run)/half_1/experts/expert_mlp/map"}}'
FOLDED = "%f = bf16[80,32] fusion(%x), kind=kCustom, calls=%folded"
LINEAR = '%l = f32[64,96] fusion(%x), kind=kCustom, calls=%gemm, metadata={op_name="jit(run)/half_1/attention/linear/dot"}'
ROUTER = (
    '%r = f32[64,96] fusion(%x), kind=kCustom, calls=%gemm, metadata={op_name="jit(run)/half_1/router/dot"}'
)
NORM = '%n = f32[8] fusion(%gemm), kind=kLoop, calls=%norm, metadata={op_name="jit(run)/half_1/attention/rms_norm"}'
DECODE = (
    '%d = (f32[8]) custom-call(%x), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={'
    "bf16[16,2,4,32]{3,2,1,0}, bf16[9,2,2,64,32]{4,3,2,1,0}, s32[16,4]{1,0}, s32[16]{0}}, "
    'metadata={op_name="jit(run)/half_1/attention/paged_attention/map"}'
)


@pytest.mark.parametrize(
    ("op", "kind", "seconds"),
    [
        (
            EXPERTS,
            "experts",
            (4 * 64 * 32 + 64 * 96) * 2 / 1e12,
        ),  # bytes: all weights, and the rows in and out
        (FOLDED, "experts", (4 * 64 * 32 + 64 * 96) * 2 / 1e12),
        (LINEAR, "attention", 2 * 64 * 96 * 32 / 1e12),
        (DECODE, "attention", 4 * 16 * 8 * 32 * 100 / 1e12),  # scores and sums of 8 heads over 100 keys
    ],
    ids=["kernel", "kernel-in-fusion", "linear", "paged-attention"],
)
def test_products_of_the_other_half_count_with_their_time(op, kind, seconds) -> None:
    (window,) = read_windows(program(0, op), LOAD, MACHINE)
    ((found, length),) = window.between
    assert (found, window.scope, window.half) == (kind, "combine", 0)
    if kind == "experts":  # 64 rows of 64 outputs: flops are the longer
        seconds = max(seconds, 2 * 64 * 64 * 32 / 1e12)
    assert length == pytest.approx(seconds)
    assert window.exchange_s == pytest.approx(7000 / 1e9 + 1e-6)


@pytest.mark.parametrize("op", [ROUTER, NORM], ids=["router", "norm-of-a-value-called-gemm"])
def test_small_ops_do_not_count(op) -> None:
    (window,) = read_windows(program(0, op), LOAD, MACHINE)
    assert window.between == ()


def test_products_of_its_own_half_do_not_count() -> None:
    (window,) = read_windows(program(1, EXPERTS, LINEAR), LOAD, MACHINE)
    assert window.between == ()


def test_too_short_a_product_does_not_cover() -> None:
    (short,) = read_windows(program(0, EXPERTS), LOAD, MACHINE)
    assert short.between
    assert not short.is_covered
    assert short.exposed_s == pytest.approx(short.exchange_s - short.product_s)
    (long,) = read_windows(program(0, EXPERTS), LOAD, Machine(1e8, 1e8, 1e9, 1e-6))
    assert long.is_covered
    assert long.exposed_s == 0


def test_a_synchronous_exchange_is_exposed_whole() -> None:
    text = program(0).replace("all-to-all-start(", "all-to-all(").replace("all-to-all-done(", "copy(")
    (window,) = read_windows(text, LOAD, MACHINE)
    assert not window.is_asynchronous
    assert window.exposed_s == window.exchange_s
    found = summarise([window])
    assert (found["exchanges"], found["synchronous"], found["share"]) == (1, 1, 0.0)


def test_a_program_without_exchange_has_no_share() -> None:
    text = "\nENTRY %main (a: f32[1]) -> f32[1] {\n  ROOT %a = f32[1] parameter(0)\n}\n"
    assert summarise(read_windows(text, LOAD, MACHINE))["share"] == 0.0
