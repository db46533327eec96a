"""The list of ops and backends: complete, with reasons, and right for GPUs that the kernels are not made for."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import pallas_kernels
from pallas_kernels import backend
from pallas_kernels.__main__ import main
from pallas_kernels.backend import choosing_for_hopper
from pallas_kernels.choices import list_choices


def test_every_op_is_listed() -> None:
    folder = Path(pallas_kernels.__file__).parent
    ops = {path.parent.name for path in folder.glob("*/op.py")}
    assert {found.op for found in list_choices()} == ops


def test_a_hopper_gpu_runs_a_kernel_of_every_op_but_linear() -> None:
    with choosing_for_hopper():
        names = {found.op: found.choice.name for found in list_choices()}
    assert names.pop("linear") == "xla"
    assert set(names.values()) == {"mosaic"}


@pytest.mark.parametrize("capability", ["8.0", "8.9", "7.5"])
def test_older_gpus_run_xla_with_the_reason(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the reference, which is dense."""
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(backend.jax, "devices", lambda: [device])
    monkeypatch.setattr(backend.native_library, "unavailable", backend.native_library.device_is_not_cpu)
    for found in list_choices():
        assert found.choice.name == "xla", found
        if found.op != "linear":
            assert (
                f"not mosaic: needs compute capability 9.x, this GPU has {capability}" in found.choice.reason
            )


def test_it_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hopper"]) == 0
    table = capsys.readouterr().out
    assert "prefill_attention  mosaic" in table
    assert main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "needs a Hopper GPU, the default device is cpu" in next(
        row["choice"]["reason"] for row in rows if row["op"] == "router"
    )
