"""DESIGN.md's rules for every method, over every base model."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import (
    ENLARGED,
    METHODS,
    ONE_LINE,
    OWN_WINDOW,
    SPECIAL,
    UNCHANGED,
    WITHIN_POSITIONS,
    every_method,
    other_cases,
)
from memories import chunked
from peft import get_peft_model
from torch.nn.functional import cross_entropy

import cacheformers
from cacheformers.modeling.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture,
    attention_modules,
    find_decoder,
    unwrap,
)
from cacheformers.modeling.rotary import rotation

BASES = ["llama_mha", "llama_gqa", "mistral", "opt", "qwen3", "stories260k"]
MORE = ["qwen2", "gemma", "phi", "gpt_neox"]
SOME = ["llama_gqa", "mistral", "opt"]
WINDOWS = {
    "segment": {},
    "sinks": {"sink_tokens": 3, "hit_scores": True},
    "sliding": {"local_window": "sliding", "window_tokens": 12, "hit_scores": True, "hit_order": True},
    "sliding sinks": {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3, "exclude_window": True},
}
WHOLE_STATES = {"compression_factor": 1}  # entries are the states themselves, in the model's own precision
PUBLISHED = {"compatibility": "reference", "gate": "none"}
SLIDING = {"local_window": "sliding", "window_tokens": 12, "sink_tokens": 3}
FIXED = {"method": "gated_attention", "far_heads": {0: [1], 1: [], 2: [0, 1]}}
ASSOCIATIVE = {"method": "recurrent_memory", "associative": True, "key_size": 8}
LEARNED = {"method": "recurrent_memory", "first": "learned"}
MEMORY_TOKENS = [
    pytest.param("llama_gqa", ASSOCIATIVE, id="llama_gqa associative"),
    pytest.param("llama_gqa", LEARNED, id="llama_gqa learned first"),
]
FIXED_HEADS = pytest.param("llama_gqa", FIXED, id="llama_gqa fixed heads")
EXACT = 1e-9
# Their own float32, in a softmax and in norms, rounds by the shape of a batch.
ROUNDED = {"gemma2": 1e-5, "llama4": 1e-5}
PART = [
    *[pytest.param(base, WINDOWS["sliding sinks"], id=f"{base} sliding sinks") for base in SPECIAL],
    *[pytest.param(base, {"method": "memorizing"}, id=f"{base} memorizing") for base in SPECIAL],
]


def rows_of_windows(bases):
    """Test cases (base, options): Neurocache with every window, each other method with one window a base."""
    cases = []
    for base in bases:
        for name, options in WINDOWS.items():
            if (base != "opt" or "sliding" not in name) and (base in SOME or name in ("segment", "sliding sinks")):
                cases.append(pytest.param(base, options, id=f"{base} {name}"))
    inside = [(base, "memorizing") for base in bases if base not in SOME]
    for base, method in [*inside, *other_cases()]:
        window = SLIDING if base in ("mistral", "qwen2", "phi") else {}
        cases.append(pytest.param(base, {"method": method, **window}, id=f"{base} {method}"))
    for name, options in (("associative", ASSOCIATIVE), ("learned first", LEARNED)):
        cases.append(pytest.param("mistral", {**options, **SLIDING}, id=f"mistral {name} sliding"))
    return cases + MEMORY_TOKENS + WITHIN_POSITIONS


def difference(left, right):
    return float((left - right).abs().max() / right.abs().max())


@torch.no_grad()
@pytest.mark.parametrize(("base", "window"), [*rows_of_windows([*BASES, *MORE, *ONE_LINE]), *PART])
def test_every_chunking_gives_the_same(make_model, ids, base, window):
    model = make_model(base, **window)
    whole = model(ids).logits
    for size in (1, 7, 16, 17):
        logits, memory = chunked(model, ids, size)
        assert difference(logits, whole) < ROUNDED.get(base, EXACT), size
        assert memory.tokens_read == [75, 75]


def repeating_text():
    """Runs of one token, at the beginning of segments too, short cycles, and random tokens said again and again."""
    generator = torch.Generator().manual_seed(4)
    few = torch.randint(3, 128, (6,), generator=generator)
    words = torch.randint(3, 128, (40,), generator=generator)
    parts = [few[:1].expand(40), words, few[:3].repeat(12), words, few[3:4].expand(37), few[:1].expand(30), words]
    return torch.cat([*parts, few.repeat(8), few[:1].expand(20), few[torch.randint(6, (40,), generator=generator)]])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, EXACT)])
@pytest.mark.parametrize(
    "options",
    [
        {"retrieval_map": {0: 0}},
        {"retrieval_map": {0: 0}, "search": "faiss", "segment_tokens": 64},
        {"retrieval_map": {0: 0}, "compression_factor": 1, "search": "auto"},
        {"retrieval_map": {3: 3}},
        {"retrieval_map": {3: 3}, "search": "faiss"},
        {"retrieval_map": {3: 3}, "similarity": "dot", "segment_tokens": 64},
        {"retrieval_map": {3: 3}, "local_window": "sliding", "window_tokens": 12},
        {"method": "memorizing", "attention_layers": [0]},
        {"method": "memorizing", "attention_layers": [3], "search": "faiss", "segment_tokens": 64},
    ],
    ids=str,
)
def test_ties_do_not_depend_on_the_chunking(make_model, options, dtype, bound):
    """Equal tokens have equal states but for rounding; which of them are retrieved must not depend on that."""
    model = make_model("stories260k", dtype, **{"cache_size": 200, **options})
    if "method" not in options:
        torch.manual_seed(6)
        for name, parameter in model.named_parameters():
            if "lora_mem_" in name and parameter.dim() > 1:
                parameter.data.normal_(0, 0.15)
    ids = repeating_text()[None]
    whole = model(ids).logits
    for size in (1, 7):
        assert difference(chunked(model, ids, size)[0], whole) < bound, size


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "method"),
    [*((base, "neurocache") for base in (*SOME, "stories260k")), ("llama_gqa", "memorizing"), ("opt", "memorizing")],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, None)])
def test_every_chunking_in_lower_precision(make_model, ids, base, method, dtype, bound):
    model = make_model(base, dtype, method=method)
    whole = model(ids).logits
    for size in (1, 7, 17):
        logits, _ = chunked(model, ids, size)
        if bound is not None:
            assert difference(logits, whole) < bound
            margin = whole.topk(2).values.diff(dim=-1).abs()[..., 0] > 1e-3
            assert torch.equal(logits.argmax(-1)[margin], whole.argmax(-1)[margin])
        else:
            ours, expected = (cross_entropy(x.float().flatten(0, 1), ids.flatten()) for x in (logits, whole))
            assert abs(float(ours - expected)) < 1e-2 * float(expected)


@torch.no_grad()
@pytest.mark.parametrize(("base", "window"), [*rows_of_windows(BASES + MORE), *PART[: len(SPECIAL)]])
def test_padding_gives_the_same_as_none(make_model, ids, base, window):
    model, exact = make_model(base, **window), ROUNDED.get(base, EXACT)
    plain = model(ids).logits
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[1, :13] = 0
    right[1, -21:] = 0
    shorter = model(ids[1:, 13:]).logits
    for size in (7, 16, 75):
        logits, memory = chunked(model, ids, size, left)
        assert difference(logits[1, 13:], shorter[0]) < exact
        assert difference(logits[0], plain[0]) < exact
        assert memory.tokens_read == [75, 62]
    logits, memory = chunked(model, ids, 75, right)
    assert difference(logits[1, :-21], plain[1, :-21]) < exact
    assert difference(logits[0], plain[0]) < exact


@torch.no_grad()
@pytest.mark.parametrize(("base", "options"), every_method(SOME))
def test_rows_that_pause_and_go_on(make_model, ids, base, options):
    """Right padding in the middle of a row's stream leaves holes in the columns, and changes nothing."""
    model = make_model(base, **options)
    expected = model(ids).logits
    memory, seen, logits = None, [0, 0], [[], []]
    generator = torch.Generator().manual_seed(3)
    while min(seen) < 75:
        wished = torch.randint(0, 14, (2,), generator=generator).tolist()
        lengths = [min(length, 75 - start) for length, start in zip(wished, seen, strict=True)]
        if max(lengths) == 0:
            continue
        part = torch.zeros(2, max(lengths), dtype=torch.long)
        mask = torch.zeros_like(part)
        for row in range(2):
            part[row, : lengths[row]] = ids[row, seen[row] : seen[row] + lengths[row]]
            mask[row, : lengths[row]] = 1
        output = model(part, attention_mask=mask, past_key_values=memory)
        memory = output.past_key_values
        for row in range(2):
            logits[row].append(output.logits[row, : lengths[row]])
            seen[row] += lengths[row]
        assert memory.columns <= 3 * 16 + part.shape[1] or options.get("method") in OWN_WINDOW
    for row in range(2):
        assert difference(torch.cat(logits[row]), expected[row]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize(("base", "window"), [*rows_of_windows(SOME), *PART[: len(SPECIAL)]])
def test_no_token_sees_its_future(make_model, ids, base, window):
    model = make_model(base, **window)
    before = model(ids).logits
    for place in (0, 5, 15, 16, 31, 50, 73):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 100 + 3
        after = model(changed).logits
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])


