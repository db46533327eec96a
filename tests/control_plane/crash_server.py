"""Children that change a configuration over HTTP, in process, until somebody kills them. Run by test_crash.py.

Reads delays in seconds from the arguments; for each it forks a child, kills it with SIGKILL that long after its first
acknowledged change, and prints the highest revision that was acknowledged.
"""

import asyncio
import os
import signal
import sys
import time

from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine

URL = "http://127.0.0.1:8000"


async def change_for_ever(folder: str, out: int) -> None:
    async with in_process(FakeEngine(), make_config(demo=True, state_dir=folder), URL) as client:
        body = (await client.get("/admin/v1/config")).json()
        revision, rows = body["revision"], body["effective"]["batch_processing"]["base_batch_size"]
        while True:
            rows = rows % 4000 + 1
            patch = {"batch_processing": {"base_batch_size": rows}, "slo": {"itl": f"{rows}ms"}}
            headers = {"If-Match": f'"{revision}"'}
            answer = await client.patch("/admin/v1/config", json={"patch": patch}, headers=headers)
            assert answer.status_code == 200, answer.text
            revision = answer.json()["number"]
            os.write(out, b"%d\n" % revision)


def main(folder: str, delays_s: list[float]) -> None:
    for delay_s in delays_s:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                asyncio.run(change_for_ever(folder, writing))
            finally:
                os._exit(1)
        os.close(writing)
        told = os.read(reading, 64)
        assert told, "the child ended by itself"
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 1 << 16):
            told += more
        os.close(reading)
        numbers = told.split(b"\n")[:-1]
        print(int(numbers[-1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [float(text) for text in sys.argv[2:]])
