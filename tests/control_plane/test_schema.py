"""schemathesis over the OpenAPI schema: whatever is sent, no answer is a 5xx and nothing is left in the engine."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case

from control_plane.app import create_app
from control_plane.service import EngineService
from tests.control_plane.conftest import Running, make_config, running
from tests.control_plane.fake_engine import Card, FakeEngine
from tests.patience import until

schema = schemathesis.openapi.from_dict(create_app(EngineService(make_config())).openapi())


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Running]:
    with running(FakeEngine(card=Card(max_context=256)), make_config(demo=True)) as found:
        yield found


@schema.parametrize()
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_answer_is_5xx(case: Case, fuzzed: Running) -> None:
    answer = case.call(base_url=fuzzed.base_url)
    assert answer.status_code < 500, answer.text
    until(lambda: fuzzed.engine.num_held == 0)
