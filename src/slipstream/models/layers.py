"""The layers decoders share. One class, one idea; names of attributes are the checkpoint's.

A model never sees a cache. It calls `attend(layer, q, k, v, scale, window)`, which whoever runs
the model supplies: the engine writes and reads pages, the reference attends densely.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from slipstream import kernels
from slipstream.core.config import ModelConfig, RopeScaling, YarnScaling
from slipstream.kernels import Angles


class Attend(Protocol):
    """Attention of packed queries over all the keys each may see, its own included."""

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, H_kv, D]
        v: Tensor,  # [T, H_kv, D]
        *,
        scale: float,
        window: int | None,
    ) -> Tensor: ...  # [T, H, D]


def unfilled(*shape: int) -> nn.Parameter:
    """A parameter that waits for its checkpoint: NaN, so that forgetting it cannot go unseen."""
    return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b, its rows filled from one or several checkpoint tensors.

    Args:
        in_features, bias: as usual.
        parts: checkpoint name -> output rows, stacked in this order. The names are siblings of
            this module: `qkv_proj` with parts q_proj, k_proj, v_proj. A single part named ""
            stands for the module itself.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool = False):
        super().__init__()
        self.parts = parts
        self.weight = unfilled(sum(parts.values()), in_features)
        self.bias = unfilled(sum(parts.values())) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)


def projection(in_features: int, out_features: int, *, bias: bool = False) -> Linear:
    """A `Linear` filled by the checkpoint tensor of its own name."""
    return Linear(in_features, {"": out_features}, bias=bias)


class RMSNorm(nn.Module):
    """Zhang and Sennrich, arXiv 1910.07467."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = unfilled(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = unfilled(vocab_size, hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        return kernels.embed(ids, self.weight)


def inverse_frequencies(config: ModelConfig, layer: int) -> Tensor:
    """theta^(-2i / D) of one layer, with the checkpoint's scaling: [D / 2] float32."""
    size, theta = config.rotary_dim, config.rope_thetas[layer]
    exponents = torch.arange(0, size, 2, device="cpu").float() / size
    inv_freq = 1.0 / (theta**exponents)
    inv_freq = inv_freq / config.rope_linear_factors[layer]
    if config.rope_factors is not None:
        return inv_freq / torch.tensor(config.rope_factors, device="cpu")
    if isinstance(config.rope_scaling, YarnScaling):
        return _stretch_yarn(inv_freq, config.rope_scaling, theta)
    if config.rope_scaling is not None:
        return _stretch(inv_freq, config.rope_scaling)
    return inv_freq


