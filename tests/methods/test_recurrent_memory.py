"""Recurrent memory tokens (RMT, ARMT): models against the specification, what is kept, gradients, windows, errors."""

import copy

import pytest
import torch
from memories import chunked
from peft import get_peft_model

import cacheformers
import train_adapt
from cacheformers.methods.recurrent_memory import RecurrentMemoryOptions, naive
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap
from cacheformers.modeling.memory import BaseShape
from cacheformers.modeling.rotary import rotation
from cacheformers.modeling.segments import close_segments

METHOD = "recurrent_memory"
OPTIONS = {
    "tokens": {"method": METHOD},
    "learned first": {"method": METHOD, "first": "learned"},
    "associative": {"method": METHOD, "associative": True, "key_size": 8},
}
CASES = [*(("llama_gqa", name) for name in OPTIONS), ("qwen3", "associative"), ("opt", "learned first")]
SHAPE = BaseShape("llama", 32, 4, 2, 8, 3, 128, 4096, rotary=True)
M = 4  # memory tokens


def difference(ours, expected):
    return float((ours - expected).detach().abs().max() / expected.detach().abs().max())


def memories_of(model):
    attentions = attention_modules(find_decoder(unwrap(model)))
    return [attention.memory for attention in attentions if hasattr(attention, "memory")]


def some_model(make_model, base, name, **options):
    """Without LoRA, and with parts as large as the base's weights: some start at 0."""
    model = make_model(base, **{**OPTIONS[name], "target_modules": [], **options})
    torch.manual_seed(7)
    for key, parameter in model.named_parameters():
        if "lora_mem_" in key:
            parameter.data.normal_(0, 0.3)
    return model


def weights(model):
    """The trained parts of each layer, by the names of the specification."""
    layers = []
    for parts in (memory.active_parts for memory in memories_of(model)):
        named = {name: part.weight for name, part in parts._asdict().items() if part is not None}
        if parts.strength is not None:
            named |= {"strength": parts.strength.weight[0], "bias": parts.strength.bias[0]}
        layers.append(named)
    return layers


def specified(base, model, text):
    """Logits `[rows, time, vocabulary]` by the naive function over every row with a plain base, and what it returns."""
    decoder = find_decoder(base)
    rotary = hasattr(decoder, "rotary_emb")

    def function_of(layer):
        def run(states):
            positions = torch.arange(len(states))[None]
            turned = {"position_embeddings": decoder.rotary_emb(states, positions)} if rotary else {}
            output = layer(states[None], attention_mask=None, position_ids=positions, **turned)
            return (output[0] if isinstance(output, tuple) else output)[0]

        return run

    layers = [function_of(layer) for layer in decoder.layers]
    if not rotary:  # learned positions are added to what the first layer gets
        first, places = layers[0], decoder.embed_positions.weight[2:]
        layers[0] = lambda states: first(states + places[: len(states)])
    finish = decoder.norm if rotary else decoder.final_layer_norm
    options = memories_of(model)[0].options
    documents = [naive(options, weights(model), layers, finish, decoder.embed_tokens(row)) for row in text]
    return torch.stack([base.lm_head(document.output) for document in documents]), documents


