"""The speculative configuration: vLLM's keys, and one clear line for everything else."""

import pytest

from slipstream.core.errors import ConfigError
from slipstream.core.speculative import CLASSIC_TABLE, SpeculativeConfig, TreeConfig


def test_nothing_given_is_auto():
    config = SpeculativeConfig.from_dict({})
    assert (config.method, config.controller, config.rejection_sample_method) == (
        "auto",
        "auto",
        "match",
    )
    assert not config.is_off


@pytest.mark.parametrize("given", [{"method": "off"}, {"num_speculative_tokens": 0}])
def test_off(given):
    assert SpeculativeConfig.from_dict(given).is_off


def test_a_table_of_ones_own_is_used():
    rows = [[1, 4, 6], [5, None, 0]]
    config = SpeculativeConfig.from_dict({"num_speculative_tokens_per_batch_size": rows})
    assert config.controller == "table"
    assert config.num_speculative_tokens_per_batch_size == ((1, 4, 6), (5, None, 0))
    assert SpeculativeConfig(controller="table").num_speculative_tokens_per_batch_size == (
        CLASSIC_TABLE
    )


def test_tree():
    config = SpeculativeConfig.from_dict({"tree": {"depth": 2, "topk": 3}})
    assert config.tree == TreeConfig(depth=2, topk=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculativ_tokens": 5}, "nearest known one is 'num_speculative_tokens'"),
        ({"tree": {"width": 2}}, "unknown key 'width' in tree"),
        ({"method": "eagle9"}, "method must be one of"),
        ({"method": "draft_model"}, "needs model"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be 0 or more, not -1"),
        ({"num_speculative_tokens": "many"}, "wrong type"),
        ({"rejection_sample_method": "typical"}, "rejection_sample_method must be one of"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_max must be at least"),
        ({"rejection_sample_method": "block", "tree": {}}, "block needs chains"),
        ({"num_speculative_tokens_per_batch_size": [[1, 2]]}, "must be rows of"),
    ],
)
def test_what_cannot_be_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict(given)
