"""The command `cacheformers`, from a text file to an answer, as real processes on a tiny model."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import WHOLE, save_adapter
from memories import assert_equal
from recipe import make_text, write_documents
from transformers import AutoModelForCausalLM, LogitsProcessorList

import cacheformers
from cacheformers.cli.inspection import kept
from cacheformers.cli.main import ELSEWHERE, comparison, dashed, main, make_parser
from cacheformers.modeling.conversation import opening
from cacheformers.modeling.files.index import read_index
from cacheformers.modeling.trace import Trace, passages

WORDS = 120
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(make_model, folder):
    """Saved in `adapter`, over the base in `base`; a text in `book.txt`."""
    model = make_model("llama_gqa", torch.float32)
    model.peft_config["default"].base_model_name_or_path = "base"  # seen from the folder
    model.save_pretrained(folder / "adapter")
    (folder / "book.txt").write_text(make_text(WORDS))
    return model


def command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "cacheformers", *map(str, arguments)], cwd=cwd, capture_output=True, text=True
    )


def traced(model, question, memory, count):
    """What is retrieved while `count` tokens are generated, and question and answer."""
    trace = Trace(memory)
    options = {"attention_mask": torch.ones_like(question), "past_key_values": memory, "do_sample": False}
    processors = LogitsProcessorList([trace])
    return trace, model.generate(question, **options, max_new_tokens=count, logits_processor=processors)


@pytest.mark.slow
def test_from_book_to_answer(folder, model, tokenizer):
    pytest.importorskip("matplotlib")
    read = command("read", "book.txt", "-o", "book.memory", "--adapter", "adapter", "--checkpoint", "2", cwd=folder)
    assert read.returncode == 0, read.stderr
    assert f"Read {WORDS} tokens" in read.stdout
    expected = cacheformers.read_text(model, tokenizer, make_text(WORDS), progress=False)
    assert_equal(cacheformers.load_memory(folder / "book.memory", model, tokenizer=tokenizer), expected)

    (folder / "book.txt").unlink()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    asked = command("ask", folder / "book.memory", "w5 w6 ?", "--explain", "--max-new-tokens", "20", cwd=elsewhere)
    assert asked.returncode == 0, asked.stderr
    question = torch.tensor([opening(tokenizer, "w5 w6 ?")])
    trace, answer = traced(model, question, expected, 20)
    assert f"A: {tokenizer.decode(answer[0, question.shape[1] :], skip_special_tokens=True)}" in asked.stdout
    texts = make_text(WORDS).split()
    seen = [(0, expected.origin.sources[0]), (WORDS, None)]
    for passage in passages(trace.asked + trace.chosen, seen, 40, 3):
        text = " ".join(texts[passage.first : passage.first + 40])
        assert f"  token {passage.first} ({passage.times} times): {text}" in asked.stdout
    assert asked.stdout.count(" near token ") >= 20
    picture = (folder / "book.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000

    seen = command("inspect", "book.memory", cwd=folder)
    assert seen.returncode == 0, seen.stderr
    assert f"{WORDS} tokens" in seen.stdout and "40 entries (at most 40) of 8 numbers" in seen.stdout
    assert f"of the tokens from {WORDS - 40}" in seen.stdout and "book.txt" in seen.stdout


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_from_scratch(folder, make_model, tokenizer, monkeypatch, capsys, name):
    """Read, stopped and gone on, inspected, asked, with what was retrieved where tokens retrieve."""
    monkeypatch.chdir(folder)
    model = make_model(name, torch.float32, segment_tokens=32)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("book.txt").write_text(make_text(WORDS))
    model = AutoModelForCausalLM.from_pretrained("model").eval()
    read = cacheformers.read_text(model, tokenizer, make_text(WORDS), progress=False)
    begun = cacheformers.read(model, tokenizer(make_text(WORDS)).input_ids[:64], progress=False)
    begun.origin.sources, begun.origin.tokenizer = read.origin.sources, read.origin.tokenizer
    begun.save("book.memory")
    main(["read", "book.txt", "-o", "book.memory", "--model", "model"])
    assert "holds the first 64 tokens of book.txt: going on" in capsys.readouterr().out
    assert kept(begun).startswith("64 of 120 tokens read, then it was interrupted: ")
    main(["read", "book.txt", "-o", "book.memory", "--model", "model", "--overwrite"])
    memory = cacheformers.load_memory("book.memory", model, tokenizer=tokenizer)
    question = torch.tensor([opening(tokenizer, "w5 w6 ?")])
    with torch.no_grad():
        expected = model(question, past_key_values=read.clone()).logits
        torch.testing.assert_close(model(question, past_key_values=memory.clone()).logits, expected)

    answer = cacheformers.Conversation(model, tokenizer, memory).ask(
        "w5 w6 ?", max_new_tokens=5, explain=memory.state.retrieves
    )
    capsys.readouterr()
    main(["ask", "book.memory", "w5 w6 ?", "--max-new-tokens", "5"])
    output = capsys.readouterr().out
    assert f"Q: w5 w6 ?\nA: {answer.text}" in output
    assert len(answer.asked) == (question.shape[1] - 1 if memory.state.retrieves else 0)
    assert len(answer.retrieved_most) == output.count(" times): ")
    assert bool(answer.retrieved_most) == memory.state.retrieves
    main(["inspect", "book.memory"])
    shown = capsys.readouterr().out
    assert "cacheformer_from_scratch, segments of 32 tokens" in shown and f"{WORDS} tokens read" in shown


def test_a_conversation_on_the_terminal(folder, model, tokenizer, monkeypatch, capsys):
    """Lines of standard input are questions that follow each other; the same as JSON lines."""
    monkeypatch.chdir(folder)
    main(["read", "book.txt", "-o", "book.memory", "--adapter", "adapter"])
    memory = cacheformers.load_memory("book.memory", model, tokenizer=tokenizer)
    conversation = cacheformers.Conversation(model, tokenizer, memory)
    questions = ["w5 w6 ?", "w7 w8"]
    answers = [conversation.ask(question, max_new_tokens=5, explain=True) for question in questions]
    capsys.readouterr()
    ask = ["ask", "book.memory", "--max-new-tokens", "5"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([questions[0], "", questions[1]])))
    main(ask)
    output = capsys.readouterr().out
    for answer in answers:
        assert f"\nQ: {answer.question}\nA: {answer.text}\n" in output
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(questions)))
    main([*ask, "--json", "--explain"])
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert "120 tokens read" in captured.err
    for line, answer in zip(lines, answers, strict=True):
        assert line["question"] == answer.question and line["answer"] == answer.text
        assert [token["token"] for token in line["tokens"]] == [tokenizer.decode([token]) for token in answer.tokens]
        found = [passage["text"] for token in line["tokens"] for passage in token["passages"]]
        assert found == [passage.text for passages in answer.passages for passage in passages]
        assert [passage["first"] for passage in line["passages"]] == [each.first for each in answer.retrieved_most]
    main([*ask, *questions, "--json"])  # each on its own
    alone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert alone[0]["answer"] == answers[0].text and "tokens" not in alone[0]
    other = cacheformers.Conversation(model, tokenizer, memory).ask(questions[1], max_new_tokens=5)
    assert alone[1]["answer"] == other.text != answers[1].text


READ = ["read", "long.txt", "-o", "long.memory", "--adapter", "adapter", "--checkpoint", "4"]


def stopped_while_reading(folder, stop, words=6000):
    """Exit status and stderr of the command, which is sent a signal as soon as it has saved something."""
    (folder / "long.txt").write_text(make_text(words))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "cacheformers", *READ], cwd=folder, **pipes)
    index = folder / "long.memory" / "index.json"
    while process.poll() is None and not index.exists():
        time.sleep(0.01)
    process.send_signal(stop)
    errors = process.communicate()[1]
    return process.returncode, errors


@pytest.mark.slow
def test_killed_reading_goes_on(folder, model, tokenizer):
    assert stopped_while_reading(folder, signal.SIGKILL)[0] == -signal.SIGKILL
    before = read_index(folder / "long.memory").rows[0].tokens_read
    assert 0 < before < 6000 and before % 64 == 0
    done = command(*READ, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"holds the first {before:,} tokens" in done.stdout
    expected = cacheformers.read_text(model, tokenizer, make_text(6000), progress=False)
    assert_equal(cacheformers.load_memory(folder / "long.memory", model), expected)
    assert len(list((folder / "long.memory").glob("*.safetensors"))) == 2


@pytest.mark.slow
def test_control_c(folder, model):
    status, errors = stopped_while_reading(folder, signal.SIGINT, words=60_000)
    assert status == 130 and "Traceback" not in errors
    remedy = "What was saved stays; give the same command again to continue from there."
    assert errors.endswith(f"\ncacheformers read: stopped. {remedy}\n")
    assert cacheformers.load_memory(folder / "long.memory").tokens_read[0] % 64 == 0


def test_refusals(folder, model, monkeypatch):
    monkeypatch.chdir(folder)
    main(["read", "book.txt", "-o", "book.memory", "--adapter", "adapter"])
    (folder / "other.txt").write_text(make_text(30, seed=9))
    other = save_adapter("base", "other_adapter")
    next(weight for name, weight in other.named_parameters() if "lora_mem_down" in name).data.mul_(1.1)
    other.save_pretrained("other_adapter")
    save_adapter("base", "windowed_adapter", method="windowed")
    main(["read", "book.txt", "-o", "windowed.memory", "--adapter", "windowed_adapter"])
    (folder / "latin.txt").write_bytes("w1 é w2".encode("latin-1"))
    with pytest.raises(SystemExit, match="empty question"):
        main(["ask", "book.memory", "why", " "])
    for arguments, message in {
        "read other.txt -o book.memory --adapter adapter": "Choose another -o",
        "read book.txt -o book.memory --adapter other_adapter": "another adapter",
        "read book.txt -o base --adapter adapter": "something else",
        "read book.txt -o new.memory": "--adapter",
        "read book.txt -o new.memory --adapter adapter --device cuda:99": "--device cuda:99 cannot be used here",
        "read book.txt -o new.memory --adapter adapter --device abacus": "--device abacus cannot be used here",
        "read book.txt -o new.memory --adapter adapter --model /no/such": "there is no folder /no/such. Check the path",
        "read book.txt -o new.memory --adapter adapter --model no/such": f"there is no folder {folder}/no/such, and",
        "read book.txt -o new.memory --adapter nowhere": f"adapter nowhere was not found: there is no folder {folder}",
        "read book.txt -o new.memory --adapter base": "base holds a model, not an adapter",
        "read book.txt -o book.txt --adapter adapter": "book.txt is a file",
        "read book.txt -o book.memory --adapter adapter --cache-size 50": "keeps 40 entries.*--overwrite",
        "read latin.txt -o new.memory --adapter adapter": "latin.txt is not utf-8 text .byte 3.*--encoding latin-1",
        "read latin.txt -o new.memory --adapter adapter --encoding klingon": "no encoding 'klingon'",
        "read train.jsonl -o new.memory --adapter adapter --encoding latin-1": "--encoding is for .txt, .md and .html",
        "read train.jsonl -o new.memory --adapter adapter --text-field body": "no field 'body', only title, text",
        "read nothing.txt -o new.memory --adapter adapter": "nothing.txt does not exist",
        "read train.jsonl -o new.memory --adapter adapter --document 3": "3 documents",
        "ask book.memory why --adapter other_adapter": "another adapter",
        "ask base why": "not a memory",
        "inspect nowhere": "not a memory",
        "ask book.memory why --heat-map why.png": "--heat-map is the picture that --explain draws",
        "ask book.memory why --prompt cut --prompt-tokens 1": "--prompt-tokens must be at least 2, got 1",
        "ask book.memory why --prompt-tokens 20": "--prompt-tokens says how much of the text --prompt shows",
        "ask book.memory why --prompt cut --max-new-tokens 9999": "the base has 64: ask for a shorter answer",
        "ask windowed.memory why --explain": "this memory's method retrieves nothing",
        "serve other_adapter --memory book.memory": "another adapter",
        "serve adapter --memory base": "not a memory",
        "serve nowhere": "nowhere was not found: there is no folder",
        "serve adapter --device abacus": "--device abacus cannot be used here",
    }.items():
        with pytest.raises(SystemExit, match=message) as stopped:
            main(arguments.split())
        assert str(stopped.value).startswith(f"cacheformers {arguments.split()[0]}: ")
    assert not (folder / "new.memory").exists()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(SystemExit, match=rf"no folder {elsewhere}/base, .*names this base: give .* with --model"):
        main(["read", "../book.txt", "-o", "new.memory", "--adapter", "../adapter"])
    with pytest.raises(SystemExit, match=rf"no folder {elsewhere}/base, .*names this base: write .* into base_model"):
        main(["serve", "../adapter"])
    assert not list(elsewhere.iterdir())


def test_read_again_and_overwrite(folder, model, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    arguments = ["read", "book.txt", "-o", "book.memory", "--model", "base", "--adapter", "adapter"]
    main(arguments)
    first = read_index(folder / "book.memory")
    assert first.reader.base == str(folder / "base") and first.reader.adapter == str(folder / "adapter")
    main(arguments)
    output = capsys.readouterr().out
    size = f"--cache-size 120: {120 * 8 * 4 / 2**20:.1f} MiB"
    assert (
        f"book.txt has 120 tokens; the memory will keep the newest 40 (to keep all, read with --overwrite {size}"
        in output
    )
    assert output.count("120 tokens read, of which the memory keeps the newest 40 (to keep all, read with --over") == 2
    assert "already" in output and read_index(folder / "book.memory").save == first.save
    (folder / "book.memory" / "index.json").write_text('{"format": "cacheformers memory", ')
    main([*arguments, "--overwrite", "--cache-size", "12"])
    assert cacheformers.load_memory(folder / "book.memory").state.rings[1].capacity == 12
    main(["ask", "book.memory", "w1", "w2", "--max-new-tokens", "2", "--no-verify"])
    output = capsys.readouterr().out
    assert output.count("Q: ") == 2 and output.count("What question and answer retrieved most") == 2
    assert output.count("120 tokens read, of which the memory keeps the newest 12 (to keep all") == 2  # read and ask
    main([*arguments, "--overwrite", "--cache-size", "120"])
    output = capsys.readouterr().out
    assert "120 tokens read, and the memory keeps all of them." in output and "to keep all" not in output


def test_other_encodings_and_fields(folder, model, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "wide.txt").write_text(make_text(30), encoding="utf-16")
    main(["read", "wide.txt", "--encoding", "utf-16", "-o", "wide.memory", "--adapter", "adapter"])
    (source,) = cacheformers.load_memory("wide.memory").origin.sources
    assert source is not None and source.text == make_text(30)
    (folder / "bodies.jsonl").write_text(json.dumps({"body": make_text(20)}) + "\n")
    for spelling in ("--text-field", "--text_field"):
        main(f"read bodies.jsonl {spelling} body -o body.memory --adapter adapter --overwrite".split())
        assert cacheformers.load_memory("body.memory").tokens_read == [20]
    assert "the longest one" not in capsys.readouterr().out
    write_documents(folder / "three.jsonl", 20, 30, 10)
    main(["read", "three.jsonl", "-o", "three.memory", "--adapter", "adapter"])
    assert "three.jsonl, document 1, the longest one, is read: --document chooses another." in capsys.readouterr().out


def test_misspelled_options_are_those_of_the_command(folder, capsys):
    for arguments, message in (
        ("read book.txt -o book.memory --adaptor adapter", "read: error: .*--adaptor adapter. Did you mean --adapter?"),
        ("ask book.memory why --promt cut", "ask: error: .*--promt cut. Did you mean --prompt?"),
        ("read book.txt other.txt -o book.memory", "read: error: unrecognized arguments: other.txt."),
    ):
        with pytest.raises(SystemExit):
            main(arguments.split())
        assert re.search(message.replace("?", r"\?"), capsys.readouterr().err), message


def test_help_needs_no_torch_and_teaches_at_once():
    """The parser is what the console script imports, without the package."""
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cacheformers_cli.main", {str(ROOT / "cli" / "main.py")!r})
main = importlib.util.module_from_spec(spec)
spec.loader.exec_module(main)
for arguments in (["--help"], ["--version"], ["read", "--help"], ["ask", "--help"], ["inspect", "--help"], ["ask"]):
    try:
        main.main(arguments)
    except SystemExit:
        pass
loaded = {{"torch", "transformers", "peft", "datasets", "cacheformers"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"\ncacheformers {cacheformers.__version__}\n" in done.stdout and done.stdout.count("usage: ") == 4
    assert "--text_field" not in done.stdout


@pytest.mark.parametrize("name", ["llama_gqa", "opt"])
def test_trace_is_what_one_forward_retrieves(make_model, ids, name):
    """Token by token with a segment closing on the way, against the hits of one forward over all of it."""
    model = make_model(name, retrieval_map={0: 0, 1: 2}, cache_size=40)
    memory = cacheformers.read(model, ids[:1], progress=False)
    once = memory.clone()
    trace, answer = traced(model, ids[1:, :5], memory, 20)
    assert len(trace.asked) == 4 and len(trace.chosen) == answer.shape[1] - 5
    read = answer[:, :-1]
    with torch.no_grad():
        model(read[:, :16], past_key_values=once)
        first = [hits_of(once, column) for column in range(16)]
        model(read[:, 16:], past_key_values=once)
    expected = first + [hits_of(once, column) for column in range(read.shape[1] - 16)]
    assert [found.tolist() for found in trace.asked + trace.chosen] == expected


def hits_of(memory, column):
    """What one column of the open segment retrieved, counted from the document's first token."""
    stores = {0: 0, 1: 2}
    return [
        hit + memory.state.rings[stores[layer]].entries(0).first
        for layer, hits in memory.state.hits.items()
        for hit in hits[0, column].tolist()
        if hit >= 0
    ]


