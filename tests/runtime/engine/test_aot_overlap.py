"""XLA's schedule of a two-micro-batch decode step for eight H200: every exchange but the last has a product of the other
half beside it that takes as long. Skipped where `.ci/aot --setup-only` has made no environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = min(ROOT.glob(".cache/aot-venv-*/bin/python"), default=None, key=str)
NUM_LAYERS = 2


@pytest.mark.skipif(
    PYTHON is None and os.environ.get("AOT_REQUIRED") != "1",
    reason="no environment of .ci/aot with the compiler",
)
@pytest.mark.timeout(900)  # a busy machine
def test_all_but_the_last_exchange_are_covered_in_time(tmp_path) -> None:
    assert PYTHON is not None, "AOT_REQUIRED is set and .ci/aot has made no environment"
    report = tmp_path / "report.json"
    command = [
        str(PYTHON),
        "-m",
        "runtime.engine.aot_overlap",
        "--layers",
        str(NUM_LAYERS),
        "--json",
        str(report),
    ]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, check=True, timeout=800)
    found = json.loads(report.read_text())["by_context"]["1024"]
    # 4 a layer. Nothing is left to stand beside the very last: 95 of 96 are covered in 24 layers.
    assert found["exchanges"] == 4 * NUM_LAYERS
    assert found["covered_in_time"] == 4 * NUM_LAYERS - 1
    beside = {name: pattern["count"] for name, pattern in found["patterns"].items()}
    assert beside == {
        "dispatch over attention": NUM_LAYERS,
        "dispatch over experts": NUM_LAYERS,
        "combine over experts": NUM_LAYERS,
        "combine over attention": NUM_LAYERS - 1,
        "combine over nothing": 1,
    }
