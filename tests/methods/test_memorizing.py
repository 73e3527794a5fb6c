"""Memorizing Transformer against its naive specification, and the rules that hold for every memory."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import cacheformers
from cacheformers.methods.memorizing import MemorizingOptions, MemorizingParts, default_layer, make_parts, mix, naive
from cacheformers.modeling.attach import add_hooks, attention_modules, base_shape, find_decoder, new_memory
from cacheformers.modeling.attending import unrotated
from cacheformers.modeling.attention import keep_inputs, restore_attention, route_attention

EXACT = 1e-9
BASES = ["llama_mha", "llama_gqa", "mistral", "opt", "qwen3", "qwen2", "gemma", "phi", "gpt_neox"]
SLIDING = {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3}
ABLATIONS = {
    "default": {},
    "k1": {"topk": 1},
    "all": {"topk": 40},
    "small store": {"cache_size": 7},
    "store of a segment": {"cache_size": 16},
    "segment of 5": {"segment_tokens": 5},
    "two layers": {"attention_layers": (0, 2)},
    "sliding": SLIDING,
}


class Memory(nn.Module):
    """What a model or a tuner puts on an attention module, at its smallest."""

    fingerprint = ()
    unread_forwards = 0

    def __init__(self, options, layer):
        super().__init__()
        self.options = options
        self.layer, self.parts = layer, nn.ModuleDict(make_parts(options))
        self.seen = None

    def check_loaded(self):
        pass

    def attend(self, inputs):
        mixed = mix(self.options, self.layer, MemorizingParts(**self.parts), inputs)
        if self.seen is not None:
            self.seen.append((inputs, mixed))
        return mixed


def attach(model, **options):
    chosen = {"attention_layers": (1,), "cache_size": 40, "topk": 4, "segment_tokens": 16, "search": "exact", **options}
    resolved = MemorizingOptions(base=base_shape(model.config), **chosen)
    torch.manual_seed(3)
    memories = []
    for layer in resolved.layers:
        attention = attention_modules(find_decoder(model))[layer]
        attention.memory = Memory(resolved, layer).to(next(model.parameters()).dtype)
        attention.register_forward_pre_hook(keep_inputs, with_kwargs=True)
        for part in attention.memory.parts.values():
            part.weight.data += torch.randn_like(part.weight)
        memories.append(attention.memory)
    add_hooks(model)
    route_attention(model)
    return memories


@pytest.fixture
def make_memorizing(make_base):
    def build(name, dtype=torch.float64, base=None, **options):
        model = make_base(name, dtype, **(base or {}))
        attach(model, **options)
        return model

    return build


def chunked(model, ids, size, mask=None, memory=None):
    logits = []
    for start in range(0, ids.shape[1], size):
        part = None if mask is None else mask[:, start : start + size]
        output = model(ids[:, start : start + size], attention_mask=part, past_key_values=memory)
        memory = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, 1), memory


def difference(left, right):
    return float((left - right).abs().max() / right.abs().max())


def observe(model, ids, layer):
    """Queries, keys and values as the projections give them, local attention and the mixture, each `[2, 75, ...]`."""
    attention = attention_modules(find_decoder(model))[layer]
    heads, seen = attention.memory.options.base, {name: [] for name in "qkv"}
    handles = [
        getattr(attention, f"{name}_proj").register_forward_hook(lambda *call, name=name: seen[name].append(call[-1]))
        for name in "qkv"
    ]
    attention.memory.seen = []
    model(ids)
    for handle in handles:
        handle.remove()
    pieces, attention.memory.seen = attention.memory.seen, None
    projected = [torch.cat(seen[name], 1).unflatten(2, (-1, heads.head_dim)) for name in "qkv"]
    return *projected, torch.cat([inputs.local[0] for inputs, _ in pieces], 1), torch.cat([m for _, m in pieces], 1)


def expected(model, layer, q, k, v, local):
    memory = attention_modules(find_decoder(model))[layer].memory
    parts = MemorizingParts(**memory.parts)
    return torch.stack([naive(memory.options, parts, q[row], k[row], v[row], local[row]) for row in range(len(q))])


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_mha", "llama_gqa", "opt", "mistral"])
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_equals_the_specification(make_memorizing, ids, base, ablation):
    if base == "opt" and ablation == "sliding":
        pytest.skip("OPT's positions cannot be moved")
    model = make_memorizing(base, **ABLATIONS[ablation])
    for layer in ABLATIONS[ablation].get("attention_layers", (1,)):
        *states, local, mixed = observe(model, ids, layer)
        assert float((mixed - expected(model, layer, *states, local)).abs().max()) < 1e-12
        first = ABLATIONS[ablation].get("segment_tokens", 16)
        assert torch.equal(mixed[:, :first], local[:, :first]), "nothing read: exactly self-attention"
        assert float((mixed[:, first:] - local[:, first:]).abs().max()) > 1e-2


@pytest.mark.parametrize("base", ["llama_gqa", "opt"])
@pytest.mark.parametrize("ablation", ["default", "small store", "segment of 5"])
def test_gradients_equal_the_specifications(make_memorizing, ids, base, ablation):
    """Of b, s, and of the projections: W_q through both attentions, W_k and W_v through the local one alone."""
    model = make_memorizing(base, **ABLATIONS[ablation]).train()
    attention = attention_modules(find_decoder(model))[1]
    weights = [
        *(part.weight for part in attention.memory.parts.values()),
        *(getattr(attention, f"{name}_proj").weight for name in "qkv"),
    ]
    direction = torch.randn(2, 75, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    *states, local, mixed = observe(model, ids, 1)
    slow = torch.autograd.grad((expected(model, 1, *states, local) * direction).sum(), weights, retain_graph=True)
    fast = torch.autograd.grad((mixed * direction).sum(), weights)
    for left, right in zip(fast, slow, strict=True):
        assert float(right.norm()) > 1e-3
        assert float((left - right).norm()) < 1e-10 * float(right.norm())


@torch.no_grad()
@pytest.mark.parametrize("window", [{}, SLIDING], ids=["segment", "sliding"])
@pytest.mark.parametrize("base", BASES)
def test_every_chunking_gives_the_same(make_memorizing, ids, base, window):
    if base == "opt" and window:
        pytest.skip("OPT's positions cannot be moved")
    model = make_memorizing(base, **window)
    whole = model(ids).logits
    for size in (1, 7, 16, 17):
        logits, memory = chunked(model, ids, size)
        assert difference(logits, whole) < EXACT and memory.tokens_read == [75, 75]


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "opt"])
def test_bfloat16_loses_little(make_memorizing, ids, base):
    model = make_memorizing(base, torch.bfloat16)
    assert new_memory(model, 2).state.rings[1].keys.dtype == torch.float32
    whole = cross_entropy(model(ids).logits.float().flatten(0, 1), ids.flatten())
    for size in (1, 7, 17):
        logits, _ = chunked(model, ids, size)
        assert logits.dtype == torch.bfloat16
        assert abs(float(cross_entropy(logits.float().flatten(0, 1), ids.flatten()) - whole)) < 1e-2 * float(whole)


@torch.no_grad()
@pytest.mark.parametrize("base", BASES)
def test_padding_gives_the_same_as_none(make_memorizing, ids, base):
    model = make_memorizing(base)
    left = torch.ones_like(ids)
    left[1, :13] = 0
    plain, shorter = model(ids).logits, model(ids[1:, 13:]).logits
    for size in (7, 75):
        logits, _ = chunked(model, ids, size, left)
        assert difference(logits[1, 13:], shorter[0]) < EXACT and difference(logits[0], plain[0]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "opt"])
def test_no_token_sees_its_future(make_memorizing, ids, base):
    model = make_memorizing(base)
    before = model(ids).logits
    for place in (5, 16, 31, 32, 60):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 125 + 3
        after = model(changed).logits
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("base", BASES)
def test_off_means_off(make_base, ids, base, implementation):
    """Routed but without a memory, with one that is not active, and restored: bit for bit the base."""
    plain = make_base(base, torch.float32, attn_implementation=implementation)
    mask = torch.ones_like(ids[:, :30])
    mask[1, :13] = 0
    reference = [plain(ids[:, :30]).logits, plain(ids[:, :30], attention_mask=mask).logits]

    def check(model):
        assert torch.equal(model(ids[:, :30]).logits, reference[0])
        assert torch.equal(model(ids[:, :30], attention_mask=mask).logits, reference[1])

    route_attention(plain)
    assert plain.config._attn_implementation == f"cacheformers_{implementation}"
    check(plain)
    (memory,) = attach(plain)
    assert not torch.equal(plain(ids[:, :30]).logits, reference[0])
    memory.options = None
    check(plain)
    restore_attention(plain)
    assert plain.config._attn_implementation == implementation
    check(plain)


@torch.no_grad()
def test_documents_of_one_segment_are_as_without(make_memorizing, make_base, ids):
    model = make_memorizing("llama_gqa")
    assert torch.equal(model(ids[:, :16]).logits, make_base("llama_gqa")(ids[:, :16]).logits)


@torch.no_grad()
def test_generate_and_the_memorys_own_methods(make_memorizing, ids):
    model = make_memorizing("llama_gqa")
    memory = cacheformers.read(model, ids, progress=False)
    question = ids[:, :5]
    answer = model.generate(question, past_key_values=memory.clone(), max_new_tokens=24, do_sample=False)
    step, given = memory.clone(), question
    for place in range(24):
        logits = model(given, past_key_values=step).logits[:, -1]
        given = logits.argmax(-1, keepdim=True)
        assert torch.equal(given[:, 0], answer[:, 5 + place])

    swapped = memory.clone()
    swapped.select([1, 0])
    flipped = model.generate(question.flip(0), past_key_values=swapped, max_new_tokens=24, do_sample=False)
    assert torch.equal(flipped.flip(0), answer)
    beams = model.generate(question, past_key_values=memory.clone(), max_new_tokens=24, num_beams=2, do_sample=False)
    alone = cacheformers.read(model, ids[1:], progress=False)
    alone = model.generate(question[1:], past_key_values=alone, max_new_tokens=24, num_beams=2, do_sample=False)
    assert torch.equal(beams[1, : alone.shape[1]], alone[0])

    again = new_memory(model, 2)
    again.load_state_dict({name: tensor.clone() for name, tensor in memory.state_dict().items()}, "cpu")
    assert torch.equal(model(question, past_key_values=again).logits, model(question, past_key_values=memory).logits)
    width = 2 * 2 * 12 * 8  # keys and values, two key heads of 12 numbers, float64
    assert again.state.nbytes == 2 * (40 + 5) * width
    again.reset([0])
    assert difference(model(question, past_key_values=again).logits[0], model(question).logits[0]) < EXACT


def test_activation_checkpointing_gives_the_same_gradients(make_memorizing, ids):
    gradients = []
    for checkpointing in (False, True):
        model = make_memorizing("llama_gqa").train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        memory = new_memory(model, 2)
        loss = sum(
            model(ids[:, start : start + 16], memory_state=memory, labels=ids[:, start : start + 16]).loss
            for start in (0, 16, 32, 48)
        )
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, recomputed = gradients
    assert plain.keys() == recomputed.keys() and sum("memory.parts" in name for name in plain) == 2
    assert all(difference(recomputed[name], plain[name]) < EXACT for name in plain)


def test_every_part_is_in_the_graph_of_a_first_segment(make_memorizing, ids):
    """Processes that share gradients need that."""
    model = make_memorizing("llama_gqa").train()
    model(ids[:, :16], labels=ids[:, :16]).loss.backward()
    parts = attention_modules(find_decoder(model))[1].memory.parts
    assert all(torch.count_nonzero(part.weight.grad) == 0 for part in parts.values())


@torch.no_grad()
@pytest.mark.parametrize("search", ["faiss", "auto", "faiss:Flat"])
def test_search_back_ends_agree(make_memorizing, ids, search):
    exact = make_memorizing("llama_gqa", torch.float32)(ids).logits
    assert difference(make_memorizing("llama_gqa", torch.float32, search=search)(ids).logits, exact) < 1e-5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_layers": (3,)}, "layers 0 to 2"),
        ({"attention_layers": ()}, "at least one layer"),
        ({"attention_layers": (1, 1)}, "each once"),
        ({"topk": 0}, "at least 1"),
        ({"topk": 50}, "must not exceed cache_size 40"),
        ({"sink_tokens": -1}, "at least 0"),
        ({"gate_start": float("nan")}, "finite"),
        ({"local_window": "all"}, "segment"),
        ({"segment_tokens": 65}, "smaller segment_tokens"),
        ({"search": "magic"}, "unknown search"),
        ({"cache_dtype": "int8"}, "cache_dtype"),
    ],
)
def test_options_that_make_no_sense(make_base, options, said):
    with pytest.raises(ValueError, match=said):
        attach(make_base("llama_gqa"), **options)


def test_bases_that_cannot_be_routed(make_base):
    with pytest.raises(ValueError, match="learned embeddings"):
        attach(make_base("opt"), **SLIDING)
    model = make_base("llama_gqa")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        route_attention(model)


def test_the_papers_layer():
    assert [default_layer(layers) for layers in (1, 2, 12, 24)] == [0, 0, 8, 17]


@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_unrotating_undoes_the_rotation(scaling):
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4))
    states = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    cos, sin = (scaling * table.double() for table in rotary(states, torch.arange(9).expand(2, -1)))
    rotated = apply_rotary_pos_emb(states, states, cos, sin)[0]
    assert float((unrotated(rotated, cos, sin) - states).abs().max()) < 1e-6 * scaling
    partly = torch.cat([rotated, states], -1)
    assert torch.equal(unrotated(partly, cos, sin)[..., 8:], states)


@torch.no_grad()
def test_models_are_copied_with_their_memory(make_memorizing, ids):
    model = make_memorizing("llama_gqa")
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
