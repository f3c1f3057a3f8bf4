"""How to speculate: vLLM's `speculative_config`, checked key by key."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slipstream.core.errors import ConfigError

HEAD_METHODS = ("medusa", "eagle", "eagle3", "mtp")
METHODS = ("auto", "off", "draft_model", "ngram", "suffix", "combined", *HEAD_METHODS)
RULES = ("match", "ratio", "block")
CONTROLLERS = ("auto", "fixed", "table")

# Drafted tokens by batch size, where a table is asked for and none is given: (first, last, K).
CLASSIC_TABLE = ((1, 8, 5), (9, 32, 2), (33, None, 0))


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """The shape of drafted trees.

    Attributes:
        depth: levels.
        topk: children of a node.
        max_tokens: nodes.
    """

    depth: int = 4
    topk: int = 4
    max_tokens: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Keys and meanings of vLLM's dictionary of the same name, and a few of our own.

    Attributes:
        method: "draft_model", "ngram", "suffix", "combined", or the kind of a draft head: "medusa",
            "eagle", "eagle3", "mtp"; "auto" takes what model and machine allow, "off" is plain
            decoding.
        model: the draft model, for draft_model and combined; the head, for the kinds of heads.
            Without one, the head is that which comes with slipstream, or an mtp of the target's own
            checkpoint.
        head: for combined, the kind of a draft head that takes the draft model's place; `model`
            then names it.
        num_speculative_tokens: most drafted tokens per sequence and step. 0 is off; None leaves
            it to the method.
        controller: "auto" chooses every step from measured cost and live acceptance; "fixed"
            always drafts num_speculative_tokens; "table" goes by batch size.
        num_speculative_tokens_per_batch_size: for "table": rows of first batch size, last batch
            size (None for no end), drafted tokens.
        rejection_sample_method: "match", "ratio" or "block".
        prompt_lookup_min, prompt_lookup_max: lengths of the n-grams looked up.
        suffix_decoding_max_tree_depth: longest context matched.
        suffix_decoding_max_cached_requests: past outputs kept for later requests of the same salt;
            0 keeps every request to itself.
        suffix_decoding_max_spec_factor: drafted tokens per matched token.
        suffix_decoding_min_token_prob: least estimated probability of a drafted token.
        tree: draft trees of this shape instead of chains.
    """

    method: str = "auto"
    model: str | None = None
    head: str | None = None
    num_speculative_tokens: int | None = None
    controller: str = "auto"
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int | None, int], ...] = CLASSIC_TABLE
    rejection_sample_method: str = "match"
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    tree: TreeConfig | None = None

    def __post_init__(self) -> None:
        _choice("method", self.method, METHODS)
        _choice("controller", self.controller, CONTROLLERS)
        _choice("rejection_sample_method", self.rejection_sample_method, RULES)
        tokens = self.num_speculative_tokens
        _require(tokens is None or tokens >= 0, "num_speculative_tokens", tokens, "0 or more")
        _require(self.prompt_lookup_min >= 1, "prompt_lookup_min", self.prompt_lookup_min, ">= 1")
        _require(
            self.prompt_lookup_max >= self.prompt_lookup_min,
            "prompt_lookup_max",
            self.prompt_lookup_max,
            f"at least prompt_lookup_min ({self.prompt_lookup_min})",
        )
        if self.head is not None:
            _choice("head", self.head, HEAD_METHODS)
        if self.method == "draft_model" and self.model is None:
            raise ConfigError("method draft_model needs model, the draft model's name")
        if self.rejection_sample_method == "block" and self.tree is not None:
            raise ConfigError("rejection_sample_method block needs chains; drop tree or use match")

    @property
    def is_off(self) -> bool:
        return self.method == "off" or self.num_speculative_tokens == 0

    @property
    def head_kind(self) -> str | None:
        """The kind of the head on the target that drafts, which `model` then names."""
        if self.method == "combined":
            return self.head
        return self.method if self.method in HEAD_METHODS else None

    @property
    def draft_model(self) -> str | None:
        """The name of the model that drafts, if one does."""
        may = self.method in ("auto", "draft_model", "combined") and self.head_kind is None
        return self.model if may and not self.is_off else None

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """Check a dictionary as users write it.

        Raises:
            ConfigError: an unknown key, with the nearest known one, or a value that cannot be.
        """
        given = dict(given)
        _known_keys(given, [f.name for f in fields(cls)], "speculative_config")
        if isinstance(tree := given.get("tree"), Mapping):
            _known_keys(tree, [f.name for f in fields(TreeConfig)], "tree")
            given["tree"] = TreeConfig(**tree)
        table = given.get("num_speculative_tokens_per_batch_size")
        if table is not None:
            given["num_speculative_tokens_per_batch_size"] = _table(table)
            given.setdefault("controller", "table")
        try:
            return cls(**given)
        except TypeError as error:
            raise ConfigError(f"speculative_config has a wrong type: {error}") from None


def _table(rows: Any) -> tuple[tuple[int, int | None, int], ...]:
    try:
        return tuple(
            (int(first), None if last is None else int(last), int(tokens))
            for first, last, tokens in rows
        )
    except (TypeError, ValueError):
        raise ConfigError(
            "num_speculative_tokens_per_batch_size must be rows of [first batch size, last, "
            f"tokens], not {rows!r}"
        ) from None


def _known_keys(given: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key {key!r} in {where}; the nearest known one is {near!r}")


def _choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {rule}, not {value!r}")
