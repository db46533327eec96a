"""A virtual environment of its own for outside clients, so that the project's own stays small."""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "conformance"


def ensure_venv(name: str, packages: Sequence[str]) -> Path:
    """The interpreter of the environment `name`, made and filled when it is not there yet."""
    folder = CACHE / name
    python = folder / "bin" / "python"
    stamp = folder / "packages.txt"
    wanted = "\n".join(packages)
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"making {folder.name} with {', '.join(packages)}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        stamp.write_text(wanted)
    return python
