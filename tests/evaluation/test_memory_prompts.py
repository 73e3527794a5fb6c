"""`--memory_prompt` and `--memory_content`: what self-attention sees after a memory has read, and what it has read."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from longbench_cases import arguments, predictions, prompt_maker, result, row, write_rows
from peft import get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

import cacheformers
from cacheformers import eval_longbench
from cacheformers.evaluation.longbench import answers
from cacheformers.evaluation.longbench.answers import answered
from cacheformers.evaluation.longbench.gold import in_sight
from cacheformers.evaluation.longbench.records import load_records
from cacheformers.evaluation.longbench.retrieval import (
    ASKING,
    BM25,
    Hybrid,
    Recalling,
    chunks,
    found_in,
    token_spans,
)
from cacheformers.modeling.reading import read

TASKS = ("--tasks", "hotpotqa", "trec")


@pytest.fixture(name="closed")
def closed_fixture(bench, config_factory):
    """An adapter whose gates are closed, with segments shorter than the prompts."""
    base = AutoModelForCausalLM.from_pretrained(bench / "base")
    model = get_peft_model(base, config_factory(cache_size=800, segment_tokens=32))
    model.save_pretrained(bench / "closed")
    return bench / "closed"


def run(folder, remembering, *more, method="memory"):
    eval_longbench.main([*arguments(folder, f"--adapter={remembering}", *more, method=method), *TASKS])


@pytest.mark.parametrize(
    ("prompt", "method", "title"),
    [("cut", "truncation", "base-truncation"), ("retrieved", "retrieval", "base-retrieval-bm25")],
)
def test_closed_gates_are_the_base_with_the_same_prompt(bench, closed, prompt, method, title):
    chunks = ("--chunk_words=10", "--chunks=2")
    run(bench, closed, *chunks, method=method)
    run(bench, closed, f"--memory_prompt={prompt}", *chunks)
    assert predictions(bench, f"closed-memory-{prompt}") == predictions(bench, title)


def test_open_gates_change_the_answers_by_what_was_read(bench, remembering):
    """The same prompts after the own context, another one, the own one shuffled, and none."""
    found = {}
    for content in ("own", "other", "shuffled", "none"):
        run(bench, remembering, "--memory_prompt=cut", f"--memory_content={content}")
        title = "remembering-memory-cut" + ("" if content == "own" else f"-{content}")
        found[content] = "".join(predictions(bench, title).values())
        settings = result(bench, title)["settings"]
        assert settings.get("memory_content", "own") == content
        assert settings["memory_prompt"]["max_length"] == 200
    assert len(set(found.values())) == 4


def test_questions_about_the_same_text_share_its_reading(bench, remembering, monkeypatch):
    """Three questions about two texts: a batch of three reads two, and answers as batches of one do."""
    rows = [row("hotpotqa", number, 60) for number in range(3)]
    rows[1]["context"] = rows[0]["context"]
    write_rows(bench / "data" / "hotpotqa.jsonl", rows)
    read, counts = answers.read, []
    monkeypatch.setattr(
        answers, "read", lambda model, texts, **more: counts.append(len(texts)) or read(model, texts, **more)
    )
    found = []
    for batch in (1, 3):
        more = (
            f"--adapter={remembering}",
            f"--batch={batch}",
            "--max_length=4000",
            "--overwrite",
            "--tasks",
            "hotpotqa",
        )
        eval_longbench.main(arguments(bench, *more, method="memory"))
        found.append(predictions(bench, "remembering-memory"))
    assert counts == [1, 1, 1, 2] and found[0] == found[1]


def scores_of(model, maker, memory, record, texts, row):
    """The scores of a text's chunks; each token belongs to the chunk in which it begins."""
    template, spans = maker.templates["hotpotqa"], []
    encoded = maker.tokenizer(template.format(**vars(record)), return_offsets_mapping=True)
    for text in texts:
        place = template.index("{context}") + record.context.index(text)
        own = [number for number, (start, _) in enumerate(encoded.offset_mapping) if place <= start < place + len(text)]
        spans.append((own[0], own[-1] + 1))
    before, query = (maker.tokenizer(part, add_special_tokens=False).input_ids for part in (ASKING, f" {record.input}"))
    return cacheformers.recall(model, memory, before + query, spans, row, skip=len(before))


