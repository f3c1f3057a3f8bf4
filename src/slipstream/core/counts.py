"""Counting what became of drafts, for one answer or for a whole engine."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.core.draft import Draft, Verdict
from slipstream.maths.trees import depths


@dataclass(slots=True)
class DraftCounts:
    """Drafts and their acceptance. Field names of `as_dict` are vLLM's where it has one.

    Attributes:
        num_steps: target passes that yielded tokens.
        num_tokens: tokens those passes committed.
        num_spec_steps: passes that judged a draft.
        num_draft_tokens, num_accepted_draft_tokens: nodes.
        num_predicted_tokens, num_accepted_predicted_tokens: those of them from the client's text.
        lengths: accepted tokens -> spec steps.
        sizes: drafted nodes -> passes, 0 included.
        reached: depth (from 1) -> spec steps whose draft went that deep.
        passed: depth -> spec steps that accepted that far.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_predicted_tokens: int = 0
    num_accepted_predicted_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)
    passed: Counter[int] = field(default_factory=Counter)

    def add(self, draft: Draft, verdict: Verdict, num_committed: int) -> None:
        """Count one pass that committed `num_committed` of the verdict's tokens."""
        accepted = min(len(verdict.path), num_committed)
        self.num_steps += 1
        self.num_tokens += num_committed
        self.sizes[len(draft)] += 1
        if not draft.token_ids:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += len(draft)
        self.num_accepted_draft_tokens += accepted
        if draft.is_predicted:
            self.num_predicted_tokens += len(draft)
            self.num_accepted_predicted_tokens += accepted
        self.lengths[accepted] += 1
        self.reached.update(range(1, max(depths(draft.parents)) + 2))
        self.passed.update(range(1, accepted + 1))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted."""
        if self.num_draft_tokens == 0:
            return None
        return self.num_accepted_draft_tokens / self.num_draft_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per target pass, the recovered or bonus token included."""
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """How often the draft was right up to each depth, of the drafts that went so deep."""
        return [self.passed[depth] / self.reached[depth] for depth in sorted(self.reached)]

    def as_dict(self) -> dict[str, Any]:
        counts = {key: value for key, value in asdict(self).items() if isinstance(value, int)}
        return counts | {
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
            "acceptance_histogram": _dense(self.lengths),
            "draft_size_histogram": _dense(self.sizes),
        }

    def merge(self, other: "DraftCounts") -> None:
        """Add another's counts to these."""
        for name in self.__dataclass_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(more)
            else:
                setattr(self, name, mine + more)


def _dense(counts: Counter[int]) -> list[int]:
    return [counts[i] for i in range(max(counts, default=-1) + 1)]