@torch.no_grad()
@pytest.mark.parametrize("base", SOME)
def test_the_memory_matters(make_model, ids, base):
    """The tests above would pass without a memory: it must show from the second segment on, and not before."""
    model = make_model(base)
    with_memory = model(ids).logits
    without = model(ids, past_key_values=cacheformers.new_memory(model, 2, cache_size=0)).logits
    assert torch.equal(with_memory[:, :16], without[:, :16])
    assert (with_memory[:, 16:] - without[:, 16:]).abs().amax(-1).min() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize(("base", "options"), [*every_method(BASES + MORE), *PART])
def test_off_means_off(make_base, make_model, ids, base, options):
    plain = make_base(base)
    expected = plain(ids[:, :60]).logits
    model = make_model(base, **options)
    attention = model.config._attn_implementation
    assert not torch.equal(model(ids[:, :60]).logits, expected)
    with model.disable_adapter():
        assert torch.equal(model(ids[:, :60]).logits, expected)
    unloaded = model.unload()
    assert unloaded.config._attn_implementation == attention.removeprefix("cacheformers_")
    assert unloaded.config._attn_implementation == plain.config._attn_implementation
    assert torch.equal(unloaded(ids[:, :60]).logits, expected)
    assert not any(hasattr(attention, "memory") for attention in attention_modules(find_decoder(unloaded)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in unloaded.modules())


@torch.no_grad()
@pytest.mark.parametrize(("base", "options"), every_method(SOME))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_neutral_gates_are_the_base(make_base, config_factory, ids, base, options, attention):
    plain = make_base(base, torch.float32, attn_implementation=attention)
    expected = plain(ids[:, :16]).logits
    neutral = {"gate_bias": math.inf} if options.get("method") == "gated_attention" else {}
    model = get_peft_model(plain, config_factory(**options, **neutral)).eval()
    assert difference(model(ids[:, :16]).logits, expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(("base", "options"), every_method(SOME))
def test_eager_and_sdpa_agree_with_padding(make_model, ids, base, options):
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    sdpa = make_model(base, **options)(ids, attention_mask=mask).logits
    eager = make_model(base, **options, base={"attn_implementation": "eager"})(ids, attention_mask=mask).logits
    bound = 1e-4 * ENLARGED.get(options.get("method"), 1)  # eager attention takes its softmax in float32
    assert difference(eager[mask.bool()], sdpa[mask.bool()]) < bound


@torch.no_grad()
@pytest.mark.parametrize(("base", "options"), every_method(SOME))
def test_two_memories_on_one_model_in_turn(make_model, ids, base, options):
    model = make_model(base, **options)
    expected = [model(ids[:1]).logits, model(ids[1:]).logits]
    memories, logits = [None, None], [[], []]
    for start in range(0, 75, 11):
        for which in range(2):
            output = model(ids[which : which + 1, start : start + 11], past_key_values=memories[which])
            memories[which] = output.past_key_values
            logits[which].append(output.logits)
    for which in range(2):
        assert difference(torch.cat(logits[which], 1), expected[which]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize(("base", "options"), [*every_method(SOME), FIXED_HEADS, *MEMORY_TOKENS, *WITHIN_POSITIONS])
def test_clone_select_expand_reset(make_model, ids, base, options):
    model = make_model(base, **options)
    whole = model(ids).logits
    _, memory = chunked(model, ids[:, :40], 40)
    again = memory.clone()
    first = model(ids[:, 40:], past_key_values=memory).logits
    second = model(ids[:, 40:], past_key_values=again.clone()).logits
    assert torch.equal(first, second)
    assert difference(first, whole[:, 40:]) < EXACT

    swapped = again.clone()
    swapped.select([1, 0, 1])
    logits = model(ids[[1, 0, 1], 40:], past_key_values=swapped).logits
    assert difference(logits, whole[[1, 0, 1], 40:]) < EXACT

    twice = again.clone()
    held = {layer: ring.nbytes for layer, ring in getattr(twice.state, "rings", {}).items()}
    twice.expand(2)
    assert all(twice.state.rings[layer].nbytes == size for layer, size in held.items()), "rows share until they write"
    logits = model(ids[[0, 0, 1, 1], 40:], past_key_values=twice).logits
    assert difference(logits, whole[[0, 0, 1, 1], 40:]) < EXACT

    again.reset([1])
    logits = model(ids[:, 40:], past_key_values=again).logits
    assert difference(logits[0], whole[0, 40:]) < EXACT
    fresh = model(ids[1:, 40:]).logits
    assert difference(logits[1], fresh[0]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "options"),
    [
        *((base, {}) for base in SOME),
        *(("llama_gqa", {"method": method}) for method in METHODS if method not in OWN_WINDOW),
        ("llama_gqa", ASSOCIATIVE),
    ],
)
def test_bounded(make_model, base, options):
    """Bytes stop growing when the store is full, or at once; columns never exceed two segments."""
    model = make_model(base, **options)
    text = torch.randint(3, 128, (1, 16 * 40), generator=torch.Generator().manual_seed(4))
    memory, sizes = None, []
    for start in range(0, text.shape[1], 16):
        memory = model(text[:, start : start + 16], past_key_values=memory).past_key_values
        sizes.append(memory.nbytes)
        assert memory.columns <= 32
    assert len(set(sizes[5:])) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "options"), [*every_method(["llama_gqa"], ["llama_gqa"]), FIXED_HEADS, *MEMORY_TOKENS, *WITHIN_POSITIONS]
)
def test_a_saved_state_goes_on(make_model, ids, base, options):
    window = {"local_window": "sliding", "window_tokens": 10, "sink_tokens": 3}
    model = make_model(base, **options, **({} if options.get("method") in OWN_WINDOW else window))
    memory, twin = cacheformers.new_memory(model, 2), cacheformers.new_memory(model, 2)
    model(ids[:, :70], past_key_values=memory)
    twin.load_state_dict(memory.state_dict(), "cpu")
    held, found = memory.state_dict(), twin.state_dict()
    assert held.keys() == found.keys() and all(torch.equal(found[name], held[name]) for name in held)
    expected = model(ids[:, 70:], past_key_values=memory).logits
    assert torch.equal(model(ids[:, 70:], past_key_values=twin).logits, expected)


