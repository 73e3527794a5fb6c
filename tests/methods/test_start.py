"""A memory that starts from the base's states, against the same sums done plainly."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import cacheformers
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap

BASES = ["llama_mha", "llama_gqa", "mistral", "opt", "gpt_neox"]


def segments(count=6, length=16):
    return list(torch.randint(3, 128, (count, length), generator=torch.Generator().manual_seed(7)))


def states_of(model, layer, chosen):
    """What self-attention of a layer is given, all segments together, `[tokens, h]`."""
    found = []
    attention = attention_modules(find_decoder(unwrap(model)))[layer]

    def keep(_, args, kwargs):
        found.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0].float())

    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad(), model.disable_adapter():
        for ids in chosen:
            model(ids[None])
    handle.remove()
    return torch.cat(found)


@torch.no_grad()
@pytest.mark.parametrize("base", BASES)
def test_entries_keep_the_main_directions_and_give_back_the_states(make_base, config_factory, base):
    config = config_factory(compression_factor=2, hit_scores=True)
    model = get_peft_model(make_base(base, torch.float32), config).eval()
    chosen = segments()
    before = model(chosen[0][None]).logits
    memories = [getattr(attention, "memory", None) for attention in attention_modules(find_decoder(unwrap(model)))]
    keys_before = memories[2].parts("default").k.weight.clone()

    cacheformers.start_from_states(model, chosen)

    states = states_of(model, 1, chosen)
    encoder = memories[1].parts("default")
    projected = states @ encoder.down.weight.T
    assert float(projected.mean(-1).abs().max()) < 1e-4, "nothing lies along (1, ..., 1), which LayerNorm takes away"
    assert float(projected.square().mean().sqrt()) == pytest.approx(1, rel=1e-3)
    # No linear map to so few numbers keeps more of the states than their largest directions do.
    width = encoder.down.weight.shape[0]
    singular = torch.linalg.svdvals(states)
    best = float(singular[: width - 1].square().sum() / singular.square().sum())
    basis = torch.linalg.qr(encoder.down.weight.T).Q
    assert float((states @ basis).square().sum() / states.square().sum()) >= best - 1e-3

    entries = encoder.encode(states)
    attention = attention_modules(find_decoder(unwrap(model)))[2]
    if hasattr(attention, "k_proj"):
        above = states_of(model, 2, chosen)
        back = torch.linalg.lstsq(entries, above).solution  # [d, h]
        for name in "kv":
            linear = getattr(attention, f"{name}_proj")
            own = linear.get_base_layer() if hasattr(linear, "get_base_layer") else linear  # without LoRA
            expected = entries @ back @ own.weight.T
            ours = entries @ getattr(memories[2].parts("default"), name).weight.T
            assert float((ours - expected).norm() / expected.norm()) < 0.1
    assert not torch.equal(memories[2].parts("default").k.weight, keys_before)
    assert torch.equal(model(chosen[0][None]).logits, before), "gates are closed: still the base"
    assert model.training is False


def test_bad_input(make_base, config_factory):
    model = get_peft_model(make_base("llama_gqa", torch.float32), config_factory(compression_factor=2))
    with pytest.raises(ValueError, match="too few: an entry has 16 numbers"):
        cacheformers.start_from_states(model, segments(1, 10))
    next(model.parameters()).data.fill_(torch.nan)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match="not finite"):
        cacheformers.start_from_states(model, segments())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters() if "lora_mem_" in name)
    lora = get_peft_model(make_base("llama_gqa", torch.float32), LoraConfig(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="No memory adapter is active"):
        cacheformers.start_from_states(lora, segments())