def test_trace_of_a_memorizing_transformer(make_model, ids):
    """Token by token, against the keys that are nearest by the dot product, head by head."""
    model = make_model("llama_gqa", method="memorizing", attention_layers=[0])
    memory = cacheformers.read(model, ids[:1], progress=False)
    once = memory.clone()
    trace, answer = traced(model, ids[1:, :5], memory, 8)
    with torch.no_grad():
        keys, queries = once.state.rings[0].entries(0), []
        attention = model.base_model.model.model.layers[0].self_attn
        attention.q_proj.register_forward_hook(lambda module, inputs, output: queries.append(output))
        model(answer[:, :-1], past_key_values=once)
    asked = torch.nn.functional.normalize(queries[0][0].unflatten(1, (4, 12)), dim=-1)  # [time, heads, d]
    stored = torch.cat([span.unflatten(1, (2, 12)) for span in keys.spans]).to(asked.dtype)  # [entries, kv heads, d]
    scores = torch.einsum("thd,nhd->thn", asked, stored.repeat_interleave(2, 1))
    scores -= 1e-12 * torch.arange(scores.shape[-1])  # of equal tokens the older one is taken
    expected = scores.topk(4).indices.flatten(1) + keys.first
    assert len(trace.asked) == 4 and len(trace.chosen) == answer.shape[1] - 5
    found = [retrieved.sort().values.tolist() for retrieved in trace.asked + trace.chosen]
    assert found == expected.sort(dim=1).values.tolist()