def test_what_was_read_is_kept_for_other_runs(bench, remembering, monkeypatch):
    """With `--memories`, answers are the same, and runs with other prompts or contents read nothing that was read."""
    counts = []
    monkeypatch.setattr(
        answers, "read", lambda model, texts, **more: counts.append(len(texts)) or read(model, texts, **more)
    )
    kept = f"--memories={bench / 'memories'}"
    for prompt, content in (("tail", "own"), ("cut", "other")):
        title = f"remembering-memory-{prompt}" + ("" if content == "own" else f"-{content}")
        how = (f"--memory_prompt={prompt}", f"--memory_content={content}", "--batch=2", "--overwrite=true")
        run(bench, remembering, *how)
        plain, before = predictions(bench, title), len(counts)
        run(bench, remembering, *how, kept)
        assert predictions(bench, title) == plain
        assert (len(counts) > before) == (prompt == "tail")
    records = sum(len(lines.splitlines()) for lines in plain.values())
    assert len(list((bench / "memories").iterdir())) == records


def test_memories_are_kept_by_their_options(bench, config_factory):
    """The same weights with another cache size read for themselves, and an unfinished folder is no memory."""
    for size in (64, 96):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(bench / "base")
        model = get_peft_model(base, config_factory(cache_size=size, segment_tokens=32)).eval()
        for _ in range(2):
            memory = answers.read_once(model, list(range(100)), None, bench / "kept")
            assert {ring.capacity for ring in memory.state.rings.values()} == {size}
    folders = list((bench / "kept").iterdir())
    assert len(folders) == 2
    for folder in folders:
        (folder / "index.json").unlink()
    assert answers.read_once(model, list(range(100)), None, bench / "kept").tokens_read == [100]


def test_the_memory_chooses_what_is_shown(bench, config_factory, error_of, monkeypatch):
    """Of a text's chunks the one with the highest score is shown, and another text's memory shows another."""
    base = AutoModelForCausalLM.from_pretrained(bench / "base")
    model = get_peft_model(base, config_factory(cache_size=800, segment_tokens=32, hit_scores=True))
    model.save_pretrained(bench / "recalling")
    how = {"memory_prompt": "recalled", "max_length": 400, "chunk_words": 10, "chunks": 1}
    maker = prompt_maker(bench, "memory", adapter=str(bench / "recalling"), **how)
    records = load_records(str(bench / "data"), "hotpotqa")[:2]
    prompts = [maker(record) for record in records]
    memory, retrievers = answers.remembered(model, prompts), []
    monkeypatch.setattr(answers, "Recalling", lambda *given: retrievers.append(Recalling(*given)) or retrievers[-1])
    shown = answers.recalled(model, maker, memory, records, prompts)
    for number, record in enumerate(records):
        texts = chunks(record.context, 10)
        scores = scores_of(model, maker, memory, record, texts, number)
        torch.testing.assert_close(torch.from_numpy(retrievers[number].scores(record.input, texts)), scores)
        seen = maker.tokenizer.decode(shown[number].asked)
        assert [text.strip() in seen for text in texts] == (scores == scores.max()).tolist()
        assert shown[number].read == prompts[number].read
        both = [retrievers[number], BM25()]
        fused = torch.zeros(len(texts), dtype=torch.float64)
        for retriever in both:
            order = torch.tensor(retriever.scores(record.input, texts)).argsort(descending=True, stable=True).tolist()
            fused += torch.tensor([1 / (61 + order.index(place)) for place in range(len(texts))], dtype=torch.float64)
        torch.testing.assert_close(torch.from_numpy(Hybrid(*both).scores(record.input, texts)), fused)
    found = []
    for content in ("own", "other"):
        run(bench, bench / "recalling", "--memory_prompt=recalled", f"--memory_content={content}", "--chunk_words=10")
        found.append(predictions(bench, "recalling-memory-recalled" + ("" if content == "own" else "-other")))
    assert found[0] != found[1]
    unasked = [replace(record, input=" ") for record in records]  # there is nothing to recall by
    cut = prompt_maker(bench, "memory", adapter=str(bench / "recalling"), memory_prompt="cut", max_length=400)
    prompts = [maker(record) for record in unasked]
    shown = answers.recalled(model, maker, memory, unasked, prompts)
    assert [prompt.asked for prompt in shown] == [cut(record).asked for record in unasked]
    given = arguments(bench, f"--adapter={bench / 'recalling'}", "--memory_prompt=recalled", method="memory")
    assert "needs a memory that holds a text" in error_of([*given, "--memory_content=none", *TASKS])


