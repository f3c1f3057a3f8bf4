"""A new head passes on what it gets: it says of the next token what the target says of this one."""

import pytest
import torch

import heads
from packing import packed_model
from slipstream import native
from slipstream.check.tiny import tiny_model
from slipstream.core.errors import ConfigError
from slipstream.train.start import eagle3_taps, new_head, root_mean_square

IDS = torch.arange(32)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_features_pass_through(method, model_type):
    target = tiny_model(model_type)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    states = heads.target_pass(target, tokens)
    size = root_mean_square([states.hidden])
    head = new_head(method, target, IDS, num_heads=1, typical_size=size).double()
    found = heads.head_logits(head, target, tokens, [])[0]
    expected = states.logits[-2]
    together = torch.stack([found, expected])
    assert torch.corrcoef(together)[0, 1] > 0.8
    assert 0.5 < found.norm() / expected.norm() < 2


def test_medusas_heads_repeat_the_target():
    target = tiny_model()
    states = heads.target_pass(target, [3, 1, 4]).hidden
    head = new_head("medusa", target, IDS, num_heads=3, typical_size=1.0).double()
    expected = target.logits(states).expand(3, -1, -1)
    torch.testing.assert_close(head.logits(states, 3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mtp"])
def test_only_the_heads_own_weights_are_trained(method):
    target = tiny_model(dtype=torch.float32)
    head = new_head(method, target, IDS[:20], num_heads=2, typical_size=1.0)
    fixed = [name for name, each in head.named_parameters() if not each.requires_grad]
    assert fixed == ["lm_head.weight"]
    assert all(each.dtype == torch.float32 for each in head.parameters())


@pytest.mark.skipif(not native.is_available(), reason="no native kernels here")
def test_weights_of_a_packed_target_are_unpacked():
    target = packed_model("llama")
    head = new_head("mtp", target, IDS, num_heads=1, typical_size=1.0)
    last = target.model.layers[-1].mlp
    torch.testing.assert_close(
        head.layer.mlp.gate_up_proj.weight.data, last.gate_up_proj.weight.values()
    )


def test_taps_are_early_middle_and_late():
    assert eagle3_taps(30) == (2, 15, 29)
    assert eagle3_taps(3) == (0, 1, 2)


def test_targets_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="gemma3"):
        new_head("eagle", tiny_model("gemma3"), IDS, num_heads=1, typical_size=1.0)
