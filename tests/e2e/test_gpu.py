"""The engine on CUDA: the same tests on another device. Skipped where there is none."""

from dataclasses import replace

import pytest
import torch

from slipstream import reference
from slipstream.build import build_engine
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.params import SamplingParams
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.engine.controller import FixedController

pytestmark = pytest.mark.gpu

REQUESTS = [
    ([1 + i, 2, 3 + i], replace(params, max_tokens=16))
    for i, params in enumerate(
        (
            SamplingParams(temperature=0),
            SamplingParams(temperature=1.0, seed=1),
            SamplingParams(temperature=0.8, seed=2, top_k=9, top_p=0.9, frequency_penalty=0.5),
        )
    )
]


def answers(model, *, num_draft_tokens: int) -> list[list[int]]:
    drafter = SyntheticDrafter({}, model.config.vocab_size, hit_rate=0.5, trees=True)
    engine = build_engine(
        loaded(model),
        EngineConfig(kv_cache_memory=2**22, block_size=4),
        drafter=drafter,
        controller=FixedController(num_draft_tokens),
    )
    for i, (prompt, params) in enumerate(REQUESTS):
        engine.add(prompt, params, request_id=str(i))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    return [engine.output(str(i)).outputs[0].token_ids for i in range(len(REQUESTS))]


@pytest.mark.parametrize("model_type", ["llama", "gemma3"])
def test_float64_equals_the_oracle(device, model_type):
    model = tiny_model(model_type).to(device)
    want = [
        reference.generate(model, prompt, params, num_tokens=params.max_tokens)
        for prompt, params in REQUESTS
    ]
    assert answers(model, num_draft_tokens=0) == want
    assert answers(model, num_draft_tokens=6) == want


def test_bfloat16_runs_to_the_end(device):
    """Near-ties may round apart between batch shapes; nothing may leak or fail."""
    model = tiny_model("llama", dtype=torch.bfloat16).to(device)
    for num_draft_tokens in (0, 6):
        for tokens in answers(model, num_draft_tokens=num_draft_tokens):
            assert len(tokens) == 16
