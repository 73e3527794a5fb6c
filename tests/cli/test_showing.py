"""Questions with a part of the text before them: what is shown, of one memory and of a library."""

import io
import json
import sys

import pytest
import torch
from recipe import make_text

import cacheformers
from cacheformers.cli import library as command
from cacheformers.cli.main import main
from cacheformers.evaluation import showing
from cacheformers.evaluation.longbench.retrieval import Recalling, chunks
from cacheformers.evaluation.showing import known_text, shown_text
from cacheformers.modeling.thinning import together

WORDS = 120
QUESTION = "w5 w6 w7"


def saved(make_model, folder, method="neurocache", **more):
    """An adapter in `adapter` over the base in `base`, and a text in `book.txt`."""
    model = make_model("llama_gqa", torch.float32, method=method, **more)
    model.peft_config["default"].base_model_name_or_path = "base"  # seen from the folder
    model.save_pretrained(folder / "adapter")
    (folder / "book.txt").write_text(make_text(WORDS))
    return model


def test_what_a_prompt_shows_beside_the_question(make_model, folder, tokenizer, monkeypatch, capsys):
    """Of four chunks, the memory recalls the last: it has forgotten the others."""
    pytest.importorskip("bm25s")
    monkeypatch.chdir(folder)
    model = saved(make_model, folder)
    main(["read", "book.txt", "-o", "book.memory", "--adapter", "adapter", "--cache-size", "12"])
    monkeypatch.setattr(showing, "CHUNK_WORDS", 30)
    first, *_, last = chunks(make_text(WORDS), 30)
    expected = {"tail": " ".join(make_text(WORDS).split()[-20:]), "retrieved": first, "recalled": last}
    expected["hybrid"] = first
    question = " ".join(first.split()[:9])
    memory = cacheformers.load_memory("book.memory", model, tokenizer=tokenizer)
    capsys.readouterr()
    for prompt, text in expected.items():
        assert shown_text(model, tokenizer, memory, question, prompt, 20).strip() == text.strip(), prompt
        shown = cacheformers.with_text(model, tokenizer, memory, question, prompt, 20, max_new_tokens=3)
        main(["ask", "book.memory", question, "--prompt", prompt, "--prompt-tokens", "20", "--max-new-tokens", "3"])
        assert f"\nA: {shown.ask(question, max_new_tokens=3).text}\n" in capsys.readouterr().out, prompt

    begun = cacheformers.read(model, tokenizer(make_text(WORDS), return_tensors="pt").input_ids[:, :40], progress=False)
    begun.origin.sources = memory.origin.sources
    shown = shown_text(model, tokenizer, begun, question, "tail", 20)
    assert shown.split() == make_text(WORDS).split()[20:40], "of a text whose reading was stopped, what was read"


