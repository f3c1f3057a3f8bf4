"""Packed heads: 5-bit weights, run natively, give what torch makes of the same packed weights."""

import pytest
import torch
from torch import Tensor

import heads
from packing import packed_model
from slipstream import native
from slipstream.check.tiny import tiny_model
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.kernels.packed import PackedPart, linear, unpack
from slipstream.kv.blocks import BlockManager
from slipstream.kv.cache import KVCache
from slipstream.loading.head_packing import pack_head
from slipstream.models.batch import Span, lay_out
from slipstream.models.heads import tensor_bytes
from slipstream.models.heads.base import packed_weights
from slipstream.models.heads.native import HeadRunner, NativeLinear

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native kernels here")

KINDS = pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "medusa"])
IDS = [3, 9, 9, 30, 1, 17]


@pytest.fixture(scope="module")
def target():
    return packed_model("llama")


@KINDS
def test_every_matrix_is_packed(target, kind):
    head = getattr(heads, kind)(target)
    before = tensor_bytes(head)
    pack_head(head)
    assert {parameter.dim() for parameter in head.parameters()} <= {1}
    assert tensor_bytes(head) < 0.25 * before, "6 bits of 32, and norms"


@pytest.mark.parametrize("kind", heads.FEATURE_HEADS)
def test_a_recorded_pass_is_the_plain_one(target, kind):
    """Two chunks over pages; torch follows the same definition, slowly and with dense attention."""
    head = heads.FEATURE_HEADS[kind](target)
    pack_head(head)
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(len(IDS), 64, generator=generator)
    expected = head(torch.tensor(IDS), features, torch.arange(len(IDS)), heads.dense)

    blocks = BlockManager(4, 4)
    blocks.allocate(0, [])
    blocks.reserve(0, 0, len(IDS))
    cache = KVCache.for_model(
        head.config, num_blocks=4, block_size=4, dtype=torch.float32, device="cpu"
    )
    runner = HeadRunner(head, cache)
    out, logits = [], []
    for start, stop in ((0, 4), (4, 6)):
        span = Span(0, start, IDS[start:stop], range(start, stop), 2)
        kept = runner.forward(lay_out([span], blocks, "cpu"), features[start:stop])
        out.append(kept[0])
        logits.append(kept[1])
    expected = expected[[2, 3, 4, 5]]  # the last two of each
    assert expected.std() > 0.5
    # Activations are rounded to 8 bits; a sum in another order may round one the other way.
    for found, wanted in ((out, expected), (logits, head.logits(expected))):
        assert (torch.cat(found) - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.parametrize("kind", heads.FEATURE_HEADS)
def test_chains_in_one_call_are_those_pass_by_pass(target, kind):
    """Three sequences, their first passes of other lengths, and one whose features are NaN."""
    head = heads.FEATURE_HEADS[kind](target)
    pack_head(head)
    vocabulary = DraftVocabulary(head.borrowed.vocab_size, head.target_ids)
    lengths, nums_tokens = [5, 1, 3], [4, 6, 2]
    features = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in nums_tokens]
    features[1][-1] = torch.nan

    def first_pass():
        blocks = BlockManager(12, 4)
        cache = KVCache.for_model(
            head.config, num_blocks=12, block_size=4, dtype=torch.float16, device="cpu"
        )
        spans = []
        for seq_id, (n, length) in enumerate(zip(nums_tokens, lengths, strict=True)):
            blocks.allocate(seq_id, [])
            blocks.reserve(seq_id, 0, n + length - 1)
            spans.append(Span(seq_id, 0, IDS[:n], range(n), 1))
        return HeadRunner(head, cache), blocks, lay_out(spans, blocks, "cpu")

    runner, blocks, batch = first_pass()
    expected: list[list[int]] = [[], [], []]
    kept, logits = runner.forward(batch, torch.cat(features))
    going = {0: kept[:1], 2: kept[2:]}
    scores = {0: logits[:1], 2: logits[2:]}
    while going:
        for seq_id in list(going):
            token = int(vocabulary.tokens(vocabulary.known(scores[seq_id]).numpy().argmax(-1))[0])
            expected[seq_id].append(token)
            key = nums_tokens[seq_id] + len(expected[seq_id]) - 1
            if len(expected[seq_id]) == lengths[seq_id]:
                del going[seq_id]
                continue
            span = Span(seq_id, key, [token], [key], 1)
            going[seq_id], scores[seq_id] = runner.forward(
                lay_out([span], blocks, "cpu"), going[seq_id]
            )

    runner, _, batch = first_pass()
    found = runner.chains(batch, torch.cat(features), lengths, vocabulary.columns)
    assert found == expected
    assert len(set(found[0])) > 1
    with pytest.raises(ValueError, match="shorter than its chain"):
        runner.chains(batch, torch.cat(features), [9, 1, 3], vocabulary.columns)
    with pytest.raises(ValueError, match="no embedding"):
        runner.chains(batch, torch.cat(features), lengths, vocabulary.columns + 500)


def test_a_linear_layer_by_itself(target):
    head = heads.eagle3(target)
    pack_head(head)
    assert isinstance(head.fc, NativeLinear)
    rows = torch.randn(3, 192, generator=torch.Generator().manual_seed(5))
    expected = linear(rows, head.fc.weight)
    torch.testing.assert_close(head.fc(rows), expected, atol=1e-4, rtol=1e-4)


def test_packed_numbers_are_the_weights(target):
    """Rows of stacked layers and columns of fused ones in their order, to within 5 bits."""
    plain, packed = (heads.eagle3(target) for _ in range(2))
    pack_head(packed)
    attention = packed.midlayer.self_attn
    halves = [
        torch.cat([unpacked(part) for part in half.parts]) for half in attention.qkv_proj.weight
    ]
    for weight, expected in (
        (torch.cat(halves, dim=1), plain.midlayer.self_attn.qkv_proj.weight),
        (unpacked(attention.o_proj.weight.parts[0]), plain.midlayer.self_attn.o_proj.weight),
    ):
        assert (weight - expected).abs().max() < expected.abs().max() / 30


def unpacked(part: PackedPart) -> Tensor:
    num_columns = part.data.numel() // part.num_rows * 32 // 24
    return unpack(part, torch.arange(part.num_rows), num_columns)


@KINDS
def test_what_does_not_fit_stays_as_it_is(kind):
    head = getattr(heads, kind)(tiny_model())  # 16 columns are half a group
    pack_head(head)
    assert packed_weights(head) == []
