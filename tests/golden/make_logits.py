"""Makes logits.json: what transformers computes from the same GGUF files, in float32.

The tokens are a formula, so only numbers are kept: at some positions the most likely ids, their
logits, and the logarithm of the sum of all exponentials, which turns logits into log-probabilities.
Beside them stands how far our reference was from transformers over all positions when the file was
made.

    pip install accelerate
    python tests/golden/make_logits.py
"""

import gc
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream import reference
from slipstream.loading.gguf import GGUFFile
from slipstream.loading.pull import cached
from slipstream.loading.weights import load_model

# Gemma's windows are 512 long, so it takes more tokens to see that they are there.
NUM_TOKENS = {"smollm2-135m": 200, "qwen2.5-coder-0.5b": 200, "gemma3-270m": 600}
NUM_POSITIONS = 20
NUM_TOP = 5


def main() -> None:
    golden = {alias: measure(alias, num_tokens) for alias, num_tokens in NUM_TOKENS.items()}
    lines = [f"{json.dumps(alias)}: {json.dumps(entry)}" for alias, entry in golden.items()]
    content = "{\n" + ",\n".join(lines) + "\n}\n"
    Path(__file__).with_name("logits.json").write_text(content)


def measure(alias: str, num_tokens: int) -> dict[str, Any]:
    path = cached(alias)
    if path is None:
        raise SystemExit(f"{alias} is not in the cache; run: slipstream pull {alias}")
    file = GGUFFile(path)
    tokens = make_tokens(num_tokens, file.config.vocab_size)
    expected = transformers_logits(path, tokens)
    gc.collect()
    ours = reference.logits(load_model(file.config, file.tensors, dtype=torch.float32), tokens)
    positions = [(i + 1) * num_tokens // NUM_POSITIONS - 1 for i in range(NUM_POSITIONS)]
    top = expected[positions].topk(NUM_TOP, dim=-1)
    difference = (ours - expected).abs().max().item()
    print(f"{alias}: largest difference {difference:.1e}")
    return {
        "num_tokens": num_tokens,
        "positions": positions,
        "top_ids": top.indices.tolist(),
        "top_logits": [[round(value, 4) for value in row] for row in top.values.tolist()],
        "log_sums": [round(value, 4) for value in expected[positions].logsumexp(-1).tolist()],
        "largest_difference_when_made": float(f"{difference:.1e}"),
    }


def make_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    """All over the vocabulary, the same ones again every 50, so that there is context to use."""
    return [(7919 * (i % 50) ** 2 + 101 * (i % 50) + 13) % vocab_size for i in range(num_tokens)]


def transformers_logits(path: Path, tokens: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


if __name__ == "__main__":
    main()
