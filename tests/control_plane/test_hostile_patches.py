"""Patches that want to break the server: each is refused with its field's name, soon, and changes nothing."""

import time
from pathlib import Path
from typing import Any

import pytest

from control_plane import config_state
from control_plane.config_state import open_state
from control_plane.config_store import ConfigStore
from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine
from tests.patience import PATIENCE_S

URL = "http://127.0.0.1:8000"
CONFIG = "/admin/v1/config"
AT_MOST_S = 1.0  # of the event loop's processor time: nothing else moves meanwhile


@pytest.mark.parametrize(
    ("patch", "told"),
    [
        ({"server": {"max_queued_tokens": "9" * 30}}, "max_queued_tokens"),  # no JSON integer holds it
        ({"server": {"max_queued_requests": 1 << 62}}, "max_queued_requests"),
        ({"server": {"max_prompt_bytes": 1e300}}, "max_prompt_bytes"),
        ({"server": {"max_body_size": "9" * 400 + "B"}}, "max_body_size"),  # infinite as a float
        ({"server": {"max_body_size": "9" * 300 + "TiB"}}, "max_body_size"),
        ({"slo": {"itl": "9" * 300 + "s"}}, "slo.itl"),
        ({"slo": {"itl": "0." + "0" * 310 + "1s"}}, "slo.itl"),  # what it divides is infinite
        ({"slo": {"ttft": "-5ms"}}, "slo.ttft"),
        ({"server": {"drain_delay": "9000h"}}, "drain_delay"),
        ({"batch_processing": {"alpha": 1e308}}, "alpha"),
        ({"ladder": {"decode_rows": [*range(1, 33)] * 9}}, "decode_rows"),
        ({"ladder": {"prefill_tokens": [*range(1, 10_001)]}}, "prefill_tokens"),  # a compile each
        ({"ladder": {"decode_rows": [0] * 400_000}}, "bytes"),  # an error each
        ({"model": {"aliases": [1] * 400_000}}, "bytes"),
        ({"a" * 900_000: 1}, "bytes"),  # which known key is nearest?
        ({"slo": {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {}}}}}}}}}}, "deep"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
async def test_refused_soon_and_by_name(patch: dict[str, Any], told: str) -> None:
    async with in_process(FakeEngine(), make_config(demo=True), URL) as client:
        before = (await client.get(CONFIG)).json()
        start, start_s = time.thread_time(), time.monotonic()
        for method, path in (("POST", f"{CONFIG}/plan"), ("PATCH", CONFIG)):
            answer = await client.request(method, path, json={"patch": patch}, headers={"If-Match": '"1"'})
            assert answer.status_code == 422, answer.text
            assert told in answer.json()["error"]["message"]
            assert len(answer.content) < 2000
        assert time.thread_time() - start < AT_MOST_S
        assert time.monotonic() - start_s < PATIENCE_S / 2  # nor did it wait for anything
        assert (await client.get(CONFIG)).json() == before


async def test_the_first_revision_is_there_after_hundreds() -> None:
    async with in_process(FakeEngine(), make_config(demo=True), URL) as client:
        for i in range(210):
            body = {"patch": {"slo": {"itl": f"{i + 1}ms"}}}
            answer = await client.patch(CONFIG, json=body, headers={"If-Match": f'"{i + 1}"'})
            assert answer.status_code == 200
        back = await client.post(
            f"{CONFIG}/rollback", json={"revision": 1}, headers={"If-Match": answer.headers["etag"]}
        )
        assert back.status_code == 200
        assert (await client.get(CONFIG)).json()["effective"]["slo"]["itl"] == "100ms"


def full_disk(self: ConfigStore, revision: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_keeps_nobody_from_starting_on_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_state, "state_folder", lambda _: tmp_path)
    append = ConfigStore.append
    monkeypatch.setattr(
        ConfigStore, "append", lambda s, r: full_disk(s, r) if s._folder is not None else append(s, r)
    )
    state = open_state(make_config())
    assert state.folder is None
    with pytest.raises(OSError, match="No space"):  # a folder that the file names must be usable
        open_state(make_config(state_dir=str(tmp_path)))