def train_two_segments(model, ids, checkpointing):
    """Fill the ring, then two segments before one backward; returns the gradients."""
    model = copy.deepcopy(model).train()
    if checkpointing:
        unwrap(model).gradient_checkpointing_enable({"use_reentrant": False})
        unwrap(model).enable_input_require_grads()
    memory = None
    with torch.no_grad():
        for start in range(0, 48, 16):
            memory = model(ids[:, start : start + 16], past_key_values=memory).past_key_values
    loss = 0.0
    for start in (48, 64):
        output = model(ids[:, start : start + 16], past_key_values=memory, labels=ids[:, start : start + 16])
        memory = output.past_key_values
        loss = loss + output.loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, float(loss.detach())


@pytest.mark.parametrize(
    ("base", "window"),
    [
        *rows_of_windows(SOME),
        *[pytest.param(base, WHOLE_STATES, id=f"{base} d=h") for base in ("llama_gqa", "opt")],
        pytest.param("llama_gqa", {**WHOLE_STATES, "hit_scores": True}, id="llama_gqa d=h, hit scores"),
        pytest.param("llama_gqa", {**WHOLE_STATES, **PUBLISHED}, id="llama_gqa d=h, as published"),
        pytest.param("llama_gqa", PUBLISHED, id="llama_gqa as published"),
    ],
)
def test_activation_checkpointing_gives_the_same_gradients(make_model, ids, base, window):
    model = make_model(base, **window)
    plain, plain_loss = train_two_segments(model, ids, checkpointing=False)
    checkpointed, loss = train_two_segments(model, ids, checkpointing=True)
    assert loss == pytest.approx(plain_loss, rel=1e-12)
    assert plain.keys() == checkpointed.keys()
    assert "representatives" in window or window.get("method") in UNCHANGED or any("lora_mem_" in key for key in plain)
    for name, gradient in plain.items():
        assert float((checkpointed[name] - gradient).norm()) <= 1e-9 * float(gradient.norm() + 1e-12), name


