"""Why the native kernels do not run, said exactly; and that compiled programs survive a restart."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from pallas_kernels.native import library

HEADER = Path(library.__file__).parent / "gemm.h"
RESTART = """
import sys
import jax, jax.numpy as jnp
from pallas_kernels.linear.op import linear
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 64), (40, 64)))
compiled = jax.jit(linear).lower(x, w).compile()
found = hits.count("/jax/compilation_cache/cache_hits")
y = compiled(jnp.ones(x.shape, x.dtype), jnp.ones(w.shape, w.dtype))
print(found, "moe_ladder_linear" in compiled.as_text(), float(y.min()), float(y.max()))
"""


def cpu_info(folder: Path, flags: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"model name\t: x\nflags\t\t: {flags}\n", encoding="utf-8")
    return path


def test_missing_processor_flags_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    with_all = " ".join(library.CPU_FLAGS)
    assert library.machine_lacks(cpu_info(tmp_path, with_all)) is None
    without = cpu_info(tmp_path, with_all.replace("avx512_bf16", "avx512_vnni"))
    assert library.machine_lacks(without) == "the processor lacks avx512_bf16"
    assert "cannot be read" in str(library.machine_lacks(tmp_path / "none"))
    assert library.load(without).why_not == "the processor lacks avx512_bf16"


def test_another_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    assert "on aarch64" in str(library.machine_lacks(tmp_path))


def test_no_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "machine_lacks", lambda _: None)
    monkeypatch.setattr(library, "device_is_not_cpu", lambda: None)
    assert library.load(find_compiler=lambda: None).why_not == "no C++ compiler, looked for c++, g++, clang++"


def test_a_folder_in_foreign_hands_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "machine_lacks", lambda _: None)
    monkeypatch.setattr(library, "device_is_not_cpu", lambda: None)
    monkeypatch.setattr(library, "default_folder", lambda: tmp_path)
    tmp_path.chmod(0o777)
    assert "writable by nobody else" in str(library.load(find_compiler=lambda: sys.executable).why_not)


def test_only_bfloat16_fits() -> None:
    bf16, f32 = jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.float32)
    assert library.unfit_for_native(bf16, bf16) == {}
    assert library.unfit_for_native(bf16, f32) == {"native": "takes bfloat16, got float32"}


def test_both_languages_agree_on_the_scratch() -> None:
    text = HEADER.read_text(encoding="utf-8")
    for name, value in (("PANEL", library.PANEL), ("MAX_LOOSE_ROWS", library.MAX_LOOSE_ROWS)):
        assert re.search(rf"\b{name} = {value};", text)
    assert library.max_panel_rows(13) == 16


@pytest.mark.skipif(library.unavailable() is not None, reason=f"native: {library.unavailable()}")
def test_a_restart_finds_native_programs_and_the_switch_keeps_them_apart(tmp_path: Path) -> None:
    def start(disabled: str) -> str:
        environment = {**os.environ, "MOE_LADDER_DISABLE_BACKENDS": disabled, "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", RESTART, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        return done.stdout.strip()

    assert start("") == "0 True 64.0 64.0"
    assert start("") == "1 True 64.0 64.0"
    assert start("native") == "0 False 64.0 64.0"
    assert start("native") == "1 False 64.0 64.0"
