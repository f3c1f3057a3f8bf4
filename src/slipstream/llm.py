"""The Python interface: one object that loads a model and answers prompts.

from slipstream import LLM, SamplingParams

llm = LLM("smollm2-135m")
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
    print(output.text)
"""

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from tqdm import tqdm

from slipstream import native
from slipstream.build import LoadedModel, build_engine, draft_bytes, load
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.outputs import Delta, RequestOutput
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import SpeculativeConfig
from slipstream.engine.engine import Engine
from slipstream.loading.aliases import DEFAULT_ALIAS
from slipstream.loading.chat import encode_chat
from slipstream.loading.tokenizer import Tokenizer

Prompt = str | Seq[int]
Message = Mapping[str, Any]


class LLM:
    """A model and an engine around it.

    Args:
        model: alias (`slipstream models`), path, or `hf:org/repo[/file]`.
        device: auto, cpu or cuda.
        dtype: auto, packed, float32, bfloat16 or float16, for weights and what they meet. Packed
            weights keep the types of their checkpoint; auto packs on a CPU with native kernels.
        quantize: int8 or int4, for weights that are floats; a change of the target.
        threads: CPU threads; None leaves torch's choice.
        quiet: no progress bars.
        speculative_config: how to speculate, as vLLM's dictionary (`SpeculativeConfig`); the
            default drafts by lookup where that pays. {"method": "off"} is plain decoding.
        engine_options: fields of `EngineConfig`, such as max_num_seqs or kv_cache_memory.
    """

    def __init__(
        self,
        model: str = DEFAULT_ALIAS,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantize: str | None = None,
        threads: int | None = None,
        quiet: bool = False,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        **engine_options: Any,
    ):
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads must be at least 1, not {threads}")
            native.use_threads(threads)
        if not isinstance(speculative_config, SpeculativeConfig):
            speculative_config = SpeculativeConfig.from_dict(speculative_config or {})
        try:
            self.config = EngineConfig(**engine_options)
        except TypeError:
            known = EngineConfig.__dataclass_fields__.keys()
            unknown = ", ".join(sorted(engine_options.keys() - known))
            raise ConfigError(
                f"unknown engine option {unknown}; known are {', '.join(known)}"
            ) from None
        self.quiet = quiet
        self.dtype = dtype
        self.loaded = load(model, device=device, dtype=dtype, quantize=quantize, quiet=quiet)
        self._drafts: dict[str, LoadedModel] = {}
        self._mail: dict[str, deque[Delta]] = {}  # open streams -> what they have not read
        self.engine = self.another_engine(speculative_config)

    @property
    def draft_bytes(self) -> int:
        """Bytes of weights that drafting needs beside the target's own."""
        return draft_bytes(self.engine.parts.drafter)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    def another_engine(self, speculative: SpeculativeConfig) -> Engine:
        """An engine of its own around the same loaded model; draft models are loaded once."""
        draft, name = None, speculative.draft_model
        if name is not None:
            if name not in self._drafts:
                device = self.loaded.model.device.type
                self._drafts[name] = load(name, device=device, dtype=self.dtype, quiet=self.quiet)
            draft = self._drafts[name]
        return build_engine(self.loaded, self.config, speculative, draft=draft)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all of them together; the outputs come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either. Text is text: what looks
                like a control token is not one.
            params: one for all, or one each.
        """
        return self._run([self._ids(prompt) for prompt in _as_list(prompts)], params)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        conversations: Seq[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        return self._run([self.chat_ids(c, **template_variables) for c in conversations], params)

    def stream(
        self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Answer a prompt or a conversation, yielding text as it comes.

        The request begins with the first `next`; closing the iterator aborts it. Several streams
        may be read in turns, and `generate` called between.
        """
        is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
        ids = self.chat_ids(prompt) if is_chat else self._ids(prompt)  # type: ignore[arg-type]
        request_id = self.engine.add(ids, params)
        self._mail[request_id] = deque()
        try:
            while self._mail[request_id] or not self.engine.is_finished(request_id):
                if not self._mail[request_id]:
                    self._step()
                while self._mail[request_id]:
                    yield self._mail[request_id].popleft()
        finally:
            del self._mail[request_id]
            self.engine.abort(request_id)
            self.engine.output(request_id)

    def chat_ids(self, messages: Seq[Message], **template_variables: Any) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak."""
        return encode_chat(
            self.tokenizer, self.loaded.chat_template, messages, **template_variables
        )

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _step(self) -> list[Delta]:
        """Step the engine, and keep for each open stream what was said to it."""
        deltas = self.engine.step()
        for delta in deltas:
            if delta.request_id in self._mail:
                self._mail[delta.request_id].append(delta)
        return deltas

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
        added: list[str] = []
        try:
            for ids, each in zip(prompts, params, strict=True):
                added.append(self.engine.add(ids, each))
            self._finish(added)
            return [self.engine.output(request_id) for request_id in added]
        except BaseException:
            # Nothing half-done stays behind: a later call starts from a clean engine.
            for request_id in added:
                self.engine.abort(request_id)
                self.engine.output(request_id)
            raise

    def _finish(self, request_ids: list[str]) -> None:
        waiting = set(request_ids)
        quiet = self.quiet or len(waiting) == 1
        with tqdm(total=len(waiting), desc="Answering", unit="prompt", disable=quiet) as bar:
            while waiting:
                for delta in self._step():
                    if delta.finish_reason and self.engine.is_finished(delta.request_id):
                        waiting.discard(delta.request_id)
                        bar.update(len(request_ids) - len(waiting) - bar.n)


def _as_list(prompts: Prompt | Seq[Prompt]) -> Seq[Prompt]:
    """A single prompt as a list of one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
