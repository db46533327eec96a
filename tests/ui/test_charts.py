"""Plots' data: what is drawn is what the wire types hold, in the units that the axes name."""

import base64
import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from control_plane.console_schemas import (
    BucketsPage,
    ExpertsPage,
    LedgerRow,
    Move,
    OverviewPage,
    RungRow,
    Series,
)
from control_plane.expert_schemas import Placement
from control_plane.request_schemas import RequestTimeline, TimelineEvent
from ui.charts import Look, gauge_band, lines, moments, stacked
from ui.maps import demand, expert_heat, layer_imbalance, moves, request_way, rung_work, token_arrivals
from ui.money import hourly, tokens_by_hour
from ui.palette import DARK, LIGHT, nice_top, palette

NOW = 1_800_000_000.0
COMMON: dict[str, Any] = {
    "span": "15min", "version": 3, "server_time": NOW, "data_age_s": 0.1, "tick_s": 2.0, "state": "ready", "step_s": 2.0,
    "times": [NOW - 4, NOW - 2, NOW],
}  # fmt: skip
LOOK = Look("15min", UTC, "light")


def overview(*series: Series) -> OverviewPage:
    return OverviewPage(page="overview", now=None, promises=None, series=list(series), **COMMON)


def spec(figure: Any) -> dict[str, Any]:
    return figure.to_plotly_json()


def numbers(drawn: dict[str, Any]) -> list[float]:
    """What plotly packed into bytes for the browser."""
    return np.frombuffer(base64.b64decode(drawn["bdata"]), drawn["dtype"]).tolist()


def test_lines_are_in_the_unit_of_their_axis_and_keep_gaps() -> None:
    page = overview(
        Series(name="ttft_p50", unit="s", values=[0.1, None, 0.3]),
        Series(name="ttft_p99", unit="s", values=[0.5, 0.6, 0.7]),
    )
    drawn = spec(
        lines(
            page,
            LOOK,
            "T",
            "ms",
            {"ttft_p50": "p50", "ttft_p99": "p99"},
            least_top=100,
            promise=(2000, "promised"),
        )
    )
    first, second = drawn["data"]
    assert numbers(first["y"]) == pytest.approx([100, math.nan, 300], nan_ok=True)
    assert first["connectgaps"] is False
    assert (first["name"], second["name"]) == ("p50", "p99")
    assert first["line"]["dash"] != second["line"]["dash"], "told apart without colour"
    assert drawn["layout"]["yaxis"]["range"] == (0, 3000) or list(drawn["layout"]["yaxis"]["range"]) == [
        0,
        3000,
    ]
    assert drawn["layout"]["shapes"][0]["y0"] == 2000
    begin, end = drawn["layout"]["xaxis"]["range"]
    assert (end - begin).total_seconds() == 900
    assert end == datetime.fromtimestamp(NOW, UTC).replace(tzinfo=None)


def test_an_empty_plot_says_so_and_keeps_its_axes() -> None:
    drawn = spec(lines(overview(), LOOK, "T", "%", {"slo_attainment": "kept"}, least_top=100, top=105))
    assert drawn["layout"]["annotations"][0]["text"] == "nothing was seen in this time"
    assert list(drawn["layout"]["yaxis"]["range"]) == [0, 105]


def test_sisters_are_stacked_and_the_axis_holds_their_sum() -> None:
    page = overview(
        Series(name="rung_hits", unit="1/s", label="decode-1", values=[1.0, 2.0, 3.0]),
        Series(name="rung_hits", unit="1/s", label="decode-4", values=[4.0, None, 6.0]),
    )
    drawn = spec(stacked(page, LOOK, "T", "1/s", "rung_hits", least_top=1))
    assert [trace["name"] for trace in drawn["data"]] == ["decode-1", "decode-4"]
    assert numbers(drawn["data"][1]["y"]) == pytest.approx([4, math.nan, 6], nan_ok=True)
    assert list(drawn["layout"]["yaxis"]["range"]) == [0, 10]


def test_a_gauge_shows_its_least_and_greatest() -> None:
    page = overview(
        Series(name="batch_size", unit="requests", values=[4, 6, 8], low=[2, 4, 8], high=[6, 8, 8])
    )
    high, low, mean = spec(gauge_band(page, LOOK, "T", "requests", "batch_size", least_top=8))["data"]
    assert (numbers(high["y"]), numbers(low["y"]), numbers(mean["y"])) == ([6, 8, 8], [2, 4, 8], [4, 6, 8])


def test_rungs_show_use_and_padding() -> None:
    def rung(name: str, hits: int, occupancy: float | None) -> RungRow:
        return RungRow(
            name=name, phase="decode", size=4, state="ready", hits=hits, hits_span=hits, occupancy=occupancy,
            occupancy_span=occupancy, computed_span=40, padding_span=10, step_s=0.01, busy_share_span=0.1, compile_s=1.0,
            from_cache=False, temp_bytes=1,
        )  # fmt: skip

    asked, padding = spec(rung_work([rung("decode-4", 12, 0.75), rung("decode-8", 0, None)], "light"))["data"]
    assert list(asked["y"]) == ["decode-4  ·  12"]
    assert (list(asked["x"]), list(padding["x"])) == ([75], [25])


