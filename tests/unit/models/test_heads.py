"""Each head's forward pass against its definition, spelled out from the tensors of a checkpoint."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import heads
from slipstream.check.tiny import tiny_model
from slipstream.loading.weights import parameter_slots
from slipstream.models.heads import tensor_bytes

IDS = torch.tensor([3, 9, 9, 30, 1, 17])
POSITIONS = torch.arange(len(IDS))


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def features() -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(len(IDS), 16, generator=generator, dtype=torch.float64)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, ... of [T, H, 8], pairs (i, i + 4) as complex numbers."""
    angles = torch.arange(len(x)).double().view(-1, 1, 1) * 10000.0 ** (-torch.arange(4) / 4)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def attention(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal attention of 4 query heads over 2 key heads, query by query."""
    q, k, v = ((x @ w[f"self_attn.{part}_proj.weight"].T).view(len(x), -1, 8) for part in "qkv")
    q, k = turned(q), turned(k)
    out = torch.zeros_like(q)
    for i in range(len(x)):
        for h in range(4):
            weights = torch.softmax(k[: i + 1, h // 2] @ q[i, h] * 8**-0.5, dim=0)
            out[i, h] = weights @ v[: i + 1, h // 2]
    return out.flatten(1) @ w["self_attn.o_proj.weight"].T


def mlp(w: dict[str, Tensor], x: Tensor) -> Tensor:
    gate, up = (x @ w[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def under(w: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in w.items() if name.startswith(prefix)}


@pytest.mark.parametrize("bias", [True, False])
def test_eagle(target, features, bias):
    head = heads.eagle(target, bias=bias)
    w = dict(parameter_slots(head))
    layer = under(w, "layers.0.")
    x = torch.cat([w["embed_tokens.weight"][IDS], features], -1) @ w["fc.weight"].T
    x = x + w["fc.bias"] if bias else x
    x = x + attention(layer, x)
    x = x + mlp(layer, norm(x, layer["post_attention_layernorm.weight"]))
    after = head(IDS, features, POSITIONS, heads.dense)
    torch.testing.assert_close(after, x, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(head.logits(after), after @ target.model.embed_tokens.weight.T)


@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_eagle3(target, norm_before_residual):
    head = heads.eagle3(target, norm_before_residual=norm_before_residual)
    w = dict(parameter_slots(head))
    layer = under(w, "midlayer.")
    seen = heads.target_pass(target, [5, *IDS[:-1].tolist()], (0, 1, 2))
    g = torch.cat([seen.taps[0], seen.taps[1], seen.taps[2]], -1) @ w["fc.weight"].T
    torch.testing.assert_close(head.fuse(head.read(seen)), g)

    e = norm(target.model.embed_tokens.weight[IDS], layer["input_layernorm.weight"])
    n = norm(g, layer["hidden_norm.weight"])
    x = (n if norm_before_residual else g) + attention(layer, torch.cat([e, n], -1))
    x = x + mlp(layer, norm(x, layer["post_attention_layernorm.weight"]))
    after = head(IDS, g, POSITIONS, heads.dense)
    torch.testing.assert_close(after, x, atol=1e-6, rtol=1e-6)

    logits = head.logits(after)
    reduced = norm(after, w["norm.weight"]) @ w["lm_head.weight"].T
    torch.testing.assert_close(logits, reduced)
    assert torch.equal(head.target_ids, heads.TARGET_IDS)


def test_mtp(target, features):
    head = heads.mtp(target)
    w = dict(parameter_slots(head))
    layer = under(w, "layer.")
    e = norm(w["embed_tokens.weight"][IDS], w["enorm.weight"])
    h = norm(features, w["hnorm.weight"])
    x = torch.cat([e, h], -1) @ w["eh_proj.weight"].T
    x = x + attention(layer, norm(x, layer["input_layernorm.weight"]))
    x = x + mlp(layer, norm(x, layer["post_attention_layernorm.weight"]))
    after = head(IDS, features, POSITIONS, heads.dense)
    torch.testing.assert_close(after, x, atol=1e-6, rtol=1e-6)
    read_out = norm(after, w["shared_head.norm.weight"]) @ target.model.embed_tokens.weight.T
    torch.testing.assert_close(head.logits(after), read_out)


@pytest.mark.parametrize("is_tied", [True, False])
def test_medusa(target, features, is_tied):
    head = heads.medusa(target, is_tied=is_tied)
    w = dict(parameter_slots(head.heads))
    for k in range(3):
        z = features
        for j in range(2):
            z = z + F.silu(z @ w[f"{k}.{j}.linear.weight"].T + w[f"{k}.{j}.linear.bias"])
        last = target.model.embed_tokens.weight if is_tied else w[f"{k}.2.weight"]
        torch.testing.assert_close(head.logits(features, k + 1)[k], z @ last.T)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "medusa"])
def test_memory_is_the_sum_of_its_own_tensors(target, kind):
    head = getattr(heads, kind)(target)
    own = {name: slot.nbytes for name, slot in parameter_slots(head)}
    maps = 8 * len(heads.TARGET_IDS) if kind == "eagle3" else 0
    assert tensor_bytes(head) == sum(own.values()) + maps
    borrowed = {"eagle": "lm_head", "eagle3": "embed_tokens", "mtp": "shared_head.head"}
    assert not any(name.startswith(borrowed.get(kind, "?")) for name in own)
