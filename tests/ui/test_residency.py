"""The Experts page over the embedded model with part of its experts resident: what the engine does is what is drawn."""

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from control_plane.client import AdminClient
from control_plane.console_schemas import ExpertsPage
from control_plane.expert_schemas import Placement, Residency
from tests.conformance.operated_server import OperatedServer
from tests.patience import until
from tests.ui.conftest import texts
from tests.ui.test_charts import COMMON, numbers, spec
from ui.residency_plots import layer_hits, resident_heat, worst_layers


def test_the_page_shows_what_the_engine_does(
    server: OperatedServer, admin: AdminClient, open_page: Callable[[str], AppTest]
) -> None:
    body = {"model": "live", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}

    def has_worked() -> bool:
        assert httpx.post(f"{server.base_url}/completions", json=body, timeout=60).status_code == 200
        found = residency(admin)
        return found.available and found.hit_share_now is not None and found.changes["evicted"] > 0

    until(has_worked)
    page = open_page("experts")
    found = residency(admin)
    assert not page.exception
    assert "Experts that sleep" in texts(page)
    tiles = "".join(str(html.proto.body) for html in page.get("html"))
    assert f"12 of {found.num_experts}" in tiles
    assert "evicted for another" in tiles
    drawn = {figure["layout"]["title"]["text"]: figure for figure in _figures(page)}
    table = drawn["Resident experts now"]["data"][0]["z"]
    assert len(table) == len(found.layers) == len(found.layer_hit_shares)
    assert {sum(row) for row in table} == {12}, "every slot has been taken from the start on"
    assert found.hit_share is not None
    assert 0 < found.hit_share < 1
    assert found.late_fetches_step is not None
    assert found.late_fetches_step > 0
    assert {line["name"] for line in drawn["Changes of residency"]["data"]} == {"woke", "evicted", "slept"}
    shares = numbers(drawn["Rows whose expert was resident"]["data"][0]["y"])
    assert all(0 < share < 100 for share in shares if not math.isnan(share))


def page_of(residency: Residency, **facts: Any) -> ExpertsPage:
    return ExpertsPage(
        page="experts", placement=Placement(available=False), residency=residency, **facts, **COMMON
    )


def test_the_worst_layers_are_pointed_out_and_perfect_ones_are_not() -> None:
    shares = [1.0, 0.4, None, 0.9, 0.6, 0.95, 1.0, 0.97]
    found = Residency(available=True, layers=[*range(1, 9)], layer_hit_shares=shares)
    bars = spec(layer_hits(found, "light"))["data"][0]
    assert list(bars["text"]) == ["", "40 %", "", "", "60 %", "", "", ""], "two of eight"
    assert len({*bars["marker"]["color"]}) == 2
    perfect = found.model_copy(update={"layer_hit_shares": [1.0] * 8})
    assert set(spec(layer_hits(perfect, "dark"))["data"][0]["text"]) == {""}


@pytest.mark.parametrize(
    ("shares", "worst"),
    [
        ([0.5], set()),  # one layer alone is no worse than another
        ([0.5] * 60, set()),
        ([0.0] * 60, set()),
        ([1.0] * 60, set()),
        ([None] * 60, set()),
        ([0.5, None], set()),
        ([0.5] * 30 + [0.75] * 30, {0, 1, 2}),  # of many equal ones the first few, that labels do not overlap
        ([1.0] * 58 + [0.997, 1.0], {58}),
        ([0.9, 0.2], {1}),
    ],
)
def test_at_most_a_few_layers_are_called_worst(shares: list[float | None], worst: set[int]) -> None:
    assert worst_layers(shares) == worst
    found = Residency(available=True, layers=[*range(len(shares))], layer_hit_shares=shares)
    texts = list(spec(layer_hits(found, "light"))["data"][0]["text"])
    assert {index for index, text in enumerate(texts) if text} == worst
    assert "100 %" not in texts


def test_the_map_is_by_the_models_layers_and_tells_rows() -> None:
    """Layer 0 is dense: it has no experts, and its row of tokens is none of theirs."""
    found = Residency(available=True, num_slots=1, num_experts=2, layers=[1, 2], resident=[[0, 1], [1, 0]])
    page = page_of(found, num_layers=3, num_experts=2, tokens=[[0, 0], [5, 6], [7, 8]])
    heat = spec(resident_heat(page, "light"))["data"][0]
    assert [list(row) for row in heat["z"]] == [[0, 1], [1, 0]]
    assert list(heat["y"]) == [1, 2]
    assert [[tuple(cell) for cell in row] for row in heat["customdata"]] == [
        [("asleep", 5), ("resident", 6)],
        [("resident", 7), ("asleep", 8)],
    ]


def test_nothing_seen_yet_draws_empty_plots_that_say_so() -> None:
    found = Residency(
        available=True, num_slots=1, num_experts=2, layers=[0], layer_hit_shares=[None], resident=[[1, 0]]
    )
    assert "no row" in spec(layer_hits(found, "light"))["layout"]["annotations"][-1]["text"]
    resident_heat(page_of(found), "light")
    resident_heat(page_of(Residency(available=True)), "dark")


def residency(admin: AdminClient) -> Residency:
    page = admin.page("experts")
    assert isinstance(page, ExpertsPage)
    return page.residency


def _figures(page: AppTest) -> list[dict[str, Any]]:
    return [json.loads(element.proto.spec) for element in page.get("plotly_chart")]
