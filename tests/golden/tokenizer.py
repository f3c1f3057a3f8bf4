"""Makes tokenizer.json: what independent tokenizers make of 1,000 varied texts.

The references are llama.cpp for byte-level vocabularies, with its vocabulary-only loading of the
same GGUF file, and the SentencePiece library for Gemma, given the pieces of the file. The
conversion from GGUF in transformers is no reference: it leaves out the digit splitting of SmolLM
and the NFC of Qwen.

For Qwen the text is normalised to NFC here, which llama.cpp does not do but the model's own
tokenizer does. Left out of the texts is what llama.cpp is known to do differently: "</s>", which it
takes for a control token in any vocabulary; and control characters SmolLM2 has no token for.

    pip install llama-cpp-python sentencepiece protobuf
    python tests/golden/tokenizer.py
"""

import ctypes
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

from slipstream.loading.gguf import read_metadata
from slipstream.loading.pull import cached

NUM_TEXTS = 1000
BYTE_LEVEL = ("smollm2-135m", "qwen2.5-coder-0.5b")
SENTENCEPIECE = "gemma3-270m"
NOT_IN_SMOLLM2 = dict.fromkeys((0x04, 0x06, 0x13, 0x14, 0x16, 0x1D))
FRAGMENTS = [
    # code
    *("def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) { a[i] = b[i]; }"),
    *(
        "#include <stdio.h>",
        "SELECT * FROM t WHERE a = 'b';",
        "\t\tif err != nil {\n\t\t\treturn\n",
    ),
    *("a_b", "CamelCase", "snake_case", "://", "\\n", "$%&", "!!!", "???", "...", "====", "-----"),
    *("https://example.org/a?b=c&d=1", "@user", "#tag", "0x1F"),
    # white space, and what is nearly that
    *(" ", "  ", "    ", "       ", "\t", "\n", "\n\n\n", "\r\n", "\r", "\x0b\x0c", "\x85", "\xa0"),
    *("\u2003", "\u3000", "\u2028", "\u200b", "\u200d", "\ufeff", "\x00", "\x1f", "\x7f"),
    # scripts
    *(
        "中文分词",
        "日本語のテキスト",
        "한국어 문장",
        "ไทย",
        "العربية",
        "עברית",
        "हिन्दी",
        "Ελληνικά",
    ),
    *("Русский текст", "ქართული", "አማርኛ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𐍈", "naïve", "café", "Straße", "İstanbul"),
    # marks that combine, and characters with several forms
    *("e\u0301", "n\u0303", "a\u0308\u0323", "A\u030a", "\u212b", "ﬁ", "Ⅷ", "①", "½", "²"),
    *("\u1112\u1161\u11ab", "\u0915\u094d\u0937", "\u1e9b\u0323"),
    # emoji of several code points
    *("👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "❤️", "🤖", "🧑‍💻"),
    # numbers
    *("0", "1", "42", "123", "1234567", "3.14159", "1,000,000", "١٢٣", "४५", "１２"),
    # contractions and prose
    *("I'm", "don't", "we'LL", "they'VE", "it’s", "'s", "'T", " 'd", "ſ'ſ", "Hello", " world"),
    *(" the", " multiple", "The quick brown fox", "…", "—", "“quoted”"),
    # text that looks like a token
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|file_sep|>", "<tool_call>", "</tool_call>"),
    *("<bos>", "<eos>", "<start_of_turn>", "<unused5>", "<h1>", "<0x0A>", "[PAD151700]", "<unk>"),
    *("<pad>", "<|im_end", "|>", "<|", "▁", "▁▁▁the", "Ġ", "Ċ"),
]


def main() -> None:
    texts = make_texts()
    ids = {}
    for alias in BYTE_LEVEL:
        tokenize = llama_cpp_tokenizer(model_path(alias))
        form = "NFC" if alias.startswith("qwen") else None
        ids[alias] = [
            tokenize(unicodedata.normalize(form, text) if form else text) for text in texts
        ]
    tokenize = sentencepiece_tokenizer(model_path(SENTENCEPIECE))
    ids[SENTENCEPIECE] = [tokenize(text) for text in texts]
    golden = {
        "texts": texts,
        "crc32_of_ids": {alias: [digest(i) for i in per_text] for alias, per_text in ids.items()},
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(golden, indent=0) + "\n")


def digest(ids: list[int]) -> int:
    return crc32(json.dumps(ids).encode())


def make_texts() -> list[str]:
    """Mostly joined fragments; some random bytes and some random characters."""
    rng = random.Random(20)
    # Those of an old Unicode version, on whose normal form all libraries agree.
    assigned = [c for c in map(chr, range(0x3000)) if unicodedata.ucd_3_2_0.category(c) != "Cn"]
    texts = []
    for _ in range(NUM_TEXTS):
        kind = rng.random()
        if kind < 0.1:
            text = rng.randbytes(rng.randrange(40)).decode("utf-8", "replace")
        elif kind < 0.2:
            text = "".join(rng.choices(assigned, k=rng.randrange(30)))
        else:
            fragments = rng.choices(FRAGMENTS, k=rng.randrange(1, 9))
            text = "".join(f + " " * (rng.random() < 0.3) for f in fragments)
        texts.append(text.translate(NOT_IN_SMOLLM2))
    return texts


def model_path(alias: str) -> Path:
    path = cached(alias)
    if path is None:
        raise SystemExit(f"{alias} is not in the cache; run: slipstream pull {alias}")
    return path


def llama_cpp_tokenizer(path: Path) -> Callable[[str], list[int]]:
    import llama_cpp

    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)

    def tokenize(text: str) -> list[int]:
        data = text.encode()
        buffer = (ctypes.c_int32 * (len(data) + 1))()
        num_tokens = llama_cpp.llama_tokenize(
            vocab, data, len(data), buffer, len(buffer), False, False
        )
        assert num_tokens >= 0, "more tokens than bytes"
        return list(buffer[:num_tokens])

    return tokenize


def sentencepiece_tokenizer(path: Path) -> Callable[[str], list[int]]:
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    metadata = read_metadata(path)
    tokens, scores, types = (
        metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")
    )
    model = ModelProto()
    for token, score, type_ in zip(tokens, scores, types, strict=True):
        piece = model.pieces.add()
        # The conversion to GGUF wrote the spaces of user-defined pieces (type 4) as spaces.
        piece.piece = token.replace(" ", "▁") if type_ == 4 else token
        piece.score, piece.type = score, type_
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    for name, key in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        setattr(model.trainer_spec, f"{name}_id", metadata[f"tokenizer.ggml.{key}_token_id"])
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.SerializeToString())
    return processor.encode


if __name__ == "__main__":
    main()
