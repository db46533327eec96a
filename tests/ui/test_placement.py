"""The Experts page over a real engine on four devices: its figures, and an operator's rebalance, pause and refusals."""

import threading
from collections.abc import Callable, Iterator

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from control_plane.app import create_app
from control_plane.client import AdminClient, AdminError
from control_plane.console_schemas import ExpertsPage
from control_plane.drain import DrainingServer, uvicorn_config
from control_plane.engine_handle import ServedModel
from control_plane.expert_schemas import Placement
from control_plane.service import EngineService
from runtime.config import parse_config
from runtime.engine.build import ModelCard
from runtime.engine.chat_template import ChatTemplate
from runtime.engine.expert_mover import ExpertMover
from runtime.engine.grammar import GrammarCompiler
from runtime.engine.tokenizer import ByteTokenizer
from tests.control_plane.conftest import make_config, running
from tests.control_plane.fake_engine import FakeEngine
from tests.control_plane.live_engine import CONFIG, VOCAB_SIZE
from tests.control_plane.test_admin_auth import digest
from tests.patience import until
from tests.runtime.engine.test_loop import make_loop
from tests.ui.conftest import APP, TIMEOUT_S, texts
from tests.ui.test_charts import spec
from tests.ui.test_roles import OPERATOR, VIEWER
from ui import session
from ui.device_plots import copies_heat, device_bars, device_heat

KEYS = {"admin_keys": [digest(OPERATOR)], "viewer_keys": [digest(VIEWER)]}


@pytest.fixture(scope="module")
def four_devices() -> Iterator[str]:
    """A server's address; its key is OPERATOR."""
    data = CONFIG.model_dump(mode="json") | {"parallel": {"expert_parallel_size": 4, "redundant_experts": 4}}
    data["ladder"] |= {"decode_rows": [4], "prefill_tokens": [64]}
    data["server"] |= {"demo": False, "port": 0} | KEYS
    # Steps stay far below the promise, however slow the machine, so nothing moves but by order.
    data["slo"] |= {"itl": "60s"}
    config = parse_config(data)
    loop = make_loop(config)
    loop.start()
    loop.wait_complete(120)
    service, tokenizer = EngineService(config), ByteTokenizer(VOCAB_SIZE)
    grammars = GrammarCompiler(tokenizer, VOCAB_SIZE)
    card = ModelCard("tiny", 256, VOCAB_SIZE, 0)
    service.attach(ServedModel(loop, tokenizer, card, ChatTemplate(None), grammars))
    server = DrainingServer(uvicorn_config(create_app(service), service), service)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertMover, "move_s", 1e-6)  # measured on a busy machine, no move might ever pay
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    loop.shutdown()


@pytest.fixture
def experts_page(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], AppTest]:
    """Opens the page of a server with a key, as a new viewer."""

    def opened(server: str, key: str = OPERATOR) -> AppTest:
        session.feed.clear()
        monkeypatch.setenv("CONSOLE_SERVER", server)
        monkeypatch.setenv("CONSOLE_KEY", key)
        return AppTest.from_file(APP, default_timeout=TIMEOUT_S).run().switch_page("views/experts.py").run()

    return opened


def test_an_operator_plans_applies_and_pauses(
    four_devices: str, experts_page: Callable[[str, str], AppTest]
) -> None:
    with AdminClient(four_devices, OPERATOR) as admin:
        until(lambda: _placement(admin).available)
        page = experts_page(four_devices, OPERATOR)
        page.button(key="rebalance_plan").click().run()
        assert not page.exception
        assert "no traffic has been seen" in texts(page), "a refusal is told in the server's words"
        with pytest.raises(AdminError, match="no traffic") as refused:
            admin.rebalance_experts(dry_run=True)
        assert refused.value.status == 422

        _ask(four_devices)
        until(lambda: (admin.experts() or {})["forecast"] is not None)  # now there are loads to plan for
        page = experts_page(four_devices, OPERATOR)

        def shows_the_plan() -> bool:
            """A window may end between the two plans, but not for ever; one may be even, which others will not be."""
            page.button(key="rebalance_plan").click().run()
            wanted = admin.rebalance_experts(dry_run=True)["num_moves"]
            if not wanted:
                _ask(four_devices)
            return wanted > 0 and f"Dry run: {wanted} moves" in texts(page).replace("*", "")

        until(shows_the_plan)
        assert _moved(admin) == 0
        page.button(key="rebalance_apply").click().run()
        assert _moved(admin) == 0, "one click does not move"
        page.button(key="rebalance_confirm").click().run()
        assert "moves are ordered" in texts(page)
        until(lambda: _moved(admin) > 0)
        assert not any(button.key == "rebalance_apply" for button in page.button)

        page.button(key="pause_experts").click().run()
        assert (admin.experts() or {})["is_paused"]
        until(lambda: _placement(admin).is_paused)
        page = experts_page(four_devices, OPERATOR)
        assert "an operator has paused" in texts(page)
        assert page.button(key="pause_experts").label == "Resume moves"
        assert not admin.pause_experts(False, "on again")["is_paused"]
        assert admin.pin_experts([1, 0])["pinned_layers"] == [0, 1]
        assert admin.audit(limit=1)["data"][0]["order"] == {"pinned_layers": [0, 1]}

    page = experts_page(four_devices, VIEWER)
    assert not any(b.key in ("rebalance_plan", "pause_experts") for b in page.button), "operators only"
    assert "This key may look and plan, not change." in texts(page)


