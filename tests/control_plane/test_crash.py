"""kill -9 in the middle of PATCHes: what was acknowledged is kept, what is on the disk is whole, the next start is fine."""

import os
import random
import subprocess
import sys
from pathlib import Path

from control_plane.config_state import open_state
from tests.control_plane.conftest import make_config

NUM_KILLS = 10


def test_a_kill_at_any_moment_leaves_a_whole_store(tmp_path: Path) -> None:
    rng = random.Random(0)
    delays = [f"{rng.uniform(0, 0.06):.4f}" for _ in range(NUM_KILLS)]
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.control_plane.crash_server", str(tmp_path), *delays],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    acknowledged = [int(line) for line in run.stdout.split()]
    assert len(acknowledged) == NUM_KILLS
    assert acknowledged == sorted(set(acknowledged))
    state = open_state(make_config(demo=True, state_dir=str(tmp_path)))
    assert state.store.damaged == []
    newest = state.store.newest
    assert newest.number in (acknowledged[-1], acknowledged[-1] + 1)
    assert newest.error == ""
    rows = state.config.batch_processing.base_batch_size
    assert round(state.config.slo.itl * 1000) == rows  # both fields of one change, or neither
    numbers = [revision.number for revision in state.store.page(None, 1000)]
    assert numbers == list(range(numbers[0], numbers[-1] - 1, -1))
    check = state.audit.verify()
    assert check.is_ok, check.problem
    told = {e["revision"] for e in state.audit.page(None, 100_000) if "revision" in e}
    assert set(numbers) <= told
    state.close()