def _stretch(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short kept, those between blended."""
    wavelength = 2 * torch.pi / inv_freq
    blend = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0, 1)
    return (1 - blend) * inv_freq / scaling.factor + blend * inv_freq


def _stretch_yarn(inv_freq: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """YaRN: as above, but blended evenly over the indices between two numbers of turns."""
    num_pairs = len(inv_freq)

    def pair(num_turns: float) -> float:
        """The index of the wavelength that turns so often over the original context."""
        wavelength = scaling.original_context / (num_turns * 2 * math.pi)
        return num_pairs * math.log(wavelength) / math.log(theta)

    first = max(math.floor(pair(scaling.beta_fast)), 0)
    last = min(math.ceil(pair(scaling.beta_slow)), 2 * num_pairs - 1)
    index = torch.arange(num_pairs, device="cpu").float()
    blend = ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    return blend * inv_freq / scaling.factor + (1 - blend) * inv_freq


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; optional biases and q/k norms.

    Args:
        layer: index of the layer, which owns one pool of K/V.
        qk_norm: normalise each query and key head before the rotation.
    """

    def __init__(self, config: ModelConfig, layer: int, *, qk_norm: bool = False):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.window = config.windows[layer]
        self.sizes = [n * config.head_dim for n in (config.num_heads, *[config.num_kv_heads] * 2)]
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.qkv_proj = Linear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = projection(self.sizes[0], config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None

    def forward(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        q, k, v = (
            part.view(x.shape[0], -1, self.head_dim)
            for part in self.qkv_proj(x).split(self.sizes, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = kernels.rotate(q, angles)
        k = kernels.rotate(k, angles)
        out = attend(self.layer, q, k, v, scale=self.scale, window=self.window)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)).

    Args:
        gated: the activation, from [T, 2 F] of gate and up side by side to [T, F].
    """

    def __init__(self, config: ModelConfig, gated=kernels.gated_silu):
        super().__init__()
        size = config.intermediate_size
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(config.hidden_size, parts)
        self.down_proj = projection(size, config.hidden_size)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_up_proj(x)))


class Backbone(nn.Module):
    """Embedding, layers, final norm: what checkpoints call `model`.

    Args:
        layers: each maps (x, angles, attend) to x.
        embedding_scale: multiplies embeddings (Gemma); 1 elsewhere.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module], embedding_scale=1.0):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.embedding_scale = embedding_scale
        # Layers with equal rotary settings share their angles.
        settings = list(zip(config.rope_thetas, config.rope_linear_factors, strict=True))
        self.angle_kinds = [settings.index(setting) for setting in settings]
        self._frequencies = {kind: inverse_frequencies(config, kind) for kind in self.angle_kinds}

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        x = self.embed_tokens(ids)
        if self.embedding_scale != 1.0:
            x = kernels.scale(x, self.embedding_scale)
        angles = {
            kind: kernels.rotary_angles(positions, inv_freq)
            for kind, inv_freq in self._frequencies.items()
        }
        tapped = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped[index] = x
            x = layer(x, angles[self.angle_kinds[index]], attend)
        return self.norm(x), tapped


class CausalLM(nn.Module):
    """A backbone and the head that turns its output into logits.

    Every architecture builds one of these; the engine knows nothing else of a model.
    """

    def __init__(self, config: ModelConfig, backbone: Backbone):
        super().__init__()
        self.config = config
        self.model = backbone
        self.lm_head = None if config.tied else projection(config.hidden_size, config.vocab_size)

    def forward(
        self,
        ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        attend: Attend,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Final hidden states [T, hidden], and the residual stream entering each tapped layer."""
        return self.model(ids, positions, attend, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V], float32 or wider."""
        if self.lm_head is None:
            out = kernels.linear(hidden, self.model.embed_tokens.weight)
        else:
            out = self.lm_head(hidden)
        return out if out.dtype == torch.float64 else out.float()

    def output_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output head: [R] int64 -> [R, hidden]."""
        return kernels.embed(ids, (self.lm_head or self.model.embed_tokens).weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def kind(self) -> str:
        """What weights are held in: a dtype's name, or "packed"."""
        return "packed" if self.is_packed else str(self.dtype).removeprefix("torch.")

    @property
    def grade(self) -> str:
        """What holds of a token's logits whatever else is computed beside it.

        "bitwise": they are the same bits; "margin": the same up to rounding.
        """
        return "bitwise" if self.is_packed else "margin"

    @property
    def is_packed(self) -> bool:
        """Whether weights are as their checkpoint stores them, for the native kernels."""
        return isinstance(self.model.embed_tokens.weight, kernels.PackedWeight)

    @property
    def num_weights(self) -> int:
        """How many weights there are, those of a tied head counted once."""
        return sum(weight.numel() for weight in self._weights())

    @property
    def weight_bytes(self) -> int:
        """Bytes of them all."""
        return sum(weight.nbytes for weight in self._weights())

    def _weights(self) -> list[kernels.Weight]:
        matrices = [getattr(module, "weight", None) for module in self.modules()]
        packed = [matrix for matrix in matrices if isinstance(matrix, kernels.PackedWeight)]
        return [*packed, *self.parameters()]
