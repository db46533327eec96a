"""GET /metrics: names that dashboards query, values from the snapshot, bounded labels."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.control_plane.conftest import in_process, make_config
from tests.control_plane.fake_engine import FakeEngine

NAMES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "moe_late_compiles_total",
    "moe_tile_misses_total",
    "moe_rung_state",
    "moe_rung_hits_total",
    "moe_rung_real_tokens_total",
    "moe_rung_computed_tokens_total",
    "moe_rung_compile_seconds",
    "moe_rung_step_seconds",
    "moe_padding_share",
    "moe_step_scope_share",
    "moe_routing_share",
    "moe_expert_tokens_total",
    "moe_expert_imbalance",
    "moe_batch_size",
    "moe_micro_batch_size",
    "moe_ladder_state",
    "moe_config_revision",
    "moe_slo_requests_total",
    "moe_slo_kept_total",
    "moe_slo_missed_total",
]


async def test_names_and_values(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"model": "fake", "prompt": "ab"})
    await client.get("/a/path/nobody/knows")
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]
    names = {sample.name for sample in samples}
    assert set(NAMES) <= names

    def value(name: str, **labels: str) -> float:
        return next(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    assert value("vllm:request_success_total", finished_reason="stop", model_name="fake", engine="0") == 1
    assert abs(value("moe_padding_share", phase="decode") - 4 / 24) < 1e-9
    assert value("moe_expert_tokens_total", layer="0", expert="0") == 3
    assert value("moe_expert_imbalance", layer="0") == 1.5
    assert value("moe_step_scope_share", rung="decode-8", scope="experts") == 0.25
    assert value("moe_routing_share", rung="decode-8", phase="decode") == 0.1875
    assert value("moe_rung_state", rung="decode-8", state="ready") == 1
    assert value("http_requests_total", handler="/v1/completions", status="200") == 1
    assert value("http_requests_total", handler="other", status="404") == 1


async def test_what_controllers_and_operators_did_is_counted(engine: FakeEngine) -> None:
    engine.configuration.decide("batch_size", "load_low", 8, 16)
    process = in_process(engine, make_config(demo=True), "http://127.0.0.1")
    async with process as client:
        body = {"patch": {"batch_processing": {"base_batch_size": 24, "micro_batch_size": 4}}}
        for _ in range(2):  # the second is stale
            await client.patch("/admin/v1/config", json=body, headers={"If-Match": '"1"'})
        text = (await client.get("/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def value(name: str, **labels: str) -> float:
        return next(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    assert value("moe_controller_decisions_total", controller="batch_size", reason="load_low") == 1
    assert value("moe_config_revision") == 2
    assert value("moe_config_changes_total", result="applied") == 1
    assert value("moe_config_changes_total", result="stale_revision") == 1
    assert (value("moe_batch_size"), value("moe_micro_batch_size")) == (24, 4)
    assert (value("moe_ladder_state", state="steady"), value("moe_ladder_state", state="failed")) == (1, 0)
