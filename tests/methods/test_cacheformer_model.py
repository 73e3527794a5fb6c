"""CacheFormer's model classes: the paper's sizes, recorded logits, causality, decoding, documents, training, errors."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from accelerate import disk_offload
from cacheformer_golden import LONG_SHORT, MODES, needs_golden, recorded
from cacheformer_models import random_ids, recorded_model, recorded_name, tiny_config, tiny_model
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import cacheformers
from cacheformers import (
    CacheFormerConfig,
    CacheFormerForCausalLM,
    CacheFormerModel,
    CacheFormerOnBaseConfig,
    NeurocacheConfig,
)
from cacheformers.methods.cacheformer.configuration import SIZES, VARIANTS

CAUSAL = ["previous_block", "token", "prefix"]
ONE_FAST = ["previous_block", *(pytest.param(name, marks=pytest.mark.slow) for name in ("token", "prefix"))]


def gap(left, right):
    return float((left - right).detach().abs().max())


# Sizes and recorded runs


@pytest.mark.parametrize(("size", "count"), [("122m", 122_523_460), ("23m", 23_377_152), ("35m", 34_934_016)])
def test_the_papers_sizes(size, count):
    """Exactly, in every row of the ablation; an overlap projection of its own would add 3,072 to the first."""
    with torch.device("meta"):
        for variant in VARIANTS:
            assert CacheFormerForCausalLM(CacheFormerConfig.preset(size, variant)).num_parameters() == count
        own = CacheFormerForCausalLM(CacheFormerConfig.preset(size, shared_projection=False))
    assert own.num_parameters() == count + SIZES[size]["num_hidden_layers"] * 64 * 4


def test_presets_are_what_they_are_called():
    options = {name: CacheFormerConfig.preset("23m", name).attention_options() for name in VARIANTS}
    assert options["transformer_ls"].branches == ("short", "long")
    assert options["overlap"].branches == ("short", "long", "overlap")
    assert options["cache_k5u3"].branches == ("short", "long", "cache")
    retrieved = {name: options[f"cache_{name}"].retrieved for name in ("k3u1", "k5u1", "k7u1", "k5u3")}
    assert retrieved == {"k3u1": 3, "k5u1": 5, "k7u1": 7, "k5u3": 15}
    assert options["overlap_cache_k7u1"].branches == ("short", "long", "overlap", "cache")
    assert CacheFormerConfig.preset("23m", selection="token").selection == "token"
    with pytest.raises(ValueError, match="size must be one of 122m, 23m, 35m, got '1b'"):
        CacheFormerConfig.preset("1b")
    with pytest.raises(ValueError, match="variant must be one of transformer_ls"):
        CacheFormerConfig.preset("23m", "best")
    with pytest.raises(ValueError, match="has no field top_k, windows_tokens"):
        CacheFormerConfig.preset("23m", top_k=3, windows_tokens=64)


@pytest.mark.parametrize("name", recorded("ls_tiny_n"))
def test_published_long_short_runs(name):
    """Logits, what attention gives each layer, and every parameter's gradient of the loss."""
    recording = load_file(needs_golden(f"{name}.safetensors"))
    model, attended = recorded_model(torch.float32, **LONG_SHORT), []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda *call: attended.append(call[-1]))
    ids, mask = recording["input_ids"], recording.get("mask")
    logits = model(ids, attention_mask=None if mask is None else mask.long()).logits
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    assert gap(logits[real], recording["logits"][real]) < 2e-6
    for layer, found in enumerate(attended):
        if f"inter.layer{layer}.attn_out" in recording:
            assert gap(found, recording[f"inter.layer{layer}.attn_out"]) < 2e-6
    if "grad.token_emb.weight" in recording:
        loss = F.cross_entropy(logits.flatten(0, 1), recording["targets"].flatten())
        assert loss.item() == pytest.approx(float(recording["loss"]), abs=1e-6)
        compare_gradients(model, loss, recording, 1e-5)