@pytest.mark.parametrize(("base", "options"), [*every_method(SOME), *MEMORY_TOKENS])
def test_every_parameter_is_in_every_graph(make_model, ids, base, options):
    """DDP needs it: also on the first segment, where nothing can be retrieved."""
    model = make_model(base, **options).train()
    model(ids[:, :16]).logits.square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


@pytest.mark.parametrize(
    ("options", "reaches"),
    [
        ({"method": "infini_attention"}, True),
        ({"method": "infini_attention", "truncated": True}, False),
        ({"method": "gated_deltanet"}, True),
        ({"method": "gated_attention"}, True),
        ({"method": "cacheformer_on_base"}, True),
        ({"method": "recurrent_memory"}, True),
        (ASSOCIATIVE, True),
        (LEARNED, True),
    ],
)
def test_gradients_reach_what_was_stored_in_the_same_step(make_model, ids, options, reaches):
    """To the first of three segments, but not from one step to the next."""
    model = make_model("llama_gqa", **options).train()
    embeddings = model.get_input_embeddings().weight.requires_grad_()
    text = ids.clamp(min=4)
    text[:, 5] = 3  # occurs nowhere else

    def gradient(*parts):
        embeddings.grad, memory = None, cacheformers.new_memory(model, 2)
        for part in parts:
            logits = model(part, past_key_values=memory).logits
        logits[:, -8:].square().sum().backward()
        return float(embeddings.grad[3].norm())

    assert (gradient(text[:, :48]) > 1e-9) == reaches
    assert gradient(text[:, :32], text[:, 32:48]) == 0


