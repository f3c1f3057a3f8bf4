"""Tokenizers rebuilt from GGUF metadata and Hugging Face directories: ids, bytes, refusals.

Small vocabularies are made here. Real ones (marker `weights`) are held to golden/tokenizer.json,
which independent tokenizers made.
"""

import json
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from slipstream.core.errors import ModelError, RequestError
from slipstream.loading.gguf import read_metadata
from slipstream.loading.pull import cached
from slipstream.loading.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tokenizer.json").read_text())
PRE_TOKENIZERS = ("gpt-2", "smollm", "qwen2", "llama-bpe")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level_metadata(
    pre: str = "gpt-2",
    merges: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
    added: tuple[tuple[str, int], ...] = (("<end>", CONTROL), ("<call>", USER_DEFINED)),
    **keys: Any,
) -> dict[str, Any]:
    """256 single bytes (ids 0 to 255 in the order of the alphabet), then merges, then `added`."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [merge.replace(" ", "") for merge in merges] + list(whole)
    types = [NORMAL] * len(tokens) + [type_ for _, type_ in added]
    tokens += [text for text, _ in added]
    keys = {"model": "gpt2", "pre": pre, "merges": list(merges), **keys}
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def sentencepiece_metadata(
    pieces: list[str], *, user_defined: tuple[str, ...] = (), **keys: Any
) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 bytes, then `pieces` by falling score, then `user_defined`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))]
    scores += [-1000.0] * len(user_defined)
    types += [NORMAL] * len(pieces) + [USER_DEFINED] * len(user_defined)
    keys = {"model": "llama", "scores": scores, "bos_token_id": 1, "eos_token_id": 2, **keys}
    return {
        "tokenizer.ggml.tokens": [*tokens, *pieces, *user_defined],
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(metadata)


def spelled(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


# Byte-level ----------------------------------------------------------------------------------


def test_merges_apply_in_their_order() -> None:
    merges = ("b c", "a b", "a bc")
    assert spelled(build(byte_level_metadata(merges=merges)), "abcab") == ["abc", "ab"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_pre_tokenizers_split_digits_each_in_its_way(pre: str, expected: list[str]) -> None:
    metadata = byte_level_metadata(pre, merges=("1 2", "12 3", "123 4"))
    assert spelled(build(metadata), "1234") == expected


@pytest.mark.parametrize(("pre", "expected"), [("gpt-2", 3), ("qwen2", 2), ("llama-bpe", 2)])
def test_newline_after_punctuation_joins_it_except_in_gpt2(pre: str, expected: int) -> None:
    newline = "\u010a"  # how the alphabet writes it
    metadata = byte_level_metadata(pre, merges=(f"; {newline}", f"{newline} a"))
    assert len(build(metadata).encode(";\na")) == expected


def test_only_qwen_normalises_to_composed_characters() -> None:
    decomposed = "e\u0301"
    for pre in PRE_TOKENIZERS:
        tokenizer = build(byte_level_metadata(pre))
        expected = "\u00e9" if pre == "qwen2" else decomposed
        assert tokenizer.decode(tokenizer.encode(decomposed)) == expected


def test_llama_takes_a_whole_word_without_merging() -> None:
    for pre, expected in (("llama-bpe", ["word"]), ("gpt-2", list("word"))):
        assert spelled(build(byte_level_metadata(pre, whole=("word",))), "word") == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text())
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(pre: str, text: str) -> None:
    tokenizer = small_byte_level(pre)
    ids = tokenizer.encode(text)
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    # The Unicode tables of Python and of the normaliser differ for characters of later versions.
    if pre != "qwen2" or all(unicodedata.ucd_3_2_0.category(c) != "Cn" for c in text):
        assert tokenizer.decode(ids) == expected
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)


@cache
def small_byte_level(pre: str) -> Tokenizer:
    return build(byte_level_metadata(pre, merges=("t h", "th e", "\u0120 the")))


def test_bytes_that_are_no_text_decode_to_replacement_characters() -> None:
    tokenizer = small_byte_level("gpt-2")
    by_byte = {tokenizer.token_bytes(i): i for i in range(256)}
    assert len(by_byte) == 256
    data = b"a\xe4\xbd\xffb\xf0\x9f"
    ids = [by_byte[bytes([byte])] for byte in data]
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_an_entry_outside_the_byte_alphabet_stands_for_its_own_text() -> None:
    tokenizer = build(byte_level_metadata(whole=("中",)))
    assert tokenizer.token_bytes(256) == "中".encode()


# Control tokens ------------------------------------------------------------------------------


def test_text_that_looks_like_a_control_token_is_ordinary_unless_trusted() -> None:
    tokenizer = build(byte_level_metadata())
    end, call = 256, 257
    text = "a<end><call>"
    assert end not in tokenizer.encode(text)
    assert call in tokenizer.encode(text)  # user-defined: a word, not a command
    assert tokenizer.encode(text, parse_special=True) == [*tokenizer.encode("a"), end, call]
    assert tokenizer.encode(text) == [*tokenizer.encode("a<end>"), call]  # the setting is off


def test_control_tokens_stand_for_no_text_unless_asked() -> None:
    tokenizer = build(byte_level_metadata())
    ids = tokenizer.encode("a<end>b", parse_special=True)
    assert tokenizer.token_bytes(256) == b""
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<end>b"


def test_ids_without_a_token_stand_for_nothing() -> None:
    tokenizer = build(byte_level_metadata(added=(("[PAD256]", UNUSED),)))
    assert tokenizer.vocab_size == 257
    assert [tokenizer.token_bytes(i) for i in (256, 257, 10**9, -1)] == [b""] * 4


def test_generation_ends_at_all_the_tokens_named_or_known_to_end_it() -> None:
    added = tuple(
        (text, CONTROL) for text in ("<end>", "<turn>", "<message>", "<|im_end|>", "<other>")
    )
    metadata = byte_level_metadata(
        added=added, eos_token_id=256, eot_token_id=257, eom_token_id=258
    )
    tokenizer = build(metadata)
    assert tokenizer.eos_ids == {256, 257, 258, 259}
    assert tokenizer.eos_id == 256
    assert tokenizer.special_ids == {256, 257, 258, 259, 260}


def test_a_name_known_to_end_text_does_not_when_it_is_an_ordinary_token() -> None:
    assert build(byte_level_metadata(added=(("<|im_end|>", NORMAL),))).eos_ids == frozenset()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (byte_level_metadata("gpt-2", bos_token_id=256), False),
        (byte_level_metadata("llama-bpe", bos_token_id=256), True),
        (byte_level_metadata("llama-bpe", bos_token_id=256, add_bos_token=False), False),
        (byte_level_metadata("gpt-2", bos_token_id=256, add_bos_token=True), True),
        (byte_level_metadata("gpt-2", add_bos_token=True), False),
        (sentencepiece_metadata(["a"]), True),
        (sentencepiece_metadata(["a"], add_bos_token=False), False),
    ],
)
def test_whether_the_beginning_token_is_added(metadata: dict[str, Any], expected: bool) -> None:
    tokenizer = build(metadata)
    assert tokenizer.add_bos is expected
    assert (tokenizer.encode("a")[0] == tokenizer.bos_id) is expected
    if tokenizer.bos_id is not None:
        assert tokenizer.encode("a", add_bos=True)[0] == tokenizer.bos_id
        assert tokenizer.encode("a", add_bos=False)[0] != tokenizer.bos_id


# SentencePiece -------------------------------------------------------------------------------


def merged_by_score(text: str, pieces: list[str]) -> list[str]:
    """SentencePiece's rule: join the neighbours that make the best piece, leftmost first."""
    symbols = list(text)
    while True:
        joined = [left + right for left, right in pairwise(symbols)]
        known = [pieces.index(piece) for piece in joined if piece in pieces]
        if not known:
            return symbols
        i = joined.index(pieces[min(known)])
        symbols[i : i + 2] = [joined[i]]