def test_uncompressed_segments_are_explained(folder, make_model, tokenizer, monkeypatch, capsys):
    """Passages are segments of 4 tokens before the two windows; the command, its JSON and Python say the same."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    model = save_adapter("base", "segments_adapter", method="cacheformer_on_base")
    (folder / "book.txt").write_text(make_text(WORDS))
    main(["read", "book.txt", "-o", "book.memory", "--adapter", "segments_adapter"])
    memory = cacheformers.load_memory("book.memory", model, tokenizer=tokenizer)
    answer = cacheformers.Conversation(model, tokenizer, memory).ask("w5 w6 ?", max_new_tokens=5, explain=True)
    assert answer.retrieves == "for each key-value head 2 segments of 4 tokens, uncompressed, u = 2"
    words, layers, heads = make_text(WORDS).split(), 3, 2
    for found, shown in zip(answer.retrieved, answer.passages, strict=True):
        assert len(found) == layers * heads * 2 * 2 * 4
        starts = found.view(-1, 4)[:, 0]
        assert bool((starts % 4 == 0).all()) and int(starts.max()) < WORDS
        assert torch.equal(found.view(-1, 4), starts[:, None] + torch.arange(4))
        for passage in shown:
            inside = (found >= passage.first) & (found <= passage.last)
            assert passage.first % 16 == 0 and passage.times == int(inside.sum())
            assert passage.text.split() == words[passage.first : passage.last + 1]
    capsys.readouterr()
    ask = ["ask", "book.memory", "w5 w6 ?", "--max-new-tokens", "5", "--explain"]
    main(ask)
    shown = capsys.readouterr().out
    assert f"(in each layer {answer.retrieves}):" in shown
    for passage in answer.retrieved_most:
        assert f"  token {passage.first} ({passage.times} times): {passage.text}" in shown
    main([*ask, "--json"])
    line = json.loads(capsys.readouterr().out)
    assert line["retrieves"] == answer.retrieves
    assert [passage["first"] for passage in line["passages"]] == [each.first for each in answer.retrieved_most]


def test_trace_of_several_rows(make_model, ids):
    with pytest.raises(ValueError, match="one row"):
        Trace(cacheformers.read(make_model("llama_gqa"), ids, progress=False))


@pytest.mark.parametrize("verb", ELSEWHERE)
def test_every_verb_of_the_door_has_help(verb, monkeypatch, capsys):
    if verb == "lm-eval":
        pytest.importorskip("lm_eval")
    monkeypatch.setattr(sys, "argv", ["cacheformers", verb, "--help"])
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    usage = "lm-eval" if verb == "lm-eval" else f"cacheformers {verb}"  # lm-eval's parser has a name of its own
    assert stopped.value.code == 0 and f"usage: {usage} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "given", [["--output", "DIR", "A", "B"], ["--output=DIR", "A", "B"], ["A", "--output", "DIR", "B"]]
)
def test_results_that_are_compared_may_come_after_the_output(given):
    assert comparison(given) == ["--compare", "A", "B", "--output", "DIR"]
    assert comparison(["A", "B", "--tasks", "x", "y"]) == ["--compare", "A", "B", "--tasks", "x", "y"]
    assert comparison(["A", "B", "--plots=false"]) == ["--compare", "A", "B", "--plots=false"]


@pytest.mark.parametrize("command", [["read", "BOOK", "-o", "MEMORY"], ["ask", "MEMORY", "Who?"]])
def test_options_take_dashes_and_underscores(command):
    """`--cache_size 5` is `--cache-size 5`; values and questions stay as they are."""
    name = {"read": "cache_size", "ask": "max_new_tokens"}[command[0]]
    for spelled in (name, name.replace("_", "-")):
        for given in ([f"--{spelled}", "5"], [f"--{spelled}=5"]):
            assert getattr(make_parser().parse_args(dashed([*command, *given, "--model", "a_b"])), name) == 5
    assert dashed(["a_b", "--model=a_b", "-o", "c_d"]) == ["a_b", "--model=a_b", "-o", "c_d"]


@pytest.mark.slow
def test_reading_and_asking_start_without_slow_libraries():
    """datasets and matplotlib take a second each to import."""
    code = """
import sys
import cacheformers.cli.ask, cacheformers.cli.inspection, cacheformers.cli.read
assert not {"datasets", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
