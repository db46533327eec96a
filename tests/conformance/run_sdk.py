"""Runs the official SDK's own tests (every create, list and retrieve of chat, completions, models) against a server.

    python tests/conformance/run_sdk.py                     the fake engine
    python tests/conformance/run_sdk.py --model ""          the embedded model; or a model folder
    python tests/conformance/run_sdk.py --base-url URL      a server that runs, started with the aliases printed here

The tests come from the source distribution of the installed SDK's version; they send model names of OpenAI's, which
the server must accept as aliases, and retrieve a stored completion, which is made first.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.conformance.sdk_venv import CACHE, ensure_venv
from tests.conformance.server import served_model

FILES = (
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/test_completions.py",
    "tests/api_resources/test_models.py",
)
PACKAGES = ("pytest", "pytest-asyncio", "pytest-xdist", "respx", "rich", "time-machine", "nest-asyncio")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="a running server, with /v1")
    parser.add_argument("--model", help="model folder for a real server; empty: the embedded model")
    parser.add_argument("--config", type=Path, help="configuration of the real server")
    args = parser.parse_args()
    sdk = version("openai")
    folder = fetch_tests(sdk)
    python = ensure_venv(f"sdk-{sdk}", [f"openai[aiohttp]=={sdk}", *PACKAGES])
    aliases = model_names(folder)
    print("aliases:", ", ".join(aliases))
    started = nullcontext(args.base_url) if args.base_url else served_model(args.model, aliases, args.config)
    with started as base_url:
        store_completion(base_url, aliases[0])
        env = os.environ | {"TEST_API_BASE_URL": base_url}
        words = ["-k", "create or list or retrieve", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        return subprocess.run(
            [python, "-m", "pytest", *FILES, *words], cwd=folder, env=env, check=False
        ).returncode


def fetch_tests(sdk: str) -> Path:
    """The unpacked source distribution of this version."""
    folder = CACHE / f"openai-{sdk}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            f"openai=={sdk}",
            "--no-binary",
            ":all:",
            "--no-deps",
        ]
        subprocess.run([*download, "-d", CACHE], check=True)
        with tarfile.open(CACHE / f"openai-{sdk}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
    return folder


def model_names(folder: Path) -> list[str]:
    """Names that the tests send, read from the tests."""
    text = "".join((folder / name).read_text() for name in FILES)
    names = re.findall(r'model="([^"]+)"', text) + re.findall(r'retrieve\(\s*"(gpt[^"]+)"', text)
    return sorted({name for name in names if name != "model"})


def store_completion(base_url: str, model: str) -> None:
    """Keeps one completion that the retrieve tests find by the name they use."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "store": True}
    answer = httpx.post(
        f"{base_url}/chat/completions", json=body, headers={"X-Request-Id": "completion_id"}, timeout=60
    )
    answer.raise_for_status()


if __name__ == "__main__":
    sys.exit(main())