def test_on_one_device_it_says_why_and_offers_nothing(
    experts_page: Callable[[str, str], AppTest],
) -> None:
    engine = FakeEngine()
    with (
        running(engine, make_config(state_dir="off", **KEYS)) as server,
        AdminClient(server.base_url, OPERATOR) as admin,
    ):
        until(lambda: "one device" in _placement(admin).reason)
        page = experts_page(server.base_url, OPERATOR)
        assert "all experts are on one device" in texts(page)
        assert "Experts that sleep" not in texts(page), "none does"
        assert not any(button.key == "rebalance_plan" for button in page.button)
        assert admin.experts() is None
        for order in (lambda: admin.rebalance_experts(dry_run=True), lambda: admin.pause_experts(True)):
            with pytest.raises(AdminError, match="on one device there is nothing to move") as refused:
                order()
            assert refused.value.status == 422


def test_plots_hold_the_wire_types_figures() -> None:
    placement = Placement(
        available=True, num_devices=2, copies=[[2, 1, 1]], plan_age_s=3.0, device_loads_before=[1.5, 0.5],
        device_loads_after=[1.0, 1.0], device_rows=[[30, 10], [0, 0]],
    )  # fmt: skip
    bars = spec(device_bars(placement, "light"))
    assert [list(bar["y"]) for bar in bars["data"]] == [[1.5, 0.5], [1.0, 1.0]]
    assert bars["layout"]["yaxis"]["range"] == [0, 2], "it does not move with small loads"
    heat = spec(device_heat(placement, "dark"))["data"][0]
    assert [list(row) for row in heat["z"]] == [[1.5, 0.5], [None, None]]
    assert [list(row) for row in spec(copies_heat(placement, "light"))["data"][0]["z"]] == [[2, 1, 1]]


def test_the_forecast_is_two_quiet_lines_and_keys_of_strangers_stay_words() -> None:
    """Run as a page of its own, with keys that want to be a picture, a heading, a colour, a line of their own, endless."""
    keys = [
        "![x](http://a/b.png)",
        "# big\n# two",
        ":red[alarm]",
        "<b>bold</b>",
        "k" * 300,
        "\u202eright",
        "",
        "translation",
    ]

    def page(keys: list[str]) -> None:
        from control_plane.expert_schemas import LoadForecast
        from ui.placement import _show_forecast

        shares = {key: (len(keys) - i) / 100 for i, key in enumerate(keys)}
        _show_forecast(
            LoadForecast(
                source="mix", errors={"last_window": 0.25, "mix": 0.125}, next_traffic=shares, num_keys=40
            )
        )

    app = AppTest.from_function(page, kwargs={"keys": keys}, default_timeout=TIMEOUT_S).run()
    assert not app.exception
    source, traffic = (str(caption.value) for caption in app.caption)
    assert "**mix**" in source
    assert source.index("mix 0.125") < source.index("last window 0.250"), "the best first"
    assert "translation 1 %" in traffic
    assert "32 more" in traffic
    for sign in ("![", "](", "\n", ":red[", "<b>", "k" * 41, "\u202e"):
        assert sign not in traffic, sign
    assert "(no key)".replace("(", "\\(").replace(")", "\\)") in traffic


def test_nothing_seen_yet_draws_empty_plots_that_say_so() -> None:
    placement = Placement(available=True, num_devices=4)
    for draw in (device_bars, device_heat):
        assert "nothing was computed" in spec(draw(placement, "light"))["layout"]["annotations"][-1]["text"]
    copies_heat(placement, "light")


def _ask(server: str) -> None:
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
    for _ in range(3):
        assert httpx.post(f"{server}/v1/completions", json=body, timeout=60).status_code == 200


def _placement(admin: AdminClient) -> Placement:
    page = admin.page("experts")
    assert isinstance(page, ExpertsPage)
    return page.placement


def _moved(admin: AdminClient) -> int:
    return (admin.experts() or {})["applied_moves"]
