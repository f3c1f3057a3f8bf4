"""What drafts are tried when laws are compared, and the law q that each would be drawn from.

The tests of `distribution` look at every emitted token beside a q that is fixed before the token
is: by the tokens that lead to it and nothing else. Any such q makes a valid test. The law that
drafts really come from makes a sharp one, since what a wrong rule does depends on p / q.
"""

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from slipstream.check.trial import Case, Trial, request_id
from slipstream.core.draft import Draft
from slipstream.core.outputs import CompletionOutput
from slipstream.core.sequence import Sequence
from slipstream.drafters.base import Drafter
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.maths.noise import Key

HIT_RATE = 0.5
_NUM_SOURCES = 128
_NUM_ASKED = 8  # answers whose laws are held together, [tokens, V] each


class Drafts(Protocol):
    """A way to draft that is on trial."""

    def drafter(self) -> Drafter:
        """What drafts in one run."""

    def laws(self, answers: Seq[CompletionOutput]) -> Iterator[Tensor]:
        """q of every token of the answers to all cases, in their order: [n, V] each.

        A row is 0 where nothing would be drafted.
        """


class SyntheticDrafts:
    """Samples from known answers to the same prompts under other seeds.

    Other seeds, because plain answers are to be judged by the same q.

    Args:
        cases: what will be answered.
        others: the same prompts under other seeds, and perhaps fewer of them.
    """

    def __init__(self, trial: Trial, cases: Seq[Case], others: Seq[Case]):
        others = others[:_NUM_SOURCES]
        sources: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for other, answer in zip(others, trial.run("Answers to draft from", others), strict=True):
            sources[tuple(other.prompt)].append(answer.token_ids)
        known = {}
        for i, case in enumerate(cases):
            mine = sources.get(tuple(case.prompt))
            if mine:
                known[request_id(i)] = {0: mine[i % len(mine)]}
        self._drafter = SyntheticDrafter(known, trial.vocab_size, HIT_RATE, sampled=True)

    def drafter(self) -> Drafter:
        return self._drafter

    def laws(self, answers: Seq[CompletionOutput]) -> Iterator[Tensor]:
        for i, answer in enumerate(answers):
            output = answer.token_ids
            rows = [self._drafter.law(request_id(i), 0, output[:n]) for n in range(len(output))]
            yield torch.stack(rows)


class OwnDrafts:
    """The method's own drafts.

    Its laws are what a new drafter says when asked for one token, before every token of an answer:
    the q it drew from, or certainty of what it would look up.
    """

    def __init__(self, trial: Trial, cases: Seq[Case]):
        self._trial = trial
        self._cases = cases
        self._asked = trial.drafter()  # it may refuse, so before all the work

    def drafter(self) -> Drafter:
        return self._trial.drafter()

    @torch.inference_mode()
    def laws(self, answers: Seq[CompletionOutput]) -> Iterator[Tensor]:
        for first in range(0, len(answers), _NUM_ASKED):
            some = range(first, min(first + _NUM_ASKED, len(answers)))
            yield from self._laws(some, [answers[i].token_ids for i in some])

    def _laws(self, cases: Seq[int], outputs: Seq[list[int]]) -> list[Tensor]:
        seqs = [self._unanswered(i) for i in cases]
        laws = [torch.zeros(len(output), self._trial.vocab_size) for output in outputs]
        for n in range(max(map(len, outputs))):
            ongoing = [b for b, output in enumerate(outputs) if n < len(output)]
            drafts = self._asked.propose([seqs[b] for b in ongoing], [1] * len(ongoing))
            for b, draft in zip(ongoing, drafts, strict=True):
                _write_law(draft, laws[b][n])
                seqs[b].tokens.append(outputs[b][n])
        for seq in seqs:
            self._asked.forget(seq.seq_id)
        return laws

    def _unanswered(self, case: int) -> Sequence:
        prompt, params = self._cases[case].prompt, self._cases[case].params
        return Sequence(
            seq_id=case,
            request_id=request_id(case),
            index=0,
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=params,
            # One more than there will be: nobody drafts a token that ends an answer anyway.
            max_tokens=(params.max_tokens or 0) + 1,
            stop_ids=self._trial.stop_ids(params),
            key=Key(params.seed or 0),
        )


def _write_law(draft: Draft, row: Tensor) -> None:
    """The law of a draft's first token, into a row of zeros [V]."""
    if draft.probs is not None:
        row.copy_(draft.probs[0])
    elif draft.token_ids:
        row[draft.token_ids[0]] = 1.0
