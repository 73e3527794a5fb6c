"""`cacheformers perplexity`: windows, memory, units, forms of texts, errors."""

import gzip
import json
import math

import numpy as np
import pytest
import torch
from cacheformer_models import tiny_model
from conftest import save_adapter
from recipe import make_text, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheformers.adapters.export import export
from cacheformers.cli import main as command_line
from cacheformers.evaluation.held_out import window_nats
from cacheformers.evaluation.text_perplexity import Windows, main, places_in_window, raw_text, read_texts


def arguments(folder, mode, *more):
    """A run over the held-out documents of the fixture `folder`, 70 and 50 tokens long."""
    given = {"base": folder / "base", "texts": folder / "valid.jsonl", "output": folder / "out", "mode": mode}
    return [*(f"--{key}={value}" for key, value in given.items()), "--device=cpu", "--plots=false", *more]


def result(folder):
    return json.loads((folder / "out" / "result.json").read_text())


@pytest.fixture
def adapter(folder):
    """A memory adapter with open gates."""
    save_adapter(folder / "base", folder / "remembering")
    return folder / "remembering"


# Windows


@torch.no_grad()
def transformers_own(model, ids, window, stride):
    """The sum of losses, and of how many tokens, by transformers' documented recipe for models of fixed length."""
    nats, count, before = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        end = min(start + window, len(ids))
        labels = ids[start:end].clone()
        labels[: len(labels) - (end - before)] = -100
        scored = int((labels[1:] != -100).sum())
        if scored:
            nats += float(model(input_ids=ids[None, start:end], labels=labels[None]).loss) * scored
        count, before = count + scored, end
        if end == len(ids):
            break
    return nats, count


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 8), (16, 5), (2, 1), (75, 75), (74, 74), (90, 3)])
@pytest.mark.parametrize("rows", [1, 3])
def test_windows_are_those_of_transformers_recipe(make_base, ids, window, stride, rows):
    model = make_base("llama_gqa", max_position_embeddings=128)
    documents = [ids[0], ids[1, :50], ids[1, :2]]
    for document, nats in zip(documents, window_nats(model, documents, window, stride, rows), strict=True):
        expected, count = transformers_own(model, document, window, stride)
        assert np.isfinite(nats).sum() == count
        assert np.nansum(nats, dtype=np.float64) == pytest.approx(expected, rel=1e-5)


# Results


@pytest.mark.parametrize(("mode", "more", "tokens"), [("segment", [], 66 + 47), ("sliding", ["--stride=7"], 69 + 49)])
def test_a_run_writes_all_units(folder, capsys, monkeypatch, mode, more, tokens):
    """A word is a token here: both perplexities are one."""
    given = arguments(folder, mode, "--window=20", "--plots=true", *more)
    monkeypatch.setattr("sys.argv", ["cacheformers"])
    command_line.main(["perplexity", *given])
    found = result(folder)
    assert found["tokens"] == tokens and found["tokens_by_document"][0] > found["tokens_by_document"][1]
    mean = sum(found["nats_by_document"]) / tokens
    assert found["perplexity"] == pytest.approx(math.exp(mean)) == pytest.approx(found["word_perplexity"])
    texts = [make_text(length, length) for length in (70, 50)]
    characters = sum(map(len, texts))
    assert found["texts"]["words"] == 120 and found["texts"]["characters"] == found["texts"]["bytes"] == characters
    assert found["bits_per_character"] == pytest.approx(mean / math.log(2) * 120 / characters)
    assert found["windows"] == {"tokens": 20, "stride": 20 if mode == "segment" else 7}
    assert found["command"][2:] == given and found["environment"]["torch"] == torch.__version__
    assert f"{found['perplexity']:.3f}" in capsys.readouterr().out
    assert (folder / "out" / "position.png").stat().st_size > 1000


