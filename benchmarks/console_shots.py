"""Pictures of every page of the console: starts a server, replays a recorded trace over HTTP, and photographs the pages.

python -m benchmarks.console_shots --trace azure2023_conv.csv.gz [--warm-up 180] [--out docs/console]
python -m benchmarks.console_shots --trace FILE --resident 8 --pages experts --suffix _asleep

Needs Debian's chromium. Two operators' changes are made while it runs, so that moves, history and audit have something
to show. `--resident` lets the other experts sleep. `--hold` leaves server, load and console running for somebody to look at.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from benchmarks.console_load import Load
from control_plane.client import AdminClient, AdminError
from runtime.bench.traces import read_trace, scale_lengths

ROOT = Path(__file__).parents[1]
PAGES = (
    "overview",
    "buckets",
    "experts",
    "kv",
    "scaling",
    "economics",
    "diagnosis",
    "tuning",
    "audit",
    "playground",
)
WIDTHS = {1280: 800, 1920: 1080}
MODES = ("light", "dark")
PRICES = {"input_price": 0.14, "cached_input_price": 0.014, "output_price": 0.28, "worker_price": 0.05}
CHROMIUM = "/usr/bin/chromium"


def main() -> None:
    args = _parser().parse_args()
    requests = scale_lengths(read_trace(args.trace, 2000), args.lengths, 2048)
    with (
        tempfile.TemporaryDirectory() as folder,
        _server(Path(folder), args.resident) as server,
        Load(server, requests, args.rate),
        _console(server, args.port) as console,
    ):
        _operate(server)
        print(f"console {console}, server {server}; {args.warm_up:g} s until the pictures", flush=True)
        time.sleep(args.warm_up)
        _operate_again(server)
        time.sleep(5)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for width in args.widths:
                for mode in MODES:
                    _photograph(browser, console, args, width, mode)
            browser.close()
        with suppress(KeyboardInterrupt):
            time.sleep(args.hold)


def _photograph(browser: Browser, console: str, args: argparse.Namespace, width: int, mode: Any) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    height = WIDTHS.get(width, 900)
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=mode)
    for name in args.pages:
        page = context.new_page()
        page.goto(f"{console}/{'' if name == 'overview' else name}")
        page.wait_for_selector("h1", timeout=30_000)
        if name == "playground":
            page.get_by_role("button", name="Send").click()
            page.get_by_text("This request").first.wait_for(timeout=30_000)
        page.wait_for_timeout(2000)
        length = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
        page.set_viewport_size({"width": width, "height": min(max(length, height), 3000)})
        page.wait_for_timeout(2500)  # tables are drawn anew
        path = args.out / f"{name}{args.suffix}_{width}_{mode}.png"
        page.screenshot(path=path)
        _shrink(path)
        page.close()
    context.close()


def _shrink(path: Path) -> None:
    """Few colours: a page is flat, and pictures in a repository should be small."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def _operate(server: str) -> None:
    """Changes that somebody on call would make."""
    with AdminClient(server) as admin:
        revision = admin.config()["revision"]
        for patch, reason in (
            ({"economics": PRICES}, "prices of this quarter"),
            ({"batch_processing": {"dynamic_adjust_window": "300ms"}}, "quicker in the morning"),
            ({"slo": {"ttft": "1s"}}, "as promised to the first customers"),
        ):
            with suppress(AdminError):
                revision = admin.change(patch, revision=revision, reason=reason)["number"]


def _operate_again(server: str) -> None:
    with AdminClient(server) as admin, suppress(AdminError):
        revision = admin.config()["revision"]
        revision = admin.rollback(revision - 1, revision=revision, reason="the old promise after all")[
            "number"
        ]
        admin.change(
            {"batch_processing": {"max_batch_size": 12}}, revision=revision, reason="room for the noon"
        )
        admin.change({"batch_processing": {"alpha": 0.3}}, revision=1, reason="written before the others")


@contextmanager
def _server(folder: Path, num_resident: int) -> Iterator[str]:
    config = {
        "server": {"port": 0, "demo": True, "state_dir": str(folder / "state")},
        "batch_processing": {"max_batch_size": 8, "base_batch_size": 8},
        "kv_cache": {"kv_cache_size": "64MiB"},
        "experts": {"resident_experts": num_resident, "prefetch_experts": min(1, num_resident)},
        "ladder": {"row_slots": 16, "max_prefill_tokens": 256, "max_prefill_rows": 8},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "control_plane", "--config", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        url = url.removesuffix("/v1")
        _until_ok(f"{url}/health/ready", 300)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield url
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _console(server: str, port: int) -> Iterator[str]:
    command = [sys.executable, "-m", "ui", "--server", server, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        _until_ok(f"http://127.0.0.1:{port}/_stcore/health", 180)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _until_ok(url: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.3)
    raise TimeoutError(f"{url} does not answer")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, required=True, help="azure *.csv.gz or mooncake *.jsonl.gz")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, on average")
    parser.add_argument("--lengths", type=float, default=0.15, help="factor of the trace's lengths")
    parser.add_argument("--warm-up", type=float, default=180.0, help="seconds of load before the pictures")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds to go on after the pictures")
    parser.add_argument("--port", type=int, default=8080, help="of the console")
    parser.add_argument("--resident", type=int, default=0, help="experts.resident_experts; 0: all")
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES)
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), help="pixels")
    parser.add_argument("--suffix", default="", help="of the pictures' names")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "console")
    return parser


if __name__ == "__main__":
    main()