@torch.no_grad()
def test_padding_never_enters_a_memory(make_model, ids):
    model = make_model("llama_gqa")
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, -30:] = 0, 0
    memory = cacheformers.read(model, ids, mask, progress=False)
    assert memory.tokens_read == [66, 45]
    assert memory.state.rings[1].written == [66, 45]
    alone = cacheformers.read(model, ids[:1, 9:], progress=False)
    ours = torch.cat(memory.state.rings[1].entries(0).spans)
    assert difference(ours, torch.cat(alone.state.rings[1].entries(0).spans)) < EXACT


@torch.no_grad()
@pytest.mark.parametrize(("base", "method"), other_cases(("llama_gqa", "opt")))
def test_what_was_read_changes_later_logits(make_model, ids, base, method):
    """A token of the first segment changes what is said of the third, but not where there is no memory."""
    model = make_model(base, method=method)
    before, changed = model(ids).logits, ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 100 + 3
    assert torch.equal(model(changed).logits[:, 32:], before[:, 32:]) == (method in UNCHANGED)


@torch.no_grad()
@pytest.mark.parametrize("base", [*BASES, *MORE, *ONE_LINE, *SPECIAL])
def test_the_segment_window_is_the_base_on_each_segment(make_base, make_model, ids, base):
    expected = torch.cat([make_base(base)(part).logits for part in ids.split(16, dim=1)], 1)
    for method in ("neurocache", "windowed"):
        model = make_model(base, method=method, target_modules=[])
        logits = model(ids, past_key_values=cacheformers.new_memory(model, 2, cache_size=0)).logits
        assert difference(logits, expected) < EXACT


