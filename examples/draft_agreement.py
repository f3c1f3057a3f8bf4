"""How often a draft model's token is the target's, exactly, on text that the target sampled.

    python examples/draft_agreement.py --model M --draft D --workload FILE

No draft is drawn: at every position both laws are known, so the chances are computed.

    ratio      1 - TV(p, q), the best any rule for one draft can do
    same race  one token wins both races with the same noise: `maths.coupling`
    coupled    what drafters do, racing a slightly sharpened q: `drafters.sampling`
    greedy     the draft model's likeliest token, which `match` accepts with its p
"""

import argparse
import json
import sys

import torch
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.bench.circumstances import circumstances
from slipstream.bench.workloads import load_workload
from slipstream.check.trial import Case, Trial
from slipstream.core.config import EngineConfig
from slipstream.core.speculative import SpeculativeConfig
from slipstream.drafters.sampling import SHARPENING
from slipstream.maths.coupling import coupled_chance
from slipstream.maths.distributions import probabilities


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--workload", default="mixed", help="mixed, humaneval, or a JSONL file")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args(argv)

    target = LLM(args.model, speculative_config={"method": "off"}, quiet=True)
    draft = LLM(args.draft, speculative_config={"method": "off"}, quiet=True)
    texts = load_workload(args.workload, args.limit).prompts
    prompts = [target.chat_ids([{"role": "user", "content": text}]) for _, text in texts]
    params = [
        SamplingParams(temperature=args.temperature, seed=i, max_tokens=args.max_tokens)
        for i in range(len(prompts))
    ]
    answers = target.generate(prompts, params)
    chances: dict[str, list[Tensor]] = {"ratio": [], "same race": [], "coupled": [], "greedy": []}
    for prompt, each, answer in zip(prompts, params, answers, strict=True):
        output = answer.outputs[0].token_ids
        p, q = (_laws(llm, Case(prompt, each), output) for llm in (target, draft))
        size = min(p.shape[-1], q.shape[-1])
        p, q = p[:, :size], q[:, :size]
        chances["ratio"].append(torch.minimum(p, q).sum(-1).double())
        chances["same race"].append(coupled_chance(p, q))
        chances["coupled"].append(coupled_chance(p, torch.softmax(q.log() * SHARPENING, -1)))
        chances["greedy"].append(p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1).double())
    rows = {name: torch.cat(parts) for name, parts in chances.items()}
    loss = rows["ratio"] - rows["coupled"]
    num_positions = len(loss)
    means = {name: float(row.mean()) for name, row in rows.items()}
    error = float(loss.std()) / num_positions**0.5
    print(f"{num_positions} positions, temperature {args.temperature:g}")
    for name, mean in means.items():
        print(f"  {name:<10} {mean:.3f}")
    print(f"  coupled is {float(loss.mean()):.3f} below ratio (standard error {error:.3f})")
    facts = {"positions": num_positions, "chances": means, "loss": float(loss.mean())}
    print(json.dumps(facts | {"standard_error": error} | circumstances(sys.argv[1:])))
    return 0


def _laws(llm: LLM, case: Case, output: list[int]) -> Tensor:
    """What a model would draw each token of an output from: [R, V] float32."""
    trial = Trial(llm.loaded, SpeculativeConfig(method="off"), EngineConfig())
    logits, controls, _ = trial.specified(case, output)
    return probabilities(logits, controls)


if __name__ == "__main__":
    sys.exit(main())
