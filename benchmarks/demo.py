"""`make demo`: starts the server, sends real requests through the official openai client, prints text and figures.

Takes a port of its own, ends the server by SIGTERM, and exits 0 only if every request was answered and nothing was
compiled while requests were served.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
_ADDRESS = re.compile(r"(http://\S+)/v1 is up")
QUESTION = "What does Elizabeth say of the ball?"
OPENINGS = (
    "It is a truth universally acknowledged, that",
    "She had been the friend and companion of",
    "The evening was spent in",
    "My dear Mr. Bennet, said his lady to him one day,",
)

out = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer and its times, as its reader saw them."""

    num_tokens: int
    ttft_s: float
    duration_s: float

    @property
    def rate(self) -> str:
        """After the first token."""
        seconds = self.duration_s - self.ttft_s
        return f"{(self.num_tokens - 1) / seconds:.0f} tokens/s" if seconds > 0 else "too short to measure"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(ROOT / "configs" / "cpu.yaml"))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--wait", type=float, default=120.0, help="longest wait in seconds for the larger rungs"
    )
    args = parser.parse_args()
    with running_server(args.config) as url:
        wait_for_rungs(url, args.wait)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0)
        model = client.models.list().data[0].id
        out.print(f"\nserving [bold]{model}[/bold] on {url}\n")
        answers = [chat(client, model, args.max_tokens), complete(client, model, args.max_tokens)]
        together_s = time.monotonic()
        answers += complete_together(client, model, args.max_tokens)
        together_s = time.monotonic() - together_s
        late_compiles = show_figures(url, answers, together_s)
    return 1 if late_compiles else 0


@contextmanager
def running_server(config: str) -> Iterator[str]:
    """The server on a port of its own choice; ended by SIGTERM, the end of its log shown when something failed."""
    command = [sys.executable, "-m", "control_plane", "--config", config, "--port", "0"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as sink:
            server = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink, start_new_session=True)
        try:
            yield wait_until_ready(server, log)
        except BaseException:
            stop(server)
            print(
                "last lines of the server's log:\n" + log.read_text(errors="replace")[-4000:], file=sys.stderr
            )
            raise
        if (status := stop(server)) != 0:
            raise SystemExit(f"the server ended with status {status}")
    out.print("server stopped")


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """Until the first rungs serve: the server's URL. It says its port in the log and answers 503 while it loads."""
    start_s = time.monotonic()
    url = ""
    with out.status("starting the server") as status:
        while True:
            seconds = time.monotonic() - start_s
            if server.poll() is not None:
                raise SystemExit(f"the server ended while starting, status {server.returncode}")
            if seconds > START_TIMEOUT_S:
                raise SystemExit(f"not ready after {START_TIMEOUT_S:g} s")
            found = _ADDRESS.search(log.read_text(errors="replace"))
            url = found[1] if found else ""
            if url and is_ready(url):
                break
            status.update(f"loading the model and compiling the first rungs ({seconds:.0f} s)")
            time.sleep(0.1)
    out.print(f"ready on the first rungs after {time.monotonic() - start_s:.1f} s")
    return url


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for_rungs(url: str, limit_s: float) -> None:
    """Until every rung is ready, or the time is over: requests are served meanwhile, on the rungs that are ready."""
    start_s = time.monotonic()
    columns = TextColumn("compiling rungs"), BarColumn(), TextColumn("{task.completed} of {task.total}")
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as progress:
        task = progress.add_task("", total=None)
        while True:
            states = [labels["state"] for labels, value in read_metrics(url, "moe_rung_state") if value]
            num_ready, seconds = states.count("ready"), time.monotonic() - start_s
            progress.update(task, total=len(states), completed=num_ready)
            if "failed" in states:
                raise SystemExit("a rung could not be compiled")
            if (states and num_ready == len(states)) or seconds > limit_s:
                break
            time.sleep(0.2)
    if num_ready == len(states):
        out.print(f"all {num_ready} rungs ready {seconds:.1f} s later")
    else:
        out.print(
            f"{num_ready} of {len(states)} rungs ready {seconds:.1f} s later; the others go on compiling meanwhile"
        )


def chat(client: OpenAI, model: str, max_tokens: int) -> Answer:
    """One streamed chat completion."""
    out.print(f"[bold]chat[/bold]  {QUESTION}")
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    start_s = time.monotonic()
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=max_tokens, temperature=0.7, seed=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    ttft_s, num_tokens = None, 0
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            ttft_s = ttft_s or time.monotonic() - start_s
            out.print(chunk.choices[0].delta.content, end="", markup=False)
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    return finish("the chat", start_s, ttft_s, num_tokens)


def complete(
    client: OpenAI, model: str, max_tokens: int, opening: str = OPENINGS[0], is_shown: bool = True
) -> Answer:
    """One streamed text completion."""
    if is_shown:
        out.print(f"[bold]completion[/bold]  {opening}", end="")
    start_s = time.monotonic()
    stream = client.completions.create(
        model=model, prompt=opening, max_tokens=max_tokens, temperature=0.7, seed=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    ttft_s, num_tokens = None, 0
    for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            ttft_s = ttft_s or time.monotonic() - start_s
            if is_shown:
                out.print(chunk.choices[0].text, end="", markup=False)
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    return finish("the completion", start_s, ttft_s, num_tokens, is_shown)


def complete_together(client: OpenAI, model: str, max_tokens: int) -> list[Answer]:
    """The same openings all at once: they share decode steps."""
    out.print(f"[bold]{len(OPENINGS)} completions at once[/bold]")
    with ThreadPoolExecutor(len(OPENINGS)) as pool:
        return list(pool.map(lambda opening: complete(client, model, max_tokens, opening, False), OPENINGS))


def finish(what: str, start_s: float, ttft_s: float | None, num_tokens: int, is_shown: bool = True) -> Answer:
    if is_shown:
        out.print("\n")
    if ttft_s is None or num_tokens == 0:
        raise SystemExit(f"{what} brought no text")
    return Answer(num_tokens, ttft_s, time.monotonic() - start_s)


def show_figures(url: str, answers: list[Answer], together_s: float) -> int:
    """Prints latencies, rates and the rungs that were used; returns the number of late compiles."""
    for name, answer in zip(("chat", "completion"), answers, strict=False):
        out.print(f"{name:<12} TTFT {answer.ttft_s * 1e3:.0f} ms, {answer.num_tokens} tokens, {answer.rate}")
    together = answers[2:]
    num_tokens = sum(answer.num_tokens for answer in together)
    worst_s = max(answer.ttft_s for answer in together)
    out.print(
        f"{len(together)} at once    TTFT at most {worst_s * 1e3:.0f} ms, {num_tokens} tokens, "
        f"{num_tokens / together_s:.0f} tokens/s in all"
    )
    hits = [
        (dict(labels)["rung"], int(value))
        for labels, value in read_metrics(url, "moe_rung_hits_total")
        if value
    ]
    out.print("rungs used   " + ", ".join(f"{rung} x{count}" for rung, count in hits), soft_wrap=True)
    late_compiles = int(sum(value for _, value in read_metrics(url, "moe_late_compiles_total")))
    out.print(f"late_compiles={late_compiles}")
    return late_compiles


def read_metrics(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Samples of one name with their labels."""
    text = httpx.get(f"{url}/metrics", timeout=10.0).raise_for_status().text
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]


def stop(server: subprocess.Popen[bytes]) -> int:
    """SIGTERM, then the whole group if it does not end by itself."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    return server.returncode


if __name__ == "__main__":
    sys.exit(main())