@pytest.mark.parametrize("name", recorded("cf_"))
def test_independent_float64_runs(name):
    """Which segments are retrieved is compared in evaluation/test_cacheformer_segments.py."""
    recording = load_file(needs_golden(f"{name}.safetensors"))
    model = recorded_model(torch.float64, **MODES[name.rsplit("_", 1)[0]])
    logits = model(recording["input_ids"][None]).logits[0]
    assert gap(logits, recording["logits"]) < 5e-7  # the recording's rotation is in float32
    if "grad.token_emb.weight" in recording:
        compare_gradients(model, F.cross_entropy(logits, recording["targets"]), recording, 2e-6)


def compare_gradients(model, loss, recording, tolerance):
    loss.backward()
    for name, parameter in model.named_parameters():
        expected = recording[f"grad.{recorded_name(name)}"].to(parameter.dtype)
        assert gap(parameter.grad, expected) <= tolerance * float(expected.abs().max()), name


# Causality


@torch.no_grad()
def leaks(model, time):
    """(t, t') where changing token t' changes the logits at t < t'."""
    ids = random_ids(1, time).expand(time, -1)
    changed = ids.clone()
    changed.diagonal().copy_(random_ids(1, time, seed=7)[0])
    changed.diagonal().add_((changed.diagonal() == ids[0]).long())
    differs = (model(ids).logits != model(changed).logits).any(-1)  # [changed token, row]
    assert bool(differs.diagonal().all())
    return [(t, token) for token, t in differs.nonzero().tolist() if t < token]


@pytest.mark.parametrize("selection", CAUSAL)
@pytest.mark.parametrize("aggregation", ["joint", "separate", "gated"])
def test_no_logits_depend_on_a_later_token(selection, aggregation):
    """Every pair of tokens, exactly, through both layers."""
    model = tiny_model(selection=selection, aggregation=aggregation, neighbors=2, tied=aggregation == "joint")
    assert leaks(model, 42) == []


