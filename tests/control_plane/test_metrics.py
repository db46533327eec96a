"""GET /metrics: names that dashboards query, values from the snapshot, bounded labels."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

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
    "moe_rung_state",
    "moe_rung_hits_total",
    "moe_rung_real_tokens_total",
    "moe_rung_computed_tokens_total",
    "moe_rung_compile_seconds",
    "moe_rung_step_seconds",
    "moe_padding_share",
    "moe_expert_tokens_total",
    "moe_expert_imbalance",
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
    assert value("moe_rung_state", rung="decode-8", state="ready") == 1
    assert value("http_requests_total", handler="/v1/completions", status="200") == 1
    assert value("http_requests_total", handler="other", status="404") == 1
