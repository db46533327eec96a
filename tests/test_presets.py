"""Every preset loads, holds the reference table's numbers, and says on its first line where they come from."""

import json
from pathlib import Path

import pytest
import yaml

from runtime.config import EngineConfig, load_config

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs" / "hardware"
PRESETS = sorted(FOLDER.glob("*.yaml"))
TABLE = {  # base, max, micro batch, dynamic_adjust_window in seconds
    "a100_40gb": (16, 64, 8, 0.3),
    "h100_80gb": (32, 128, 16, 0.5),
    "h800_80gb": (32, 128, 16, 0.5),
    "a10_24gb": (8, 32, 4, 0.2),
}
OURS = {"h200_141gb", "cpu"}


def numbers(config: EngineConfig) -> tuple[int, int, int, float]:
    batch = config.batch_processing
    return batch.base_batch_size, batch.max_batch_size, batch.micro_batch_size, batch.dynamic_adjust_window


def test_the_presets_are_the_table_and_ours() -> None:
    assert {p.stem for p in PRESETS} == set(TABLE) | OURS


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_preset_holds_the_numbers_of_the_table(name: str) -> None:
    assert numbers(load_config(FOLDER / f"{name}.yaml")) == TABLE[name]


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_a_preset_is_consistent_and_leaves_room_to_grow_live(path: Path) -> None:
    config = load_config(path)
    base, largest, micro, window = numbers(config)
    assert micro <= base <= largest < config.ladder.row_slots
    assert micro <= config.batch_processing.max_micro_batch_size <= largest
    assert 0.2 <= window <= 0.5
    assert config.batch_processing.enable_dynamic_batch


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_the_first_line_says_where_the_numbers_come_from(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    wanted = "published" if path.stem in TABLE else "measured"
    assert first.startswith("# ")
    assert wanted in first.lower()


def test_the_h200_is_marked_until_it_was_measured() -> None:
    text = (FOLDER / "h200_141gb.yaml").read_text(encoding="utf-8")
    assert "unmeasured: written from the neighbours" in text.splitlines()[0].lower()


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_a_preset_sets_hardware_fields_only(path: Path) -> None:
    """What depends on the model or on the place it runs in stays with the operator."""
    assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) <= {"batch_processing", "kv_cache", "ladder"}


def test_the_cpu_preset_is_what_the_recorded_sweep_recommends() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "sweep_cpu.json").read_text(encoding="utf-8"))
    found, config = recorded["recommended"], load_config(FOLDER / "cpu.yaml")
    names = ("base_batch_size", "max_batch_size", "micro_batch_size", "max_micro_batch_size")
    assert [getattr(config.batch_processing, n) for n in names] == [found[n] for n in names]
    assert config.batch_processing.dynamic_adjust_window == found["dynamic_adjust_window_s"]
    assert config.batch_processing.dynamic_batch_window == found["dynamic_batch_window_s"]
    assert config.ladder.row_slots == found["row_slots"]
