"""From a model's name and settings to a wired engine. The only file that knows concrete classes."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from slipstream import native
from slipstream.core.config import EngineConfig, ModelConfig
from slipstream.core.errors import ConfigError, ModelError
from slipstream.core.speculative import SpeculativeConfig
from slipstream.drafters.base import Drafter, NoDrafter
from slipstream.drafters.combined import CombinedDrafter
from slipstream.drafters.draft_model import DraftModelDrafter, check_same_tokenizer
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.engine.auto import AutoController
from slipstream.engine.calibration import calibrated
from slipstream.engine.controller import Controller, FixedController, TableController
from slipstream.engine.costs import CostModel
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import Parts
from slipstream.engine.verifier import Verifier, make_verifier
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache, promised_bytes
from slipstream.loading.chat import ChatTemplate
from slipstream.loading.directory import ModelDirectory
from slipstream.loading.gguf import GGUFFile
from slipstream.loading.head_packing import pack_head
from slipstream.loading.heads import load_head, resolve_head
from slipstream.loading.pull import cache_dir, resolve
from slipstream.loading.quantize import quantized
from slipstream.loading.shipped import shipped_head
from slipstream.loading.tokenizer import Tokenizer
from slipstream.loading.weights import StoredTensor, can_pack, load_model
from slipstream.models import CausalLM
from slipstream.models.heads import MedusaHead, tensor_bytes
from slipstream.models.runner import ModelRunner

# Most drafted tokens of a sequence and step where nobody says. Looking up more costs nothing, and
# the controller drafts no more than pays; with the token they follow 15 make 16 rows.
DEFAULT_DRAFT_TOKENS, DEFAULT_LOOKUP_TOKENS = 8, 15

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with everything that turns text into its tokens and back."""

    name: str
    path: Path
    model: CausalLM
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def description(self) -> str:
        """What computes, in a line: "packed weights, avx512 kernels, grade bitwise"."""
        model = self.model
        kernels = f"{native.describe()} kernels" if model.is_packed else f"torch on {model.device}"
        return f"{model.kind} weights, {kernels}, grade {model.grade}"


