"""Level C: is speculation lossless on this model, with these settings?

Equality where a rule promises it (`match`, and every rule at temperature 0), laws elsewhere.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from slipstream import __version__
from slipstream.build import LoadedModel
from slipstream.check import distribution, equality
from slipstream.check.report import Report
from slipstream.check.trial import LOGIT_SLACK, POWER, Case, Trial
from slipstream.core.config import EngineConfig
from slipstream.core.errors import RequestError
from slipstream.core.params import SamplingParams
from slipstream.engine.verifier import make_verifier

MAX_TOKENS = 32


def prove_model(
    loaded: LoadedModel,
    params: SamplingParams,
    *,
    rule: str = "match",
    prompts: Seq[Seq[int]],
    samples: int | None = None,
    draft_tokens: int = 4,
    detect: float = 0.05,
    config: EngineConfig | None = None,
    quiet: bool = True,
) -> Report:
    """Prove or refute that speculation changes nothing.

    Args:
        params: how to sample; request i gets the seed `params.seed + i`.
        rule: match, ratio or block.
        prompts: token ids, used in turn.
        samples: seeded requests; None takes as many as `detect` needs.
        draft_tokens: drafted per sequence and step.
        detect: the total variation that must have been seen for a pass to count. Of whole answers
            where equality is tested, of tokens where laws are.
        config: of the engines.
        quiet: no progress bars.

    Raises:
        RequestError: parameters that leave nothing to test.
        ConfigError: an unknown rule.
        ModelError: the model computes NaN.
    """
    make_verifier(rule)
    _require(bool(prompts), "there are no prompts; give at least one")
    _require(0 < detect < 1, f"detect must be in (0, 1), not {detect}")
    _require(draft_tokens >= 1, f"spec_tokens must be at least 1, not {draft_tokens}")
    _require(samples is None or samples >= 1, f"samples must be at least 1, not {samples}")
    max_tokens = params.max_tokens or MAX_TOKENS
    _require(max_tokens >= 2, "max_tokens must be at least 2; a single token is never drafted")

    by_equality = rule == "match" or params.temperature == 0
    enough = equality.samples_for(detect)
    if not by_equality:
        enough = distribution.samples_for(detect, max_tokens)
    num_samples = samples or enough
    first_seed = params.seed or 0
    cases = [
        Case(
            list(prompts[i % len(prompts)]),
            replace(
                params,
                seed=(first_seed + i) % 2**64,
                n=1,
                max_tokens=max_tokens,
                speculative=True,
            ),
        )
        for i in range(num_samples)
    ]
    trial = Trial(loaded, rule, draft_tokens, config or EngineConfig(), quiet)
    report = Report(
        f"{loaded.name}: speculation under {rule}",
        settings=_settings(trial, params, max_tokens, len(prompts), num_samples),
        power=POWER,
    )
    if by_equality:
        equality.prove_equality(trial, cases, report)
    else:
        distribution.prove_distribution(trial, cases, report)
    if num_samples < enough:
        report.samples_needed = enough
    elif not by_equality and not all(bug.caught for bug in report.planted):
        # Too weak a bias to be seen, under sampling that leaves little to chance.
        report.samples_needed = 4 * num_samples
    return report


def _settings(
    trial: Trial, params: SamplingParams, max_tokens: int, num_prompts: int, num_samples: int
) -> dict[str, object]:
    model = trial.loaded.model
    default = SamplingParams()
    return {
        "model": trial.loaded.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "rule": trial.rule,
        "temperature": params.temperature,
        **{
            name: getattr(params, name)
            for name in SamplingParams.__dataclass_fields__
            if name not in ("temperature", "seed", "n", "max_tokens", "speculative")
            and getattr(params, name) != getattr(default, name)
        },
        "seed": params.seed or 0,
        "max tokens": max_tokens,
        "prompts": num_prompts,
        "samples": num_samples,
        "spec tokens": trial.draft_tokens,
        "near-tie limit": f"{LOGIT_SLACK[model.dtype]:.2g} of the largest logit",
        "slipstream": __version__,
        "torch": torch.__version__,
    }


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RequestError(message)
