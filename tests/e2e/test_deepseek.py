"""DeepSeek-V3 in the engine: a latent for keys and values, experts, its own MTP module."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import heads
from engines import EOS, TREE, answers, engine_for, requests, run
from slipstream import reference
from slipstream.build import build_engine
from slipstream.check.tiny import loaded, tiny_model
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ModelError
from slipstream.core.speculative import SpeculativeConfig
from slipstream.drafters.synthetic import SyntheticDrafter
from slipstream.loading.directory import ModelDirectory, read_config
from slipstream.loading.head_files import write_head
from slipstream.loading.heads import load_head
from slipstream.loading.weights import load_model, parameter_slots

BYTES_PER_TOKEN = 3 * 14 * 8  # one latent and rotary key, in each of three layers
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 9,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
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
    "self_attn.q_a_proj.weight": (12, 16),
    "self_attn.q_a_layernorm.weight": (12,),
    "self_attn.q_b_proj.weight": (40, 12),
    "self_attn.kv_a_proj_with_mqa.weight": (14, 16),
    "self_attn.kv_a_layernorm.weight": (10,),
    "self_attn.kv_b_proj.weight": (44, 10),
    "self_attn.o_proj.weight": (16, 20),
    "mlp.gate.weight": (8, 16),
    "mlp.gate.e_score_correction_bias": (8,),
    **{
        f"mlp.{where}.{name}_proj.weight": (16, 9) if name == "down" else (9, 16)
        for where in (*(f"experts.{e}" for e in range(8)), "shared_experts")
        for name in ("gate", "up", "down")
    },
}


@pytest.fixture(scope="module")
def target():
    return tiny_model("deepseek_v3")


@pytest.fixture(scope="module")
def plain(target):
    return [
        reference.generate(target, prompt, params, stop_ids=EOS, num_tokens=params.max_tokens)
        for prompt, params in requests(9)
    ]


@pytest.fixture(scope="module")
def module() -> dict[str, Tensor]:
    """The tensors of an MTP module."""
    generator = torch.Generator().manual_seed(6)
    tensors = {}
    for name, shape in MTP.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        centre = 1.0 if "norm" in name else 0.0
        tensors[name] = centre + (0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5) * noise
    return tensors


@pytest.fixture(scope="module")
def checkpoint(target, module, tmp_path_factory):
    """A model's directory with its MTP module, as layer 3."""
    path = tmp_path_factory.mktemp("deepseek")
    tensors = {name: slot.clone() for name, slot in parameter_slots(target)}
    tensors |= {f"model.layers.3.{name}": tensor for name, tensor in module.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("num_blocks", [20, 400])
@pytest.mark.parametrize("trees", [False, True])
def test_drafts_change_nothing(target, plain, trees, num_blocks):
    known = {f"r{i}": {0: tokens} for i, tokens in enumerate(plain)}
    drafter = SyntheticDrafter(known, 32, hit_rate=0.7, trees=trees)
    engine = engine_for(
        target,
        drafter=drafter,
        num_draft_tokens=6,
        block_size=4,
        kv_cache_memory=num_blocks * 4 * BYTES_PER_TOKEN,
        max_num_batched_tokens=24,
    )
    assert run(engine, requests(9), stagger=1) == plain
    assert drafter.num_accepted > 20
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 20)


def test_only_the_latent_is_kept(target):
    engine = engine_for(target, block_size=4, kv_cache_memory=100 * 4 * BYTES_PER_TOKEN)
    assert engine.parts.runner.cache.pool.shape == (3, 1, 100, 4, 1, 14)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
def test_its_own_mtp_module_drafts(target, plain, checkpoint, tree):
    """Read from the target's directory, where no other is named."""
    there = replace(loaded(target, EOS), path=checkpoint)
    engine = build_engine(
        there,
        EngineConfig(kv_cache_memory=400 * 4 * BYTES_PER_TOKEN, block_size=4),
        SpeculativeConfig(method="mtp", controller="fixed", num_speculative_tokens=4, tree=tree),
    )
    outputs = answers(engine, requests(9), stagger=1)
    assert [output.token_ids for output in outputs] == plain
    assert sum(output.draft_counts.num_accepted_draft_tokens for output in outputs) > 0


def test_the_model_loads_without_the_module(target, checkpoint):
    where = ModelDirectory(checkpoint)
    model = load_model(where.config, where.tensors, dtype=torch.float64)
    for (name, ours), (_, theirs) in zip(
        parameter_slots(model), parameter_slots(target), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"kv_lora_rank": None}, "does not describe a deepseek_v3 model"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1, "mscale_all_dim": 0.7}},
            "mscale equal to mscale_all_dim",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        read_config(CONFIG | changes)