def choose_device(name: str = "auto") -> torch.device:
    """`auto` is CUDA where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda asked for, but torch sees no CUDA device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(
    name: str, device: torch.device, config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> torch.dtype | None:
    """What weights are computed in; None packs them as they are stored, for the native kernels.

    `auto` packs where the kernels can run the model, else takes bfloat16 where the hardware
    multiplies it, else float32.

    Raises:
        ConfigError: an unknown name, or `packed` where the kernels cannot run the model.
    """
    if name in ("auto", "packed"):
        if device.type == "cpu" and _has_native_kernels() and can_pack(config, tensors):
            return None
        if device.type == "cpu" and native.is_missing():
            warnings.warn(
                "this installation has no native kernels, so torch computes, several times slower; "
                "install a C++ compiler and reinstall slipstream",
                stacklevel=2,
            )
        if name == "packed":
            raise ConfigError(
                "dtype packed needs a CPU, the native kernels, and weights they have a format for; "
                "use --dtype auto"
            )
        fast = device.type == "cuda" or _cpu_multiplies_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        known = ", ".join(("auto", "packed", *DTYPES))
        raise ConfigError(f"dtype must be one of {known}, not {name!r}")
    return DTYPES[name]


def _has_native_kernels() -> bool:
    try:
        return native.is_available()
    except native.KernelsError as error:
        raise ConfigError(str(error)) from None


def _cpu_multiplies_bfloat16() -> bool:
    # Older torch cannot say; float32 is then the safe answer.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(feature) for feature in ("avx512_bf16", "amx_bf16", "bf16"))


def load(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    quiet: bool = False,
) -> LoadedModel:
    """Find a model, download it if need be, and load it.

    Args:
        name: an alias, a path, or `hf:org/repo[/file]`.
        device, dtype: see `choose_device`, `choose_dtype`.
        quantize: "int8" or "int4" for float weights (`loading.quantize`); a change of the model.
        quiet: no progress bars.

    Raises:
        ModelError, DownloadError, ConfigError: as their names say.
    """
    where = choose_device(device)
    path = resolve(name, quiet=quiet)
    checkpoint: GGUFFile | ModelDirectory
    if path.is_dir():
        checkpoint = ModelDirectory(path)
        tokenizer = Tokenizer.from_directory(path)
    else:
        checkpoint = GGUFFile(path)
        tokenizer = Tokenizer.from_gguf_metadata(checkpoint.metadata)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise ModelError(
            f"the tokenizer of {path} knows {tokenizer.vocab_size} tokens, the model only "
            f"{checkpoint.config.vocab_size}; they do not belong together"
        )
    config, tensors = checkpoint.config, checkpoint.tensors
    if quantize is not None:
        tensors = quantized(tensors, quantize)
    kind = choose_dtype(dtype, where, config, tensors)
    model = load_model(config, tensors, dtype=kind, device=where, quiet=quiet)
    if where.type == "cpu":
        native.take_threads() if model.is_packed else native.return_threads()
    return LoadedModel(name, path, model, tokenizer, ChatTemplate.of(tokenizer))


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    *,
    draft: LoadedModel | None = None,
    drafter: Drafter | None = None,
    controller: Controller | None = None,
    verifier: Verifier | None = None,
) -> Engine:
    """Wire an engine around a loaded model.

    Args:
        speculative: how to speculate; None is plain decoding.
        draft: the draft model, where the method needs one.
        drafter, controller, verifier: in place of what the settings choose; for experiments.
    """
    config = config or EngineConfig()
    speculative = speculative or SpeculativeConfig(method="off")
    model_config = loaded.model.config
    context_length = model_config.context_length
    if config.max_model_len is not None:
        if config.max_model_len > context_length:
            raise ConfigError(
                f"max_model_len {config.max_model_len} exceeds the model's context of "
                f"{context_length}"
            )
        context_length = config.max_model_len
    num_blocks = _num_blocks(config, context_length, loaded.model)
    blocks = BlockManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
    cache = KVCache.for_model(
        model_config,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=kv_dtype(config, loaded.model),
        device=loaded.model.device,
    )
    drafter = drafter or make_drafter(speculative, loaded, draft, config, context_length)
    runner = ModelRunner(loaded.model, cache, drafter.taps)
    parts = Parts(
        scheduler=Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens),
        controller=controller or make_controller(speculative, runner),
        drafter=drafter,
        runner=runner,
        verifier=verifier or make_verifier(speculative.rejection_sample_method),
    )
    return Engine(parts, loaded.tokenizer, context_length)


def make_drafter(
    speculative: SpeculativeConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    config: EngineConfig,
    context_length: int,
) -> Drafter:
    """The drafter a method names."""
    if speculative.is_off:
        return NoDrafter()
    method = speculative.method
    if method == "auto":
        method = "combined" if draft is not None else "suffix"
    if method == "ngram":
        return NgramDrafter(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    trees = speculative.tree is not None and speculative.rejection_sample_method == "match"
    suffix = SuffixDrafter(
        max_depth=speculative.suffix_decoding_max_tree_depth,
        max_spec_factor=speculative.suffix_decoding_max_spec_factor,
        min_token_prob=speculative.suffix_decoding_min_token_prob,
        max_cached_requests=speculative.suffix_decoding_max_cached_requests,
        trees=trees,
    )
    if method == "suffix":
        return suffix
    network: Drafter
    if speculative.head_kind is not None:
        network = make_head_drafter(
            speculative.head_kind, speculative, loaded, config, context_length
        )
    else:
        network = make_model_drafter(speculative, loaded, draft, config, context_length)
    if method != "combined":
        return network
    return CombinedDrafter(suffix, network, merge=trees, in_chains=speculative.tree is None)


def make_model_drafter(
    speculative: SpeculativeConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None,
    config: EngineConfig,
    context_length: int,
) -> DraftModelDrafter:
    """The drafter of a draft model."""
    if draft is None:
        raise ConfigError(
            f"method {speculative.method} needs a draft model; give its name as model"
        )
    check_same_tokenizer(loaded.tokenizer, draft.tokenizer)
    return DraftModelDrafter.for_model(
        draft.model,
        loaded.model.config.vocab_size,
        num_blocks=_num_blocks(config, context_length, draft.model),
        block_size=config.block_size,
        kv_dtype=kv_dtype(config, draft.model),
        rule=speculative.rejection_sample_method,
        tree=speculative.tree,
        chunk_tokens=config.max_num_batched_tokens,
    )


def make_head_drafter(
    kind: str,
    speculative: SpeculativeConfig,
    loaded: LoadedModel,
    config: EngineConfig,
    context_length: int,
) -> EagleDrafter | MedusaDrafter:
    """The drafter of a head, which is loaded for it."""
    target, rule, tree = loaded.model, speculative.rejection_sample_method, speculative.tree
    head = load_head(kind, _head_path(kind, speculative.model, loaded), target)
    if target.is_packed:
        pack_head(head)
    vocab_size = target.config.vocab_size
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, vocab_size, rule=rule, tree=tree)
    return EagleDrafter(
        head,
        vocab_size,
        num_blocks=_num_blocks(config, context_length, target),
        block_size=config.block_size,
        kv_dtype=kv_dtype(config, target),
        device=target.device,
        rule=rule,
        tree=tree,
    )


def _head_path(kind: str, name: str | None, loaded: LoadedModel) -> Path:
    """Where a head is: as told, with this package, or in the target's own checkpoint."""
    if name is not None:
        return resolve_head(name)
    shipped = shipped_head(loaded.name, kind)
    if shipped is None and kind != "mtp":
        raise ConfigError(
            f"a head of kind {kind} needs model, its directory; none for {loaded.name} comes with "
            "slipstream"
        )
    return shipped or loaded.path


