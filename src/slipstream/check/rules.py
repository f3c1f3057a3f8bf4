"""Level A: the rules alone, exactly and with the engine's own noise.

Every function returns a `Check` and takes no weights. The processes are Markov: the next token
depends on the last one, which is enough to tell a row of the right position from its neighbour's.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slipstream.check.laws import (
    Context,
    Setting,
    Table,
    completed,
    distance,
    expected_emitted,
    output_law,
    target_law,
)
from slipstream.check.report import Check
from slipstream.core.controls import Row, controls
from slipstream.core.params import SamplingParams
from slipstream.maths import acceptance
from slipstream.maths.acceptance import DraftBatch
from slipstream.maths.distributions import finishers, probabilities
from slipstream.maths.noise import Address, Key, StepNoise, Stream
from slipstream.maths.stats import detectable_tv, g_test

CHAIN, PAIR, FORK_LATE, FORK_EARLY = (-1, 0), (-1, -1), (-1, 0, 0), (-1, -1, 0, 1)
FALSE_ALARM = 1e-6

SETTINGS = (
    Setting("match", CHAIN),
    Setting("match", FORK_EARLY, certain=True),
    Setting("ratio", CHAIN),
    Setting("ratio", CHAIN, certain=True),
    Setting("ratio", PAIR),
    Setting("ratio", PAIR, replacement=True),
    Setting("ratio", FORK_LATE),
    Setting("ratio", FORK_EARLY, certain=True),
    Setting("block", CHAIN),
)

# Rows of weights: what follows token 0, 1, 2, ..; the last row is the start. Plain, with zeros and
# ties, and with nothing in common.
_TABLES = {
    "plain": (
        ((1, 6, 3), (1, 1, 1), (5, 4, 1), (5, 3, 2)),
        ((2, 1, 1), (1, 1, 4), (1, 3, 6), (2, 3, 5)),
    ),
    "zeros and ties": (
        ((0, 1, 1), (1, 0, 0), (2, 2, 1), (1, 1, 0)),
        ((1, 1, 0), (0, 1, 1), (2, 2, 1), (1, 0, 1)),
    ),
    "disjoint": (
        ((1, 2, 0, 0), (3, 1, 0, 0), (1, 1, 0, 0), (1, 3, 0, 0), (2, 1, 0, 0)),
        ((0, 0, 1, 1), (0, 0, 2, 1), (0, 0, 1, 3), (0, 0, 1, 1), (0, 0, 1, 2)),
    ),
}


def exact_laws(tables: tuple[str, ...] = tuple(_TABLES)) -> Check:
    """Every rule, every shape: the law of what a step emits is the target's, to 1e-12."""
    worst, where = 0.0, ""
    for name in tables:
        p, q = (_table(weights) for weights in _TABLES[name])
        for setting in SETTINGS:
            length = 3 if setting.parents != PAIR else 2
            law = completed(output_law(setting, p, q), p, length)
            far = distance(law, target_law(p, length))
            if not far <= worst:  # NaN counts as worst
                worst, where = far, f"{setting.rule} on {list(setting.parents)}, {name} table"
    detail = f"largest total variation {worst:.1e}" + (f" ({where})" if worst > 1e-12 else "")
    return Check("exact laws of all rules equal the target's", worst <= 1e-12, detail)


def block_is_longest() -> Check:
    """Block verification emits at least as many tokens as the ratio rule: 2.17 against 2.12."""
    p, q = (_table(weights) for weights in _TABLES["plain"])
    by_ratio = expected_emitted(output_law(Setting("ratio", CHAIN), p, q))
    by_block = expected_emitted(output_law(Setting("block", CHAIN), p, q))
    return Check(
        "block emits no fewer tokens than ratio",
        by_block >= by_ratio,
        f"{by_block:.4f} against {by_ratio:.4f} tokens per step",
    )


def composed_step(rule: str, num_samples: int = 20_000) -> Check:
    """Steps with the engine's own noise, one after another: the joint law of three tokens."""
    p, q = (_rows(weights) for weights in _TABLES["plain"])
    strings = _emit(rule, p, q, num_samples, length=3)
    counts = torch.bincount(strings @ torch.tensor([9, 3, 1]), minlength=27)
    start = p[-1]
    joint = torch.einsum("a,ab,bc->abc", start, p[:3], p[:3]).flatten()
    outcome = g_test(counts, joint)
    detectable = detectable_tv(num_samples, 27, FALSE_ALARM, 0.99)
    return Check(
        f"{rule} with addressed noise has the target's joint law",
        outcome.p_value >= FALSE_ALARM,
        f"{num_samples} samples of 3 tokens, p-value {outcome.p_value:.2g}, "
        f"alarm at {FALSE_ALARM:.0e}, would show a total variation of {detectable:.3f}",
    )