def test_the_papers_rule_leaks_and_cannot_generate():
    with pytest.warns(UserWarning, match="depend on tokens after it"):
        model = CacheFormerForCausalLM(tiny_config(selection="paper_block"))
    model = tiny_model(selection="paper_block")
    found = leaks(model, 42)
    assert found and all(t // 8 == token // 8 for t, token in found)
    for arguments in ({}, {"use_cache": False}):
        with pytest.raises(ValueError, match="paper_block.*cannot generate"):
            model.generate(random_ids(1, 20), max_new_tokens=2, **arguments)
    with pytest.raises(ValueError, match="cannot generate"), torch.no_grad():
        model(random_ids(1, 20), use_cache=True)
    assert leaks(tiny_model(selection="paper_block", cache=False), 42) == []


@pytest.mark.filterwarnings("ignore:selection")
@torch.no_grad()
def test_the_papers_rule_looks_ahead_in_its_own_document_alone():
    """Neither at padding nor at a longer document beside it."""
    model, ids, mask = tiny_model(selection="paper_block"), random_ids(2, 42), torch.ones(2, 42)
    mask[1, 29:] = 0
    together = model(ids, attention_mask=mask).logits[1, :29]
    torch.testing.assert_close(together, model(ids[1:, :29]).logits[0], atol=1e-9, rtol=0)


# Decoding


@torch.no_grad()
def decode(model, ids, mask, chunks):
    """Logits of ids that are fed in chunks of the given sizes, over and over."""
    cache, read, begin = None, [], 0
    while begin < ids.shape[1]:
        end = begin + chunks[len(read) % len(chunks)]
        seen = None if mask is None else mask[:, :end]
        output = model(ids[:, begin:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        cache, begin = output.past_key_values, end
        read.append(output.logits)
    assert cache.get_seq_length() == ids.shape[1]
    return torch.cat(read, 1)


def padded(lengths, side):
    """Documents of different lengths as rows, padded on one side: ids, mask, and the documents."""
    documents = [random_ids(1, length, seed=length) for length in lengths]
    time = max(lengths)
    ids, mask = torch.zeros(len(lengths), time, dtype=torch.long), torch.zeros(len(lengths), time, dtype=torch.long)
    for row, document in enumerate(documents):
        place = slice(time - document.shape[1], time) if side == "left" else slice(0, document.shape[1])
        ids[row, place], mask[row, place] = document[0], 1
    return ids, mask, documents


@pytest.mark.parametrize("neighbors", [1, 2, 3])
@pytest.mark.parametrize("selection", CAUSAL)
def test_teacher_forcing_is_decoding(selection, neighbors):
    """Token by token, at once and in chunks; rows of different lengths, padded on either side, each as if alone."""
    model = tiny_model(selection=selection, neighbors=neighbors)
    for side, ways in (("left", ([1], [7, 1, 1, 12])), ("right", ([37], [5, 1, 9]))):
        ids, mask, documents = padded([37, 30, 19, 3], side)
        found = [model(ids, attention_mask=mask).logits, *(decode(model, ids, mask, chunks) for chunks in ways)]
        for row, document in enumerate(documents):
            alone = model(document).logits[0]
            for logits in found:
                assert gap(logits[row][mask[row] == 1], alone) < 1e-9


@pytest.mark.parametrize("selection", CAUSAL)
def test_single_precision(selection):
    """1e-4, and the same tokens."""
    model = tiny_model(torch.float32, selection=selection, neighbors=2)
    ids = random_ids(2, 61)
    expected = model(ids).logits
    for chunks in ([1], [7, 1, 12]):
        found = decode(model, ids, None, chunks)
        assert gap(found, expected) < 1e-4 * float(expected.detach().abs().max())
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("selection", ONE_FAST)
def test_generate(selection):
    """With a state as without one: greedy, sampled, beams, several answers, prompts in chunks, left padding."""
    model = tiny_model(selection=selection, neighbors=2)
    ids, mask, documents = padded([37, 22, 5], "left")
    ways = {
        "greedy": {"do_sample": False},
        "chunks": {"do_sample": False, "prefill_chunk_size": 10},
        "sampled": {"do_sample": True, "top_k": 20},
        "beams": {"num_beams": 3, "do_sample": False},
        "answers": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
        "sampled beams": {"num_beams": 2, "do_sample": True},
    }
    for name, way in ways.items():
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            chunked = use_cache or "prefill_chunk_size" not in way
            given = way if chunked else {"do_sample": False}
            found.append(
                model.generate(ids, attention_mask=mask, max_new_tokens=9, use_cache=use_cache, **given)[:, 37:]
            )
        assert torch.equal(*found), name
        if name in ("greedy", "beams"):
            for row, document in enumerate(documents):
                alone = model.generate(document, max_new_tokens=9, **way)[0, document.shape[1] :]
                assert torch.equal(found[0][row], alone), name


def test_a_cache_goes_on():
    """generate() returns it; it is cloned, expanded by beams, given other rows: each goes on as the row that it was."""
    model = tiny_model(neighbors=2)
    ids = random_ids(2, 30)
    first = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    whole = model.generate(ids, max_new_tokens=16, do_sample=False)
    cache = first.past_key_values
    assert cache.tokens_read == [35, 35] and "tokens_read=[35, 35]" in repr(cache)
    kept = cache.clone()
    again = model.generate(first.sequences, past_key_values=cache, max_new_tokens=10, do_sample=False)
    assert torch.equal(again, whole)
    assert cache.tokens_read == [45, 45] and kept.tokens_read == [35, 35]
    beams = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(embedded, first.sequences[:, 30:])
    expanded = model.generate(first.sequences, past_key_values=kept.clone(), **beams)
    assert torch.equal(expanded, model.generate(first.sequences, **beams))

    kept.batch_select_indices(torch.tensor([False, True]))
    kept.batch_repeat_interleave(2)
    kept.reset([1])
    then = random_ids(1, 9).expand(2, -1)
    with torch.no_grad():
        read = model(then, past_key_values=kept).logits
        assert gap(read[0], model(torch.cat([first.sequences[1:, :35], then[:1]], 1)).logits[0, 35:]) < 1e-9
        assert gap(read[1], model(then[:1]).logits[0]) < 1e-9
    assert kept.tokens_read == [44, 9]
    kept.reset()
    assert kept.get_seq_length() == 0 and kept.tokens_read == [0, 0]


@torch.no_grad()
def test_offloaded_weights_change_nothing(tmp_path):
    model, ids = tiny_model().eval(), random_ids(2, 50)
    asked = {"input_ids": ids, "max_new_tokens": 5, "do_sample": False}
    logits, tokens = model(ids).logits, model.generate(**asked)
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert torch.equal(model(ids).logits, logits) and torch.equal(model.generate(**asked), tokens)


def test_what_a_cache_cannot_do_says_so():
    model, ids = tiny_model(), random_ids(2, 20)
    for arguments in ({"cache_implementation": "static"}, {"cache_implementation": "offloaded"}):
        with pytest.raises(ValueError, match="cannot carry a memory"):
            model.generate(ids, max_new_tokens=2, **arguments)
    for arguments in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": tiny_model()}):
        with pytest.raises(ValueError, match="stateful"):
            model.generate(ids[:1], max_new_tokens=2, **arguments)
    with pytest.raises(ValueError, match="carries no gradient"):
        model(ids, use_cache=True)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="holds 2 documents, the batch has 3 rows"):
            model(random_ids(3, 4), past_key_values=cache)
        with pytest.raises(ValueError, match=r"position_ids restart.*cache.reset"):
            model(ids[:, :4], position_ids=torch.arange(4)[None], past_key_values=cache)
        with pytest.raises(ValueError, match=r"topk \(2 in the memory, 1 here\)"):
            tiny_model(topk=1)(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="attention_mask has shape"):
            model(ids[:, :4], attention_mask=torch.ones(2, 9), past_key_values=cache)
    with pytest.raises(ValueError, match="clone"):
        cache.crop(-1)
    with pytest.raises(RuntimeError, match="without an active memory adapter"):
        cache.update(None, None, 0)


# Documents


@pytest.mark.parametrize("selection", ["previous_block", "token"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_documents_are_kept_apart(selection, tied):
    """position_ids that restart, with padding around and between: logits and gradients of each as if alone."""
    model = tiny_model(neighbors=2, selection=selection, tied=tied)
    documents = [(0, 3, 21), (0, 24, 1), (0, 27, 15), (1, 0, 33), (1, 33, 7)]  # row, first token, tokens
    ids, mask, positions = random_ids(2, 43), *torch.zeros(2, 2, 43, dtype=torch.long)
    for row, first, tokens in documents:
        mask[row, first : first + tokens], positions[row, first : first + tokens] = 1, torch.arange(tokens)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    weights = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (logits * weights * mask[..., None]).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row, first, tokens in documents:
        place = slice(first, first + tokens)
        alone = model(ids[row : row + 1, place]).logits
        assert gap(alone[0], logits[row, place]) < 1e-12
        (alone * weights[row : row + 1, place]).sum().backward()
    for name, parameter in model.named_parameters():
        assert gap(parameter.grad, packed[name]) < 1e-9 * max(float(packed[name].abs().max()), 1), name


def test_documents_that_cannot_be_told_apart():
    model, ids = tiny_model(), random_ids(1, 12)
    with pytest.raises(ValueError, match="must count each document's tokens from 0"):
        model(ids, position_ids=torch.arange(12)[None] + 3)
    with pytest.raises(ValueError, match="padding inside a document"):
        model(ids, attention_mask=torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1]]))
    assert torch.equal(model(ids, position_ids=torch.arange(12)[None]).logits, model(ids).logits)


# What users of transformers expect


@torch.no_grad()
def test_outputs():
    model, ids = tiny_model(torch.float32), random_ids(2, 30)
    labels = ids.clone()
    labels[:, :4] = -100
    output = model(ids, labels=labels, output_hidden_states=True)
    assert output.past_key_values is None
    assert [tuple(states.shape) for states in output.hidden_states] == [(2, 30, 16)] * 3
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ids))
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    loss, logits = model(ids, labels=labels, return_dict=False)[:2]
    assert torch.equal(loss, output.loss) and torch.equal(logits, output.logits)
    assert torch.allclose(model(ids, logits_to_keep=3).logits, output.logits[:, -3:], atol=1e-6)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(embedded.logits, output.logits)
    assert model.model(ids).last_hidden_state.shape == (2, 30, 16)
    with pytest.raises(ValueError, match="Attentions are not available"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(tmp_path, tied):
    model, ids = tiny_model(torch.float32, tie_word_embeddings=tied, aggregation="gated"), random_ids(2, 40)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is CacheFormerForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)
    headless = AutoModel.from_pretrained(tmp_path)
    assert type(headless) is CacheFormerModel
    assert torch.equal(loaded.lm_head(headless(ids).last_hidden_state), model(ids).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is CacheFormerConfig and config.attention_options() == model.config.attention_options()
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert torch.equal(placed(ids).logits, model(ids).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    losses = [each(ids, labels=ids).loss.item() for each in (half, model)]
    assert half(ids).logits.dtype == torch.bfloat16 and losses[0] == pytest.approx(losses[1], abs=0.1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids).logits, model(ids).logits)
    model.resize_token_embeddings(60)
    assert torch.allclose(model(ids).logits[..., :48], loaded(ids).logits, atol=1e-6)


def test_other_switches_on_the_same_weights(tmp_path):
    """The paper trains without the cache first, then with it: the same file serves both."""
    tiny_model(torch.float32, overlap=False, cache=False).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, overlap=True, cache=True)
    assert loaded.model.options.branches == ("short", "long", "overlap", "cache")
    for name, parameter in tiny_model(torch.float32, overlap=False, cache=False).named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))
    with pytest.raises(ValueError, match="does not describe.*memory.pool"):
        AutoModelForCausalLM.from_pretrained(tmp_path, long=False)
    with pytest.raises(ValueError, match="has no tensors for .*memory.gate"):
        AutoModelForCausalLM.from_pretrained(tmp_path, aggregation="gated")