def draft_bytes(drafter: Drafter) -> int:
    """Bytes of the weights that a drafter needs beside the target's."""
    if isinstance(drafter, EagleDrafter | MedusaDrafter):
        return tensor_bytes(drafter.head)
    if isinstance(drafter, CombinedDrafter):
        return draft_bytes(drafter.model)
    return drafter.model.weight_bytes if isinstance(drafter, DraftModelDrafter) else 0


def make_controller(speculative: SpeculativeConfig, runner: ModelRunner) -> Controller:
    """The controller the settings name, with its costs measured if it needs them."""
    if speculative.is_off:
        return FixedController(0)
    tokens = _most_tokens(speculative)
    if speculative.controller == "fixed":
        return FixedController(tokens)
    if speculative.controller == "table":
        return TableController(speculative.num_speculative_tokens_per_batch_size)
    return AutoController(CostModel(calibrated(runner, cache_dir() / "costs")), tokens)


def _most_tokens(speculative: SpeculativeConfig) -> int:
    """The largest draft of a sequence."""
    if speculative.num_speculative_tokens is not None:
        return speculative.num_speculative_tokens
    if speculative.tree is not None:
        return speculative.tree.max_tokens
    looks_up = speculative.method in ("auto", "ngram", "suffix", "combined")
    is_free = looks_up and speculative.controller == "auto"
    return DEFAULT_LOOKUP_TOKENS if is_free else DEFAULT_DRAFT_TOKENS


def kv_dtype(config: EngineConfig, model: CausalLM) -> torch.dtype:
    """What keys and values are stored in; `auto` is the model's own, or float16 if packed."""
    if config.kv_cache_dtype != "auto":
        return DTYPES[config.kv_cache_dtype]
    return torch.float16 if model.is_packed else model.dtype


def _num_blocks(config: EngineConfig, context_length: int, built: CausalLM) -> int:
    """The size of a model's pool, from the memory it may take."""
    model = built.config
    bytes_per_block = KVCache.bytes_per_block(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        config.block_size,
        kv_dtype(config, built),
        model.num_kv_planes,
    )
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory > _total_bytes(built.device):
            raise ConfigError(
                f"kv_cache_memory {config.kv_cache_memory:,} is more than the machine's "
                f"{_total_bytes(built.device):,} bytes; lower --kv-cache-memory"
            )
        num_blocks = config.kv_cache_memory // bytes_per_block
    else:
        if built.device.type == "cuda":
            free_bytes = torch.cuda.mem_get_info(built.device)[0]
        else:
            available = psutil.virtual_memory().available
            # What is written of other pools is counted twice, which must not end in nothing.
            free_bytes = max(available - promised_bytes(), available // 4)
        enough = config.max_num_seqs * -(-context_length // config.block_size)
        num_blocks = min(int(free_bytes * config.kv_cache_share) // bytes_per_block, enough)
    if num_blocks < 1:
        raise ConfigError(
            f"one KV block needs {bytes_per_block:,} bytes, more than kv_cache_memory allows; "
            "raise --kv-cache-memory"
        )
    return num_blocks


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return psutil.virtual_memory().total
