"""Every rule is exact on every process: the law of what a step emits is the target's, to 1e-12.

The laws come from running the rule itself under every decision (`check.laws`), in float64, so
there is no sampling error. Processes depend on the context: a rule that looks at the wrong row is
often right for the first token and wrong for the joint law.
"""

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.check.laws import (
    Context,
    Law,
    Setting,
    Table,
    completed,
    distance,
    expected_emitted,
    output_law,
    target_law,
)
from slipstream.maths.trees import depths

# Zeros, ties, the ordinary and the nearly impossible.
WEIGHTS = [0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 0.1, 1e-9]

Process = tuple[Table, Table]


def pair(random: Random, vocab_size: int, min_support: int) -> tuple[list[float], list[float]]:
    """Weights of p and of q; q can draw `min_support` tokens without replacement."""

    def row(tokens: Sequence[int], least: int = 1) -> list[float]:
        weights = [random.choice(WEIGHTS) if t in tokens else 0.0 for t in range(vocab_size)]
        for token in random.sample(tokens, least):
            weights[token] = weights[token] or 1.0
        return weights

    tokens = range(vocab_size)
    kinds = ["any", "any", "any", "equal", "certain"] + ["disjoint"] * (min_support < vocab_size)
    kind = random.choice(kinds)
    if kind == "disjoint":
        cut = random.randrange(min_support, vocab_size)
        return row(tokens[cut:]), row(tokens[:cut], min_support)
    q = row(tokens, min_support)
    if kind == "equal":
        return q, q
    return row(random.sample(tokens, 1) if kind == "certain" else tokens), q


@st.composite
def processes(
    draw: st.DrawFn, parents: tuple[int, ...], vocab_sizes: Sequence[int] = (2, 3)
) -> Process:
    """Tables p and q in which three pairs of rows are spread over all contexts."""
    # Hypothesis prefers simple numbers, and simple rows are all one-hot: take real randomness.
    random = draw(st.randoms(use_true_random=True))
    vocab_size = draw(st.sampled_from(vocab_sizes))
    num_siblings = max(parents.count(parent) for parent in parents)
    drawn = [pair(random, vocab_size, num_siblings) for _ in range(3)]
    rows = [
        [weights / weights.sum() for weights in torch.tensor(both, dtype=torch.float64)]
        for both in drawn
    ]

    def which(context: Context) -> int:
        return sum(5**i * (token + 1) for i, token in enumerate(context)) % len(rows)

    return lambda context: rows[which(context)][0], lambda context: rows[which(context)][1]


def assert_exact(law: Law, p: Table, length: int) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert distance(completed(law, p, length), target_law(p, length)) < 1e-12


CHAINS = [(-1,), (-1, 0), (-1, 0, 1)]
TREES = [(-1, -1), (-1, -1, 0, 1), (-1, 0, 0)]  # one level of 2; 2 then 1 each; 1 then 2

SETTINGS = [
    *(Setting(rule, parents) for rule in ("match", "ratio", "block") for parents in CHAINS),
    *(Setting(rule, parents, certain=True) for rule in ("ratio", "block") for parents in CHAINS),
    *(Setting(rule, parents) for rule in ("match", "ratio") for parents in TREES),
    *(Setting(rule, parents, certain=True) for rule in ("match", "ratio") for parents in TREES),
    *(Setting("ratio", parents, replacement=True) for parents in TREES),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_a_step_emits_has_the_law_of_the_target(setting: Setting) -> None:
    is_cheap = setting.certain or len(setting.parents) <= 2

    @settings(max_examples=60 if is_cheap else 15)
    @given(processes(setting.parents))
    def check(process: Process) -> None:
        p, q = process
        assert_exact(output_law(setting, p, q), p, max(depths(setting.parents)) + 2)

    check()


@pytest.mark.parametrize(("parents", "num_examples"), [((-1, 0), 60), ((-1, 0, 1), 15)])
def test_block_never_emits_less_than_ratio(parents: tuple[int, ...], num_examples: int) -> None:
    @settings(max_examples=num_examples)
    @given(processes(parents))
    def check(process: Process) -> None:
        block, ratio = (output_law(Setting(rule, parents), *process) for rule in ("block", "ratio"))
        assert expected_emitted(block) >= expected_emitted(ratio) - 1e-12

    check()


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_two_steps_in_a_row_have_the_law_of_the_target(rule: str) -> None:
    """The second step starts from whatever the first one emitted, with no memory of its draft."""
    setting = Setting(rule, (-1, 0))

    def after(table: Table, string: Context) -> Table:
        return lambda context: table(string + context)

    @settings(max_examples=15)
    @given(processes(setting.parents, vocab_sizes=[2]))
    def check(process: Process) -> None:
        p, q = process
        law: Law = {}
        for first, chance in output_law(setting, p, q).items():
            for second, then in output_law(setting, after(p, first), after(q, first)).items():
                law[first + second] = law.get(first + second, 0.0) + chance * then
        assert_exact(law, p, 6)

    check()


@pytest.mark.parametrize("wrong", [lambda p, q: p, lambda p, q: (p - q).abs()])
def test_a_wrong_residual_is_seen(
    wrong: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.maths.acceptance.residual", wrong)
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
    law = output_law(Setting("ratio", (-1,)), lambda _: p, lambda _: q)
    assert distance(completed(law, lambda _: p, 2), target_law(lambda _: p, 2)) > 0.1
