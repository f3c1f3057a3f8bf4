"""Text to token ids and back, from the metadata of a GGUF file or a Hugging Face directory.

The `tokenizers` library does the splitting and merging; this file rebuilds its parts from what a
model file records, and keeps beside it a table of the exact bytes each token stands for, because
decoding, streaming and the comparison of two vocabularies are all statements about bytes.

Two kinds of vocabulary are known, by their GGUF names: "gpt2", byte-level BPE, where a token is
written in 256 printable characters, one per byte; and "llama", SentencePiece BPE, where a space is
written "▁" and a byte that has no piece of its own "<0xNN>".

It does not know chat templates beyond carrying their source (see `chat`), nor streaming (see
`engine.detokenize`).
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers import Tokenizer as Backend

from slipstream.core.errors import ModelError, RequestError
from slipstream.loading.special_text import SpecialText

# Values of tokenizer.ggml.token_type. What is none of these is padding of the table: no text.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# The `tokenizer.ggml.pre` names we can split for. The patterns are those of the models' own
# tokenizer.json files; alternatives are tried from left to right.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_PRE_TOKENIZERS = ("gpt-2", "smollm", "qwen2", "llama-bpe")

# A GGUF file carries one end-of-sequence id and not the list of generation_config.json, so the
# further tokens at which these model families stop are recognised by name.
_END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
    }
)


class Tokenizer:
    """A model's vocabulary: encodes, decodes, and says which ids are control tokens.

    Safe to share between threads.

    Attributes:
        vocab_size: number of ids the tokenizer knows; a model may have more rows than that.
        bos_id: the beginning-of-sequence token, if there is one.
        add_bos: whether `encode` puts `bos_id` first unless told otherwise.
        eos_id: the end-of-sequence token a chat template writes, if there is one.
        eos_ids: every token that ends generation.
        special_ids: control tokens; they stand for no text.
        chat_template: Jinja source, if the model has one.
        strips_leading_space: the encoder put a space before the text, so decoding drops one.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        tokens: Sequence[str],
        pieces: Sequence[bytes],
        special_ids: Iterable[int],
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: Iterable[int],
        add_bos: bool,
        chat_template: str | None,
        strips_leading_space: bool,
    ) -> None:
        """Use `from_gguf_metadata` or `from_directory`.

        `pieces` has the bytes of each of `tokens`, control tokens included.
        """
        self._backend = backend
        self._lock = threading.Lock()
        self._tokens = tokens
        self._pieces = pieces
        self.vocab_size = len(tokens)
        self.special_ids = frozenset(special_ids)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = frozenset(eos_ids)
        self.add_bos = add_bos and bos_id is not None
        self.chat_template = chat_template
        self.strips_leading_space = strips_leading_space
        for name, ids in (("beginning", {bos_id} - {None}), ("end", self.eos_ids)):
            if unknown := [i for i in ids if i not in range(self.vocab_size)]:
                raise ModelError(
                    f"{name}-of-sequence id {unknown[0]} is outside the vocabulary of "
                    f"{self.vocab_size} tokens; the model's files do not belong together"
                )

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Rebuild the tokenizer a GGUF file describes.

        Args:
            metadata: GGUF keys to Python values; arrays as lists.

        Raises:
            ModelError: a key is missing or damaged, or the kind of tokenizer is not one we know.
        """
        kind = _required(metadata, "model")
        tokens: list[str] = _required(metadata, "tokens")
        types: list[int] = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        if len(types) != len(tokens):
            raise ModelError(
                f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; "
                "the file is damaged"
            )
        space_prefix = False
        if kind == "gpt2":
            pre = _required(metadata, "pre")
            backend = _byte_level_backend(tokens, _required(metadata, "merges"), pre)
            add_bos = pre == "llama-bpe"
        elif kind == "llama":
            space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
            scores = _required(metadata, "scores")
            backend = _sentencepiece_backend(tokens, types, scores, space_prefix=space_prefix)
            add_bos = True
        else:
            raise ModelError(f"tokenizer kind {kind!r} is not supported; known: 'gpt2', 'llama'")
        # SentencePiece looks for user-defined pieces after it has rewritten spaces. A file with a
        # space prefix cannot have it so: the prefix would become part of the piece.
        normalized = kind == "llama" and not space_prefix
        _add_tokens(backend, tokens, types, normalized_user_defined=normalized)

        byte_level = kind == "gpt2"
        ids = {
            name: metadata[f"tokenizer.ggml.{name}_token_id"]
            for name in ("bos", "eos", "eot", "eom")
            if f"tokenizer.ggml.{name}_token_id" in metadata
        }
        bos_id = ids.pop("bos", None)
        special_ids = [i for i, type_ in enumerate(types) if type_ in (_CONTROL, _UNKNOWN)]
        named_ends = {i for i in special_ids if tokens[i] in _END_NAMES}
        return cls(
            backend,
            tokens=tokens,
            pieces=[
                _piece(token, type_, byte_level=byte_level)
                for token, type_ in zip(tokens, types, strict=True)
            ],
            special_ids=special_ids,
            bos_id=bos_id,
            eos_id=ids.get("eos"),
            eos_ids=named_ends.union(ids.values()),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
            chat_template=metadata.get("tokenizer.chat_template"),
            strips_leading_space=space_prefix,
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Read a Hugging Face directory: tokenizer.json and the small files beside it.

        Raises:
            ModelError: tokenizer.json is missing, damaged, or of a kind we do not know.
        """
        path = Path(path)
        if not (path / "tokenizer.json").is_file():
            raise ModelError(f"{path} has no tokenizer.json; download it with the model's weights")
        spec = _read_json(path / "tokenizer.json")
        config = _read_json(path / "tokenizer_config.json")
        try:
            backend = Backend.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        byte_level, strips_leading_space = _decoder_kind(spec.get("decoder"), path)

        ids = backend.get_vocab()
        tokens = [""] * (max(ids.values(), default=-1) + 1)
        for token, token_id in ids.items():
            tokens[token_id] = token
        types = [_BYTE if _is_byte(token) and not byte_level else _NORMAL for token in tokens]
        for added in spec.get("added_tokens", []):
            types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED

        names = _read_json(path / "special_tokens_map.json") | config
        bos_id, eos_id = (_named_id(backend, names.get(f"{end}_token")) for end in ("bos", "eos"))
        eos_ids = set() if eos_id is None else {eos_id}
        for file in ("config.json", "generation_config.json"):
            listed = _read_json(path / file).get("eos_token_id", [])
            eos_ids.update(listed if isinstance(listed, list) else {listed} - {None})
        add_bos = config.get("add_bos_token")
        if add_bos is None:  # then the post-processor of tokenizer.json decides
            add_bos = bos_id is not None and bos_id in backend.encode("").ids
        return cls(
            backend,
            tokens=tokens,
            pieces=[
                _piece(token, type_, byte_level=byte_level)
                for token, type_ in zip(tokens, types, strict=True)
            ],
            special_ids=[i for i, type_ in enumerate(types) if type_ == _CONTROL],
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=eos_ids,
            add_bos=add_bos,
            chat_template=_directory_chat_template(path, config),
            strips_leading_space=strips_leading_space,
        )

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = False
    ) -> list[int]:
        """The ids of `text`.

        Args:
            text: what to encode. Text that looks like a control token stays ordinary text ...
            parse_special: ... unless this is set, for text that is trusted to contain them.
            add_bos: put `bos_id` first; None does as the model's files say.

        Raises:
            RequestError: the text has a lone surrogate, or there is no beginning token to add.
        """
        start: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise RequestError("the model has no beginning-of-sequence token; drop add_bos")
            start = [self.bos_id]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text has the lone surrogate {text[error.start]!a} at character {error.start}, "
                "which is not Unicode text; remove it"
            ) from None
        with self._lock:  # the setting below belongs to the whole backend
            self._backend.encode_special_tokens = not parse_special
            return start + self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The exact bytes a token stands for; the text of a control token only if asked.

        An id the tokenizer does not know stands for nothing: a model may have more rows than its
        vocabulary, and nothing forbids sampling one.
        """
        if token_id not in range(self.vocab_size):
            return b""
        if skip_special and token_id in self.special_ids:
            return b""
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """The vocabulary entry as the model's files spell it."""
        return self._tokens[token_id]

    @cached_property
    def special_text(self) -> SpecialText:
        """Finds the control tokens in a text."""
        return SpecialText({self._tokens[i]: i for i in self.special_ids})

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that give every id the same meaning.

        A hash of all ids that stand for something, with their bytes: padding at the end of a table
        and the container the vocabulary came from do not matter.
        """
        digest = sha256()
        for token_id, piece in enumerate(self._pieces):
            if piece:
                digest.update(b"%d %d " % (token_id, len(piece)))
                digest.update(piece)
        return digest.hexdigest()


def _byte_level_backend(tokens: list[str], merges: list[str], pre: str) -> Backend:
    """Byte-level BPE with the pre-tokenizer GGUF calls `pre`."""
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {pre!r} is not supported; known: {', '.join(_PRE_TOKENIZERS)}"
        )
    # With ignore_merges a whole word that is in the vocabulary is taken without merging.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = _bpe(tokens, pairs, ignore_merges=pre == "llama-bpe")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        backend.pre_tokenizer = gpt2
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    else:
        pattern = Regex(_QWEN2_SPLIT if pre == "qwen2" else _LLAMA3_SPLIT)
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    if pre == "qwen2":  # which GGUF does not record, but the model was trained with
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(
    tokens: list[str], types: list[int], scores: list[float], *, space_prefix: bool
) -> Backend:
    """SentencePiece BPE, whose merges are implied by the scores of the pieces.

    SentencePiece joins the two neighbours that make the piece of highest score. So every way to
    cut a piece into two pieces is a merge, and the merges rank as the pieces they make do.
    """
    if len(scores) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens; "
            "the file is damaged"
        )
    ids = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    merges: list[tuple[str, str]] = []
    for piece, _ in sorted(ids.items(), key=lambda item: -scores[item[1]]):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        known = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(known, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    unknown = next((tokens[i] for i, type_ in enumerate(types) if type_ == _UNKNOWN), None)
    backend = _bpe(tokens, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if space_prefix else spaces
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if space_prefix else []),
        ]
    )
    return backend


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"the merges do not fit the vocabulary ({error}); damaged file") from error


def _add_tokens(
    backend: Backend, tokens: list[str], types: list[int], *, normalized_user_defined: bool
) -> None:
    """Tell the backend which tokens are matched in the text before anything is merged."""
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_CONTROL, _UNKNOWN)
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=normalized_user_defined)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == _USER_DEFINED
        ]
    )


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters of byte-level BPE and the bytes they stand for.

    Bytes that are printable in Latin-1 are written as themselves; the others, in order, as the
    characters from U+0100 on (Radford et al. 2019, GPT-2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _piece(token: str, type_: int, *, byte_level: bool) -> bytes:
    """The bytes of a vocabulary entry; those of a control token are its name."""
    if type_ in (_CONTROL, _UNKNOWN):
        return token.encode()
    if byte_level and type_ == _NORMAL:
        try:
            return bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:  # not written in the alphabet, so it was added as plain text
            return token.encode()
    if type_ == _BYTE:
        if not _is_byte(token):
            raise ModelError(f"byte token {token!r} is not written as <0xNN>; the file is damaged")
        return bytes([int(token[3:5], 16)])
    if type_ in (_NORMAL, _USER_DEFINED):
        return token.encode() if byte_level else token.replace("▁", " ").encode()
    return b""


def _is_byte(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) is not None


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise ModelError(f"the file has no {key}, so its tokenizer cannot be rebuilt")
    return metadata[key]


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object; download it again")
    return content


def _decoder_kind(decoder: dict[str, Any] | None, path: Path) -> tuple[bool, bool]:
    """Whether tokens are byte-level (else SentencePiece), and whether a leading space is dropped.

    Raises:
        ModelError: it is neither.
    """
    steps = (decoder or {}).get("decoders", [decoder or {}])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    if "ByteFallback" in kinds:
        return False, "Strip" in kinds
    raise ModelError(
        f"the tokenizer in {path} decodes by {kinds}; known: ByteLevel, ByteFallback with '▁'"
    )


def _named_id(backend: Backend, token: str | dict[str, Any] | None) -> int | None:
    """The id of a token that a configuration names, by its text or by an object with it."""
    name = token["content"] if isinstance(token, dict) else token
    return None if name is None else backend.token_to_id(name)


def _directory_chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja if there is one, else the (default) template of the configuration."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
