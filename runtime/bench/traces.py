"""Reads recorded workloads: when requests came, how long they were, which prefix blocks they shared. Imports no JAX.

Two public formats, told apart by the file's name: `*.csv[.gz]` with the columns t_s, prompt_tokens, output_tokens
(Azure), and `*.jsonl[.gz]` with timestamp (ms), input_length, output_length, hash_ids (Mooncake). Neither holds text.
"""

import csv
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

BLOCK_LEN = 512  # tokens that one id of hash_ids stands for


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request; `block_ids` is empty where the trace does not say what was shared."""

    t_s: float
    prompt_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.output_len


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceRequest]:
    """The first max_requests requests in order of time. Raises ValueError when the file is not a trace."""
    suffixes = [s for s in path.suffixes if s != ".gz"]
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if not suffixes or suffixes[-1] not in readers:
        raise ValueError(f"{path.name}: expected a name that ends in .csv, .jsonl, .csv.gz or .jsonl.gz")
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as lines
        ):
            requests = list(itertools.islice(readers[suffixes[-1]](lines), max_requests))
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name}: not a trace: {type(error).__name__}: {error}") from None
    if not requests:
        raise ValueError(f"{path.name}: holds no request")
    return spread_equal_times(sorted(requests, key=lambda r: r.t_s))


def spread_equal_times(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Requests stamped alike move apart evenly up to the next stamp: some recorders round to whole seconds.

    Without it every step of the recorder's clock would look like a burst.
    """
    groups = [list(group) for _, group in itertools.groupby(requests, key=lambda r: r.t_s)]
    spread: list[TraceRequest] = []
    step_s = 0.0
    for i, group in enumerate(groups):
        if i + 1 < len(groups):
            step_s = groups[i + 1][0].t_s - group[0].t_s
        spread += [replace(r, t_s=r.t_s + step_s * k / len(group)) for k, r in enumerate(group)]
    return spread


def fitting_factor(requests: Iterable[TraceRequest], max_context: int) -> float:
    """One factor for all lengths, so that the longest request just fits the context; never above 1."""
    longest = max(r.total_len for r in requests)
    return min(1.0, max_context / longest)


def scale_lengths(requests: Iterable[TraceRequest], factor: float, max_context: int) -> list[TraceRequest]:
    """Every length times one factor, at least one token each; raises if a request then exceeds the context."""
    scaled = []
    for request in requests:
        prompt_len, output_len = (max(1, int(n * factor)) for n in (request.prompt_len, request.output_len))
        if prompt_len + output_len > max_context:
            raise ValueError(
                f"a request of {request.total_len} tokens is {prompt_len + output_len} at length scale {factor:.4g}, "
                f"more than the context of {max_context}; use a smaller --length-scale"
            )
        scaled.append(replace(request, prompt_len=prompt_len, output_len=output_len))
    return scaled


def _read_csv(lines: IO[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        yield TraceRequest(float(row["t_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))


def _read_jsonl(lines: IO[str]) -> Iterator[TraceRequest]:
    for line in lines:
        row = json.loads(line)
        block_ids = tuple(int(i) for i in row["hash_ids"])
        yield TraceRequest(
            row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), block_ids
        )
