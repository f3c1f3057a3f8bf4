"""This engine beside llama.cpp: the same GGUF, token ids and threads, taking turns in one process.

Both compute the same passes over a context of the same length: n tokens of one sequence with logits
after each, one token of each of n sequences, a prompt. Whatever surrounds a pass, sampling and
bookkeeping, is left out on both sides; `plain decoding` has it on both.

llama.cpp comes with the optional package llama-cpp-python, which nothing else here needs.
"""

import ctypes
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median, quantiles
from types import ModuleType
from typing import Any

import numpy as np

from slipstream import native
from slipstream.bench.measure import Run, answer
from slipstream.build import LoadedModel, build_engine, kv_dtype
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.models.batch import Span, lay_out
from slipstream.models.runner import ModelRunner

PEERS = ("llama.cpp",)
CONTEXT = 256
PREFILL = 512
STEPS = (1, 2, 4, 8, 16, 32)
SEQUENCES = 16
DECODE = 64


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One measurement on both sides, in milliseconds: medians over rounds, and quartiles.

    Attributes:
        ratio: of their median to ours; above 1 we are faster.
    """

    what: str
    ours_ms: float
    ours_quartiles: tuple[float, float]
    theirs_ms: float
    theirs_quartiles: tuple[float, float]
    ratio: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    loaded: LoadedModel, *, rounds: int, progress: Callable[[str], None] = lambda text: None
) -> list[PeerRow]:
    """Measure both engines on every pass, in turns.

    Raises:
        ConfigError: the peer is not installed, or the model is not a GGUF file.
    """
    ours, theirs = _Ours(loaded), _LlamaCpp(loaded)
    passes: list[tuple[str, Callable[[], float], Callable[[], float]]] = []
    for rows in STEPS:
        name = f"pass of {rows} rows" if rows > 1 else "pass of 1 row"
        passes.append((name, partial(ours.verify, rows), partial(theirs.verify, rows)))
    name = f"{SEQUENCES} sequences, 1 row each"
    passes.append((name, ours.decode_all, theirs.decode_all))
    passes.append((f"prefill of {PREFILL}", ours.prefill, theirs.prefill))
    passes.append((f"plain decoding, {DECODE} tokens", ours.generate, theirs.generate))

    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, _, _ in passes}
    for turn in range(rounds + 1):  # the first one warms up
        for name, mine, other in passes:
            progress(f"round {turn} of {rounds}: {name}")
            pair = (mine(), other())
            if turn:
                for sec, kept in zip(pair, times[name], strict=True):
                    kept.append(sec)
    return [_row(name, *times[name]) for name in times]


def table(rows: Seq[PeerRow]) -> str:
    """One line a row."""
    lines = [
        f"{'':<28} {'ours ms':>9} {'quartiles':>18} {'llama.cpp ms':>13} {'quartiles':>18}   ratio"
    ]
    for row in rows:
        ours, theirs = (
            f"{low:.1f} to {high:.1f}" for low, high in (row.ours_quartiles, row.theirs_quartiles)
        )
        lines.append(
            f"{row.what:<28} {row.ours_ms:>9.2f} {ours:>18} {row.theirs_ms:>13.2f} {theirs:>18} "
            f"{row.ratio:>6.2f}x"
        )
    return "\n".join(lines)


def _row(what: str, ours: list[float], theirs: list[float]) -> PeerRow:
    def spread(sec: list[float]) -> tuple[float, float]:
        if len(sec) < 2:
            return (1e3 * sec[0], 1e3 * sec[0])
        low, _, high = quantiles(sec, n=4, method="inclusive")
        return (1e3 * low, 1e3 * high)

    return PeerRow(
        what,
        1e3 * median(ours),
        spread(ours),
        1e3 * median(theirs),
        spread(theirs),
        median(theirs) / median(ours),
    )


def _tokens(count: int) -> list[int]:
    """Arbitrary token ids, the same on both sides."""
    return [100 + i for i in range(count)]


class _Ours:
    """Passes of our runner, over pages that already hold a context."""

    def __init__(self, loaded: LoadedModel):
        self._loaded = loaded
        config = EngineConfig()
        size = config.block_size
        num_blocks = -(-(SEQUENCES * (CONTEXT + 1) + CONTEXT + PREFILL) // size) + SEQUENCES + 2
        self._blocks = BlockManager(num_blocks, size, prefix_caching=False)
        cache = KVCache.for_model(
            loaded.model.config,
            num_blocks=num_blocks,
            block_size=size,
            dtype=kv_dtype(config, loaded.model),
            device=loaded.model.device,
        )
        self._runner = ModelRunner(loaded.model, cache)
        for seq in range(SEQUENCES):
            self._blocks.allocate(seq, [])
            self._blocks.reserve(seq, 0, CONTEXT + (PREFILL if seq == 0 else 1))
            self._run([Span(seq, 0, _tokens(CONTEXT), range(CONTEXT), 1)])
        self._engine = build_engine(loaded, config)

    def _run(self, spans: Seq[Span]) -> float:
        batch = lay_out(spans, self._blocks, self._loaded.model.device)
        began = time.perf_counter()
        self._runner.forward(batch)
        return time.perf_counter() - began

    def verify(self, rows: int) -> float:
        positions = range(CONTEXT, CONTEXT + rows)
        return self._run([Span(0, CONTEXT, _tokens(rows), positions, rows)])

    def decode_all(self) -> float:
        one = [Span(seq, CONTEXT, _tokens(1), [CONTEXT], 1) for seq in range(SEQUENCES)]
        return self._run(one)

    def prefill(self) -> float:
        return self._run([Span(0, 0, _tokens(PREFILL), range(PREFILL), 1)])

    def generate(self) -> float:
        # The first token belongs to the prompt.
        params = SamplingParams(temperature=0.0, max_tokens=DECODE + 1, ignore_eos=True)
        done = Run()
        answer(self._engine, [_tokens(CONTEXT)], [params], done)
        return done.decode_sec / done.decode_tokens * DECODE


class _LlamaCpp:
    """The same passes by llama.cpp's own C interface."""

    def __init__(self, loaded: LoadedModel):
        self._lib = lib = _library()
        if not loaded.path.is_file():
            raise ConfigError(f"llama.cpp reads GGUF files; {loaded.name} is a directory")
        self._vocab_size = loaded.model.config.vocab_size
        # Kept, since the library calls it for as long as it lives.
        self._log = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            str(loaded.path).encode(), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx = SEQUENCES * (CONTEXT + PREFILL + DECODE)
        params.n_batch = params.n_ubatch = PREFILL
        params.n_seq_max = SEQUENCES
        params.n_threads = params.n_threads_batch = native.num_threads()
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(PREFILL, 0, 1)
        for seq in range(SEQUENCES):
            self._decode([(token, i, seq) for i, token in enumerate(_tokens(CONTEXT))], 1)

    def _decode(self, rows: Seq[tuple[int, int, int]], num_logits: int) -> float:
        """Run (token, position, sequence) rows, with logits after the last few."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = i >= len(rows) - num_logits
        began = time.perf_counter()
        status = self._lib.llama_decode(self._context, batch)
        self._lib.llama_get_logits_ith(self._context, -1)  # waits for them
        sec = time.perf_counter() - began
        assert status == 0, f"llama.cpp failed with {status}"
        return sec

    def _back_to(self, length: int, seqs: Seq[int] = (0,)) -> None:
        for seq in seqs:
            self._lib.llama_memory_seq_rm(self._memory, seq, length, -1)

    def verify(self, rows: int) -> float:
        self._back_to(CONTEXT)
        return self._decode([(t, CONTEXT + i, 0) for i, t in enumerate(_tokens(rows))], rows)

    def decode_all(self) -> float:
        seqs = range(SEQUENCES)
        self._back_to(CONTEXT, seqs)
        return self._decode([(_tokens(1)[0], CONTEXT, seq) for seq in seqs], SEQUENCES)

    def prefill(self) -> float:
        self._back_to(0)
        sec = self._decode([(t, i, 0) for i, t in enumerate(_tokens(PREFILL))], 1)
        self._back_to(CONTEXT)
        return sec

    def generate(self) -> float:
        self._back_to(CONTEXT - 1)
        token, position = _tokens(CONTEXT)[-1], CONTEXT - 1
        self._decode([(token, position, 0)], 1)
        began = time.perf_counter()
        for _ in range(DECODE):
            logits = self._lib.llama_get_logits_ith(self._context, -1)
            token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
            position += 1
            self._decode([(token, position, 0)], 1)
        return time.perf_counter() - began


def _library() -> ModuleType:
    try:
        import llama_cpp
    except ImportError:
        raise ConfigError(
            "--peers llama.cpp needs llama-cpp-python; pip install llama-cpp-python"
        ) from None
    return llama_cpp