@pytest.mark.parametrize("exported", [False, True])
def test_memory_reads_a_document_as_one_pass(folder, adapter, tokenizer, exported):
    model = AutoModelForCausalLM.from_pretrained(adapter).eval()
    given = [f"--adapter={adapter}"]
    if exported:
        given = [f"--base={export(adapter, folder / 'model')}"]
    main(arguments(folder, "memory", "--rows=2", *given))
    found = result(folder)
    for place, length in enumerate((70, 50)):
        ids = tokenizer(make_text(length, length), return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        assert found["nats_by_document"][place] == pytest.approx(float(expected), rel=1e-4)
    assert found["windows"] is None and found["name"] == ("model-memory" if exported else "remembering-memory")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sliding", "memory"])
def test_two_processes_equal_one(folder, adapter, mode):
    given = arguments(folder, mode, *(["--window=20"] if mode == "sliding" else [f"--adapter={adapter}"]))
    main(given)
    alone = result(folder)
    run(given, folder / "log", 2, recipe="evaluation.text_perplexity")
    together = result(folder)
    assert together["environment"]["processes"] == 2
    np.testing.assert_allclose(together["nats_by_document"], alone["nats_by_document"], rtol=1e-5)


# Texts


def test_forms_of_texts(folder, tokenizer):
    """Raw files, compressed or not, are one document each; line ends stay; a cut character at the end is left out."""
    text = "w1 w2\r\n\n w3 Ĝ"
    (folder / "enwik").write_bytes(text.encode()[:-1])
    (folder / "wiki.raw.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "book.txt").write_bytes(text.encode())
    assert raw_text(folder / "enwik") == text[:-1]
    paths = [str(folder / name) for name in ("wiki.raw.gz", "book.txt")]
    zipped, plain = read_texts(paths, tokenizer)
    assert (zipped.tokens, zipped.words, zipped.characters, zipped.bytes) == (4, 4, len(text), len(text) + 1)
    assert plain.ids.tolist() == zipped.ids.tolist() and zipped.name == "wiki.raw.gz, document 0"
    assert len(read_texts([str(folder / "valid.jsonl"), *paths], tokenizer, documents=3)) == 3


def test_first_tokens_and_bos(folder, tokenizer):
    path = str(folder / "valid.jsonl")
    whole = read_texts([path], tokenizer)[0]
    (first,) = read_texts([path], tokenizer, bos=True, documents=1, tokens=10)
    assert first.ids.tolist() == [tokenizer.bos_token_id, *whole.ids[:10].tolist()]
    assert first.tokens == first.words == 10
    assert first.characters == len(" ".join(make_text(70, 70).split()[:10]))


# Errors, all of them before a model is loaded


@pytest.mark.parametrize(
    ("mode", "more", "message"),
    [
        ("segment", ["--window=65"], "A window of 65 tokens exceeds the model's 64 positions"),
        ("sliding", ["--window=10", "--stride=11"], "would leave tokens out between windows of 10"),
        ("segment", ["--stride=4"], "stride is for sliding, not for segment"),
        ("memory", ["--window=4"], "window is for sliding and segment"),
        ("memory", [], "takes a model with a memory: give an --adapter"),
        ("segment", ["--tokens=1"], "tokens must be at least 2"),
        ("segment", ["--words=9", "--tokens=5"], "words is for whole texts"),
        ("magic", [], "invalid choice: 'magic'"),
        ("segment", ["--texts=no/such/file.raw"], "no/such/file.raw"),
    ],
)
def test_options_that_cannot_work(folder, refused, mode, more, message):
    assert message in refused(main, arguments(folder, mode, *more))
    assert not (folder / "out").exists()


def test_a_memory_is_not_read_in_windows(folder, adapter, refused):
    said = refused(main, arguments(folder, "sliding", f"--adapter={adapter}"))
    assert "remembering has a memory: use the mode memory" in said


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken.gz", gzip.compress(b"w1 w2 " * 99, mtime=0)[:-9], "broken.gz cannot be read as gzip"),
        ("wrong.gz", gzip.compress(b"w1 w2 ", mtime=0)[:10] + b"w1 w2 w3 w4", "wrong.gz cannot be read as gzip"),
        ("picture.png", b"\x89PNG\xff\xfe", "picture.png is not text: its byte 0 is not UTF-8"),
        ("empty.raw", b" \n \n", "There is no document of two tokens or more"),
    ],
)
def test_files_that_are_not_text(folder, refused, name, content, message):
    (folder / name).write_bytes(content)
    assert message in refused(main, arguments(folder, "segment", f"--texts={folder / name}"))


