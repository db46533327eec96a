"""What the console costs: time to the first useful paint, its own idle CPU, the server's CPU with one and with ten viewers.

python -m benchmarks.console_cost --server URL --server-pid PID [--seconds 30]

Needs Debian's chromium and a server that runs. A paint is useful when the tiles and the first plot are drawn.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from playwright.sync_api import Browser, sync_playwright

from benchmarks.console_shots import CHROMIUM

ROOT = Path(__file__).parents[1]
LOADS = 5


def main() -> None:
    args = _parser().parse_args()
    command = [sys.executable, "-m", "ui", "--server", args.server, "--port", str(args.port)]
    console = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{args.port}"
    server = psutil.Process(args.server_pid)
    try:
        _until_up(url)
        measured = psutil.Process(console.pid)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            paints = [_paint_s(browser, url) for _ in range(LOADS)]
            print(
                f"first useful paint: first {paints[0]:.2f} s, then median {statistics.median(paints[1:]):.2f} s"
            )
            time.sleep(3)
            for viewers in (0, 1, 10):
                _watch(browser, url, viewers, measured, server, args.seconds)
            browser.close()
    finally:
        console.terminate()
        console.wait(30)


def _paint_s(browser: Browser, url: str) -> float:
    """Seconds from asking for the page to its tiles and first plot."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    start = time.perf_counter()
    page.goto(url)
    page.locator(".tile").first.wait_for()
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    took_s = time.perf_counter() - start
    context.close()
    return took_s


def _watch(
    browser: Browser, url: str, viewers: int, console: psutil.Process, server: psutil.Process, seconds: float
) -> None:
    """Prints the CPU of console and server with so many viewers of the overview at the usual refresh."""
    contexts = [browser.new_context(viewport={"width": 1280, "height": 800}) for _ in range(viewers)]
    for context in contexts:
        page = context.new_page()
        page.goto(url)
        page.locator(".tile").first.wait_for()
    time.sleep(5)
    start_s, console_s, server_s = time.perf_counter(), _cpu_s(console), _cpu_s(server)
    time.sleep(seconds)
    span_s = time.perf_counter() - start_s
    console_s, server_s = _cpu_s(console) - console_s, _cpu_s(server) - server_s
    print(
        f"{viewers:2d} viewers: console {100 * console_s / span_s:.1f} % of one core, server {100 * server_s / span_s:.1f} % "
        f"(over {span_s:.0f} s)"
    )
    for context in contexts:
        context.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _until_up(url: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}/_stcore/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise TimeoutError(f"{url} does not answer")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--server", required=True, help="address of a server that runs")
    parser.add_argument("--server-pid", type=int, required=True, help="its process, whose CPU is measured")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each number of viewers")
    parser.add_argument("--port", type=int, default=8089, help="of the console that is started")
    return parser


if __name__ == "__main__":
    main()
