"""Questions with a part of the text before them: what is shown, of one memory and of a library."""

import asyncio
import io
import json
import sys
from functools import partial

import pytest
import torch
from recipe import ROOT, make_text

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
        shown = cacheformers.PassageConversation(model, tokenizer, memory, prompt, 20)
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
    talk = cacheformers.PassageConversation(model, tokenizer, memory, prompt_tokens=20)
    shown = talk.passages(QUESTION)
    assert shown in make_text(WORDS) and len(shown.split()) == 8
    wanted = talk.ask(QUESTION, max_new_tokens=4).tokens
    prompt = tokenizer(f"{shown}\n\n\nQuestion: {QUESTION}\nAnswer:", return_tensors="pt")
    plain = model.generate(**prompt, past_key_values=memory.with_window(60), max_new_tokens=4, do_sample=False)
    assert wanted == plain[0, prompt.input_ids.shape[1] :].tolist()
    other = talk.ask("w9", max_new_tokens=4, explain=True)
    assert [turn.question for turn in talk.turns] == [QUESTION, "w9"] and not talk.follows
    assert len(talk.ids) == sum(turn.prompt_tokens + len(turn.tokens) - turn.finished for turn in talk.turns)
    assert other.retrieved_most and not memory.timeline.open.any()
    own = tokenizer("\nQuestion: w9\nAnswer:").input_ids
    assert len(own) - 1 <= len(other.asked) <= len(own), "what passages retrieve is not what the question does"
    assert talk.prompt("w9") == tokenizer(f"{talk.passages('w9')}\n\n\nQuestion: w9\nAnswer:").input_ids
    talk.reset()
    assert "".join(talk.ask(QUESTION, max_new_tokens=4, stream=True)) == talk.turns[0].text
    assert talk.turns[0].tokens == wanted, "each question is asked by itself"
    capsys.readouterr()
    ask, few = ["ask", "book.memory", "--max-new-tokens", "4", "--json"], ["--prompt-tokens", "20"]
    tokens = {}
    for prompt in ((), ("--prompt", "recalled"), ("--prompt", "question")):
        main([*ask, QUESTION, *prompt, *([] if "question" in prompt else few)])
        tokens[prompt] = json.loads(capsys.readouterr().out)["answer"]
    said = tokenizer.decode(wanted, skip_special_tokens=True)
    assert tokens[()] == tokens["--prompt", "recalled"] == said != tokens["--prompt", "question"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\nw9\n{QUESTION}\n"))
    main([*ask, *few])
    answers = [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()]
    assert answers[0] == answers[2] == said, "each typed question is asked by itself"


def test_the_card_of_heads_shows_how_to_ask_them(make_model, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    saved(make_model, folder, "retrieval_heads", cache_size=400)
    (folder / "book.txt").write_text(make_text(30))
    code = (folder / "adapter" / "README.md").read_text().partition("```python\n")[2].partition("\n```")[0]
    exec(code.replace("THIS_FOLDER_OR_HUB_ID", "adapter").replace("max_new_tokens=40", "max_new_tokens=4"), {})
    assert "PassageConversation" in code and capsys.readouterr().out.strip()


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
    begun = cacheformers.PassageConversation(model, tokenizer, memory, prompt_tokens=20)
    assert begun.passages(QUESTION) == best
    command.main(["shelf", "ask", QUESTION, "--prompt-tokens", "20", "--max-new-tokens", "4", "--adapter", "adapter"])
    assert f"A: {begun.ask(QUESTION, max_new_tokens=4).text}\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION))
    command.main(["shelf", "ask", "--prompt-tokens", "20", "--max-new-tokens", "4", "--adapter", "adapter", "--json"])
    assert json.loads(capsys.readouterr().out)["answer"] == begun.turns[0].text

    with pytest.raises(ValueError, match="cacheformers.PassageConversation"):
        library.ask(QUESTION)
    again = together([library.memory("one"), library.memory("one")])
    twice = Recalling(model, tokenizer, again, *known_text(again)).scores(QUESTION, chunks(known_text(again)[0], 70))
    assert len(twice) == 2 and twice[0] == pytest.approx(twice[1], abs=1e-6), "where a text begins does not count"


def test_the_page_shows_passages(make_model, folder, tokenizer, monkeypatch):
    """Of heads; with the memory off there are none. A memory without its text cannot be asked."""
    pytest.importorskip("gradio")
    from cacheformers.app import show
    from cacheformers.app.desk import Desk

    model = saved(make_model, folder, "retrieval_heads", cache_size=400)
    monkeypatch.setattr(showing, "CHUNK_WORDS", 8)
    monkeypatch.setattr(showing, "CHUNK_TOKENS", 300)  # one passage
    desk = Desk(model, tokenizer, longest=4)
    *_, reading = desk.open([str(folder / "book.txt")])
    talk = desk.talk(reading)
    *_, said = desk.ask(talk, QUESTION)
    *_, later = desk.ask(talk, "w9")
    alone = cacheformers.PassageConversation(model, tokenizer, reading.memory)
    assert [said, later] == [alone.ask(question, max_new_tokens=4).text for question in (QUESTION, "w9")]
    assert "with the passages" in show.greeting(talk) and "None of it" in show.greeting(desk.talk(None))
    page = show.conversation(talk, tokenizer)
    assert page.count('<p class="question">') == 2 and "Question:" not in page and alone.passages("w9") not in page
    assert "data-retrieved" in page.split('<p class="answer">')[0], "words of the question show what they retrieved"
    assert type(desk.talk(None)) is cacheformers.Conversation
    reading.memory.origin.sources[0] = None
    reading.memory.save(folder / "bare.memory")
    with pytest.raises(ValueError, match="saved without its text"):
        list(desk.open([str(file) for file in (folder / "bare.memory").iterdir()]))


def test_the_server_puts_passages_before_the_last_question(folder):
    pytest.importorskip("openai")
    from fastapi import HTTPException
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerationState, Modality

    from cacheformers.cli.server import SHOWN, Chats, Responses

    said = [("system", "Be brief."), ("user", "When?"), ("assistant", "Who?"), ("user", "When?"), ("user", " ")]
    messages = [{"role": role, "content": content} for role, content in said]

    async def prompted(handler):
        SHOWN.set(await handler.search("model", messages))
        return handler.get_processor_inputs_from_messages(messages, Modality.LLM)

    for kind in (Chats, Responses):
        handler = kind(ModelManager(), GenerationState())
        assert handler.get_processor_inputs_from_messages(messages, Modality.LLM) == messages
        handler.passages = lambda question: f"about {question}"
        shown = asyncio.run(prompted(handler))
        assert shown[3] == {"role": "user", "content": "about When?\n\nWhen?"}
        assert [*shown[:3], shown[4]] == [*messages[:3], messages[4]]
        handler.apart = True
        apart = asyncio.run(prompted(handler))
        assert apart == [*messages[:3], {"role": "system", "content": "about When?\n"}, *messages[3:]]
        assert handler.get_processor_inputs_from_messages(messages, Modality.LLM) == messages  # of another request
        assert asyncio.run(handler.search("model", messages[:1])) == ""
        handler.passages = partial(int, base=10)  # a ValueError of passages
        with pytest.raises(HTTPException, match="invalid literal"):
            asyncio.run(prompted(handler))


def test_a_text_that_was_not_saved_cannot_be_shown(make_model, folder, tokenizer):
    model = saved(make_model, folder)
    memory = cacheformers.read(model, tokenizer(make_text(40)).input_ids, progress=False)
    with pytest.raises(ValueError, match="saved without its text.*read the text again"):
        cacheformers.PassageConversation(model, tokenizer, memory)
    with pytest.raises(ValueError, match="prompt must be one of recalled, .* got 'question'"):
        cacheformers.PassageConversation(model, tokenizer, memory, "question")
    memory = cacheformers.read_text(model, tokenizer, make_text(40), progress=False)
    unread = cacheformers.new_memory(model, 1)
    unread.origin.sources = memory.origin.sources
    with pytest.raises(ValueError, match="has read nothing yet"):
        cacheformers.PassageConversation(model, tokenizer, unread)
    talk = cacheformers.PassageConversation(model, tokenizer, memory)
    with pytest.raises(ValueError, match="the base has 64: ask for a shorter answer, or show less"):
        talk.ask(QUESTION, max_new_tokens=9999)
    with pytest.raises(ValueError, match="Question, text and answer take .* the base has 64"):
        talk.passages(make_text(80))
    assert not talk.turns and talk.ask("w5", max_new_tokens=2).text == talk.turns[0].text


@pytest.mark.slow
def test_the_shipped_heads_find_and_read_a_fact(smollm2, tmp_path, monkeypatch, capsys):
    """Of some 3,000 tokens, as a user asks; the base alone has not seen the text."""
    monkeypatch.chdir(ROOT)
    line = "Call me Ishmael. Some years ago, never mind how long precisely. "
    (tmp_path / "book.txt").write_text(line * 90 + "The old lighthouse of Port Amsel was painted green. " + line * 90)
    model = ["--model", str(smollm2), "--adapter", "model_cards/answers_heads", "--dtype", "float32"]
    main(["read", str(tmp_path / "book.txt"), "-o", str(tmp_path / "book.memory"), *model])
    main(["ask", str(tmp_path / "book.memory"), "What color is the lighthouse of Port Amsel?", *model])
    assert "green" in capsys.readouterr().out.partition("\nA: ")[2].partition("\n")[0].lower()
