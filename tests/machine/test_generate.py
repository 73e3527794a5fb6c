"""Reading and generating: prompts of any length, batches, beams, chunks, streams, and going on from a memory."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import GATED, METHODS, OWN_WINDOW, WITHIN_POSITIONS, other_cases
from transformers import DynamicCache, StaticCache

import cacheformers
from cacheformers.adapters.export import to_model
from cacheformers.modeling.architectures import unwrap

BASES = ["llama_gqa", "mistral", "opt"]
NEW = 6  # with prompts of 45, 3 tokens before and 3 after the end of a segment
OTHER_CASES = other_cases(("llama_gqa", "opt"))


def generate(model, ids, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **options)


@torch.no_grad()
@pytest.mark.parametrize(("base", "method"), [*((base, "neurocache") for base in BASES), *OTHER_CASES])
@pytest.mark.parametrize("window", [{}, {"local_window": "sliding", "window_tokens": 8, "sink_tokens": 2}])
def test_greedy_equals_one_pass(make_model, ids, base, method, window):
    """A new token is the likeliest after all tokens before it, read at once; the last segment closes on the way."""
    if window and (base == "opt" or method in OWN_WINDOW):
        pytest.skip("learned positions cannot slide; these methods have a window of their own")
    model = make_model(base, method=method, **window)
    answered = generate(model, ids[:, :45])
    assert torch.equal(model(answered[:, :-1]).logits[:, 44:].argmax(-1), answered[:, 45:])
    assert torch.equal(generate(model, ids[:, :45], prefill_chunk_size=7), answered)
    if base == "llama_gqa":
        assert torch.equal(generate(model, ids[:, :45], use_cache=False), answered)


@torch.no_grad()
@pytest.mark.parametrize(("base", "options"), WITHIN_POSITIONS)
def test_greedy_equals_one_pass_within_positions(make_model, ids, base, options):
    model = make_model(base, **options)
    answered = generate(model, ids[:, :45])
    assert torch.equal(model(answered[:, :-1]).logits[:, 44:].argmax(-1), answered[:, 45:])
    assert torch.equal(generate(model, ids[:, :45], prefill_chunk_size=7), answered)


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "method"), [*((base, "neurocache") for base in BASES), ("llama_gqa", "cacheformer_on_base")]
)
def test_left_padded_batches(make_model, ids, base, method):
    model = make_model(base, method=method)
    alone = [generate(model, ids[:1, :45]), generate(model, ids[1:, :33])]
    batch = torch.zeros(2, 45, dtype=torch.long)
    batch[0], batch[1, 12:] = ids[0, :45], ids[1, :33]
    mask = (batch != 0).long()
    mask[0] = 1
    for options in ({}, {"prefill_chunk_size": 10}):
        together = generate(model, batch, attention_mask=mask, **options)
        assert torch.equal(together[0], alone[0][0])
        assert torch.equal(together[1, 12:], alone[1][0])


@torch.no_grad()
def test_a_question_after_forwards_that_keep_no_cache(make_model, ids):
    """Where each forward is a segment, the last one is in the memory when it ends, as after reading."""
    model = make_model("llama_gqa", compatibility="reference", gate="none")
    read = cacheformers.read(model, ids[:, :32], progress=False)
    memory = cacheformers.new_memory(model, 2)
    for start in (0, 16):
        model(ids[:, start : start + 16], past_key_values=memory, use_cache=False)
    assert memory.get_seq_length() == 0
    for question in (ids[:, 40:50], ids[:, 40:64]):  # shorter and longer than the last segment
        expected = generate(model, question, past_key_values=read.clone())
        assert torch.equal(generate(model, question, past_key_values=memory.clone()), expected)


@torch.no_grad()
@pytest.mark.parametrize("base", BASES)
def test_question_after_reading(make_model, ids, base):
    """Reading closes the last segment; the question begins a new one. Not flushed, it continues the text."""
    model = make_model(base)
    text, question = ids[:, :40], ids[:, 40:52]
    memory = cacheformers.read(model, text, progress=False)
    assert memory.get_seq_length() == 0
    first = generate(model, question, past_key_values=memory.clone())
    second = generate(model, question, past_key_values=memory.clone())
    assert torch.equal(first, second)
    assert first.shape == (2, 12 + NEW)
    remembered = model(question, past_key_values=memory.clone()).logits
    assert not torch.allclose(remembered, model(question).logits), "the memory must matter"

    unflushed = cacheformers.read(model, text, flush=False, progress=False)
    continued = generate(model, question, past_key_values=unflushed)
    whole = generate(model, torch.cat([text, question], 1))
    assert torch.equal(continued[:, 12:], whole[:, 52:])


@torch.no_grad()
@pytest.mark.parametrize(("base", "method"), [("llama_gqa", "neurocache"), ("opt", "neurocache"), *OTHER_CASES])
def test_beams_equal_rows_with_their_own_memory(make_model, ids, base, method):
    """Every beam must carry its own history: re-scoring each result in one pass gives its score."""
    model = make_model(base, method=method)
    beams, steps = 3, 24
    output = generate(
        model,
        ids[:, :45],
        max_new_tokens=steps,
        num_beams=beams,
        num_return_sequences=beams,
        output_scores=True,
        return_dict_in_generate=True,
        length_penalty=0.0,
    )
    assert output.sequences.shape == (2 * beams, 45 + steps)
    logits = model(output.sequences).logits
    chosen = torch.log_softmax(logits[:, 44:-1], -1).gather(2, output.sequences[:, 45:, None])[..., 0].sum(1)
    assert torch.allclose(chosen, output.sequences_scores.to(chosen), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_a_memory_expands_by_itself(make_model, ids, options):
    model = make_model("llama_gqa")
    memory = cacheformers.read(model, ids[:, :40], progress=False)
    torch.manual_seed(0)
    with_expansion = generate(model, ids[:, 40:50], past_key_values=memory.clone(), **options)
    again = memory.clone()
    again.expand(3)
    torch.manual_seed(0)
    assert torch.equal(with_expansion, generate(model, ids[:, 40:50], past_key_values=again, **options))


@torch.no_grad()
def test_sampling_and_streaming(make_model, ids):
    tokens = []
    streamer = SimpleNamespace(put=lambda ids: tokens.extend(ids.flatten().tolist()), end=lambda: tokens.append(None))
    model = make_model("llama_gqa")
    torch.manual_seed(0)
    expected = generate(model, ids[:1, :45], do_sample=True, top_k=5)
    torch.manual_seed(0)
    streamed = generate(model, ids[:1, :45], do_sample=True, top_k=5, streamer=streamer)
    assert torch.equal(streamed, expected)
    assert tokens == [*expected[0].tolist(), None]


@torch.no_grad()
def test_logits_to_keep_and_loss_of_long_inputs(make_model, ids):
    model = make_model("llama_gqa")
    whole = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(whole.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(whole.loss.double(), expected, atol=1e-6)
    for keep in (1, 5, 30):
        assert torch.allclose(model(ids, logits_to_keep=keep).logits, whole.logits[:, -keep:], atol=1e-12)
    positional = model.base_model.model.model(ids)
    assert torch.equal(positional.last_hidden_state, model.base_model.model.model(input_ids=ids).last_hidden_state)
    assert torch.equal(model(ids, return_dict=False)[0], whole.logits)


@torch.no_grad()
def test_documents_of_different_lengths(make_model, ids):
    model = make_model("llama_gqa")
    memory = cacheformers.read(model, [ids[0].tolist(), ids[1, :23].tolist()], progress=False)
    assert memory.tokens_read == [75, 23]
    question = ids[:, 60:70]
    together = model(question, past_key_values=memory).logits
    for row, length in enumerate((75, 23)):
        alone = cacheformers.read(model, ids[row, :length], progress=False)
        logits = model(question[row : row + 1], past_key_values=alone).logits
        assert torch.allclose(logits[0], together[row], atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_crop(make_model, ids, method):
    model = make_model("llama_gqa", method=method)
    memory = model(ids[:, :40]).past_key_values
    model(ids[:, 60:65], past_key_values=memory)
    if method == "cacheformer_on_base":
        with pytest.raises(ValueError, match="clone\\(\\) the memory"):
            memory.crop(-5)
        return
    memory.crop(-5)
    logits = model(ids[:, 40:50], past_key_values=memory).logits
    assert torch.allclose(logits, model(ids[:, :50]).logits[:, 40:], atol=1e-9)
    with pytest.raises(ValueError, match="in the memory already"):
        memory.crop(-20)


DOES_NOT_GO_ON = r"does not go on.*memory.clone\(\) each time.*pass all ids since the last read\(\)"


@torch.no_grad()
@pytest.mark.parametrize("door", ["PeftModel", "add_adapter", "exported"])
def test_a_second_prompt_needs_a_clone(make_model, make_base, config_factory, opener, ids, tmp_path, door):
    """`generate` would skip as many of its first ids as the memory has seen."""
    if door == "add_adapter":
        model = make_base("llama_gqa")
        model.add_adapter(config_factory())
        opener(model)
    else:
        model = make_model("llama_gqa") if door == "PeftModel" else to_model(make_model("llama_gqa", torch.float32))
    memory = cacheformers.read(model, ids[:, :40], progress=False)
    first, second = ids[:, 40:52], ids[:, 50:74]
    expected = generate(model, second, past_key_values=memory.clone())
    answered = generate(model, first, past_key_values=memory)
    assert memory.visible == answered.shape[1] - 1
    for prompt in (second, ids[:, 30:75], first, answered[:, :-1]):
        for options in ({}, {"prefill_chunk_size": 7}, {"attention_mask": None}, {"num_beams": 2}):
            with pytest.raises(ValueError, match=DOES_NOT_GO_ON):
                generate(model, prompt, past_key_values=memory.clone(), **options)
    memory.save(tmp_path / "memory")
    with pytest.raises(ValueError, match=DOES_NOT_GO_ON):
        generate(model, second, past_key_values=cacheformers.load_memory(tmp_path / "memory", model))
    memory.reset()
    memory = cacheformers.read(model, ids[:, :40], memory=memory, progress=False)
    assert torch.equal(generate(model, second, past_key_values=memory), expected)


@torch.no_grad()
def test_a_model_from_scratch_knows_what_it_has_read(make_model, ids):
    """CacheFormer: another prompt is refused, the same one goes on, also with padding and beams; no requests mix."""
    model = make_model("cacheformer")
    prompt, mask = ids[:, :15].clone(), torch.ones(2, 15, dtype=torch.long)
    prompt[1, :4], mask[1, :4] = 0, 0
    memory = cacheformers.new_memory(model, 2)
    answered = generate(model, prompt, attention_mask=mask, past_key_values=memory, suppress_tokens=[0])
    for other in (ids[:, 20:60], ids[:, 20:24], prompt):
        with pytest.raises(ValueError, match=DOES_NOT_GO_ON):
            generate(model, other, past_key_values=memory.clone())
    more = torch.cat([answered, ids[:, 60:64]], 1)
    masked = {"attention_mask": torch.cat([mask, torch.ones(2, more.shape[1] - 15, dtype=torch.long)], 1)}
    for options in (masked, {**masked, "num_beams": 2}):
        expected = generate(model, more, **options)
        assert torch.equal(generate(model, more, past_key_values=memory.clone(), **options), expected)
    with pytest.raises(ValueError, match="Continuous batching .* a memory cannot follow"):
        model.generate_batch(ids[:, :9].tolist())


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_going_on_with_all_ids(make_model, ids, tmp_path, method):
    """After generating, after plain forwards, after going back, with padding, from a file, and with beams."""
    model = make_model("llama_gqa", method=method)
    memory = cacheformers.read(model, ids[:, :20], progress=False)
    prompt, mask = ids[:, 20:35].clone(), torch.ones(2, 15, dtype=torch.long)
    prompt[1, :4], mask[1, :4] = 0, 0
    answered = generate(model, prompt, attention_mask=mask, past_key_values=memory, suppress_tokens=[0])
    more = torch.cat([answered, ids[:, 60:64]], 1)
    mask = torch.cat([mask, torch.ones(2, more.shape[1] - 15, dtype=torch.long)], 1)
    memory.save(tmp_path / "memory")
    fresh = cacheformers.read(model, ids[:, :20], progress=False)
    expected = generate(model, more, attention_mask=mask, past_key_values=fresh)
    masked = {"attention_mask": mask}
    for given in (masked, {**masked, "prefill_chunk_size": 3}, {"attention_mask": None}):
        assert torch.equal(generate(model, more, past_key_values=memory.clone(), **given), expected)
    loaded = cacheformers.load_memory(tmp_path / "memory", model)
    assert torch.equal(generate(model, more, attention_mask=mask, past_key_values=loaded), expected)
    new = generate(model, more[:, memory.visible :], attention_mask=mask, past_key_values=memory.clone())
    assert torch.equal(new[:, -NEW:], expected[:, -NEW:]), "new ids alone, under a mask over all"

    memory = model(ids[:, :18]).past_key_values
    if memory.state.can_crop:
        model(ids[:, 50:52], past_key_values=memory)
        memory.crop(-2)
    assert torch.equal(generate(model, ids[:, :30], past_key_values=memory), generate(model, ids[:, :30]))
    memory = model(ids[:, :18]).past_key_values
    beams = generate(model, ids[:, :30], num_beams=2, past_key_values=memory)
    assert torch.equal(beams, generate(model, ids[:, :30], num_beams=2))


@pytest.mark.parametrize(
    "options", [*({"method": method} for method in METHODS), {**GATED, "window_tokens": 1}], ids=str
)
def test_what_inference_mode_read_goes_on_without_it(make_model, ids, options):
    model = make_model("llama_gqa", **options)
    with torch.inference_mode():
        memory = cacheformers.read(model, ids[:, :40], progress=False)
    expected = cacheformers.read(model, ids[:, :40], progress=False)
    assert torch.equal(*(generate(model, ids[:, 40:45], past_key_values=given) for given in (memory, expected)))
    with torch.inference_mode():
        memory = cacheformers.read(model, ids[:, :32], flush=False, progress=False)
    expected = cacheformers.read(model, ids[:, :32], flush=False, progress=False)
    for given in (memory, expected):
        given.reset([1])
    with torch.no_grad():
        assert torch.equal(*(model(ids[:, 40:60], past_key_values=given).logits for given in (memory, expected)))


@torch.no_grad()
@pytest.mark.parametrize("options", [GATED, {"method": "gated_attention", "window_tokens": 6, "far_heads": {0: [1]}}])
def test_a_refused_crop_changes_nothing(make_model, ids, options):
    model = make_model("llama_gqa", **options)
    memory = cacheformers.read(model, ids[:, :42], progress=False)
    model(ids[:, 42:50], past_key_values=memory)
    expected = generate(model, ids[:, 42:51], past_key_values=memory.clone())
    with pytest.raises(ValueError, match="cannot be removed"):
        memory.crop(-4)
    assert torch.equal(generate(model, ids[:, 42:51], past_key_values=memory), expected)


@torch.no_grad()
@pytest.mark.parametrize("method", ["neurocache", "memorizing"])
def test_continuous_batching_is_refused(make_model, ids, method):
    model = make_model("llama_gqa", torch.float32, method=method)
    for door in (model, unwrap(model), to_model(copy.deepcopy(model))):
        with pytest.raises(ValueError, match="Continuous batching .* a memory cannot follow"):
            door.generate_batch(ids[:, :9].tolist())
        with pytest.raises(ValueError, match="Continuous batching .* a memory cannot follow"):
            door.generate(ids[:, :9], cache_implementation="paged")
    base = model.unload()
    assert not {"generate", "init_continuous_batching"} & vars(base).keys()


def test_caches_that_cannot_carry_a_memory(make_model, ids):
    model = make_model("llama_gqa")
    config = model.config
    with pytest.raises(ValueError, match="StaticCache"):
        generate(model, ids[:, :20], cache_implementation="static")
    with pytest.raises(ValueError, match="StaticCache"):
        model(ids[:, :20], past_key_values=StaticCache(config=config, max_cache_len=64))
    with pytest.raises(ValueError, match="offloaded"):
        generate(model, ids[:, :20], cache_implementation="offloaded")
    filled = DynamicCache(config=config)
    with model.disable_adapter():
        model(ids[:, :20], past_key_values=filled)
    with pytest.raises(ValueError, match="already holds tokens"):
        model(ids[:, 20:30], past_key_values=filled)


def test_assisted_decoding(make_model, make_base, ids):
    """Exact as long as rejected candidates lie in the open segment; an error where the memory would have to forget."""
    model = make_model("llama_gqa")
    plain = generate(model, ids[:1, :20], max_new_tokens=40)
    assert torch.equal(generate(model, ids[:1, :20], assistant_model=make_base("opt"), max_new_tokens=40), plain)
    memory = cacheformers.read(model, ids[:1], progress=False)
    with pytest.raises(ValueError, match="[Aa]ssisted"):
        generate(model, ids[:1, :20], past_key_values=memory, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="[Aa]ssisted"):
        model(ids[:, :20]).past_key_values.crop(-5)
