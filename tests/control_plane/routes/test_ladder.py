"""The ladder as operators see it: what it asks for, what applying it does, and what that brought."""

import pytest

from tests.control_plane.ladders import operated

LADDER = "/admin/v1/ladder"


async def test_nothing_served_nothing_to_propose():
    async with operated() as server:
        shown = await server.get(LADDER)
        assert (shown["proposal"], shown["applied"], shown["max_rungs"]) == (None, None, 24)
        assert "1000 needed to learn" in shown["why_no_proposal"]
        assert [r["name"] for r in shown["rungs"]][:2] == ["decode-1", "decode-2"]
        answer = await server.post(f"{LADDER}/apply", reason="why not")
        assert answer.status_code == 422
        assert "no ladder to propose" in answer.json()["error"]["message"]


async def test_from_demand_to_realised_gain():
    async with operated() as server:
        server.engine.ask_for("decode", 5, 20_000)
        shown = await server.get(LADDER)
        assert shown["demand"] == {"prefill": [], "decode": [{"positions": 5, "steps": 20_000}]}
        proposal = shown["proposal"]
        assert 5 in proposal["decode_rows"]
        assert "decode-5" in proposal["rungs_to_add"]
        assert proposal["padding_now"]["decode"] == pytest.approx(1 / 6)
        assert proposal["padding_predicted"]["decode"] == 0
        assert proposal["predicted_gain"] == pytest.approx(1 / 6)

        answer = await server.post(f"{LADDER}/apply", reason="five rows all day")
        assert answer.status_code == 200
        made = answer.json()["revision"]
        assert (made["number"], made["actor"], made["reason"]) == (2, "demo", "five rows all day")
        assert "decode-5" in answer.json()["plan"]["rungs_to_add"]
        assert answer.headers["etag"] == '"2"'
        assert 5 in server.service.live.effective.ladder.decode_rows

        server.engine.ask_for(
            "decode", 5, 500
        )  # served by the old ladder, so no part of what came of the new one
        applied = (await server.get(LADDER))["applied"]
        assert (applied["status"], applied["is_serving"], applied["realised"]) == ("compiling", False, None)
        server.engine.finish()
        assert (await server.get(LADDER))["applied"]["realised"]["num_steps"] == 0
        server.engine.ask_for("decode", 5, 300)
        server.engine.ask_for("decode", 32, 100)
        shown = await server.get(LADDER)
        applied = shown["applied"]
        assert applied["is_serving"]
        assert applied["revision"] == 2
        assert applied["realised"]["num_steps"] == 400
        assert applied["realised"]["padding"]["decode"] == 0
        assert applied["realised"]["padding_before"]["decode"] == pytest.approx(300 / (300 * 6 + 3200))
        assert applied["realised"]["gain"] == pytest.approx(300 / 5000)
        assert shown["proposal"] is None  # there is nothing more to gain


async def test_a_ladder_that_fails_to_compile_is_not_called_serving():
    async with operated() as server:
        server.engine.ask_for("decode", 5, 20_000)
        await server.post(f"{LADDER}/apply")
        server.engine.finish(error="decode-5: no memory")
        failed = server.engine.now.ladder_change
        await server.service.live.tick()
        shown = await server.get(LADDER)
        assert (shown["applied"]["status"], shown["applied"]["realised"]) == ("failed", None)
        assert failed.error == "decode-5: no memory"
        assert 5 not in server.service.live.effective.ladder.decode_rows


async def test_a_ladder_that_was_replaced_counts_no_further():
    async with operated() as server:
        server.engine.ask_for("decode", 5, 20_000)
        await server.post(f"{LADDER}/apply")
        server.engine.finish()
        await server.get(LADDER)
        patch = {"ladder": {"decode_rows": [1, 8, 32]}}
        await server.service.live.change(patch, if_match=None, actor="other", reason="")
        server.engine.finish()
        applied = (await server.get(LADDER))["applied"]
        assert (applied["is_serving"], applied["realised"]) == (False, None)


async def test_more_rungs_than_allowed_are_told_not_raised():
    async with operated({"ladder": {"max_rungs": 3}}) as server:
        server.engine.ask_for("decode", 5, 20_000)
        assert "max_rungs is 3" in (await server.get(LADDER))["why_no_proposal"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"reason": "x" * 501}, 422),
        ({"reason": "", "also": 1}, 422),
        ({"canary": {"guard_period": "10", "metric": "itl_p99"}}, 422),  # no unit
        ({"canary": {"guard_period": "10s", "metric": "mood"}}, 422),
        ({"canary": {"guard_period": "10s", "metric": "itl_p99"}}, 422),  # nothing to compare with
    ],
)
async def test_bad_bodies_change_nothing(body, status):
    async with operated() as server:
        server.engine.ask_for("decode", 5, 20_000)
        assert (await server.post(f"{LADDER}/apply", **body)).status_code == status
        assert server.service.live.revision == 1
        assert (await server.get(LADDER))["applied"] is None
