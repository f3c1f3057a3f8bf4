"""Many clients at once, on a tiny model in float64, where answers must be equal to the bit.

SLIPSTREAM_STRESS_SEC makes it longer; the bench of the same load is `slipstream.bench.serve_load`.
"""

import asyncio
import os
from pathlib import Path

from serving import serving
from slipstream import LLM
from slipstream.bench.serve_load import load

SECONDS = float(os.environ.get("SLIPSTREAM_STRESS_SEC", "8"))


def test_answers_under_load_are_what_they_are_alone(tiny_gguf: Path) -> None:
    # So few blocks that sequences are preempted all the time.
    llm = LLM(
        str(tiny_gguf),
        dtype="float64",
        device="cpu",
        quiet=True,
        max_num_seqs=24,
        kv_cache_memory=2**19,
        speculative_config={"method": "suffix", "num_speculative_tokens": 4, "controller": "fixed"},
    )
    with serving(llm) as url:
        tally = asyncio.run(
            load(f"{url}/v1", "tiny", streams=64, seconds=SECONDS, max_tokens=32, cases=18)
        )
    assert tally.examples == {}
    assert tally.counts["answered"] > 64
    assert tally.counts["hung up"] > 5
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.drafts.num_accepted_draft_tokens > 0