def distributions_against_oracle() -> Check:
    """Temperature, truncation, penalties against float64 arithmetic spelled out per token."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.25, -1.0, -3.0, 4.0, 3.99])
    worst = 0.0
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.05),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.2),
        SamplingParams(
            temperature=0.9,
            top_k=6,
            top_p=0.95,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={4: 2.0},
        ),
    ):
        row = Row(params, tokens=[6, 6, 1, 2, 1], num_prompt=2)
        got = probabilities(logits.unsqueeze(0), controls([row]))[0]
        worst = max(worst, float((got.double() - _oracle(logits, row)).abs().max()))
    return Check(
        "p equals float64 arithmetic spelled out",
        worst < 1e-6,
        f"largest difference {worst:.1e}",
    )


def _oracle(logits: Tensor, row: Row) -> Tensor:
    """p of one row, the slow way, sharing no code with `maths.distributions`."""
    params, output = row.params, list(row.tokens[row.num_prompt :])
    value = [float(x) + params.logit_bias.get(token, 0.0) for token, x in enumerate(logits)]
    for token in set(row.tokens):
        factor = params.repetition_penalty
        value[token] = value[token] / factor if value[token] > 0 else value[token] * factor
    for token in set(output):
        value[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    p = torch.softmax(torch.tensor(value, dtype=torch.float64) / params.temperature, dim=0)
    p[p < params.min_p * p.max()] = 0.0
    order = p.argsort(descending=True, stable=True).tolist()
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p = p / p.sum()
    mass = 0.0
    for token in order:
        if mass >= params.top_p:
            p[token] = 0.0
        mass += float(p[token])
    return p / p.sum()


def _emit(rule: str, p: Tensor, q: Tensor, num_samples: int, length: int) -> Tensor:
    """Run steps until every sequence has `length` tokens, drafting two at a time: [B, length]."""
    keys = [Key(seed) for seed in range(num_samples)]
    tokens = torch.full((num_samples, length + 2), -1)
    counts = torch.zeros(num_samples, dtype=torch.int64)
    while len(alive := (counts < length).nonzero().flatten()) > 0:
        who = alive.tolist()
        # Position 1 is the first token: the start symbol stands at 0.
        noise = StepNoise([keys[b] for b in who], [1 + int(counts[b]) for b in who])
        last = torch.where(
            counts[alive] > 0, tokens[alive, (counts[alive] - 1).clamp(min=0)], p.shape[0] - 1
        )
        everyone = torch.arange(len(who))
        shared = [
            [Address(keys[b], Stream.TARGET, 1 + int(counts[b]) + d) for b in who] for d in range(3)
        ]
        drafted, laws, before = [], [], last
        for depth in range(2):
            law = q[before]
            if rule == "match":
                addresses = shared[depth]
            else:
                addresses = noise.drafts(everyone, torch.full_like(everyone, depth))
            before = finishers(law.log().float(), addresses, 1).squeeze(1)
            drafted.append(before)
            laws.append(law)
        drafts = DraftBatch(
            torch.stack(drafted, 1),
            torch.tensor(CHAIN).expand(len(who), -1),
            None if rule == "match" else torch.stack(laws, 1),
        )
        context = torch.cat((last.unsqueeze(1), drafts.tokens), 1)  # [A, 3]: node + 1

        def target(seqs: Tensor, nodes: Tensor, context: Tensor = context) -> Tensor:
            return p[context[seqs, nodes + 1]]

        def draw(
            seqs: Tensor,
            nodes: Tensor,
            context: Tensor = context,
            shared: list[list[Address]] = shared,
        ) -> Tensor:
            where = zip(seqs.tolist(), nodes.tolist(), strict=True)
            addresses = [shared[node + 1][b] for b, node in where]
            return finishers(target(seqs, nodes, context).log().float(), addresses, 1).squeeze(1)

        if rule == "match":
            verdicts = acceptance.match(drafts, draw)
        else:
            verdicts = getattr(acceptance, rule)(drafts, target, noise)
        for depth in range(3):
            accepted = verdicts.accepted.sum(1)
            drafted_here = drafts.tokens[:, depth] if depth < 2 else verdicts.next_tokens
            token = torch.where(depth < accepted, drafted_here, verdicts.next_tokens)
            rows = alive[depth <= accepted]
            place = (counts[rows] + depth).clamp(max=length + 1)
            tokens[rows, place] = token[depth <= accepted]
        counts[alive] += verdicts.accepted.sum(1) + 1
    return tokens[:, :length]


def _rows(weights: tuple[tuple[int, ...], ...]) -> Tensor:
    rows = torch.tensor(weights, dtype=torch.float64)
    return rows / rows.sum(-1, keepdim=True)


def _table(weights: tuple[tuple[int, ...], ...]) -> Table:
    rows = _rows(weights)

    def after(context: Context) -> Tensor:
        return rows[context[-1] if context else len(rows) - 1]

    return after


CHECKS: tuple[Callable[[], Check], ...] = (
    exact_laws,
    block_is_longest,
    distributions_against_oracle,
    partial(composed_step, "match"),
    partial(composed_step, "ratio"),
    partial(composed_step, "block"),
)
