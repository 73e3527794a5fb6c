"""Libraries of memory files: added, listed, asked together, thinned and removed, in Python and on the command line."""

import io
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from recipe import Recipe, make_text, run, write_documents

import cacheformers
from cacheformers.cli import library as command
from cacheformers.cli.main import main
from cacheformers.cli.model import load_model

ROOT = Path(__file__).resolve().parents[2]

LOW, HIGH = " ".join(f"w{n % 40}" for n in range(0, 240, 3)), " ".join(f"w{40 + n % 40}" for n in range(0, 240, 3))


@pytest.fixture
def library(make_model, folder, tokenizer):
    model = make_model("llama_gqa", torch.float32, cache_size=400)
    model.peft_config["default"].base_model_name_or_path = "base"  # seen from the folder
    model.save_pretrained(folder / "adapter")
    (folder / "low.txt").write_text(LOW)
    (folder / "high.md").write_text(HIGH)
    return cacheformers.Library(folder / "library", model, tokenizer)


def test_add_list_ask_remove(library, folder):
    for path in ("low.txt", "high.md"):
        library.add(str(folder / path), progress=False)
    library.add("a name", "third", text=make_text(60), progress=False)
    assert [(held.name, held.tokens) for held in library.contents()] == [("high", 80), ("low", 80), ("third", 60)]
    assert library.contents()[1].source == str(folder / "low.txt")

    answer = library.ask("w5 w6 w7", max_new_tokens=4)
    assert {passage.document for passage in answer.retrieved_most} <= {*map(str, folder.glob("*")), "a name"}
    alone = library.ask("w5 w6 w7", ["low"], max_new_tokens=4)
    expected = cacheformers.Conversation(library.model, library.tokenizer, library.memory("low"))
    assert alone.tokens == expected.ask("w5 w6 w7", max_new_tokens=4).tokens
    assert {passage.document for passage in alone.retrieved_most} == {str(folder / "low.txt")}
    chosen = {question: library.choose(question, ["low", "high"]) for question in ("w3 w6 w9", "w43 w46", "w70 w71")}
    for question, name in chosen.items():
        first, second = (hits(library, asked) for asked in (question, "?"))
        votes = [sum(max(first[n] - second[n], 0) for n in part) for part in (range(80), range(80, 160))]
        assert name == ("low" if votes[0] >= votes[1] else "high")
        answer = library.ask(question, ["low", "high"], choose=True, max_new_tokens=4)
        named = {passage.document for passage in answer.retrieved_most}
        assert named == {str(folder / {"low": "low.txt", "high": "high.md"}[name])}

    library.remove("third")
    assert library.names == ["high", "low"]
    held = library.compress("low", 20_000, questions=["w3 w6"], rule="unused")
    assert held.bytes <= 20_000 and library.ask("w3", max_new_tokens=2).tokens


def hits(library, question):
    """How often each entry of two memories is retrieved."""
    conversation = library.conversation(["low", "high"])
    answer = conversation.ask(question, max_new_tokens=1, explain=True)
    return Counter(int(number) for found in [*answer.asked, *answer.retrieved] for number in found)


def test_what_is_refused(library, folder, make_model, tokenizer):
    with pytest.raises(ValueError, match="holds no memory yet"):
        library.ask("w5")
    library.add(str(folder / "low.txt"), progress=False)
    with pytest.raises(ValueError, match="has a memory low already"):
        library.add(str(folder / "low.txt"))
    with pytest.raises(ValueError, match="leave out slashes"):
        library.add(str(folder / "low.txt"), "../low")
    for name in ("nothing", "../library/low", ".."):
        with pytest.raises(ValueError, match="has no memory"):
            library.remove(name)
    with pytest.raises(ValueError, match="without a model"):
        cacheformers.Library(library.folder).ask("w5")
    with pytest.raises(ValueError, match="is a file"):
        cacheformers.Library(folder / "low.txt")
    infini = make_model("llama_gqa", torch.float32, method="infini_attention")
    other = cacheformers.Library(folder / "matrices", infini, tokenizer)
    for name in ("low.txt", "high.md"):
        other.add(str(folder / name), progress=False)
    assert other.ask("w5", ["low"], max_new_tokens=2).tokens  # alone it answers
    with pytest.raises(ValueError, match="cannot be searched together"):
        other.ask("w5")


def test_questions_to_compress_are_for_one_rule(library, refused):
    """Nothing is loaded for them: there is no such model."""
    message = "Questions are for the rule 'unused', not 'oldest'"
    with pytest.raises(ValueError, match=message):
        library.compress("low", 20_000, questions=["w3 w6"])
    given = ["compress", "low", "--bytes", "20K", "--question", "w3", "--model", "nowhere"]
    assert message in refused(command.main, [str(library.folder), *given])


