"""What the console costs: time to the first useful paint, its own idle CPU, the server's CPU with one and with ten viewers.

python -m benchmarks.console_cost --server URL --server-pid PID [--seconds 30]

Needs Debian's chromium and a server that runs. A paint is useful when alerts and tiles are there.
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
            _paints(browser, url, args.loads)
            for viewers in args.viewers:
                _watch(browser, url, viewers, measured, server, args.server, args.seconds)
            browser.close()
    finally:
        console.terminate()
        console.wait(30)


def _paints(browser: Browser, url: str, loads: int) -> None:
    """Prints the seconds to tiles and to the first plot: for a browser that comes first, and for one that was here."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    found: list[tuple[float, float]] = []
    for _ in range(loads):
        page = context.new_page()
        start = time.perf_counter()
        page.goto(url)
        page.locator(".tile").first.wait_for()
        tiles_s = time.perf_counter() - start
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        found.append((tiles_s, time.perf_counter() - start))
        page.close()
    context.close()
    tiles_s, plot_s = (statistics.median(times) for times in zip(*found[1:], strict=True))
    print(f"alerts and tiles {found[0][0]:.2f} s, first plot {found[0][1]:.2f} s: first visit", flush=True)
    print(f"alerts and tiles {tiles_s:.2f} s, first plot {plot_s:.2f} s: later visits, median", flush=True)


def _watch(
    browser: Browser,
    url: str,
    viewers: int,
    console: psutil.Process,
    server: psutil.Process,
    server_url: str,
    seconds: float,
) -> None:
    """Prints what so many viewers of the overview cost, at the usual refresh."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    for _ in range(viewers):
        page = context.new_page()
        page.goto(url)
        page.locator(".tile").first.wait_for()
    time.sleep(5)
    start_s, num_asked = time.perf_counter(), _num_asked(server_url)
    console_s, server_s = _cpu_s(console), _cpu_s(server)
    time.sleep(seconds)
    span_s, num_asked = time.perf_counter() - start_s, _num_asked(server_url) - num_asked
    console_s, server_s = _cpu_s(console) - console_s, _cpu_s(server) - server_s
    print(
        f"{viewers:2d} viewers, {span_s:.0f} s: console {100 * console_s / span_s:.1f} % of one core, server "
        f"{100 * server_s / span_s:.1f} %, {num_asked / span_s:.2f} questions a second to the server",
        flush=True,
    )
    context.close()


def _num_asked(server_url: str) -> float:
    """Answers of the server to the console so far, from its own metrics."""
    lines = httpx.get(f"{server_url}/metrics").text.splitlines()
    counted = [
        line
        for line in lines
        if line.startswith("http_requests_total") and ("/admin/" in line or "/health/" in line)
    ]
    return sum(float(line.rpartition(" ")[2]) for line in counted)


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
    parser.add_argument("--viewers", type=int, nargs="+", default=[0, 1, 10], help="at a time")
    parser.add_argument("--loads", type=int, default=5, help="times the page is opened, two at least")
    parser.add_argument("--port", type=int, default=8089, help="of the console that is started")
    return parser


if __name__ == "__main__":
    main()
