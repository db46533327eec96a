"""Compiles the C++ kernels into a shared object, once for each state of source, compiler and headers.

The object lies in a folder that only this user may write to, for its content is run. Knows nothing of what it holds.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

SOURCE_FOLDER = Path(__file__).parent
MAIN_SOURCE = "handlers.cpp"
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread"),
    *("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
)
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 120.0


class CompileError(Exception):
    """Why there is no shared object, in one sentence for the operator."""


def shared_object(folder: Path, compiler: str) -> Path:
    """The compiled kernels in `folder`, compiled now if they are not there. Two processes may do so at once.

    Raises CompileError if the folder cannot be trusted or written to, and with the compiler's first error.
    """
    prepare_folder(folder)
    target = folder / f"kernels-{digest(compiler)}.so"
    if target.is_file():
        return target
    try:
        handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    except OSError as error:
        raise CompileError(f"the folder {folder.name} cannot be written to: {error.strerror}") from None
    os.close(handle)
    try:
        _run_compiler(compiler, Path(name))
        Path(name).replace(target)  # whole or not at all: another process may load it this moment
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def default_folder() -> Path:
    """Beside the cache of executables. Raises CompileError for a user without a home."""
    try:
        return Path.home() / ".cache" / "moe-ladder" / "native"
    except RuntimeError:
        raise CompileError("this user has no home folder for the compiled kernels") from None


def find_compiler() -> str | None:
    """The first of COMPILERS on the path."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def prepare_folder(folder: Path) -> None:
    """Create the folder for this user alone. Raises CompileError if others may write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise CompileError(f"the folder {folder.name} cannot be created: {error.strerror}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileError(
            f"the folder {folder.name} must belong to this user and be writable by nobody else: its content is run"
        )


def digest(compiler: str) -> str:
    """Names what the object is made from: sources, flags, compiler, headers."""
    text = hashlib.sha256()
    for path in sorted(SOURCE_FOLDER.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            text.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    text.update(f"{FLAGS} {version('jaxlib')} {_compiler_version(compiler)}".encode())
    return text.hexdigest()[:16]


def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"{Path(compiler).name} --version failed: {error}") from None
    return f"{compiler} {done.stdout.decode(errors='replace')}"


def _run_compiler(compiler: str, output: Path) -> None:
    source = SOURCE_FOLDER / MAIN_SOURCE
    command = [compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"{Path(compiler).name} failed: {error}") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise CompileError(f"{Path(compiler).name} failed: {first[:300]}")