@pytest.mark.parametrize("lost", ["0.self_attn.memory.pool", "1.mlp.up_proj.bias", "lm_head.bias"])
def test_a_missing_tensor_is_an_error(tmp_path, lost):
    tiny_model(torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if lost not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"has no tensors for .*{lost}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_every_new_parameter_is_initialized():
    """As when a model is built on the meta device: `to_empty` leaves garbage, here NaN; what was loaded stays."""
    with torch.device("meta"):
        model = CacheFormerForCausalLM(tiny_config(hidden_size=64, aggregation="gated", tied=False))
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))
    loaded = model.model.layers[0].self_attn.q_proj.weight
    loaded.data.copy_(torch.arange(loaded.numel()).view_as(loaded))
    loaded._is_hf_initialized = True
    model.init_weights()
    assert torch.equal(loaded.flatten(), torch.arange(loaded.numel()).float())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    layer = model.model.layers[1]
    assert not bool(layer.self_attn.memory["gate"].weight.any())
    for norm in (layer.input_layernorm, layer.self_attn.memory["local_norm"], model.model.norm):
        assert bool((norm.weight == 1).all()) and not bool(norm.bias.any())
    # PyTorch's defaults: uniform within 1 / sqrt(fan in); embeddings normal
    assert float(layer.mlp.up_proj.weight.detach().std()) == pytest.approx((3 * 64) ** -0.5, rel=0.05)
    assert float(layer.mlp.down_proj.bias.detach().abs().max()) <= 256**-0.5
    assert float(model.model.embed_tokens.weight.detach().std()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("selection", CAUSAL)
def test_training_with_activation_checkpointing(selection):
    """Gradients reach every part, and are those without checkpointing; generating in between does no harm."""
    gradients = []
    ids, mask, _ = padded([45, 30], "right")
    labels = ids.masked_fill(mask == 0, -100)
    for checkpointing in (False, True):
        model = tiny_model(selection=selection, aggregation="gated", shared_projection=False).train()
        if checkpointing:
            model.activation_checkpointing_enable()
            assert model.generate(random_ids(1, 20), max_new_tokens=3, do_sample=False).shape == (1, 23)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert bool(expected.any()), name
        assert gap(gradients[1][name], expected) < 1e-12, name


@pytest.mark.parametrize("selection", CAUSAL)
def test_backward_inside_autocast(selection):
    """As some training loops call it: the same gradients as outside."""
    model, ids = tiny_model(torch.float32, selection=selection), random_ids(2, 40)

    def gradients(inside):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [weight.grad.clone() for name, weight in model.named_parameters() if "memory" in name]

    for left, right in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(left, right)


def test_a_cache_of_inference_mode_goes_on():
    model, ids = tiny_model(), random_ids(1, 40)
    with torch.inference_mode():
        memory = None
        for piece in ids[:, :30].split(10, dim=1):
            memory = model(piece, past_key_values=memory, use_cache=True).past_key_values
    with torch.no_grad():
        logits = model(ids[:, 30:], past_key_values=memory, use_cache=True).logits
        assert gap(logits, model(ids).logits[:, 30:]) < 1e-9


@torch.no_grad()
@pytest.mark.slow
def test_compiled():
    """What is around the attention is compiled; the attention itself decides on the host."""
    model, ids = tiny_model(torch.float32), random_ids(2, 40)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.allclose(compiled(ids).logits, model(ids).logits, atol=1e-5)
    with torch.enable_grad():
        gradients = []
        for each in (model, compiled):
            model.zero_grad()
            each(ids, labels=ids).loss.backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.allclose(*gradients, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 5}, "head_dim must be even"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"cache": "no"}, "cache must be bool, got 'no'"),
        ({"topk": 1.5}, "topk must be int, got 1.5"),
        ({"hidden_size": 18}, "does not divide hidden_size 18"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1"),
        ({"segment_tokens": 10.5}, "segment_tokens must be a whole number of at least 1"),
    ],
)
def test_configurations_that_contradict_themselves(changes, message):
    with pytest.raises(ValueError, match=message):
        CacheFormerForCausalLM(tiny_config(**changes))


@pytest.mark.parametrize("kind", [CacheFormerConfig, CacheFormerOnBaseConfig, NeurocacheConfig])
def test_a_configuration_is_printed_whole(kind):
    shown = str(kind())
    assert f'"model_type": "{kind.model_type}"' in shown and "hidden_size" in shown and '"topk"' in shown


@pytest.mark.parametrize(("shape", "message"), [((1, 0), "empty"), ((0, 9), "empty"), ((9,), r"tensor \[rows, time\]")])
def test_ids_are_rows_of_tokens(make_model, shape, message):
    ids = torch.zeros(shape, dtype=torch.long)
    for call in (tiny_model(), make_model("llama_gqa", method="cacheformer_on_base"), tiny_model().generate):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            call(ids)


def test_what_else_is_refused():
    with pytest.raises(ValueError, match=r"position_ids has shape \(1, 9\), but there are 20 tokens"):
        tiny_model()(random_ids(1, 20), position_ids=torch.arange(9)[None])
    with pytest.raises(ValueError, match="this model has a memory already"):
        get_peft_model(tiny_model(), cacheformers.NeurocacheAdapterConfig())