# The specification


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(("base", "name"), CASES)
def test_a_model_is_its_specification(make_base, make_model, ids, base, name, checkpointing):
    """Five segments in one forward, with gradients of all parts and of the base through all of them."""
    model, plain = some_model(make_model, base, name).train(), make_base(base).train()
    if checkpointing:
        unwrap(model).gradient_checkpointing_enable({"use_reentrant": False})
    direction = torch.randn(2, 75, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for which in (model, plain):
        decoder = find_decoder(unwrap(which))
        watched = {key: parameter for key, parameter in model.named_parameters() if "lora_mem_" in key}
        for part in (decoder.embed_tokens, decoder.layers[1]):
            watched |= {key: p.requires_grad_() for key, p in part.named_parameters() if "lora_mem_" not in key}
        logits = model(ids).logits if which is model else specified(plain, model, ids)[0]
        results.append((logits, *torch.autograd.grad((logits * direction).sum(), list(watched.values()))))
    for key, ours, expected in zip(["logits", *watched], *results, strict=True):
        size = float(expected.detach().abs().max())
        assert size > 1e-6 or key.endswith("k_proj.bias"), key
        assert float((ours - expected).detach().abs().max()) <= 1e-9 * max(1.0, size), key


@torch.no_grad()
@pytest.mark.parametrize(("base", "name"), CASES)
@pytest.mark.parametrize("size", [1, 7, 32])
def test_what_is_stored_is_what_the_specification_stores(make_base, make_model, ids, base, name, size):
    """After every number of tokens that was read, the partial last segment closed or not."""
    model = some_model(make_model, base, name)
    expected, documents = specified(make_base(base), model, ids)
    logits, memory = chunked(model, ids, size)
    assert difference(logits, expected) < 1e-9
    for closed in (4, 5):
        if closed == 5:
            close_segments(find_decoder(unwrap(model)), memory, [0, 1])
        state = memory.state.tensors
        for row, document in enumerate(documents):
            if name == "associative":
                for layer, (matrix, norm) in enumerate(document.associations[closed - 1]):
                    assert difference(state["matrix"][layer][row], matrix) < 1e-9
                    assert difference(state["norm"][layer][row], norm) < 1e-9
            else:
                assert difference(state["memory"][0][row], document.memories[closed - 1]) < 1e-9


# Rules that the shared tests guard for memory tokens without the associative memory


@torch.no_grad()
@pytest.mark.parametrize("base", ["llama_gqa", "opt"])
def test_an_untrained_associative_memory_is_the_base_in_its_window(make_base, config_factory, ids, base):
    """At any length: W_v is 0. Memory tokens alone are the base until a segment is stored."""
    expected = torch.cat([make_base(base)(part).logits for part in ids.split(16, dim=1)], 1)
    model = get_peft_model(make_base(base), config_factory(**OPTIONS["associative"])).eval()
    assert difference(model(ids).logits, expected) < 1e-9
    model = get_peft_model(make_base(base), config_factory(METHOD)).eval()
    logits = model(ids).logits
    assert difference(logits[:, :16], expected[:, :16]) < 1e-9
    assert float((logits[:, 16:] - expected[:, 16:]).abs().amax(-1).min()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", ["tokens", "associative"])
def test_in_bfloat16(make_model, ids, name):
    """A and z are float32 (rule 8); memory tokens are states of the model, in its own precision."""
    model = some_model(make_model, "llama_gqa", name)
    half = copy.deepcopy(model).bfloat16()
    memory = cacheformers.new_memory(half, 2)
    logits = half(ids, past_key_values=memory).logits
    kinds = {tensor.dtype for held in memory.state.tensors.values() for tensor in held.values()}
    assert kinds == {torch.float32 if name == "associative" else torch.bfloat16}
    expected = model(ids).logits
    assert bool(torch.isfinite(logits).all())
    assert float((logits - expected)[:, :32].abs().mean()) < 0.05 * float(expected.abs().mean())


# Windows


@torch.no_grad()
def test_memory_tokens_stand_before_a_segment_and_count_as_no_text(make_model, ids):
    model = some_model(make_model, "llama_gqa", "tokens")
    memory = cacheformers.read(model, ids[:, :32], progress=False)
    assert memory.columns == 0 and memory.tokens_read == [32, 32]
    model(ids[:, 32:39], past_key_values=memory)
    assert memory.columns == M + 7 and memory.visible == 7 and memory.tokens_read == memory.tokens_kept == [39, 39]
    assert memory.timeline.position[0].tolist() == list(range(M + 7))
    assert memory.timeline.memory[0].tolist() == [True] * M + [False] * 7
    learned = some_model(make_model, "llama_gqa", "learned first")
    empty = cacheformers.new_memory(learned, 2, cache_size=0)
    learned(ids[:, :20], past_key_values=empty)
    assert empty.columns == M + 4 and empty.tokens_kept == [4, 4]


@torch.no_grad()
def test_a_sliding_window_keeps_text_alone(make_model, ids):
    """When a short segment closes, its memory tokens go, and the window reaches back behind them."""
    window = {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3}
    model = some_model(make_model, "llama_gqa", "tokens", **window)
    memory = cacheformers.read(model, ids[:, :20], flush=False, progress=False)
    _, values = memory.local[1]  # the first segment without its fourth token, memory tokens, 4 of the second segment
    assert memory.timeline.memory[0].nonzero()[:, 0].tolist() == list(range(16, 16 + M)) and values.shape[2] == 20 + M
    close_segments(find_decoder(unwrap(model)), memory, [0, 1])
    expected = values[:, :, [0, 1, 2, *range(8, 16), *range(16 + M, 20 + M)]]
    kept = memory.timeline.kept[0].nonzero()[:, 0]
    assert torch.equal(memory.local[1][1][:, :, kept], expected)
    assert memory.timeline.position[0, kept].tolist() == list(range(15)) and not bool(memory.timeline.memory.any())


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_questions_in_turn(make_model, ids, name):
    """A dropped question leaves the memory as it was; a prompt in a window of its own sees it too."""
    model = some_model(make_model, "llama_gqa", name)
    memory = cacheformers.read(model, ids[:, :32], progress=False)
    expected = model(ids[:, 60:72], past_key_values=memory.clone()).logits
    model(ids[:, 40:52], past_key_values=memory)
    memory.drop([0, 1])
    memory.forget_ids()
    assert difference(model(ids[:, 60:72], past_key_values=memory).logits, expected) < 1e-9
    memory = cacheformers.read(model, ids[:, :32], progress=False)
    prompt = ids[:, 40:64]
    seen = model(prompt, past_key_values=memory.with_window(24)).logits
    assert difference(seen[:, :12], model(prompt[:, :12], past_key_values=memory.clone()).logits) < 1e-9
    empty = cacheformers.new_memory(model, 2, cache_size=0)
    assert difference(model(prompt[:, :12], past_key_values=empty).logits, seen[:, :12]) > 1e-3


# Errors


@torch.no_grad()
@pytest.mark.parametrize("name", ["tokens", "associative"])
def test_what_is_not_finite_is_not_stored(make_model, ids, name):
    model = some_model(make_model, "llama_gqa", name)
    memory = cacheformers.read(model, ids[:, :16], flush=False, progress=False)
    held = {key: tensor.clone() for key, tensor in memory.state_dict().items()}
    weight = memories_of(model)[0].active_parts.initial.weight
    weight[0, 9], before = torch.inf, weight[0, 9].clone()  # beyond the fingerprint
    with pytest.raises(ValueError, match="row 0 hold NaN or Inf.*nothing was stored"):
        model(ids[:, 16:20], past_key_values=memory)
    weight[0, 9] = before
    assert all(torch.equal(tensor, held[key]) for key, tensor in memory.state_dict().items())
    assert difference(model(ids[:, 16:20], past_key_values=memory).logits, model(ids[:, :20]).logits[:, 16:]) < 1e-9


@torch.no_grad()
def test_closing_without_the_model(make_model, ids):
    model = some_model(make_model, "llama_gqa", "tokens")
    memory = cacheformers.read(model, ids[:, :10], flush=False, progress=False)
    with pytest.raises(RuntimeError, match="close_segments"):
        memory.close([0], rotation(find_decoder(unwrap(model))))


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="leave first out"):
        RecurrentMemoryOptions(base=SHAPE, associative=True, first="learned")
    with pytest.raises(ValueError, match="memory_tokens must be at least 1"):
        RecurrentMemoryOptions(base=SHAPE, memory_tokens=0)
    with pytest.raises(ValueError, match="first must be one of"):
        RecurrentMemoryOptions(base=SHAPE, first="paper")
    with pytest.raises(ValueError, match=r"memory tokens 32 = 4128 positions, but this base model has 4096"):
        RecurrentMemoryOptions(base=SHAPE, segment_tokens=4096)
    assert RecurrentMemoryOptions(base=SHAPE, segment_tokens=4064).window.positions == 4096


@torch.no_grad()
def test_embeddings_of_another_width(make_base, config_factory, ids):
    model = get_peft_model(make_base("opt", word_embed_proj_dim=16), config_factory(METHOD)).eval()
    model(ids[:, :16])
    with pytest.raises(ValueError, match=r"embeddings are as wide \(here 16\)"):
        model(ids)


def test_sharding_is_refused(folder, refused):
    given = ("--estimate=true", "--estimate_processes=2", "--sharding=fsdp2", "--lanes=2", f"--method={METHOD}")
    paths = (f"--base={folder / 'base'}", f"--train={folder / 'train.jsonl'}", f"--output={folder / 'out'}")
    said = refused(train_adapt.main, [*paths, *given, "--segment_tokens=16", "--memory_tokens=4"])
    assert "its memory tokens run whenever a document's segment closes" in said and "Leave --sharding out" in said
