"""Draft heads on disk: public names and shapes, what is missing or wrong, and writing them back."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import heads
from slipstream.check.tiny import tiny_config, tiny_model
from slipstream.core.errors import ModelError
from slipstream.loading.directory import ModelDirectory
from slipstream.loading.head_files import write_head, write_speculators
from slipstream.loading.heads import load_head
from slipstream.loading.weights import load_model, parameter_slots
from slipstream.train.start import new_head

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
ATTENTION = {
    "self_attn.q_proj.weight": (32, 16),
    "self_attn.k_proj.weight": (16, 16),
    "self_attn.v_proj.weight": (16, 16),
    "self_attn.o_proj.weight": (16, 32),
}
MLP = {
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}
EAGLE = {
    "embed_tokens.weight": (32, 16),
    "fc.weight": (16, 32),
    "fc.bias": (16,),
    "layers.0.post_attention_layernorm.weight": (16,),
    **{f"layers.0.{name}": shape for name, shape in (ATTENTION | MLP).items()},
}
EAGLE3 = {
    "fc.weight": (16, 48),
    "midlayer.self_attn.q_proj.weight": (32, 32),
    "midlayer.self_attn.k_proj.weight": (16, 32),
    "midlayer.self_attn.v_proj.weight": (16, 32),
    "midlayer.self_attn.o_proj.weight": (16, 32),
    "midlayer.hidden_norm.weight": (16,),
    "midlayer.input_layernorm.weight": (16,),
    "midlayer.post_attention_layernorm.weight": (16,),
    **{f"midlayer.{name}": shape for name, shape in MLP.items()},
    "norm.weight": (16,),
    "lm_head.weight": (19, 16),
}
MEDUSA = {
    f"{head}.{name}": shape
    for head in range(3)
    for name, shape in {
        "0.linear.weight": (16, 16),
        "0.linear.bias": (16,),
        "1.weight": (32, 16),
    }.items()
}
MTP = {
    "embed_tokens.weight": (32, 16),
    "enorm.weight": (16,),
    "hnorm.weight": (16,),
    "eh_proj.weight": (16, 32),
    "shared_head.norm.weight": (16,),
    "shared_head.head.weight": (32, 16),
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    **ATTENTION,
    **MLP,
}
# Offsets of heads.TARGET_IDS.
D2T = heads.TARGET_IDS - torch.arange(19)
T2D = torch.isin(torch.arange(32), heads.TARGET_IDS)


@pytest.fixture(scope="module")
def target():
    return tiny_model()


def tensors_of(shapes) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def published(method: str, folder, *, without=(), changed=None, **config):
    """A directory as the authors of a method publish it."""
    files = {"medusa": "medusa_lm_head.safetensors"}
    shapes = {"eagle": EAGLE, "eagle3": EAGLE3, "medusa": MEDUSA}
    raw = CONFIG
    if method == "mtp":
        model = dict(parameter_slots(tiny_model(dtype=torch.float32)))
        tensors = model | {f"model.layers.3.{k}": each for k, each in tensors_of(MTP).items()}
        raw = CONFIG | {
            "num_hidden_layers": 3,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": True,
        }
    else:
        tensors = tensors_of(shapes[method])
    if method == "eagle3":
        raw = CONFIG | {"draft_vocab_size": 19, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        tensors |= {"d2t": D2T, "t2d": T2D}
    if method == "medusa":
        raw = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
    tensors |= changed or {}
    kept = {name: each.contiguous() for name, each in tensors.items() if name not in without}
    save_file(kept, folder / files.get(method, "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(raw | config))
    return folder


def held(head) -> dict[str, Tensor]:
    return dict(parameter_slots(head))


METHODS = pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mtp"])


@METHODS
def test_public_names_are_read_and_written(tmp_path, target, method):
    """Every tensor arrives, and comes back under its name."""
    (tmp_path / "read").mkdir()
    head = load_head(method, published(method, tmp_path / "read"), target)
    assert head.state_dict()
    assert next(head.parameters()).dtype == torch.float64
    write_head(head, tmp_path / "written", target.config)
    file = "medusa_lm_head.safetensors" if method == "medusa" else "model.safetensors"
    given, back = load_file(tmp_path / "read" / file), load_file(tmp_path / "written" / file)
    if method == "mtp":
        given = {name: each for name, each in given.items() if name.startswith("model.layers.3.")}
    assert given.keys() == back.keys()
    for name, tensor in given.items():
        assert torch.equal(back[name].to(tensor.dtype), tensor), name

    again = load_head(method, tmp_path / "written", target)
    for (name, first), (_, second) in zip(held(head).items(), held(again).items(), strict=True):
        assert torch.equal(first, second), name


@METHODS
def test_what_is_missing_is_named(tmp_path, target, method):
    key = {
        "eagle": "fc.bias",
        "eagle3": "midlayer.hidden_norm.weight",
        "medusa": "2.1.weight",
        "mtp": "model.layers.3.hnorm.weight",
    }[method]
    where = published(method, tmp_path, without=[key])
    with pytest.raises(ModelError, match=rf"lacks.*{key.removeprefix('model.layers.3.')}"):
        load_head(method, where, target)


@METHODS
def test_what_is_surplus_or_misshapen_is_named(tmp_path, target, method):
    prefix = "model.layers.3." if method == "mtp" else ""
    surplus = published(method, tmp_path, changed={f"{prefix}rogue.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"rogue\.weight"):
        load_head(method, surplus, target)
    name = {"eagle": "fc.weight", "eagle3": "fc.weight", "medusa": "1.0.linear.weight"}
    key = name.get(method, "eh_proj.weight")
    published(method, tmp_path, changed={f"{prefix}{key}": torch.zeros(16, 15)})
    with pytest.raises(ModelError, match=rf"{key} has shape \[16, 15\]"):
        load_head(method, tmp_path, target)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("eagle", {"config": {"hidden_size": 24}}, "hidden_size is 24, the target needs 16"),
        ("eagle", {"config": {"vocab_size": 31}}, "vocab_size is 31, the target needs 32"),
        ("eagle3", {"without": ["d2t"]}, "lacks d2t"),
        ("eagle3", {"without": ["lm_head.weight"]}, r"lacks lm_head\.weight"),
        ("eagle3", {"changed": {"d2t": heads.TARGET_IDS}}, "must hold offsets"),
        ("eagle3", {"changed": {"t2d": ~T2D}}, "d2t and t2d disagree"),
        ("eagle3", {"config": {"norm_output": True}}, "norm_output True"),
        ("eagle3", {"config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, r"\[0, 1, 3\]"),
        ("medusa", {"without": ["0.0.linear.weight"]}, r"lacks.* 0\.0\.linear\.weight"),
        ("mtp", {"config": {"num_nextn_predict_layers": 2}}, "is 2, expected 1"),
        ("mtp", {"config": {"model_type": "gemma3"}}, "'gemma3'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, target, method, given, message):
    given = dict(given)
    config = given.pop("config", {})
    if config.get("model_type") == "gemma3":
        config |= {"hidden_act": "gelu_pytorch_tanh"}
    with pytest.raises(ModelError, match=message):
        load_head(method, published(method, tmp_path, **given, **config), target)


def test_files_that_are_not_there_or_not_whole(tmp_path, target):
    published("eagle", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"none of model\.safetensors"):
        load_head("eagle", tmp_path, target)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is not a file of tensors"):
        load_head("eagle", tmp_path, target)


def test_pickled_heads(tmp_path, target):
    """As older heads are published: EAGLE's in pytorch_model.bin, Medusa's in .pt."""
    for method, old in (("eagle", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")):
        folder = tmp_path / method
        folder.mkdir()
        published(method, folder)
        (file,) = folder.glob("*.safetensors")
        expected = held(load_head(method, folder, target))
        torch.save(load_file(file), folder / old)
        file.unlink()
        for name, tensor in held(load_head(method, folder, target)).items():
            assert torch.equal(tensor, expected[name])


def test_draft_tokens_are_where_the_offsets_lead(tmp_path, target):
    head = load_head("eagle3", published("eagle3", tmp_path), target)
    assert head.target_ids.tolist() == heads.TARGET_IDS.tolist()
    assert head.taps == (0, 1, 2)


def test_a_medusa_with_the_targets_output_head(tmp_path, target):
    own = [name for name in MEDUSA if name.endswith("1.weight")]
    where = published("medusa", tmp_path, without=own, original_lm_head=True)
    head = load_head("medusa", where, target)
    states = torch.ones(1, 16, dtype=torch.float64)
    expected = target.logits(head.heads[1](states))
    torch.testing.assert_close(head.logits(states, 2)[1], expected)


@METHODS
def test_a_draft_vocabulary_borrows_rows_of_the_targets_output_head(tmp_path, target, method):
    """d2t alone is stored; what is drafted has the logits of the whole, the rest is impossible."""
    ids = heads.TARGET_IDS
    head = new_head(method, target, ids, num_heads=2, typical_size=1.0)
    write_head(head, tmp_path, target.config)
    (file,) = tmp_path.glob("*.safetensors")
    stored = {name.rpartition(".")[2]: each for name, each in load_file(file).items()}
    assert torch.equal(stored["d2t"], D2T) and torch.equal(stored["t2d"], T2D)
    assert not any("lm_head" in name for name in load_file(file))

    again = load_head(method, tmp_path, target)
    assert torch.equal(again.target_ids, ids)
    assert torch.equal(again.lm_head.weight, target.output_rows(ids))
    states = torch.randn(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if method == "medusa":
        found, final = again.logits(states, 2)[1], again.heads[1](states)
    else:
        found, final = again.logits(states), again.final(states)
    torch.testing.assert_close(found, target.logits(final)[:, ids])


def test_a_tied_eagle3_head_must_say_what_it_drafts(tmp_path, target):
    where = published("eagle3", tmp_path, without=["lm_head.weight", "d2t"], original_lm_head=True)
    with pytest.raises(ModelError, match="lacks d2t"):
        load_head("eagle3", where, target)


def test_the_speculators_layout(tmp_path, target):
    """Its names and fields; what is computed is the same."""
    head = heads.eagle3(target, norm_before_residual=True)
    write_speculators(head, tmp_path, target.config, "some/model")
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {name.replace("midlayer", "layers.0") for name in EAGLE3} | {"d2t", "t2d"}
    assert tensors.keys() == expected
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["Eagle3Speculator"]
    assert raw["norm_before_residual"] is True
    assert raw["draft_vocab_size"] == 19
    assert raw["transformer_layer_config"]["hidden_size"] == 16
    speculators = raw["speculators_config"]
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 5
    assert speculators["verifier"] == {
        "name_or_path": "some/model",
        "architectures": ["LlamaForCausalLM"],
    }
    again = load_head("eagle3", tmp_path, target)
    tokens = [3, 1, 4, 1, 5]
    assert torch.equal(
        heads.head_logits(again, target, tokens, [9]), heads.head_logits(head, target, tokens, [9])
    )


def test_a_model_with_an_mtp_module_loads_without_it(tmp_path):
    where = ModelDirectory(published("mtp", tmp_path))
    model = load_model(where.config, where.tensors, dtype=torch.float32)
    assert model.config.num_layers == 3


def test_biases_of_attention_are_found(tmp_path, target):
    extra = {
        f"layers.0.self_attn.{part}_proj.bias": torch.ones(size)
        for part, size in (("q", 32), ("k", 16), ("v", 16))
    }
    head = load_head("eagle", published("eagle", tmp_path, changed=extra), target)
    assert head.layers[0].self_attn.qkv_proj.bias is not None


def test_factors_of_a_gguf_have_no_name(tmp_path, target):
    config = replace(tiny_config(), rope_factors=(1.0,) * 4)
    with pytest.raises(ModelError, match="rotary factors"):
        write_head(heads.mtp(target), tmp_path, config)
