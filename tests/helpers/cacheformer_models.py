"""Tiny CacheFormer models: random ones, and those of the recorded runs."""

import warnings

import torch
from cacheformer_golden import needs_golden
from safetensors.torch import load_file

from cacheformers import CacheFormerConfig, CacheFormerForCausalLM

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "window_tokens": 8,
    "pool_tokens": 4,
    "pool_vectors": 2,
    "topk": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}
# Our names -> those of the recordings.
NAMES = {
    "model.embed_tokens": "token_emb",
    "model.norm": "to_logits.0",
    "lm_head": "to_logits.1",
    "model.layers": "layers",
    "input_layernorm": "0.norm",
    "self_attn.q_proj": "0.fn.to_q",
    "self_attn.kv_proj": "0.fn.to_kv",
    "self_attn.o_proj": "0.fn.to_out",
    "self_attn.memory.pool": "0.fn.to_dynamic_proj",
    "self_attn.memory": "0.fn",
    "post_attention_layernorm": "1.norm",
    "mlp.up_proj": "1.fn.net.0",
    "mlp.down_proj": "1.fn.net.3",
}


def tiny_config(**changes):
    return CacheFormerConfig(**{**TINY, **changes})


def tiny_model(dtype=torch.float64, **changes):
    """A model whose every part matters: sharper attention than at first, norms and gates that are not neutral."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = CacheFormerForCausalLM(tiny_config(**changes))
    for name, parameter in model.named_parameters():
        if "memory" in name or "norm" in name:
            parameter.data += 0.5 * torch.randn_like(parameter)
        elif "q_proj" in name or "k_proj" in name or "kv_proj" in name:
            parameter.data *= 3
    return model.to(dtype).eval()


def random_ids(rows, time, seed=1):
    return torch.randint(1, TINY["vocab_size"], (rows, time), generator=torch.Generator().manual_seed(seed))


def recorded_model(dtype, **options):
    """The model of the recorded runs, with its weights."""
    weights = load_file(needs_golden("ls_tiny_weights.safetensors"))
    config = CacheFormerConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        window_tokens=16,
        pool_tokens=4,
        pool_vectors=2,
        **options,
    )
    model = CacheFormerForCausalLM(config).to(dtype).eval()
    model.load_state_dict({name: weights[recorded_name(name)].to(dtype) for name in model.state_dict()})
    assert len(weights) == len(model.state_dict())
    return model


def recorded_name(name):
    """A parameter's name in the recordings."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name
