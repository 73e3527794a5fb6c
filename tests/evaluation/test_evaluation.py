"""Evaluation: losses token by token, kinds of tokens, intervals, controls, several processes, tables and plots."""

import importlib.util
import json
import math
import sys

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipe import make_text

import cacheformers
from cacheformers.common.documents import Documents
from cacheformers.common.loss import token_losses
from cacheformers.evaluation import plots
from cacheformers.evaluation.held_out import HeldOut, divide, held_out, side_by_side, token_nats
from cacheformers.evaluation.model import EvalOptions, evaluate_model
from cacheformers.evaluation.readers import (
    Damaged,
    Forgetting,
    Remembering,
    other_document,
    shuffled,
    window_of_equal_bytes,
)
from cacheformers.evaluation.run import (
    RESAMPLES,
    Run,
    compare,
    measure,
    perplexity_interval,
    print_runs,
    reference,
    scores,
    token_classes,
)
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.method import active_options

N = 16  # tokens a segment, as in conftest


def documents(*lengths):
    """Documents of random ids."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for index, length in enumerate(lengths):
        ids = torch.randint(3, 128, (length,), generator=generator)
        made.append(HeldOut(ids, 4 * (length - 1), f"document {index}"))
    return made


def memory_options(model):
    return active_options(find_decoder(unwrap(model)))


@torch.no_grad()
def nats_of(model, inputs, labels, **options):
    """Losses of the last positions of one forward over one document."""
    logits = model(input_ids=inputs[None], **options).logits[:, -len(labels) :]
    return token_losses(logits, labels[None])[0].numpy()


# Reading


def test_a_document_is_read_as_one_pass_reads_it(make_model):
    model = make_model("llama_gqa").train()
    (document,) = documents(60)
    (found,) = token_nats(model, [document], Remembering(), N)
    assert model.training
    assert found.dtype == np.float32 and found.shape == (59,)
    model.eval()
    np.testing.assert_allclose(found, nats_of(model, document.ids[:-1], document.ids[1:]), rtol=1e-6)
    (off,) = token_nats(model, [document], Remembering(0), N)
    np.testing.assert_array_equal(off[:N], found[:N])
    assert not np.isclose(off[N:], found[N:]).any()


@pytest.mark.parametrize("name", ["llama_gqa", "mistral", "opt", "gpt_neox"])
@pytest.mark.parametrize("context", [0, 7, 40])
def test_forgetting_reads_the_tokens_before_again(make_model, make_base, name, context):
    """With an adapter whose memory is off, with the adapter disabled, and the base itself."""
    model, (document,) = make_model(name), documents(60)
    ids = document.ids
    with model.disable_adapter():
        (disabled,) = token_nats(model, [document], Forgetting(context), N)
    (off,) = token_nats(model, [document], Forgetting(context), N)
    base = make_base(name)
    np.testing.assert_array_equal(token_nats(base, [document], Forgetting(context), N)[0], disabled)
    # With segments of N + context tokens nothing is remembered within one of them.
    for reader, found in ((base, disabled), (make_model(name, segment_tokens=N + context), off)):
        expected = [
            nats_of(reader, ids[max(start - context, 0) : min(start + N, 59)], ids[start + 1 : start + N + 1])
            for start in range(0, 59, N)
        ]
        np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-6)


@pytest.mark.parametrize("window", ["segment", "sliding"])
@pytest.mark.parametrize(
    "reader", [Remembering(), Remembering(0), Damaged(shuffled), Forgetting(9)], ids=["full", "off", "shuffled", "none"]
)
def test_rows_read_side_by_side_are_as_read_alone(make_model, window, reader):
    model = make_model("llama_gqa", local_window=window, window_tokens=9)
    chosen = documents(45, 60, 17, 2, 33, 49)
    alone = token_nats(model, chosen, reader, N)
    assert [len(losses) for losses in alone] == [44, 59, 16, 1, 32, 48]
    for rows in (3, 6):
        for one, other in zip(alone, token_nats(model, chosen, reader, N, rows), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_memory_of_constant_size_can_be_off(make_model, make_base):
    """It stays empty then: the base reads segment by segment, within its window."""
    for window in ({}, {"local_window": "sliding", "window_tokens": 9}):
        model = make_model("llama_gqa", method="infini_attention", target_modules=[], **window)
        chosen = documents(60, 45)
        off, on = (token_nats(model, chosen, Remembering(size), N, 2) for size in (0, None))
        windowed = make_model("llama_gqa", method="windowed", **window)
        for module in windowed.modules():
            if "lora_B" in getattr(module, "_modules", {}):
                module.lora_B["default"].weight.data.zero_()
        for one, two, other in zip(off, token_nats(windowed, chosen, Remembering(), N, 2), on, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6)
            assert not np.isclose(one[N:], other[N:]).any()


def test_held_out_documents_are_cut(tokenizer):
    texts = [make_text(length, length) for length in (40, 1, 30, 50)]
    chosen = held_out(Documents(texts, tokenizer), count=2, tokens=33)
    assert [len(document.ids) for document in chosen] == [34, 30]
    assert [document.name for document in chosen] == ["document 0", "document 2"]
    words = texts[0].split()[:34]
    assert chosen[0].characters == len(" ".join(words[1:]))
    with pytest.raises(ValueError, match="No document is left to evaluate on"):
        held_out(Documents(texts, tokenizer, min_tokens=60))


def test_a_loss_that_is_not_finite_is_found(make_model):
    model, chosen = make_model("llama_gqa"), documents(60, 45)
    chosen[1].ids[20] = 1  # no other token has this id
    model.get_input_embeddings().weight.data[1] = float("nan")
    # 0 * NaN is NaN, so a masked key spoils its whole segment; token 17 is the first that this segment predicts.
    with pytest.raises(FloatingPointError, match="The loss of document 1 at token 17 is nan"):
        token_nats(model, chosen, Remembering(), N)


# Controls


@pytest.mark.parametrize("lengths", [(60, 58), (60, 20), (60, 59, 45), (60, 59, 50, 49, 40)])
def test_other_document_reads_what_another_one_stored(make_model, lengths):
    """Equal to reading each segment with a memory made by hand. An odd one out makes a round of three."""
    model, chosen = make_model("llama_gqa"), documents(*lengths)
    found = token_nats(model, chosen, Damaged(other_document, together=2), N)
    round_of_three = len(lengths) - 3 if len(lengths) % 2 else len(lengths)
    for index, document in enumerate(chosen):
        place = index - round_of_three
        other = index ^ 1 if place < 0 else round_of_three + (place + 1) % 3
        ids, expected = document.ids, []
        for start in range(0, len(ids) - 1, N):
            read = chosen[other].ids[: min(start, (len(chosen[other].ids) - 1) // N * N)]  # as far as segments are full
            memory = cacheformers.new_memory(model, 1)
            memory = cacheformers.read(model, read, progress=False) if len(read) else memory
            labels = ids[start + 1 : start + 1 + N]
            expected.append(nats_of(model, ids[start : start + len(labels)], labels, past_key_values=memory))
        np.testing.assert_allclose(found[index], np.concatenate(expected), rtol=1e-6)
        own = token_nats(model, [document], Remembering(), N)[0]
        assert np.isclose(own, found[index])[N:].mean() < 0.1


@pytest.mark.parametrize("cache_size", [20, 40])
def test_shuffled_permutes_entries_and_puts_them_back(make_model, cache_size):
    """Retrieval of hits alone does not see the order; with neighbors it does. The ring drops its oldest as ever."""
    (document,) = documents(90)
    alone = make_model("llama_gqa", cache_size=cache_size, neighborhood_size=1)
    right, wrong = (token_nats(alone, [document], reader, N)[0] for reader in (Remembering(), Damaged(shuffled)))
    np.testing.assert_allclose(right, wrong, rtol=1e-5)
    wide = make_model("llama_gqa", cache_size=cache_size, neighborhood_size=2)
    right, wrong = (token_nats(wide, [document], reader, N)[0] for reader in (Remembering(), Damaged(shuffled)))
    np.testing.assert_array_equal(right[:N], wrong[:N])
    assert np.isclose(right, wrong)[N:].mean() < 0.1


def test_a_longer_window_takes_the_bytes_of_the_memory(make_model):
    model = make_model("llama_gqa", cache_size=1000)
    memory = cacheformers.read(model, torch.cat([document.ids for document in documents(1200)]), progress=False)
    (ring,) = memory.state.rings.values()
    plain = torch.zeros(1, 3)
    with model.disable_adapter():
        cache = model(input_ids=plain.long(), use_cache=True).past_key_values
    per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 3
    window = window_of_equal_bytes(memory_options(model), torch.device("cpu"), torch.float64)
    assert ring.keys.nbytes == 1000 * 8 * 8
    assert window * per_token <= ring.keys.nbytes < (window + 1) * per_token


# Kinds of tokens


def test_token_classes_are_as_defined():
    generator = np.random.default_rng(0)
    for segment, window, vocabulary in [(4, 0, 5), (4, 3, 5), (5, 7, 30), (16, 0, 12), (1, 1, 3), (8, 100, 6)]:
        ids = generator.integers(vocabulary, size=60)
        expected = []
        for i in range(1, len(ids)):
            earlier = [p for p in range(i) if ids[p] == ids[i]]
            visible = range((i - 1) // segment * segment - window, i)
            expected.append(0 if not earlier else 1 if earlier[-1] in visible else 2)
        assert token_classes(ids, segment, window).tolist() == expected


def made_run(seed, *lengths, **options):
    generator = np.random.default_rng(seed)
    losses = [generator.gamma(2.0, 1.0, length - 1).astype(np.float32) for length in lengths]
    return measure(documents(*lengths), losses, N, **options)


def test_parts_add_up_to_the_whole():
    run = made_run(0, 200, 90, 3, window_tokens=5)
    assert run.total.nats == pytest.approx(math.fsum(np.concatenate(run.losses).astype(float)), rel=1e-12)
    assert list(run.by_position) == ["0-16", "16-32", "32-64", "64-128", "128-256"]
    assert list(run.by_class) == ["first occurrence", "repeated within the window", "repeated only beyond it"]
    for parts in (run.by_position, run.by_class):
        assert sum(part.tokens for part in parts.values()) == run.total.tokens == 290
        nats = sum(math.log(part.perplexity) * part.tokens for part in parts.values())
        assert nats == pytest.approx(run.total.nats)
    assert run.by_position["128-256"].tokens == 199 - 128
    assert run.by_position["128-256"].interval is None  # a single document is that long
    second = np.concatenate([losses[16:32] for losses in run.losses]).astype(float)
    assert run.by_position["16-32"].perplexity == pytest.approx(math.exp(second.mean()))
    assert run.perplexity == pytest.approx(math.exp(np.concatenate(run.losses).astype(float).mean()))
    assert run.bits_per_character == pytest.approx(run.total.nats / math.log(2) / (4 * 290))


# Intervals


def test_intervals_are_those_of_a_plain_loop():
    run, other = made_run(1, 50, 40, 30, 80), made_run(2, 50, 40, 30, 80)
    generator = np.random.default_rng(0)
    perplexities, ratios = [], []
    for drawn in generator.integers(4, size=(RESAMPLES, 4)):
        tokens = sum(len(run.losses[i]) for i in drawn)
        nats = [sum(float(one.losses[i].sum(dtype=float)) for i in drawn) for one in (run, other)]
        perplexities.append(math.exp(nats[0] / tokens))
        ratios.append(math.exp(nats[0] / tokens) / math.exp(nats[1] / tokens))
    assert run.total.interval == pytest.approx(np.quantile(perplexities, (0.025, 0.975)))
    comparison = compare(run.total, other.total)
    assert comparison.ratio == pytest.approx(run.perplexity / other.perplexity)
    assert comparison.interval == pytest.approx(np.quantile(ratios, (0.025, 0.975)))


def test_pairs_of_runs_are_compared_document_by_document():
    """Documents differ far more than the two runs do: only a paired comparison sees that one is better everywhere."""
    losses = [np.full(100, level, np.float32) for level in (1.0, 2.0, 3.0, 4.0, 5.0)]
    chosen = documents(*[101] * 5)
    worse = measure(chosen, losses, N)
    better = measure(chosen, [each - 0.01 for each in losses], N)
    assert worse.total.interval[0] < better.perplexity < worse.perplexity < better.total.interval[1]
    assert compare(better.total, worse.total).interval == pytest.approx((math.exp(-0.01),) * 2, rel=1e-6)


def test_one_document_has_no_interval():
    run = made_run(0, 50)
    assert run.total.interval is None and compare(run.total, run.total).interval is None
    assert perplexity_interval(np.array([5.0, 0.0]), np.array([3.0, 0.0])) is None


# Everything at once


def wanted(**options):
    return EvalOptions(**{"controls": ["other_document", "shuffled", "longer_window"], "valid_rows": 2, **options})


def test_an_adapter_is_evaluated(make_model, capsys):
    model, chosen = make_model("llama_gqa", cache_size=100), documents(60, 45, 90)
    runs = evaluate_model(model, chosen, wanted(cache_sizes=[0, 20, 100]), memory_options(model))
    assert list(runs) == [
        *("base", "cache off", "cache 20", "cache 100", "other document", "shuffled", "longer window")
    ]
    assert reference(runs) == "cache 100"
    perplexities = [run.perplexity for run in runs.values()]
    assert len(set(perplexities)) == 7
    # 100 entries of 8 numbers and 2 * 3 layers * 2 heads * 12 numbers a token, both in float64
    assert runs["longer window"].note == "5 more tokens of self-attention take the bytes of 100 entries"
    np.testing.assert_array_equal(runs["longer window"].losses[0], token_nats(model, chosen[:1], Forgetting(5), N)[0])
    result = json.loads(json.dumps(scores(runs)))
    assert result["base"]["compared_with"] == "cache 100"
    late = [result[name]["by_position"]["64-128"] for name in ("base", "cache 100")]
    assert late[0]["compared"]["ratio"] == pytest.approx(late[0]["perplexity"] / late[1]["perplexity"])
    assert result["cache 20"]["compared"]["ratio"] == pytest.approx(perplexities[2] / perplexities[3])
    assert result["shuffled"]["tokens_by_document"] == [59, 44, 89]
    assert sum(result["shuffled"]["nats_by_document"]) == pytest.approx(result["shuffled"]["nats"])
    again = {name: Run.from_dict(numbers) for name, numbers in result.items()}
    assert json.loads(json.dumps(scores(again))) == result
    capsys.readouterr()
    print_runs(runs)
    shown = capsys.readouterr().out
    assert f"{runs['cache 20'].perplexity:.3f}" in shown and "3 held-out documents, 192 tokens predicted" in shown
    assert f"{runs['base'].by_class['first occurrence'].perplexity:.3f}" in shown and "longer window: 5 more" in shown
    print_runs(runs, against="base")
    divided = capsys.readouterr().out.partition("/ base, by last occurrence")[2]
    first = [runs[name].by_class["first occurrence"].perplexity for name in ("cache 100", "base")]
    assert f"cache 100 {first[0] / first[1]:.4f} (" in " ".join(divided.split())


def test_lora_alone_is_evaluated(make_base, config_factory, opener):
    base = make_base("llama_gqa")
    memory = config_factory(cache_size=4000).resolve(cacheformers.modeling.architectures.base_shape(base.config))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["up_proj"], task_type="CAUSAL_LM"))
    opener(model)
    chosen = documents(100, 45)
    runs = evaluate_model(model, chosen, wanted(), memory)
    assert list(runs) == ["base", "lora", "longer window"]
    for found, cut in zip(runs["longer window"].losses, token_nats(model, chosen, Forgetting(48), N), strict=True):
        np.testing.assert_allclose(found, cut, rtol=1e-6)
    assert runs["base"].perplexity != pytest.approx(runs["lora"].perplexity, rel=1e-3)
    note = "222 more tokens of self-attention take the bytes of 4,000 entries; cut to 48, which fit the base model's 64"
    assert runs["longer window"].note == f"{note} positions"
    assert list(evaluate_model(model, documents(20), EvalOptions(skip_base=True), memory)) == ["lora"]


def test_the_default_is_off_and_on(make_model):
    model = make_model("llama_gqa")
    runs = evaluate_model(model, documents(40), EvalOptions(), memory_options(model))
    assert list(runs) == ["base", "cache off", "cache 40"]
    whole = unwrap(model)  # a model that is not a PeftModel has no base, and is also read with twice the entries
    assert list(evaluate_model(whole, documents(40), EvalOptions(), memory_options(model))) == [
        "cache off",
        "cache 40",
        "cache 80",
    ]


@pytest.mark.parametrize(
    ("options", "adapter", "message"),
    [
        ({"controls": ["other_document"]}, {}, "at least two held-out documents"),
        ({"controls": ["shuffled"]}, {"neighborhood_size": 1}, "no hit brings neighbors along"),
        ({"controls": ["longer_window"]}, {"segment_tokens": 64}, "fill the base model's 64 positions"),
    ],
)
def test_controls_that_are_not_possible(make_model, options, adapter, message):
    model = make_model("llama_gqa", **adapter)
    with pytest.raises(ValueError, match=message):
        evaluate_model(model, documents(40), EvalOptions(**options), memory_options(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valid_rows": 0}, "valid_rows must be greater than 0, got 0"),
        ({"valid_tokens": -1}, "valid_tokens must be greater than 0"),
        ({"cache_sizes": [0, -5]}, "cache_sizes must not be negative"),
        ({"controls": ["random"]}, "random is not one of other_document, shuffled, longer_window"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        EvalOptions(**options)


# Several processes


def test_documents_are_divided_evenly():
    assert side_by_side([5, 9, 1, 7, 7], 2) == [[1, 3], [4, 0], [2]]
    assert side_by_side([5, 9, 1, 7, 7], 2, least=2) == [[1, 3], [4, 0, 2]]
    assert divide([9, 7, 5, 5, 1], 2) == [[0, 3], [1, 2, 4]]
    assert divide([9], 3) == [[0], [], []]


# Pictures


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {"base": made_run(0, 90, 60), "cache off": made_run(1, 90, 60, cache_size=0)}
    runs["cache 40"] = made_run(2, 90, 60, cache_size=40)
    files = plots.save_plots(tmp_path / "new", runs, [3.0, 2.5, 2.0])
    assert [file.name for file in files] == [
        *("position.png", "token_class.png", "cache_size.png", "training_loss.png")
    ]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files)
    assert "matplotlib.pyplot" not in sys.modules
    one = {"lora": made_run(0, 10)}  # one document in one segment: no interval, one bucket
    assert [file.name for file in plots.save_plots(tmp_path, one, [1.0])] == [
        *("position.png", "token_class.png", "training_loss.png")
    ]


def test_without_matplotlib_only_the_plots_are_missing(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert plots.save_plots(tmp_path, {"base": made_run(0, 90)}, [1.0]) == []
    assert 'pip install "cacheformers[eval]"' in capsys.readouterr().out
