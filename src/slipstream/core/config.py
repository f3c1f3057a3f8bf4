"""Settings of models and of the engine, as plain numbers."""

from dataclasses import dataclass

from slipstream.core.errors import ConfigError

KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of rotary wavelengths beyond the original context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's stretching, arXiv 2309.00071: wavelengths that turn often enough are kept.

    Those of more than `beta_fast` turns over the original context stay, those of fewer than
    `beta_slow` are stretched by `factor`, others blended.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention over a latent, from which keys and values of all heads are made (DeepSeek).

    Attributes:
        query_rank: size of the latent of queries; None makes them of the hidden state directly.
        rank: size of the latent of keys and values.
        content_dim, rotary_dim: parts of a query or key without and with positions.
        value_dim: of a head.
        is_interleaved: rotary pairs are neighbours in the weights, (2 i, 2 i + 1).
    """

    query_rank: int | None
    rank: int
    content_dim: int
    rotary_dim: int
    value_dim: int
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers of which every token takes a few experts (DeepSeek).

    Attributes:
        first_layer: earlier layers have one MLP for all tokens.
        num_experts, num_chosen: in a layer, and by a token.
        num_groups, num_chosen_groups: experts lie in groups, and a token's are in a few of these.
        num_shared: experts that every token takes besides.
        size: intermediate size of one.
        scale: of what the chosen say together.
        is_normalised: the weights of the chosen add up to 1 before that.
    """

    first_layer: int
    num_experts: int
    num_chosen: int
    num_groups: int
    num_chosen_groups: int
    num_shared: int
    size: int
    scale: float
    is_normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder, read from `config.json` or GGUF metadata.

    Attributes:
        model_type: names the file in `models/` that builds it.
        head_dim: size of one attention head; not always hidden_size / num_heads.
        windows: per layer, how many positions back a query sees; None sees all.
        rope_thetas: per layer, the rotary base.
        rope_linear_factor: per layer, positions are divided by this.
        rope_factors: divisors of the inverse frequencies given by the checkpoint, head_dim / 2.
        tied: the output head is the embedding.
        norm_plus_one: the checkpoint stores RMSNorm weights as w - 1 (Gemma in safetensors).
        latent: attention over a latent; `num_kv_heads` and `head_dim` are then those of the latent
            with its rotary key, the one head that is kept.
        experts: layers with experts.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    windows: tuple[int | None, ...]
    rope_thetas: tuple[float, ...]
    rope_linear_factors: tuple[float, ...]
    rope_scaling: RopeScaling | YarnScaling | None = None
    rope_factors: tuple[float, ...] | None = None
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    tied: bool = False
    norm_plus_one: bool = False
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        per_layer = (self.windows, self.rope_thetas, self.rope_linear_factors)
        assert all(len(values) == self.num_layers for values in per_layer), "one value per layer"
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot be shared evenly by "
                f"{self.num_kv_heads} key/value heads"
            )

    @property
    def rotary_dim(self) -> int:
        """How much of a query or key head turns with its position."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def num_kv_planes(self) -> int:
        """Keys and values apart; or one latent that is both."""
        return 2 if self.latent is None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs; every field has a flag of the same name.

    Attributes:
        max_num_seqs: sequences computed together in one step.
        max_num_batched_tokens: tokens computed in one step; longer prompts go in chunks.
        max_model_len: context limit; None takes the model's own.
        block_size: tokens per KV block.
        kv_cache_memory: bytes for K/V; None takes `kv_cache_share` of free memory, but no more
            than `max_num_seqs` full contexts need.
        kv_cache_share: that share.
        kv_cache_dtype: "float32", "float16" or "bfloat16"; "auto" is the model's own, or float16
            beside packed weights.
        prefix_caching: keep K/V of finished requests for prompts that begin alike.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    kv_cache_share: float = 0.25
    kv_cache_dtype: str = "auto"
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise ConfigError(f"kv_cache_dtype must be one of {known}, not {self.kv_cache_dtype!r}")
        if not 0 < self.kv_cache_share <= 1:
            raise ConfigError(f"kv_cache_share must be in (0, 1], not {self.kv_cache_share}")