def test_heads_answer_with_what_they_recall(make_model, folder, tokenizer, monkeypatch, capsys):
    """Attention does not see their memory, so passages are shown unless the question alone is asked for."""
    monkeypatch.chdir(folder)
    model = saved(make_model, folder, "retrieval_heads", cache_size=400)
    main(["read", "book.txt", "-o", "book.memory", "--adapter", "adapter"])
    memory = cacheformers.load_memory("book.memory", model, tokenizer=tokenizer)
    monkeypatch.setattr(showing, "CHUNK_WORDS", 8)
    shown = cacheformers.with_text(model, tokenizer, memory, QUESTION, prompt_tokens=20, max_new_tokens=4)
    assert shown.shown.split()[0] in make_text(WORDS) and len(shown.shown.split()) == 8
    wanted = shown.ask(QUESTION, max_new_tokens=4).tokens
    capsys.readouterr()
    ask = ["ask", "book.memory", "--prompt-tokens", "20", "--max-new-tokens", "4", "--json"]
    tokens = {}
    for prompt in ((), ("--prompt", "recalled"), ("--prompt", "question")):
        main([*ask, QUESTION, *prompt])
        tokens[prompt] = json.loads(capsys.readouterr().out)["answer"]
    said = tokenizer.decode(wanted, skip_special_tokens=True)
    assert tokens[()] == tokens["--prompt", "recalled"] == said != tokens["--prompt", "question"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\nw9\n{QUESTION}\n"))
    main(ask)
    answers = [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()]
    assert answers[0] == answers[2] == said, "each typed question is asked by itself"


def test_a_library_shows_passages_of_all_its_memories(make_model, folder, tokenizer, monkeypatch, capsys, refused):
    monkeypatch.chdir(folder)
    model = saved(make_model, folder, "retrieval_heads", cache_size=400)
    texts = {"one.txt": make_text(60, seed=1), "other.txt": make_text(70, seed=2)}
    library = cacheformers.Library("shelf", model, tokenizer)
    for name, text in texts.items():
        library.add(name, text=text, progress=False)
    memory = library.memories()
    assert known_text(library.memories(["one"]))[0] == texts["one.txt"]
    text, places = known_text(memory)
    assert text == texts["one.txt"] + showing.GAP + texts["other.txt"]
    words = [text[start:end].strip() for start, end in places]
    assert words[:60] == texts["one.txt"].split() and words[61:] == texts["other.txt"].split()[1:]

    passages = chunks(text, 10)
    scores = Recalling(model, tokenizer, memory, text, places).scores(QUESTION, passages)
    best = passages[int(scores.argmax())].strip()
    monkeypatch.setattr(showing, "CHUNK_WORDS", 10)
    begun = cacheformers.with_text(model, tokenizer, memory, QUESTION, prompt_tokens=20, max_new_tokens=4)
    assert begun.shown == best
    command.main(["shelf", "ask", QUESTION, "--prompt-tokens", "20", "--max-new-tokens", "4", "--adapter", "adapter"])
    assert f"A: {begun.ask(QUESTION, max_new_tokens=4).text}\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION))
    command.main(["shelf", "ask", "--prompt-tokens", "20", "--max-new-tokens", "4", "--adapter", "adapter", "--json"])
    assert json.loads(capsys.readouterr().out)["answer"] == begun.turns[0].text

    with pytest.raises(ValueError, match="cacheformers.with_text"):
        library.ask(QUESTION)
    again = together([library.memory("one"), library.memory("one")])
    twice = Recalling(model, tokenizer, again, *known_text(again)).scores(QUESTION, chunks(known_text(again)[0], 70))
    assert len(twice) == 2 and twice[0] == pytest.approx(twice[1], abs=1e-6), "where a text begins does not count"


def test_what_shows_no_passages_refuses_heads(make_model, folder, tokenizer, monkeypatch, refused):
    pytest.importorskip("uvicorn")
    monkeypatch.chdir(folder)
    model = saved(make_model, folder, "retrieval_heads", cache_size=400)
    main(["read", "book.txt", "-o", "book.memory", "--adapter", "adapter"])
    with pytest.raises(SystemExit, match="Attention does not see this memory"):
        main(["serve", "adapter", "--memory", "book.memory"])
    pytest.importorskip("gradio")
    from cacheformers.app.desk import Desk

    with pytest.raises(ValueError, match="Attention does not see this memory"):
        Desk(model, tokenizer)


def test_a_text_that_was_not_saved_cannot_be_shown(make_model, folder, tokenizer):
    model = saved(make_model, folder)
    memory = cacheformers.read(model, tokenizer(make_text(40)).input_ids, progress=False)
    with pytest.raises(ValueError, match="saved without its text.*--prompt question"):
        cacheformers.with_text(model, tokenizer, memory, QUESTION)
    with pytest.raises(ValueError, match="prompt must be one of recalled, .* got 'question'"):
        cacheformers.with_text(model, tokenizer, memory, QUESTION, "question")
    memory = cacheformers.read_text(model, tokenizer, make_text(40), progress=False)
    unread = cacheformers.new_memory(model, 1)
    unread.origin.sources = memory.origin.sources
    with pytest.raises(ValueError, match="has read nothing yet"):
        cacheformers.with_text(model, tokenizer, unread, QUESTION)
    with pytest.raises(ValueError, match="the base has 64: give a smaller"):
        cacheformers.with_text(model, tokenizer, memory, QUESTION, max_new_tokens=9999)
