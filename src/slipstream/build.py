"""From a model's name and settings to a wired engine. The only file that knows concrete classes."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from slipstream.core.config import EngineConfig, ModelConfig
from slipstream.core.errors import ConfigError, ModelError
from slipstream.drafters.base import Drafter, NoDrafter
from slipstream.engine.controller import Controller, FixedController
from slipstream.engine.engine import Engine
from slipstream.engine.runner import ModelRunner
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import Parts
from slipstream.engine.verifier import MatchVerifier, Verifier
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.loading.chat import ChatTemplate
from slipstream.loading.directory import ModelDirectory
from slipstream.loading.gguf import GGUFFile
from slipstream.loading.pull import resolve
from slipstream.loading.tokenizer import Tokenizer
from slipstream.loading.weights import load_model
from slipstream.models import CausalLM

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


def choose_device(name: str = "auto") -> torch.device:
    """`auto` is CUDA where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda asked for, but torch sees no CUDA device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float32."""
    if name == "auto":
        fast = device.type == "cuda" or _cpu_multiplies_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


def _cpu_multiplies_bfloat16() -> bool:
    # Older torch cannot say; float32 is then the safe answer.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(feature) for feature in ("avx512_bf16", "amx_bf16", "bf16"))


def load(
    name: str, *, device: str = "auto", dtype: str = "auto", quiet: bool = False
) -> LoadedModel:
    """Find a model, download it if need be, and load it.

    Args:
        name: an alias, a path, or `hf:org/repo[/file]`.
        device, dtype: see `choose_device`, `choose_dtype`.
        quiet: no progress bars.

    Raises:
        ModelError, DownloadError, ConfigError: as their names say.
    """
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
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
    model = load_model(checkpoint.config, checkpoint.tensors, dtype=kind, device=where, quiet=quiet)
    return LoadedModel(name, path, model, tokenizer, ChatTemplate.of(tokenizer))


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig | None = None,
    *,
    drafter: Drafter | None = None,
    controller: Controller | None = None,
    verifier: Verifier | None = None,
) -> Engine:
    """Wire an engine around a loaded model.

    Args:
        drafter, controller, verifier: in place of what the settings choose; for experiments.
    """
    config = config or EngineConfig()
    drafter = drafter or NoDrafter()
    model_config = loaded.model.config
    context_length = model_config.context_length
    if config.max_model_len is not None:
        if config.max_model_len > context_length:
            raise ConfigError(
                f"max_model_len {config.max_model_len} exceeds the model's context of "
                f"{context_length}"
            )
        context_length = config.max_model_len
    num_blocks = _num_blocks(config, model_config, context_length, loaded.model)
    blocks = BlockManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
    cache = KVCache(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=loaded.model.dtype,
        device=loaded.model.device,
    )
    parts = Parts(
        scheduler=Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens),
        controller=controller or FixedController(0),
        drafter=drafter,
        runner=ModelRunner(loaded.model, cache, drafter.taps),
        verifier=verifier or MatchVerifier(),
    )
    return Engine(parts, loaded.tokenizer, context_length)


def _num_blocks(
    config: EngineConfig, model: ModelConfig, context_length: int, built: CausalLM
) -> int:
    """The pool's size, from the memory it may take."""
    bytes_per_block = KVCache.bytes_per_block(
        model.num_layers, model.num_kv_heads, model.head_dim, config.block_size, built.dtype
    )
    if config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // bytes_per_block
    else:
        if built.device.type == "cuda":
            free_bytes = torch.cuda.mem_get_info(built.device)[0]
        else:
            free_bytes = psutil.virtual_memory().available
        enough = config.max_num_seqs * -(-context_length // config.block_size)
        num_blocks = min(int(free_bytes * config.kv_cache_share) // bytes_per_block, enough)
    if num_blocks < 1:
        raise ConfigError(
            f"one KV block needs {bytes_per_block:,} bytes, more than kv_cache_memory allows; "
            "raise --kv-cache-memory"
        )
    return num_blocks