@given(
    pieces=st.lists(st.text("abc", min_size=2, max_size=6), unique=True, max_size=12),
    text=st.text("abc", max_size=25),
)
def test_regenerated_merges_are_those_of_sentencepiece(pieces: list[str], text: str) -> None:
    pieces = ["a", "b", "c", *pieces]
    tokenizer = build(sentencepiece_metadata(pieces, add_space_prefix=False))
    assert spelled(tokenizer, text, add_bos=False) == merged_by_score(text, pieces)


@pytest.mark.parametrize("space_prefix", [True, False])
@given(text=st.text("ab é▁\n"))
def test_sentencepiece_text_survives_but_for_its_space_symbol(
    space_prefix: bool, text: str
) -> None:
    tokenizer = small_sentencepiece(space_prefix)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


@cache
def small_sentencepiece(space_prefix: bool) -> Tokenizer:
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    return build(sentencepiece_metadata(pieces, add_space_prefix=space_prefix))


def test_a_space_prefix_is_added_and_taken_away() -> None:
    tokenizer = small_sentencepiece(True)
    assert spelled(tokenizer, "ab a") == ["<s>", "▁ab", "▁a"]
    assert tokenizer.strips_leading_space
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"
    assert spelled(small_sentencepiece(False), "ab a") == ["<s>", "ab", "▁a"]


