"""Level C: is speculation lossless on this model, with these settings?

Equality where a rule promises it (`match`, and every rule at temperature 0), laws elsewhere.
"""

import math
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
from slipstream.core.speculative import SpeculativeConfig

MAX_TOKENS = 32
_SPARE = 1.5  # more answers than would be enough if all were compared to their ends


def prove_model(
    loaded: LoadedModel,
    params: SamplingParams,
    *,
    speculative: SpeculativeConfig | None = None,
    draft: LoadedModel | None = None,
    synthetic: bool = True,
    prompts: Seq[Seq[int]],
    samples: int | None = None,
    detect: float = 0.05,
    config: EngineConfig | None = None,
    quiet: bool = True,
) -> Report:
    """Prove or refute that speculation changes nothing.

    Args:
        params: how to sample; request i gets the seed `params.seed + i`.
        speculative: the rule and the number of drafted tokens; with `synthetic` off, the method and
            its settings too. The controller counts for nothing: every step drafts as much as it
            may, so that speculation is really tried. None takes the defaults.
        draft: the draft model, where the method needs one.
        synthetic: drafts are made up from known answers, right and wrong ones mixed; otherwise
            they are the method's own.
        prompts: token ids, used in turn.
        samples: seeded requests; None takes as many as `detect` needs.
        detect: the total variation that must have been seen for a pass to count. Of whole answers
            where equality is tested, of tokens where laws are.
        config: of the engines.
        quiet: no progress bars.

    Raises:
        RequestError: parameters that leave nothing to test.
        ConfigError: a method that cannot be wired to this model.
        ModelError: the model computes NaN.
    """
    speculative = speculative or SpeculativeConfig()
    _require(bool(prompts), "there are no prompts; give at least one")
    _require(0 < detect < 1, f"detect must be in (0, 1), not {detect}")
    _require(
        speculative.method != "off",
        "method off drafts nothing, so there is nothing to prove; leave it out to prove with "
        "synthetic drafts",
    )
    _require(not speculative.is_off, "spec_tokens must be at least 1, not 0")
    _require(samples is None or samples >= 1, f"samples must be at least 1, not {samples}")
    max_tokens = params.max_tokens or MAX_TOKENS
    _require(max_tokens >= 2, "max_tokens must be at least 2; a single token is never drafted")

    rule = speculative.rejection_sample_method
    by_equality = rule == "match" or params.temperature == 0
    enough = equality.samples_for(detect)
    if not by_equality:
        enough = distribution.samples_for(detect, max_tokens)
    # Where answers part at near-ties, some more than enough are enough.
    is_coarse = by_equality and loaded.model.dtype in (torch.bfloat16, torch.float16)
    num_samples = samples or math.ceil(enough * (_SPARE if is_coarse else 1))
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
    trial = Trial(loaded, speculative, config or EngineConfig(), draft, synthetic, quiet)
    by_method = "" if synthetic else f" by {speculative.method}"
    report = Report(
        f"{loaded.name}: speculation{by_method} under {rule}",
        settings=_settings(trial, params, max_tokens, len(prompts), num_samples),
        power=POWER,
    )
    judge = equality.prove_equality if by_equality else distribution.prove_distribution
    num_judged = judge(trial, cases, report)
    if report.untested is not None:
        # Whatever would have been seen, there was nothing to see; more samples would not help.
        report.detectable_tv = None
    elif num_judged < enough:
        report.samples_needed = math.ceil(enough * num_samples / max(num_judged, 1))
    elif not by_equality and not all(bug.caught for bug in report.planted):
        # Too weak a bias to be seen, under sampling that leaves little to chance.
        report.samples_needed = 4 * num_samples
    return report


def _settings(
    trial: Trial, params: SamplingParams, max_tokens: int, num_prompts: int, num_samples: int
) -> dict[str, object]:
    model = trial.loaded.model
    return {
        "model": trial.loaded.name,
        "dtype": model.kind,
        "device": str(model.device),
        "rule": trial.rule,
        "temperature": params.temperature,
        **_unusual(params, "temperature", "seed", "n", "max_tokens", "speculative"),
        "seed": params.seed or 0,
        "max tokens": max_tokens,
        "prompts": num_prompts,
        "samples": num_samples,
        **_drafting(trial),
        "near-tie limit": f"{LOGIT_SLACK[model.kind]:.2g} of the largest logit",
        "grade": model.grade,
        "slipstream": __version__,
        "torch": torch.__version__,
    }


def _drafting(trial: Trial) -> dict[str, object]:
    if trial.synthetic:
        return {"method": "synthetic drafts", "spec tokens": trial.draft_tokens}
    own, tree = trial.speculative, trial.speculative.tree
    said = {"method": own.method, "spec tokens": trial.draft_tokens}
    if own.model is not None:
        said["draft model"] = own.model
    if tree is not None:
        said["tree"] = f"depth {tree.depth}, topk {tree.topk}, max_tokens {tree.max_tokens}"
    return {
        **said,
        **_unusual(
            own,
            *("method", "num_speculative_tokens", "model", "tree", "rejection_sample_method"),
            *("controller", "num_speculative_tokens_per_batch_size"),
        ),
        "controller": f"fixed at {trial.draft_tokens} (not {own.controller}), so that speculation "
        "is really tried",
    }


def _unusual(settings: SamplingParams | SpeculativeConfig, *besides: str) -> dict[str, object]:
    """Fields that are not at their defaults."""
    default = type(settings)()
    return {
        name: getattr(settings, name)
        for name in settings.__dataclass_fields__
        if name not in besides and getattr(settings, name) != getattr(default, name)
    }


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RequestError(message)
