"""The cache of compiled kernels: who may write to it, when it compiles, and what a failing compiler leaves behind."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pallas_kernels.native import compile as native_compile
from pallas_kernels.native.compile import CompileError, digest, prepare_folder, shared_object

FAKE = """#!/bin/sh
[ "$1" = --version ] && echo fake {version} && exit 0
echo x >> {folder}/calls
for last; do :; done
echo object > "$last"
"""
BROKEN = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo "In file included from handlers.cpp:2:" >&2
echo "gemm.h:1:2: error: boom" >&2
exit 1
"""


def write_compiler(path: Path, text: str) -> str:
    path.write_text(text.format(folder=path.parent, version=path.name), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_an_object_is_compiled_once_into_a_private_folder(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path / "cc", FAKE)
    folder = tmp_path / "cache"
    first, second = shared_object(folder, compiler), shared_object(folder, compiler)
    assert first == second
    assert first.read_text(encoding="utf-8") == "object\n"
    assert (tmp_path / "calls").read_text(encoding="utf-8") == "x\n"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == [first]


def test_racing_processes_end_with_one_whole_object(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path / "cc", FAKE)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: shared_object(tmp_path / "cache", compiler), range(4)))
    assert len(set(paths)) == 1
    assert list((tmp_path / "cache").iterdir()) == paths[:1]


def test_the_first_error_of_the_compiler_is_the_reason(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path / "cc", BROKEN)
    with pytest.raises(CompileError, match=r"^cc failed: gemm\.h:1:2: error: boom$"):
        shared_object(tmp_path / "cache", compiler)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(CompileError, match="writable by nobody else"):
        prepare_folder(tmp_path)


def test_a_file_in_place_of_the_folder_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("", encoding="utf-8")
    with pytest.raises(CompileError, match="cannot be created"):
        prepare_folder(tmp_path / "cache")


def test_the_digest_changes_with_source_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = write_compiler(tmp_path / "cc1", FAKE), write_compiler(tmp_path / "cc2", FAKE)
    monkeypatch.setattr(native_compile, "SOURCE_FOLDER", tmp_path)
    (tmp_path / "gemm.h").write_text("a", encoding="utf-8")
    before = digest(one)
    assert digest(one) == before
    assert digest(other) != before
    (tmp_path / "gemm.h").write_text("b", encoding="utf-8")
    assert digest(one) != before


def test_a_compiler_that_is_gone_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="cc --version failed"):
        shared_object(tmp_path / "cache", str(tmp_path / "cc"))