def test_characters_without_a_piece_become_bytes() -> None:
    tokenizer = small_sentencepiece(False)
    assert spelled(tokenizer, "é", add_bos=False) == ["<0xC3>", "<0xA9>"]
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.token_bytes(tokenizer.encode(" ", add_bos=False)[0]) == b" "


def test_names_of_bytes_and_control_tokens_are_ordinary_text() -> None:
    pieces = [*"<s>0xA", "<s", "0x", "<0x", "<0xA", "<0xA0"]
    tokenizer = build(sentencepiece_metadata(pieces, add_space_prefix=False))
    assert spelled(tokenizer, "<s><0x0A>", add_bos=False) == ["<s", ">", "<0x", "0", "A", ">"]


def test_user_defined_pieces_are_found_first_the_longest_first_in_rewritten_spaces() -> None:
    metadata = sentencepiece_metadata(
        ["▁", "a", "▁a"], user_defined=("  ", "   "), add_space_prefix=False
    )
    tokenizer = build(metadata)
    assert spelled(tokenizer, "   a  a a", add_bos=False) == ["   ", "a", "  ", "a", "▁a"]
    assert spelled(tokenizer, "▁ a", add_bos=False) == ["  ", "a"]
    assert tokenizer.decode(tokenizer.encode("   a  a a")) == "   a  a a"


# Comparing vocabularies ----------------------------------------------------------------------


def test_fingerprint_sees_meaning_and_not_padding() -> None:
    base = build(byte_level_metadata(added=(("<end>", CONTROL), ("x1", USER_DEFINED))))
    padded = build(
        byte_level_metadata(
            added=(("<end>", CONTROL), ("x1", USER_DEFINED), ("[PAD258]", UNUSED)),
        )
    )
    swapped = build(byte_level_metadata(added=(("x1", USER_DEFINED), ("<end>", CONTROL))))
    renamed = build(byte_level_metadata(added=(("<stop>", CONTROL), ("x1", USER_DEFINED))))
    assert base.fingerprint == padded.fingerprint
    assert len({base.fingerprint, swapped.fingerprint, renamed.fingerprint}) == 3


# Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level_metadata("tekken"), r"'tekken'.*gpt-2, smollm, qwen2, llama-bpe"),
        (byte_level_metadata(model="bert"), r"'bert'.*'gpt2', 'llama'"),
        (byte_level_metadata(token_type=[1]), "1 entries for 258 tokens"),
        (byte_level_metadata() | {"tokenizer.ggml.merges": ["x yy"]}, "merges"),
        (byte_level_metadata() | {"tokenizer.ggml.merges": ["x"]}, "merges"),
        (byte_level_metadata(eos_token_id=258), "258 is outside"),
        (byte_level_metadata(bos_token_id=-1), "-1 is outside"),
        (sentencepiece_metadata(["a"], scores=[0.0]), "1 entries for 260 tokens"),
        (byte_level_metadata(added=(("A", BYTE),)), "'A' is not written as <0xNN>"),
        ({}, "no tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "gpt2"}, "no tokenizer.ggml.tokens"),
    ],
)
def test_refuses_what_it_cannot_rebuild(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(metadata)


def test_refuses_text_that_is_not_unicode() -> None:
    with pytest.raises(RequestError, match=r"'\\ud800' at character 1"):
        small_byte_level("gpt-2").encode("a\ud800")


def test_refuses_to_add_a_beginning_token_that_does_not_exist() -> None:
    with pytest.raises(RequestError, match="no beginning-of-sequence"):
        small_byte_level("gpt-2").encode("a", add_bos=True)


# Hugging Face directories --------------------------------------------------------------------


def write_directory(
    path: Path, *, post_processor: Any = None, decoder: Any = None, **files: dict[str, Any]
) -> Path:
    """A byte-level tokenizer.json with <bos> = 256 and <end> = 257, and JSON files beside it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>"), AddedToken("<end>")])
    backend.add_tokens([AddedToken("<call>", normalized=False)])
    if post_processor is not None:
        backend.post_processor = post_processor
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_directory_is_read_with_the_files_beside_it(tmp_path: Path) -> None:
    write_directory(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<bos>"},
            "eos_token": "<end>",
            "chat_template": "in the configuration",
        },
        config={"eos_token_id": 0},
        generation_config={"eos_token_id": [257, 65]},
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert tokenizer.eos_ids == {257, 65, 0}
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.vocab_size == 259
    assert not tokenizer.add_bos
    assert tokenizer.chat_template == "in the configuration"
    assert 257 not in tokenizer.encode("é<end>")
    assert tokenizer.encode("<end><call>", parse_special=True) == [257, 258]
    assert tokenizer.decode(tokenizer.encode("é <call>")) == "é <call>"


def test_a_directory_and_a_gguf_file_of_one_model_have_one_fingerprint(tmp_path: Path) -> None:
    added = (("<bos>", CONTROL), ("<end>", CONTROL), ("<call>", USER_DEFINED))
    from_gguf = build(byte_level_metadata(added=added))
    from_directory = Tokenizer.from_directory(write_directory(tmp_path))
    assert from_directory.fingerprint == from_gguf.fingerprint


def test_without_a_setting_the_post_processor_says_whether_to_add_the_beginning(
    tmp_path: Path,
) -> None:
    adds_bos = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    write_directory(tmp_path, post_processor=adds_bos, special_tokens_map={"bos_token": "<bos>"})
    assert Tokenizer.from_directory(tmp_path).encode("!") == [256, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert Tokenizer.from_directory(tmp_path).encode("!") == [0]


def test_a_template_file_wins_and_of_several_templates_the_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "A"}, {"name": "default", "template": "B"}]
    write_directory(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_directory(tmp_path).chat_template == "B"
    (tmp_path / "chat_template.jinja").write_text("C")
    assert Tokenizer.from_directory(tmp_path).chat_template == "C"


def test_a_sentencepiece_directory_keeps_bytes_and_strips_its_prefix(tmp_path: Path) -> None:
    pieces = ["▁", "a", "▁a"]
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    vocab |= {piece: 257 + i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.token_bytes(1 + 0xC3) == b"\xc3"
    assert tokenizer.token_bytes(259) == b" a"
    assert tokenizer.decode(tokenizer.encode("a é")) == "a é"


def test_refuses_a_directory_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    write_directory(tmp_path, decoder=decoders.WordPiece())
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"truncated')
    with pytest.raises(ModelError, match="not valid JSON"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)


# Real vocabularies ---------------------------------------------------------------------------


@cache
def real(alias: str) -> Tokenizer:
    path = cached(alias)
    if path is None or path.is_dir():
        pytest.skip(f"no GGUF file of {alias} in the cache; run: slipstream pull {alias}")
    return build(read_metadata(path))


@pytest.mark.weights
@pytest.mark.parametrize("alias", GOLDEN["crc32_of_ids"])
def test_ids_are_those_of_independent_tokenizers(alias: str) -> None:
    tokenizer = real(alias)
    different = [
        text
        for text, expected in zip(GOLDEN["texts"], GOLDEN["crc32_of_ids"][alias], strict=True)
        if crc32(json.dumps(tokenizer.encode(text, add_bos=False)).encode()) != expected
    ]
    assert different == []


@pytest.mark.weights
def test_smollm2_gives_the_published_ids() -> None:
    tokenizer = real("smollm2-135m")
    assert tokenizer.encode("Hello, we can use") == [19556, 28, 392, 416, 722]
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]


@pytest.mark.weights
@pytest.mark.parametrize("alias", GOLDEN["crc32_of_ids"])
def test_real_texts_survive_encoding(alias: str) -> None:
    tokenizer = real(alias)
    for text in GOLDEN["texts"]:
        expected = unicodedata.normalize("NFC", text) if alias.startswith("qwen") else text
        if alias.startswith("gemma"):
            expected = text.replace("▁", " ")
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == expected
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == expected


@pytest.mark.weights
@pytest.mark.parametrize(
    ("alias", "eos", "add_bos"),
    [
        ("smollm2-135m", {"<|im_end|>", "<|endoftext|>"}, False),
        ("qwen2.5-coder-0.5b", {"<|im_end|>", "<|endoftext|>"}, False),
        ("gemma3-270m", {"<eos>", "<end_of_turn>"}, True),
    ],
)
def test_real_models_end_and_begin_as_they_should(alias: str, eos: set[str], add_bos: bool) -> None:
    tokenizer = real(alias)
    assert {tokenizer.token_text(i) for i in tokenizer.eos_ids} == eos
    assert tokenizer.add_bos is add_bos


@pytest.mark.weights
def test_draft_and_target_of_one_family_have_one_fingerprint() -> None:
    draft, target = real("qwen2.5-coder-0.5b"), real("qwen2.5-coder-1.5b")
    assert draft.fingerprint == target.fingerprint
    assert draft.fingerprint != real("smollm2-135m").fingerprint
