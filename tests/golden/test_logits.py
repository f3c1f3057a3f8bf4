"""Real models against logits.json: the reference, and the engine's chunked and cached prompts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from golden.make_logits import NUM_TOKENS, make_tokens
from slipstream import LLM, SamplingParams, reference

GOLDEN = json.loads(Path(__file__).with_name("logits.json").read_text())
TOLERANCE = 1e-3


def test_golden_is_of_the_models_it_should_be() -> None:
    assert {alias: entry["num_tokens"] for alias, entry in GOLDEN.items()} == NUM_TOKENS
    for entry in GOLDEN.values():
        assert entry["largest_difference_when_made"] < TOLERANCE


@pytest.mark.weights
@pytest.mark.parametrize("alias", GOLDEN)
def test_logits_of_real_models(alias: str, model_path: Callable[[str], Path]) -> None:
    golden = GOLDEN[alias]
    llm = LLM(
        str(model_path(alias)),
        device="cpu",
        dtype="float32",
        quiet=True,
        max_num_batched_tokens=64,
        kv_cache_memory=64 * 2**20,
    )
    model = llm.loaded.model
    tokens = make_tokens(golden["num_tokens"], model.config.vocab_size)
    top_ids, top_logits = torch.tensor(golden["top_ids"]), torch.tensor(golden["top_logits"])
    log_sums = torch.tensor(golden["log_sums"])

    logits = reference.logits(model, tokens)[golden["positions"]]
    torch.testing.assert_close(logits.gather(1, top_ids), top_logits, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits.logsumexp(-1), log_sums, rtol=0, atol=TOLERANCE)

    # The longest prompt is computed in chunks; the others find most of theirs in its blocks.
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=top_ids.shape[1])
    for row in reversed(range(len(golden["positions"]))):
        prompt = tokens[: golden["positions"][row] + 1]
        answer = llm.generate([prompt], params)[0].outputs[0]
        assert answer.logprobs is not None
        assert answer.token_ids[0] in golden["top_ids"][row]
        logprobs = torch.tensor([value for _, value in answer.logprobs[0].top])
        expected = top_logits[row] - log_sums[row]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=TOLERANCE)
        assert answer.metrics.num_cached_tokens == (
            0 if row == len(golden["positions"]) - 1 else (len(prompt) - 1) // 16 * 16
        )