def test_routers_stay_in_float32(checkpoint):
    where = ModelDirectory(checkpoint)
    model = load_model(where.config, where.tensors, dtype=torch.bfloat16)
    router = model.model.layers[1].mlp.gate
    assert {each.dtype for each in router.parameters()} == {torch.float32}
    assert model.model.layers[1].mlp.experts[0].down_proj.weight.dtype == torch.bfloat16
    assert reference.logits(model, [1, 2, 3]).isfinite().all()


YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": YARN}, {"q_lora_rank": None}])
def test_a_written_module_is_read_back(target, checkpoint, tmp_path, changes):
    head = load_head("mtp", checkpoint, target)
    shape = read_config(CONFIG | changes)
    write_head(head, tmp_path, shape)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert read_config(raw) == shape
    assert raw["num_nextn_predict_layers"] == 1
    if not changes:
        again = load_head("mtp", tmp_path, target)
        slots = zip(parameter_slots(again), parameter_slots(head), strict=True)
        for (name, ours), (_, theirs) in slots:
            assert torch.equal(ours, theirs), name
        ids, features = torch.tensor([3, 9, 1]), torch.randn(3, 16, dtype=torch.float64)
        outputs = [each(ids, features, torch.arange(3), heads.dense) for each in (again, head)]
        assert torch.equal(*outputs)


def test_the_module_is_what_its_definition_says(target, checkpoint, module):
    """Keys and values made of the latent for each head, experts one by one; nothing absorbed."""
    head = load_head("mtp", checkpoint, target)
    ids = torch.tensor([3, 9, 9, 30, 1])
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(5, 16, generator=generator, dtype=torch.float64)
    w = module

    e = norm(w["embed_tokens.weight"][ids], w["enorm.weight"])
    h = norm(features, w["hnorm.weight"])
    x = torch.cat([e, h], -1) @ w["eh_proj.weight"].T
    x = x + attention(w, norm(x, w["input_layernorm.weight"]))
    x = x + experts(w, norm(x, w["post_attention_layernorm.weight"]))
    after = head(ids, features, torch.arange(5), heads.dense)
    torch.testing.assert_close(after, x, atol=1e-5, rtol=1e-5)
    expected = norm(after, w["shared_head.norm.weight"]) @ w["shared_head.head.weight"].T
    torch.testing.assert_close(head.logits(after), expected)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, ... of [T, 4], neighbours being pairs."""
    pairs = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous())
    angles = torch.arange(len(x)).double().unsqueeze(1) * torch.tensor([1.0, 0.01]).double()
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def attention(w: dict[str, Tensor], x: Tensor) -> Tensor:
    w = {name.removeprefix("self_attn.").removesuffix(".weight"): each for name, each in w.items()}
    q = norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    made = x @ w["kv_a_proj_with_mqa"].T
    kv = norm(made[:, :10], w["kv_a_layernorm"]) @ w["kv_b_proj"].T
    out = []
    for head in range(4):
        of_q, of_kv = q[:, 10 * head :][:, :10], kv[:, 11 * head :][:, :11]
        queries = torch.cat([of_q[:, :6], turned(of_q[:, 6:])], -1)
        keys = torch.cat([of_kv[:, :6], turned(made[:, 10:])], -1)
        scores = queries @ keys.T * 10**-0.5
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        out.append(torch.softmax(scores, -1) @ of_kv[:, 6:])
    return torch.cat(out, -1) @ w["o_proj"].T


def experts(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.stack([of_one_token(w, row) for row in x])


def of_one_token(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Two of four groups of two experts by the sum of their wishes; three experts of those."""
    scores = (w["mlp.gate.weight"] @ x).sigmoid()
    wish = (scores + w["mlp.gate.e_score_correction_bias"]).tolist()
    groups = sorted(range(4), key=lambda g: wish[2 * g] + wish[2 * g + 1], reverse=True)[:2]
    open_experts = [e for e in range(8) if e // 2 in groups]
    chosen = sorted(open_experts, key=wish.__getitem__, reverse=True)[:3]
    total = sum(scores[e] for e in chosen)
    out = mlp(w, "mlp.shared_experts", x)
    for e in chosen:
        out = out + 2.5 * scores[e] / total * mlp(w, f"mlp.experts.{e}", x)
    return out


def mlp(w: dict[str, Tensor], where: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{where}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return down @ (F.silu(gate @ x) * (up @ x))