def test_no_bos(folder, tokenizer, refused):
    tokenizer.bos_token = None
    tokenizer.save_pretrained(folder / "base")
    tokenizer.bos_token = "<bos>"
    assert "has no BOS token: leave out --bos" in refused(main, arguments(folder, "segment", "--bos=true"))


# CacheFormer


@pytest.fixture
def cacheformer(folder, tokenizer, request):
    """A CacheFormer model whose selection the test chooses, in `folder / "base"`."""
    selection = getattr(request, "param", "previous_block")
    model = tiny_model(torch.float32, vocab_size=128, segment_tokens=20, select_rows=None, selection=selection)
    model.save_pretrained(folder / "base")
    return folder


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:selection")
@pytest.mark.parametrize("cacheformer", ["previous_block", "paper_block"], indirect=True)
def test_a_cacheformer_in_windows(cacheformer, ids):
    """As trained, and as a decoder would see it: the same for a causal rule alone."""
    found = {}
    for stepwise in ("false", "true"):
        main(arguments(cacheformer, "segment", "--rows=2", f"--stepwise={stepwise}"))
        found[stepwise] = result(cacheformer)
        assert found[stepwise]["windows"] == {"tokens": 20, "stride": 20}  # those of its rows
    assert found["true"]["name"] == "base-segment-stepwise" and found["true"]["tokens"] == 66 + 47
    model = AutoModelForCausalLM.from_pretrained(cacheformer / "base")
    change = found["true"]["perplexity"] / found["false"]["perplexity"] - 1
    assert (abs(change) > 1e-4) is (not model.model.options.causal)
    [nats] = window_nats(model, [ids[0]], 20, 20, stepwise=True)
    token = model(ids[:1, 20:33]).logits[0, -1].log_softmax(-1)[ids[0, 33]]
    assert nats[32] == pytest.approx(-float(token), rel=1e-4)


@torch.no_grad()
def test_a_cacheformer_with_its_state(cacheformer):
    """Whole documents, side by side: what one forward over each of them gives."""
    main(arguments(cacheformer, "memory", "--rows=2"))
    found, model = result(cacheformer), AutoModelForCausalLM.from_pretrained(cacheformer / "base").eval()
    texts = read_texts([str(cacheformer / "valid.jsonl")], AutoTokenizer.from_pretrained(cacheformer / "base"))
    nats = [float(model(text.ids[None], labels=text.ids[None]).loss) * (len(text.ids) - 1) for text in texts]
    assert found["nats_by_document"] == pytest.approx(nats, rel=1e-5) and found["by_place_in_window"] == {}


@pytest.mark.filterwarnings("ignore:selection")
@pytest.mark.parametrize("cacheformer", ["paper_block"], indirect=True)
def test_the_papers_rule_has_no_state(cacheformer, refused):
    assert "Use the mode segment, with --stepwise" in refused(main, arguments(cacheformer, "memory"))


def test_places_in_the_window():
    """Windows side by side: the first bucket holds the tokens with fewer than 128 before them in their window."""
    rng = np.random.default_rng(0)
    losses = [rng.random(700).astype(np.float32)]
    losses[0][299::300] = np.nan
    found = places_in_window(losses, Windows(300, 300))
    assert {name: part.tokens for name, part in found.items()} == {"0-128": 356, "128-256": 256, "256-512": 43 + 43}
    chosen = np.concatenate([losses[0][:128], losses[0][300:428], losses[0][600:]])
    assert found["0-128"].nats == pytest.approx(float(chosen.sum(dtype=np.float64)), rel=1e-6)
    assert places_in_window(losses, Windows(300, 150)) == places_in_window(losses, None) == {}