def test_moves_are_grouped_by_reason() -> None:
    listed = [
        Move(time=NOW - 9, number=1, controller="batch_size", previous=8, value=12, reason="load_low", inputs={"load": 0.2}),
        Move(time=NOW - 5, number=2, controller="batch_size", previous=12, value=8, reason="load_high", inputs={"load": 0.9}),
        Move(time=NOW - 1, number=3, controller="batch_size", previous=8, value=12, reason="load_low"),
    ]  # fmt: skip
    page = BucketsPage(page="buckets", ladder=None, moves=listed, num_moves=3, **COMMON)
    high, low = spec(moves(page, LOOK))["data"]
    assert (high["name"], list(high["y"])) == ("batch size: load high", [8])
    assert (low["name"], list(low["y"])) == ("batch size: load low", [12, 12])
    assert list(high["customdata"][0]) == ["12", "load 0.9"]
    assert high["marker"]["symbol"] != low["marker"]["symbol"]


def test_the_heat_map_is_relative_to_an_even_share() -> None:
    page = ExpertsPage(
        page="experts", num_layers=2, num_experts=4, tokens=[[10, 10, 10, 10], [40, 0, 0, 0]], imbalance=[1.0, 4.0],
        placement=Placement(available=False, reason="one device"), **COMMON,
    )  # fmt: skip
    heat = spec(expert_heat(page, "light"))["data"][0]
    assert [list(row) for row in heat["z"]] == [[1, 1, 1, 1], [4, 0, 0, 0]]
    assert (heat["zmin"], heat["zmax"]) == (0, 3)
    assert list(spec(layer_imbalance(page, "dark"))["data"][0]["y"]) == [1, 4]


def test_a_layer_that_saw_nothing_is_empty_not_even() -> None:
    page = ExpertsPage(
        page="experts", num_layers=1, num_experts=2, tokens=[[0, 0]], imbalance=[None],
        placement=Placement(available=False), **COMMON,
    )  # fmt: skip
    assert list(spec(expert_heat(page, "light"))["data"][0]["z"][0]) == [None, None]


def test_hours_show_cost_beside_income() -> None:
    rows = [
        LedgerRow(start=NOW, end=NOW + 3600, input_tokens=10, cached_input_tokens=5, output_tokens=20, worker_hours=1.0,
                  idle_share=0.5, cost_usd=2.0, income_usd=3.0, margin=0.5),
        LedgerRow(start=NOW + 3600, end=NOW + 4000, input_tokens=1, cached_input_tokens=0, output_tokens=2, worker_hours=0.1,
                  idle_share=None, cost_usd=None, income_usd=None, margin=None),
    ]  # fmt: skip
    cost, income = spec(hourly(rows, UTC, "light", "T"))["data"]
    assert (list(cost["y"]), list(income["y"])) == ([2.0, None], [3.0, None])
    assert [list(bar["y"]) for bar in spec(tokens_by_hour(rows, UTC, "dark"))["data"]] == [
        [20, 2],
        [10, 1],
        [5, 0],
    ]


def test_a_request_is_drawn_in_milliseconds_after_its_arrival() -> None:
    events = [
        TimelineEvent(time=NOW, offset_s=0, kind="arrived"),
        TimelineEvent(time=NOW, offset_s=0.05, kind="prefill", rung="prefill-64", duration_s=0.02, tokens=60, launches=1),
        TimelineEvent(time=NOW, offset_s=0.07, kind="first_token"),
        TimelineEvent(time=NOW, offset_s=0.07, kind="decode", rung="decode-1", duration_s=0.1, tokens=9, launches=9),
        TimelineEvent(time=NOW, offset_s=0.17, kind="finished"),
    ]  # fmt: skip
    timeline = RequestTimeline(
        id="1", call_id="c", response_id="cmpl", state="finished", arrived=NOW, prompt_tokens=60, cached_tokens=0,
        generated_tokens=10, finish_reason="length", queue_s=0.05, prefill_s=0.02, ttft_s=0.07, decode_s=0.1, e2e_s=0.17,
        num_preemptions=0, events=events, rungs={"prefill-64": 1, "decode-1": 9},
    )  # fmt: skip
    bars = spec(request_way(timeline, "light"))["data"]
    drawn = [(bar["y"][0], bar["base"][0], pytest.approx(bar["x"][0])) for bar in bars]
    assert drawn == [("queue", 0, 50), ("prefill-64", 50, 20), ("decode-1", pytest.approx(70), 100)]


def test_gaps_and_demand() -> None:
    assert list(spec(token_arrivals([0.1, 0.11, 0.15], 0.1, "light"))["data"][0]["y"]) == pytest.approx(
        [10, 40]
    )
    bars = spec(demand([{"positions": 3, "steps": 7}], "T", [4, 8], "dark"))
    assert (list(bars["data"][0]["x"]), list(bars["data"][0]["y"])) == ([3], [7])
    assert [shape["x0"] for shape in bars["layout"]["shapes"]] == [4, 8]


@pytest.mark.parametrize(
    ("values", "top"), [([], 10), ([None], 10), ([9.7], 10), ([10], 15), ([1000], 1500), ([2049], 3000), ([7.9e9], 1e10)]
)  # fmt: skip
def test_axes_end_at_round_numbers(values: list[float | None], top: float) -> None:
    assert nice_top(values, 10) == pytest.approx(top)


def test_text_can_be_read_on_both_grounds() -> None:
    """Contrast of at least 4.5 to 1 for text, 3 to 1 for lines (WCAG 2)."""
    for colours, ground in ((LIGHT, "#FFFFFF"), (DARK, "#1A1916")):
        assert _contrast(colours.text, ground) > 4.5
        assert all(_contrast(colour, ground) >= 3 for colour in (*colours.lines, colours.good, colours.warn))
    assert palette("dark") is DARK


def test_the_viewers_own_time_of_day() -> None:
    assert moments([0.0], UTC) == [datetime(1970, 1, 1)]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