def test_memory_and_bm25_together(bench, config_factory):
    """With all chunks shown, their order is the one of the fused ranks; the run says what it depends on."""
    base = AutoModelForCausalLM.from_pretrained(bench / "base")
    model = get_peft_model(base, config_factory(cache_size=800, segment_tokens=32, hit_scores=True))
    model.save_pretrained(bench / "together")
    how = {"adapter": str(bench / "together"), "memory_prompt": "hybrid", "max_length": 2000, "chunk_words": 10}
    maker = replace(prompt_maker(bench, "memory", **how), retriever=BM25())
    record = load_records(str(bench / "data"), "hotpotqa")[0]
    prompts = [maker(record)]
    memory = answers.remembered(model, prompts)
    (shown,) = answers.recalled(model, maker, memory, [record], prompts)
    places = [(start + len(record.context), end + len(record.context)) for start, end in prompts[0].places]
    recalling = Recalling(model, maker.tokenizer, memory, record.context, places)
    texts = chunks(record.context, 10)
    order = (-Hybrid(recalling, BM25()).scores(record.input, texts)).argsort(kind="stable")[:7]
    assert "\n\n".join(texts[place].strip() for place in order) in maker.tokenizer.decode(shown.asked)
    maker = replace(maker, options=replace(maker.options, text_order=True))
    (shown,) = answers.recalled(model, maker, memory, [record], prompts)
    assert "\n\n".join(texts[place].strip() for place in sorted(order)) in maker.tokenizer.decode(shown.asked)
    run(bench, bench / "together", "--memory_prompt=hybrid", "--chunk_words=10", "--text_order=true")
    settings = result(bench, "together-memory-hybrid")["settings"]["memory_prompt"]
    assert settings["retriever"] == "bm25" and settings["chunk_words"] == 10 and settings["text_order"]


@pytest.mark.parametrize("spaces", ["before", "between"])
def test_every_word_belongs_to_its_own_passage(spaces):
    """Tokens begin with the space before their word, or leave it out."""
    text = "He shut the door. Mary went away. It rained all night."
    words = WordLevel({"[UNK]": 0, "[BOS]": 1}, unk_token="[UNK]")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = Metaspace() if spaces == "before" else Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    places = [tuple(place) for place in tokenizer.encode(text).offsets]
    assert places[0] == (0, 0) and (spaces == "before") == any(text[start] == " " for start, _ in places[1:])
    texts = chunks(text, 4)
    assert [chunk.strip() for chunk in texts] == ["He shut the door.", "Mary went away.", "It rained all night."]
    for chunk, (first, end) in zip(texts, token_spans(found_in(text, texts), [end for _, end in places]), strict=True):
        own = "".join(text[slice(*place)] for place in places[first:end])
        assert "".join(own.split()) == "".join(chunk.split())


@pytest.mark.parametrize(
    ("query", "texts"), [("?!", ["two words", "..."]), ("two words", ["...", "\u2014"]), ("", [""])]
)
def test_without_a_word_no_text_is_nearer(query, texts):
    assert BM25().scores(query, texts).tolist() == [0] * len(texts)


SEARCH = """
from cacheformers.evaluation.longbench.retrieval import BM25
assert BM25().scores("red window", ["a blue door", "a red window"]).argmax() == 1
print("Searched.")
import jax
"""