def masks_for(model, full, near):
    """Masks of layers that see all of the local window or what is near alone, as a base takes them."""
    if model.config._attn_implementation == "eager":
        full, near = (torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e300) for mask in (full, near))
    full, near = (mask[None, None].expand(2, 1, -1, -1) for mask in (full, near))
    by_layer_type = {"full_attention": full, "chunked_attention": full, "sliding_attention": near}
    return by_layer_type if architecture(model.config).masks_by_layer_type else near


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "padding"),
    [
        *((base, padding) for base in [*BASES, *MORE, *ONE_LINE] for padding in (0, 7) if base != "opt"),
        *((base, 7) for base in SPECIAL),
    ],
)  # learned positions cannot slide
def test_a_sliding_window_is_the_base_under_a_mask(make_base, make_model, ids, base, padding):
    """Keys that were turned to new positions at every boundary must attend as if they had never moved."""
    plain = make_base(base)
    place = torch.arange(60 - padding)
    seen = (place <= place[:, None]) & (place >= place[:, None] // 16 * 16 - 12)
    near = seen & (place[:, None] - place < (getattr(plain.config, "sliding_window", None) or 60))  # the base's own
    mask = masks_for(plain, seen, near)
    expected = plain(ids[:, padding:60], attention_mask=mask).logits
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[:, :padding] = 0
    for method in ("neurocache", "windowed"):
        model = make_model(base, method=method, target_modules=[], local_window="sliding", window_tokens=12)
        memory = cacheformers.new_memory(model, 2, cache_size=0)
        logits = model(ids[:, :60], attention_mask=mask, past_key_values=memory).logits[:, padding:]
        assert difference(logits, expected) < 1e-5  # angles are float32 in transformers


TURN_OTHERWISE = ["smollm3", "exaone4", "cohere2", "glm4", "helium", "ernie4_5", "gpt_oss"]


@torch.no_grad()
@pytest.mark.parametrize("family", TURN_OTHERWISE)
def test_a_base_whose_keys_turn_otherwise_cannot_slide(make_base, config_factory, opener, ids, monkeypatch, family):
    """What a row of names alone would say of them is found out before a key is moved."""
    masks = ARCHITECTURES[family].masks_by_layer_type
    monkeypatch.setitem(ARCHITECTURES, family, Architecture(masks_by_layer_type=masks))
    base = make_base(family)
    sliding = config_factory(target_modules=[], local_window="sliding", window_tokens=12)
    message = rf"layers \[.*2\] of this {family} base keys do not turn.*local_window='segment'"
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, sliding)
    with pytest.raises(ValueError, match="keys do not turn"):
        cacheformers.NeurocacheForCausalLM.from_base(base, segment_tokens=16, local_window="sliding", window_tokens=12)
    assert not any("lora_" in name for name, _ in base.named_parameters())
    model = get_peft_model(base, config_factory(target_modules=[]))
    opener(model)
    assert bool(torch.isfinite(model(ids).logits).all())


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_the_mask_is_left_where_nothing_is_padded_and_nothing_closes(make_base, make_model, ids, method):
    """Attention gets the mask that transformers would give it: none, so that fused kernels can be chosen."""

    def masks(model, mask=None):
        seen = []
        hooks = [
            attention.register_forward_pre_hook(
                lambda module, arguments, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
            )
            for attention in attention_modules(find_decoder(unwrap(model)))
        ]
        model(ids[:, :16], attention_mask=mask)
        for hook in hooks:
            hook.remove()
        return seen

    padded = torch.ones(2, 16, dtype=torch.long)
    padded[0, :5] = 0
    model = make_model("llama_gqa", method=method)
    assert masks(model) == masks(model, torch.ones_like(padded)) == masks(make_base("llama_gqa")) == [None] * 3
    assert all(mask is not None for mask in masks(model, padded))


