"""The tables of measured tiles: found by device and key, misses counted, broken files refused."""

from pathlib import Path

import pytest

from pallas_kernels.tuning import FOLDER, TileTables, device_folder, num_tile_misses


def make_table(folder: Path, text: str) -> TileTables:
    (folder / "nvidia_h200").mkdir()
    (folder / "nvidia_h200" / "op.json").write_text(text)
    return TileTables(folder, device_folder("NVIDIA H200"))


def test_a_tile_is_found_and_a_miss_is_counted(tmp_path: Path) -> None:
    tables = make_table(tmp_path, '{"tiles": {"rows=8": {"rows": 8}}}')
    assert tables.look_up("op", "rows=8") == {"rows": 8}
    assert tables.look_up("op", "rows=9") is None
    assert tables.look_up("op", "rows=9") is None
    assert tables.look_up("other", "rows=8") is None
    assert tables.misses() == {("op", "rows=9"): 2, ("other", "rows=8"): 1}


@pytest.mark.parametrize(
    "text", ['{"tiles": {"rows=8": 8}}', '{"tiles": {"rows=8": {"rows": "8"}}}', '{"a": 1}', "{"]
)
def test_a_broken_table_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"op\.json|Expecting"):
        make_table(tmp_path, text).look_up("op", "rows=8")


def test_misses_of_this_process_are_counted() -> None:
    before = num_tile_misses()
    TileTables.of_package().look_up("no such op", "no such key")
    assert num_tile_misses() == before + 1


def test_the_shipped_tables_can_be_read() -> None:
    for path in FOLDER.rglob("*.json"):
        TileTables(FOLDER, path.parent.name).look_up(path.stem, "")
    assert TileTables.of_package() is TileTables.of_package()