def test_bm25_leaves_the_gpu_s_memory_to_torch(tmp_path):
    """JAX reserves three quarters of it as soon as it is called, and bm25s would call it when it is imported."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('JAX was imported.')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SEARCH], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Searched.", "JAX was imported."]


def test_the_tail_is_the_end_of_the_prompt(bench, closed):
    maker = prompt_maker(bench, "memory", memory_prompt="tail", max_length=400, adapter=str(closed))
    record = load_records(str(bench / "data"), "hotpotqa")[0]
    prompt = maker(record)
    assert prompt.shown is not None and prompt.asked == prompt.ids[-400:]
    assert prompt.read == prompt.ids[: prompt.question] and record.context in maker.tokenizer.decode(prompt.read)
    assert prompt.asking == len(prompt.ids) - prompt.question


def test_a_passage_is_in_sight_where_all_of_it_is_shown(bench, closed):
    maker = prompt_maker(bench, "memory", memory_prompt="tail", max_length=400, adapter=str(closed))
    record = load_records(str(bench / "data"), "hotpotqa")[0]
    prompt, length = maker(record), len(record.context)
    first, last, whole = (0, 40), (length - 60, length - 20), (0, length)
    for gold, seen in (((first,), False), ((last,), True), ((first, last), True), ((whole,), False)):
        assert in_sight(maker.tokenizer, replace(record, gold=gold), prompt.asked) == {"gold_in_sight": seen}
    assert in_sight(maker.tokenizer, record, prompt.asked) == {}


def test_a_base_that_reads_everything_has_every_passage_in_sight(bench, closed):
    """Also beside a memory whose prompt has its question looked up."""
    base = AutoModelForCausalLM.from_pretrained(bench / "base").eval()
    for shown in ("question", "cut"):
        maker = prompt_maker(bench, "full", memory_prompt=shown, adapter=str(closed))
        record = load_records(str(bench / "data"), "hotpotqa")[0]
        _, [cost] = answered(base, maker, [replace(record, gold=((0, 40),))])
        assert cost["gold_in_sight"] is True


def test_prompts_need_a_window_of_their_own(bench, config_factory, error_of):
    base = AutoModelForCausalLM.from_pretrained(bench / "base")
    get_peft_model(base, cacheformers.GatedAttentionAdapterConfig(window_tokens=32)).save_pretrained(bench / "gated")
    given = arguments(bench, f"--adapter={bench / 'gated'}", "--memory_prompt=cut", method="memory")
    assert "has no window of its own" in error_of([*given, *TASKS])
    assert "memory_prompt must be one of question" in error_of([*given, "--memory_prompt=all"])


def test_own_sets_take_the_prompt_and_metric_of_their_template(bench, remembering, capsys, error_of):
    """Sets under names of their own, with a gold passage each: hits are counted by layer."""
    rows = []
    for number in range(3):
        made = {**row("hotpotqa", number, 150), "template": "hotpotqa"}
        start = made["context"].index(" ", 200) + 1
        rows.append({**made, "gold": [[start, start + 40]]})
    write_rows(bench / "sets" / "wiki_qa.jsonl", rows)
    more = (f"--adapter={remembering}", f"--data={bench / 'sets'}", "--max_length=4000")
    given = arguments(bench, *more, method="memory")
    given = [word for word in given if word not in ("--tasks", "hotpotqa", "trec", "samsum", "passage_count")]
    eval_longbench.main(given)
    found = result(bench, "remembering-memory")
    assert list(found["tasks"]) == ["wiki_qa"] and found["tasks"]["wiki_qa"]["metric"] == "qa_f1_score"
    assert found["gold_hits"]["records"] == 3 and "Multi-document QA" in found
    (layer,) = found["gold_hits"]["layers"].values()
    assert 0 < layer["passage"] <= 1 and 0 <= layer["tokens"] <= 1
    assert "answer's passage retrieved" in capsys.readouterr().out
    rows[0]["gold"] = [[0, 10**6]]
    write_rows(bench / "sets" / "wiki_qa.jsonl", rows)
    assert "gold passage outside its context" in error_of([*given, "--overwrite"])


def test_dropped_questions_leave_no_trace(make_model):
    """After `drop`, a second question is answered as if the first had never been asked, in every row by itself."""
    model = make_model("llama_gqa", segment_tokens=8, cache_size=64)
    ids = torch.randint(0, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        memory = cacheformers.read(model, ids[:, :20], progress=False)
        asked = memory.clone()
        model(input_ids=ids[:, 20:26], past_key_values=asked)
        asked.drop([0, 1])
        assert asked.tokens_read == memory.tokens_read
        once = model(input_ids=ids[:, 30:], past_key_values=memory).logits
        twice = model(input_ids=ids[:, 30:], past_key_values=asked).logits
    assert torch.equal(once, twice)