@pytest.mark.parametrize("method", METHODS)
def test_two_threads_on_one_model(make_model, ids, method):
    model = make_model("llama_gqa", method=method)

    @torch.no_grad()
    def score(row):
        return chunked(model, ids[row : row + 1, :40], 5)[0]

    expected = [score(row) for row in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for row, logits in enumerate(threads.map(score, [0, 1] * 2)):
            assert torch.equal(logits, expected[row % 2])


FIRST = {"retrieval_map": {0: 0}}
READ = [(base, {}, 2) for base in [*BASES, *MORE]]
READ += [(base, FIRST, 1) for base in SOME] + [("llama_gqa", {"method": "memorizing"}, 2)]
READ += [
    ("llama_gqa", WINDOWS["sinks"], 3),
    ("llama_gqa", {"local_window": "sliding", "window_tokens": 12}, 3),
    ("llama_gqa", {"method": "infini_attention"}, 3),
    ("llama_gqa", {"method": "gated_deltanet", "layers": [0, 1]}, 2),
]


@torch.no_grad()
@pytest.mark.parametrize("base, options, layers", READ)
def test_reading_runs_the_layers_that_leave_something(make_model, ids, base, options, layers):
    """The memory is the same, with rows of different lengths, and later tokens see the same."""
    model = make_model(base, **options)
    decoder = find_decoder(unwrap(model))
    mask = torch.ones_like(ids)
    mask[1, 50:] = 0
    whole = cacheformers.new_memory(model, len(ids))
    step = whole.window.segment_tokens
    for start in range(0, ids.shape[1], step):
        model(ids[:, start : start + step], attention_mask=mask[:, start : start + step], past_key_values=whole)
    whole.close(range(len(ids)), rotation(decoder))
    whole.forget_ids()
    ran = set()
    handles = [
        attention.register_forward_hook(lambda *_, number=number: ran.add(number))
        for number, attention in enumerate(attention_modules(decoder))
    ]
    memory = cacheformers.read(model, ids, mask, progress=False)
    for handle in handles:
        handle.remove()
    assert len(ran) == layers and len(decoder.layers) >= 3
    expected, found = whole.state.state_dict(), memory.state.state_dict()
    stored = [name for name in expected if name.startswith("rings")]
    for name in stored:
        torch.testing.assert_close(found[name], expected[name], rtol=EXACT, atol=EXACT)
    assert memory.tokens_read == whole.tokens_read
    question = ids[:, :20]
    for _ in range(2):
        logits = model(question, past_key_values=memory).logits
        assert difference(logits, model(question, past_key_values=whole).logits) < EXACT