def test_a_method_that_retrieves_nothing_has_nothing_to_explain(folder, make_model, tokenizer, monkeypatch, refused):
    monkeypatch.chdir(folder)
    model = make_model("llama_gqa", torch.float32, method="infini_attention")
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained("matrices")
    cacheformers.Library("shelf", model, tokenizer).add("low", text=LOW, progress=False)
    for more in (["w5"], ["w5", "--json"], []):
        given = ["shelf", "ask", *more, "--explain", "--adapter", "matrices"]
        assert "retrieves nothing: leave it out" in refused(command.main, given)


def test_the_command(library, folder, monkeypatch, capsys, refused):
    monkeypatch.chdir(folder)
    (folder / "low.html").write_text(f"<html><body><p>{LOW}</p></body></html>")
    pytest.importorskip("bs4")
    assert "holds no memory yet" in refused(command.main, ["shelf", "ask", "w5"])
    assert "--adapter" in refused(command.main, ["shelf", "add", "low.html"])
    command.main(["shelf", "add", "low.html", "high.md", "--adapter", "adapter"])
    command.main(["shelf"])
    output = capsys.readouterr().out
    assert "low: 80 tokens" in output and "high.md" in output and "80 tokens" in output.splitlines()[-1]
    command.main(["shelf", "ask", "--json", "--max-new-tokens", "3", "w5", "w45"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["question"] for line in lines] == ["w5", "w45"]
    assert {passage["document"] for line in lines for passage in line["passages"]} <= {"low.html", "high.md"}
    command.main(["shelf", "ask", "w43 w46 w49", "--choose", "--max-new-tokens", "3"])
    assert "Q: w43 w46 w49 (high)\nA: " in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5\nw6\n"))
    command.main(["shelf", "ask", "--in", "low", "--in", "high", "--max-new-tokens", "3"])
    output = capsys.readouterr().out
    assert output.count("\nQ: ") == 2 and ("low.html, token " in output or "high.md, token " in output)
    command.main(["shelf", "compress", "low", "--bytes", "11K", "--rule", "oldest"])
    assert "low: 80 entries, " in capsys.readouterr().out
    assert "was thinned" in stopped(["read", "low.html", "-o", "shelf/low.memory", "--adapter", "adapter"])
    command.main(["shelf", "remove", "low", "high"])
    command.main(["shelf"])
    gone = "low is removed.\nhigh is removed.\nshelf holds no memory yet: add a document first.\n"
    assert capsys.readouterr().out == gone
    assert "holds no memory yet" in refused(command.main, ["shelf", "remove", "low"])
    write_documents(folder / "three.jsonl", 20, 30, 10)
    command.main(["shelf", "add", "three.jsonl", "--adapter", "adapter"])
    assert "three: 30 tokens, " in (output := capsys.readouterr().out) and "(the longest document of" in output


def test_a_damaged_memory_does_not_stop_the_others(library, folder, monkeypatch, capsys, refused):
    """And the base may have moved: its adapter is still the one that read."""
    monkeypatch.chdir(folder)
    for path in ("low.txt", "high.md"):
        command.main(["shelf", "add", path, "--adapter", "adapter"])
    (folder / "shelf" / "high.memory" / "index.json").write_text("{")
    capsys.readouterr()
    assert "high.memory" in refused(command.main, ["shelf"])
    command.main(["shelf", "ask", "w5", "--in", "low", "--max-new-tokens", "3"])
    (folder / "base").rename(folder / "moved")
    command.main(["shelf", "ask", "w5", "--in", "low", "--max-new-tokens", "3", "--model", "moved"])
    one, two = capsys.readouterr().out.split("low            ")[-1].split("\nQ: w5\n")[1:]
    assert one == two
    command.main(["shelf", "compress", "low", "--bytes", "11K"])
    assert "high.memory" in refused(command.main, ["shelf", "compress", "high", "--bytes", "11K"])
    (folder / "shelf" / "low.memory" / "index.json").write_text("{")
    assert ".memory" in refused(command.main, ["shelf", "add", "low.txt", "--name", "new"])
    (folder / "moved").rename(folder / "base")
    command.main(["shelf", "add", "low.txt", "--name", "new", "--adapter", "adapter"])
    for size in ("inf", "nan", "some"):
        assert "--bytes" in refused(command.main, ["shelf", "compress", "low", "--bytes", size])


def test_a_shelf_that_cannot_be_written_is_noticed_at_once(library, folder, monkeypatch):
    (folder / "library" / "low.memory").mkdir(parents=True)
    (folder / "library" / "low.memory" / "mine.txt").write_text("mine")
    monkeypatch.setattr("cacheformers.common.library.load_text", None)  # nothing is read
    with pytest.raises(cacheformers.MemoryFileError, match="low.memory"):
        library.add(str(folder / "low.txt"), progress=False)


def test_what_a_killed_save_left_does_not_take_the_name(library, folder):
    library.add(str(folder / "low.txt"), progress=False)
    (library.path("low") / "index.json").unlink()
    assert library.names == []
    library.add(str(folder / "low.txt"), progress=False)
    assert library.names == ["low"]


def test_documents_that_cannot_be_read_do_not_stop_the_others(library, folder, monkeypatch, refused):
    monkeypatch.chdir(folder)
    (folder / "empty.txt").write_text("")
    message = refused(command.main, ["shelf", "add", "empty.txt", "low.txt", "none.txt", "--adapter", "adapter"])
    assert "empty.txt is empty" in message and "none.txt" in message
    assert cacheformers.Library("shelf").names == ["low"]
    (folder / "low.md").write_text(HIGH)
    for documents in (["high.md", "low.txt"], ["high.md", "low.md"]):
        assert "has a memory low already" in refused(command.main, ["shelf", "add", *documents, "--adapter", "adapter"])
    assert "Two documents would be called low" in refused(command.main, ["other", "add", "low.md", "low.txt"])
    assert cacheformers.Library("shelf").names == ["low"]


def test_two_processes_share_the_documents(library, folder):
    """Each writes the memory files of its share; an error of one is told by the first."""
    lengths = {"one": 90, "two": 20, "three": 70, "four": 33}
    for name, length in lengths.items():
        (folder / f"{name}.txt").write_text(make_text(length, length))
    added = ["shelf", "add", *(f"{name}.txt" for name in lengths), "--adapter", "adapter", "--device", "cpu"]
    done = run(added, folder / "two.log", 2, recipe="cli.library")
    lines = [
        {line.partition(":")[0] for line in done.output(rank).splitlines() if " tokens, " in line} for rank in (0, 1)
    ]
    assert lines == [{"one", "four"}, {"three", "two"}]
    shelf = cacheformers.Library(folder / "shelf", library.model, library.tokenizer)
    assert {held.name: held.tokens for held in shelf.contents()} == lengths
    for name in lengths:
        alone = cacheformers.Library(folder / "alone", library.model, library.tokenizer)
        alone.add(str(folder / f"{name}.txt"), progress=False)
        assert_same_entries(shelf.memory(name), alone.memory(name))
    (folder / "empty.txt").write_text("")
    failing = ["other", "add", "empty.txt", "two.txt", "--adapter", "adapter", "--device", "cpu"]
    started = Recipe(failing, folder / "failing.log", 2, recipe="cli.library")
    assert started.wait() == [2, 2]
    assert "empty.txt is empty" in started.output(0) and "empty.txt" not in started.output(1)
    assert cacheformers.Library(folder / "other").names == ["two"]


def assert_same_entries(one, other):
    for layer, ring in one.state.rings.items():
        found, expected = (torch.cat(each.entries(0).spans) for each in (ring, other.state.rings[layer]))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # loaded weights lie elsewhere, and round so


def stopped(arguments):
    """What the command says when it refuses its arguments."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    return str(raised.value)


@pytest.mark.slow
def test_the_shipped_memory_answers_from_two_plays(smollm2, tmp_path):
    """Real weights: one store of two texts, the passage that told it, and a follow-up question."""
    model, tokenizer = load_model(str(smollm2), str(ROOT / "model_cards" / "answers_facts"), "cpu", "float32")
    library = cacheformers.Library(tmp_path, model, tokenizer)
    filler = "The bell then beating one, the watch walked slowly on and nobody said a word about the king.\n"
    facts = {"north": "Clara keeps a green trumpet at home.\n", "south": "Oscar is afraid of a wooden ladder.\n"}
    for name, fact in facts.items():
        library.add(f"{name}.txt", text=6 * filler + fact + 6 * filler, progress=False)
    conversation = library.conversation()
    for question, right, name in [
        ("What does Clara keep at home?", "green trumpet", "north.txt"),
        ("What is Oscar afraid of?", "wooden ladder", "south.txt"),
    ]:
        answer = conversation.ask(question, max_new_tokens=12, explain=True)
        assert right in answer.text
        told = [passage for token in answer.passages for passage in token if passage.document == name]
        assert any(word in passage.text for passage in told for word in right.split())
    assert library.choose("What is Oscar afraid of?") == "south"
