"""Names of exchanges: what the configuration offers is what a rung can be, and what a step can do."""

from typing import get_args

from runtime.config import ParallelConfig
from runtime.experts.exchange_kind import ExchangeKind
from runtime.ladder.bucket import decode_bucket, prefill_bucket


def test_every_exchange_of_the_configuration_is_a_kind():
    """Else a valid configuration would end the start of an engine."""
    offered = set(get_args(ParallelConfig.model_fields["exchange"].annotation))
    assert offered - {"auto"} == {kind.value for kind in ExchangeKind} - {"local"}


def test_rungs_of_different_kinds_have_different_names():
    """Compiled programs are found by these."""
    names = {
        bucket.name
        for kind in ExchangeKind
        for bucket in (decode_bucket(8, kind), prefill_bucket(8, 4, 4, kind))
    }
    assert len(names) == 2 * len(ExchangeKind)
