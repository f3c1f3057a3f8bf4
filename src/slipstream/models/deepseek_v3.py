"""DeepSeek-V3: attention over a latent that stands for keys and values, and experts.

Attention is written in its absorbed form. With c the latent of a token, a head's key is [up_k c;
rotary key] and its value up_v c; so queries are taken to the latent instead, up_k^T q, and what
they gather there is brought back by up_v. What is kept of a token is [c; rotary key], the same for
all heads, and once, as keys and values are both read from it.

Source: arXiv 2412.19437, sections 2.1.1 and 2.1.2.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from slipstream import kernels
from slipstream.core.config import ExpertsConfig, ModelConfig
from slipstream.kernels import Angles
from slipstream.models.layers import (
    MLP,
    Attend,
    Backbone,
    CausalLM,
    RMSNorm,
    projection,
    unfilled,
)

# Of the norms of latents, whatever the config says of others.
_LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention, absorbed."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        assert config.latent is not None, "deepseek_v3 attends to a latent"
        self.layer = layer
        self.shape = shape = config.latent
        self.num_heads = config.num_heads
        self.scale = config.attention_scale
        size, bias = config.hidden_size, config.output_bias
        query_size = config.num_heads * (shape.content_dim + shape.rotary_dim)
        if shape.query_rank is None:
            self.q_proj = projection(size, query_size)
        else:
            self.q_a_proj = projection(size, shape.query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(shape.query_rank, _LATENT_NORM_EPS)
            self.q_b_proj = projection(shape.query_rank, query_size)
        self.kv_a_proj_with_mqa = projection(size, shape.rank + shape.rotary_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(shape.rank, _LATENT_NORM_EPS)
        up_size = config.num_heads * (shape.content_dim + shape.value_dim)
        self.kv_b_proj = projection(shape.rank, up_size)
        self.o_proj = projection(config.num_heads * shape.value_dim, size, bias=bias)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        shape = self.shape
        q = self._queries(x).view(x.shape[0], self.num_heads, -1)
        content, turning = q.split([shape.content_dim, shape.rotary_dim], dim=-1)
        latent, rotary_key = self.kv_a_proj_with_mqa(x).split([shape.rank, shape.rotary_dim], -1)
        key = [
            self.kv_a_layernorm(latent).unsqueeze(1),
            self._turn(rotary_key.unsqueeze(1), angles),
        ]
        kept = torch.cat(key, dim=-1)  # [T, 1, rank + rotary]

        up = self.kv_b_proj.weight.view(self.num_heads, -1, shape.rank)
        up_k, up_v = up.split([shape.content_dim, shape.value_dim], dim=1)
        in_latent = torch.einsum("thc,hcr->thr", content, up_k)
        q = torch.cat([in_latent, self._turn(turning, angles)], dim=-1)
        out = attend(self.layer, q, kept, kept, scale=self.scale, window=None)
        values = torch.einsum("thr,hvr->thv", out[..., : shape.rank], up_v)
        return self.o_proj(values.flatten(1))

    def _queries(self, x: Tensor) -> Tensor:
        if self.shape.query_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _turn(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotate [T, H, D]; neighbours that are pairs are first put half a head apart."""
        if self.shape.is_interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return kernels.rotate(x, angles)


class Router(nn.Module):
    """Which experts a token takes, and with what weights; in float32 whatever the model is in.

    A correction steers the choice, so that experts are used evenly, but not the weights.
    """

    def __init__(self, hidden_size: int, experts: ExpertsConfig):
        super().__init__()
        self.experts = experts
        self.weight = unfilled(experts.num_experts, hidden_size)
        self.e_score_correction_bias = unfilled(experts.num_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> the chosen experts [T, num_chosen] int64, and their weights."""
        experts = self.experts
        scores = kernels.linear(x.to(self.weight.dtype), self.weight).sigmoid()
        wish = scores + self.e_score_correction_bias
        groups = wish.unflatten(-1, (experts.num_groups, -1))
        value = groups.topk(2, dim=-1).values.sum(-1)
        best = value.topk(experts.num_chosen_groups, dim=-1).indices
        is_open = torch.zeros_like(value, dtype=torch.bool).scatter_(1, best, True)
        wish = groups.masked_fill(~is_open.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = wish.topk(experts.num_chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if experts.is_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * experts.scale


class MixtureOfExperts(nn.Module):
    """A weighted sum over the experts a token takes, and the shared ones.

    A token's result does not depend on the others: nobody is turned away from a full expert.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts = config.experts
        assert experts is not None
        self.gate = Router(config.hidden_size, experts)
        one = replace(config, intermediate_size=experts.size)
        self.experts = nn.ModuleList([MLP(one) for _ in range(experts.num_experts)])
        shared = replace(config, intermediate_size=experts.size * experts.num_shared)
        self.shared_experts = MLP(shared) if experts.num_shared else None

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self.gate(x)
        out = torch.zeros_like(x) if self.shared_experts is None else self.shared_experts(x)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            said = self.experts[expert](x[rows]) * weights[rows, places].unsqueeze(1)
            out.index_add_(0, rows, said.to(out.dtype))
        return out


class DeepseekV3Layer(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x)); an MLP in the first layers."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = LatentAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        has_experts = config.experts is not None and layer >= config.experts.first_layer
        self.mlp = MixtureOfExperts(config) if has_experts else MLP(config)

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def build(config: ModelConfig) -> CausalLM:
    layers = [DeepseekV3Layer(config, i) for i in range(config.num_layers)]
    return CausalLM(config, Backbone(config, layers))
