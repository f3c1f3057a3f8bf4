"""The heads that come with slipstream: they fit, they draft, and they change no token."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from slipstream.build import draft_bytes
from slipstream.core.counts import DraftCounts
from slipstream.core.speculative import SpeculativeConfig
from slipstream.loading.shipped import shipped_head
from slipstream.models.heads.base import tensor_bytes

METHODS = ("eagle3", "medusa", "mtp")
TARGET = "smollm2-135m"


def folder(method: str) -> Path:
    path = shipped_head(TARGET, method)
    assert path is not None
    return path


def test_they_are_small() -> None:
    sizes = [file.stat().st_size for method in METHODS for file in folder(method).iterdir()]
    assert sum(sizes) < 24e6


@pytest.mark.parametrize("method", METHODS)
def test_their_cards_say_what_they_are(method: str) -> None:
    card = json.loads((folder(method) / "card.json").read_text())
    assert (card["method"], card["target"], card["data"]) == (method, TARGET, "builtin")
    assert card["commit"] and card["schedule"]["num_steps"] > 0
    assert not any(part.startswith("/") for part in card["argv"])
    least = {"eagle3": 1.9, "medusa": 1.5, "mtp": 2.45}  # chains, on answers held out
    assert card["held_out"]["acceptance_length"] > least[method]


@pytest.mark.weights
def test_they_draft_and_change_no_token(model_path: Callable[[str], Path]) -> None:
    model_path(TARGET)
    llm = LLM(TARGET, quiet=True, kv_cache_memory=2**27)
    messages = [{"role": "user", "content": "Give five practical tips about bread baking."}]
    prompt = llm.chat_ids(messages)
    chains, trees = ({method: DraftCounts() for method in METHODS} for _ in range(2))
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=48, logprobs=1)
        plain = llm.generate([prompt], params)[0].outputs[0]
        for method in METHODS:
            for tree in (None, {"depth": 3, "topk": 3, "max_tokens": 8}):
                settings = {"method": method, "controller": "fixed", "tree": tree}
                settings["num_speculative_tokens"] = 8 if tree else 3
                engine = llm.another_engine(SpeculativeConfig.from_dict(settings))
                request = engine.add(prompt, params)
                while engine.has_work:
                    engine.step()
                (drafted,) = engine.output(request).outputs
                # Without kernels rounding depends on the rows, and near-ties may fall otherwise.
                if llm.loaded.model.is_packed:
                    assert drafted.token_ids == plain.token_ids
                    assert drafted.logprobs == plain.logprobs
                counts = drafted.draft_counts
                if tree is None:
                    assert counts.num_accepted_draft_tokens > 0.05 * counts.num_draft_tokens
                (chains if tree is None else trees)[method].merge(counts)
                drafter = engine.parts.drafter
                assert draft_bytes(drafter) == tensor_bytes(drafter.head) > 0
    for method in METHODS:
        assert trees[method].mean_acceptance_length > chains[method].mean_acceptance_length > 1.15
