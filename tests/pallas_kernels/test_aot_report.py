"""What is read from Mosaic's dumps, and what breaks a budget."""

from dataclasses import replace
from pathlib import Path

import pytest

from pallas_kernels.aot_report import KernelReport, count_unguarded_loops, read_reports

PTXAS = """ptxas info    : Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 34 registers, used 2 barriers, 1 bytes smem
"""
RESOURCES = (
    "Resources(smem_scratch_bytes=139264, tmem_scratch_cols=0, barrier_counts=Counter({Barrier(arrival_count=3, "
    "num_barriers=4, orders_tensor_core=False): 1, Barrier(arrival_count=1, num_barriers=1): 2}))"
)
LOOP = """$L__BB0_2:
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1, 1, 0, 0;
	wgmma.wait_group.sync.aligned 1;
	@%p1 cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r16], [%rd7], [%r22];
	@%p2 bra.uni 	$L__BB0_2;
	cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2];
"""
GOOD = KernelReport("k", registers=90, spill_bytes=0, shared_bytes=227 * 1024, wgmma=4, tma=3, seconds=1.0)


def write_dump(folder: Path, stem: str, ptx: str = LOOP) -> None:
    (folder / f"{stem}.ptx").write_text(ptx)
    (folder / f"{stem}.ptxas").write_text(PTXAS)
    (folder / f"{stem}.resources.txt").write_text(RESOURCES)


def test_a_dump_is_read(tmp_path: Path) -> None:
    write_dump(tmp_path, "body_0")
    expected = KernelReport("op/shape", 34, 12, 139264 + 8 * 6, wgmma=1, tma=2, seconds=0.5)
    assert read_reports(tmp_path, "op/shape", 0.5) == [expected]
    write_dump(tmp_path, "body_1")
    assert [r.name for r in read_reports(tmp_path, "op/shape", 0.5)] == ["op/shape[0]", "op/shape[1]"]


def test_a_dump_of_another_form_is_refused(tmp_path: Path) -> None:
    write_dump(tmp_path, "body_0")
    (tmp_path / "body_0.ptxas").write_text("nothing")
    with pytest.raises(ValueError, match=r"body_0\.ptxas"):
        read_reports(tmp_path, "op/shape", 0.5)


def test_a_loop_that_never_waits_for_its_products_is_found() -> None:
    assert count_unguarded_loops(LOOP) == 0
    without_wait = LOOP.replace("wgmma.wait_group", "nothing")
    assert count_unguarded_loops(without_wait) == 1
    assert count_unguarded_loops(without_wait.replace("bra.uni", "nothing")) == 0  # no loop


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"spill_bytes": 4}, "k: spills 4 bytes"),
        ({"shared_bytes": 227 * 1024 + 1}, "k: takes 232449 bytes"),
        ({"wgmma": 0}, "k: has no wgmma"),
        ({"is_serialized": True}, "serialized"),
        ({"unguarded_loops": 1}, "never wait"),
    ],
)
def test_each_budget_breaks_alone(change: dict, sentence: str) -> None:
    assert GOOD.broken_budgets() == []
    (broken,) = replace(GOOD, **change).broken_budgets()
    assert sentence in broken


def test_a_kernel_without_products_has_budgets_of_its_own() -> None:
    router = replace(GOOD, wgmma=0, spill_bytes=20)
    assert router.broken_budgets(needs_wgmma=False, max_spill_bytes=32) == []
