"""`cacheformers passkey`: prompts, answers, scores, going on; and documents to train for it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save_adapter
from longbench_cases import KILLED
from peft import PeftModel
from recipe import Recipe, run, script
from reciter import make_reciter
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers import train_adapt
from cacheformers.common.documents import DataOptions, open_documents
from cacheformers.evaluation.lengths.options import parse_length
from cacheformers.evaluation.passkey import main as passkey
from cacheformers.evaluation.passkey.prompts import INTRO, NEEDLES, REPEATED, Case, PromptMaker, load_filler, make_cases

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (420, 600)  # the sentences about the key alone take 290 bytes
DEPTHS = (0, 50, 100)


@pytest.fixture
def data(byte_folder):
    """A tiny base model with its tokenizer in `base`, and sentences of many lengths in `book.txt`."""
    sentences = [f"Sentence {number} has {'very ' * (number % 7)}many words." for number in range(80)]
    (byte_folder / "book.txt").write_text(" ".join(sentences))
    return byte_folder


@pytest.fixture
def adapter(data):
    """A memory adapter with open gates, of 500 entries."""
    model = save_adapter(data / "base", data / "remembering", cache_size=500, segment_tokens=128)
    for name, parameter in model.named_parameters():
        if "lora_mem_gate" in name:
            parameter.data.mul_(8)  # so that greedy answers show what is remembered
    model.save_pretrained(data / "remembering")
    return data / "remembering"


def arguments(folder, *more):
    """A tiny run; `more` overrides."""
    given = {"base": folder / "base", "output": folder / "out", "device": "cpu", "plots": False}
    given = {key: value for key, value in given.items() if not any(m.startswith(f"--{key}=") for m in more)}
    numbers = ["--lengths", *map(str, LENGTHS), "--depths", *map(str, DEPTHS)]
    return [*(f"--{key}={value}" for key, value in given.items()), *numbers, *more]


def answers(folder, output="out"):
    """The lines of the answers' files."""
    files = sorted((folder / output / "answers").glob("*.jsonl"))
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def result(folder, output="out"):
    return json.loads((folder / output / "result.json").read_text())


# Prompts


def check_prompts(maker, lengths, longest_sentence):
    """Prompts have their length, their parts and the needle where it belongs. Returns the filler's beginnings."""
    wording, tokenizer, beginnings = maker.wording, maker.tokenizer, set()
    for case in make_cases(wording, lengths, (0, 10, 50, 100), 2, seed=3):
        prompt = maker(case)
        assert len(prompt.ids) == case.length
        text = tokenizer.decode(prompt.ids)
        before, needle, after = text.partition(f"\n{wording.needle.format(key=case.key)}\n")
        assert needle and before.startswith(f"{wording.intro}\n") and after.endswith(f"\n{wording.question}")
        assert tokenizer.decode(prompt.ids[prompt.question :]) == f"\n{wording.question}"
        intro, said, asked = map(len, maker.parts(case))
        filler = case.length - intro - said - asked
        place = len(tokenizer(before, add_special_tokens=False).input_ids) - intro
        assert abs(place - filler * case.depth / 100) <= longest_sentence
        assert place == 0 if case.depth == 0 else place == filler if case.depth == 100 else 0 <= place <= filler
        filling = before.removeprefix(f"{wording.intro}\n") + after.removesuffix(f"\n{wording.question}")
        assert place in (0, filler) or before.rstrip()[-1] == "."  # a sentence ends before the needle
        beginnings.add(filling[:40])
    return beginnings


@pytest.mark.parametrize("needle", list(NEEDLES))
def test_prompts_have_their_exact_length_and_depth(data, byte_tokenizer, needle):
    filler = load_filler("repeat", "text", byte_tokenizer, 2000)
    beginnings = check_prompts(PromptMaker(NEEDLES[needle], filler, byte_tokenizer, 0), (420, 1000, 2000), 40)
    assert beginnings == {REPEATED[:40]}


def test_a_book_is_a_filler(data, byte_tokenizer):
    filler = load_filler(str(data / "book.txt"), "text", byte_tokenizer, 1000)
    beginnings = check_prompts(PromptMaker(NEEDLES["passkey"], filler, byte_tokenizer, 0), (420, 1000), 80)
    assert len(beginnings) > 8 and all(beginning.startswith("Sentence ") for beginning in beginnings)


def test_special_tokens_come_first_and_count(byte_tokenizer):
    byte_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    maker = PromptMaker(NEEDLES["passkey"], load_filler("repeat", "text", byte_tokenizer, 500), byte_tokenizer, 0)
    prompt = maker(Case(500, 50, 0, "12345"))
    assert prompt.ids[0] == 1 and prompt.ids.count(1) == 1 and len(prompt.ids) == 500


def test_a_case_depends_on_nothing_but_itself_and_the_seed(data, byte_tokenizer):
    wording = NEEDLES["passkey"]
    many = make_cases(wording, (420, 600), (0, 50, 100), 3, seed=5)
    assert make_cases(wording, (600,), (50,), 1, seed=5) == [case for case in many if case.id == "600-50-0"]
    assert len({case.key for case in many}) == len(many) and all(10_000 <= int(case.key) < 100_000 for case in many)
    assert [case.key for case in make_cases(wording, (420,), (0,), 1, seed=6)] != [many[0].key]
    one, other = (
        PromptMaker(wording, load_filler(str(data / "book.txt"), "text", byte_tokenizer, longest), byte_tokenizer, 5)
        for longest in (600, 1200)
    )
    assert one(many[-1]) == other(many[-1])


@pytest.mark.parametrize(("text", "tokens"), [("5000", 5000), ("4K", 4096), ("1m", 1024 * 1024)])
def test_lengths(text, tokens):
    assert parse_length(text) == tokens


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" 12345.", 1),
        ("\n**12345** is", 1),
        (" 123456", 0),
        (" 1234", 0),
        (" not 99. It is 12345", 0),
        ("", 0),
        (" one", 0),
    ],
)
def test_the_first_number_of_an_answer_counts(answer, score):
    assert NEEDLES["passkey"].score(answer, "12345") == score


def test_the_first_word_of_an_answer_counts():
    answers = (" Silver.", " silver", " silvery", " not silver", " 1")
    assert [NEEDLES["word"].score(answer, "silver") for answer in answers] == [1, 1, 0, 0, 0]


# Answers and scores


def test_a_model_that_says_the_key_scores(data, capsys):
    cases = make_cases(NEEDLES["passkey"], LENGTHS, DEPTHS, 1, seed=1)
    known = next(case for case in cases if len(set(case.key)) == 5)
    make_reciter(data, f"s {known.key}.")  # the question ends in "is"
    passkey.main(arguments(data, "--seed=1", "--plots=true"))
    found = result(data)
    assert [case["_id"] for case in found["cases"]] == [case.id for case in cases]
    assert [case["score"] for case in found["cases"]] == [float(case is known) for case in cases]
    assert all(case["answer"].startswith(f" {known.key}.") for case in found["cases"])
    assert (found["lengths"], found["depths"]) == (list(LENGTHS), list(DEPTHS))
    expected = [[100.0 * ((n, depth) == (known.length, known.depth)) for n in LENGTHS] for depth in DEPTHS]
    assert found["scores"] == expected and found["score"] == pytest.approx(100 / 6, abs=0.01)
    assert all(case["seconds"] > 0 and case["peak_bytes"] > 1e6 for case in found["cases"])
    assert found["environment"]["torch"] == torch.__version__ and found["settings"]["needle"] == "passkey"
    assert (data / "out" / "heatmap.png").stat().st_size > 10_000
    table = (data / "out" / "table.md").read_text()
    assert table in capsys.readouterr().out and "base: 1 of 6 found" in table and "| depth | 420 | 600 |" in table


def test_the_base_answers_as_plain_generate(data):
    passkey.main(arguments(data, f"--filler={data / 'book.txt'}", "--limit=2"))
    tokenizer, model = AutoTokenizer.from_pretrained(data / "base"), AutoModelForCausalLM.from_pretrained(data / "base")
    filler = load_filler(str(data / "book.txt"), "text", tokenizer, LENGTHS[-1])
    maker = PromptMaker(NEEDLES["passkey"], filler, tokenizer, 0)
    lines = [line for file in answers(data).values() for line in file]
    assert len(lines) == 4
    for case in result(data)["cases"]:
        prompt = maker(Case(case["length"], case["depth"], 0, case["key"]))
        output = model.generate(torch.tensor([prompt.ids]), max_new_tokens=9, do_sample=False)  # " 12345" and 3 more
        assert case["answer"] == tokenizer.decode(output[0, len(prompt.ids) :], skip_special_tokens=True)


def test_with_a_memory_the_context_is_read_and_the_question_is_a_segment(data, adapter):
    """Longer prompts than the base has positions for; the size of the memory shows."""
    given = [f"--adapter={adapter}", "--lengths", "1500", "--depths", "30"]
    passkey.main(arguments(data, *given, "--cache_size=1500", f"--output={data / 'large'}"))
    passkey.main(arguments(data, *given, "--forget=true", f"--output={data / 'small'}"))
    tokenizer, base = AutoTokenizer.from_pretrained(data / "base"), AutoModelForCausalLM.from_pretrained(data / "base")
    model = PeftModel.from_pretrained(base, adapter).eval()
    maker = PromptMaker(NEEDLES["passkey"], load_filler("repeat", "text", tokenizer, 1500), tokenizer, 0)
    for output, size in (("large", 1500), ("small", None)):
        [case] = result(data, output)["cases"]
        prompt = maker(Case(1500, 30, 0, case["key"]))
        memory = cacheformers.read(model, torch.tensor([prompt.ids[: prompt.question]]), cache_size=size)
        question = torch.tensor([prompt.ids[prompt.question :]])
        output_ids = model.generate(question, past_key_values=memory, max_new_tokens=9, do_sample=False)
        assert case["answer"] == tokenizer.decode(output_ids[0, question.shape[1] :], skip_special_tokens=True)
    assert result(data, "large")["cases"][0]["answer"] != result(data, "small")["cases"][0]["answer"]


# Going on, processes

RECIPE = "evaluation.passkey.main"


def test_killed_and_resumed_by_two_processes_equals_uninterrupted(data):
    passkey.main(arguments(data, f"--output={data / 'whole'}"))
    before = KILLED.format(rank=0, moment=6, half=True)  # times, answers, times, ...
    killed = Recipe(arguments(data), data / "killed.log", 1, before, RECIPE)
    assert killed.wait() == [-9], killed.output()
    assert sum(len((data / "out" / "answers" / name).read_bytes().splitlines()) for name in ("420.jsonl",)) == 3
    resumed = run(arguments(data), data / "resumed.log", 2, recipe=RECIPE)
    assert answers(data) == answers(data, "whole")
    assert result(data)["scores"] == result(data, "whole")["scores"]
    assert result(data)["environment"]["processes"] == 2
    assert "| depth |" in resumed.output(0) and "| depth |" not in resumed.output(1)


def test_lengths_can_be_added_and_settings_must_be_the_same(data, refused):
    given = ["--depths", "50", "--lengths", "420"]
    passkey.main(arguments(data, *given))
    times = (data / "out" / "answers" / "times.ndjson").read_text()
    passkey.main(arguments(data, *given, "600"))
    assert (data / "out" / "answers" / "times.ndjson").read_text().startswith(times)
    assert result(data)["lengths"] == [420, 600] and len(result(data)["cases"]) == 2
    for more, message in {
        "--needle=number": "needle ('passkey' in the checkpoint",
        f"--filler={data / 'book.txt'}": "filler",
        "--trials=2": "records of 420",
    }.items():
        assert message in refused(passkey.main, arguments(data, *given, more))
    passkey.main(arguments(data, *given, "--trials=2", "--overwrite=true"))
    assert len(result(data)["cases"]) == 2


# Errors, before a model is loaded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lengths", "4K"], "take 4,105 positions, but the model has 1,024"),
        (["--lengths", "100"], "too short: introduction, needle and question alone take"),
        (["--lengths", "0"], "is not a number of tokens"),
        (["--depths", "50", "101"], "depths are per cent"),
        (["--depths", "33.33333", "33.333333"], "depths names one twice"),
        (["--needle=haystack"], "is not one of passkey, number, word"),
        (["--filler=nothing.txt"], "neither 'repeat' nor a file"),
        (["--filler={data}/short.txt"], "too few to fill 600"),
        (["--adapter={data}/remembering", "--lengths", "600", "1K"], "but the memory holds 500"),
        (["--adapter={data}/remembering", "--cache_size=300"], "but the memory holds 300"),
        (["--cache_size=300"], "which this model does not have"),
        (["--trials=0"], "trials must be at least 1"),
        (["--seed=-1"], "seed must not be negative"),
        (["--adapter={data}/nothing"], "nothing"),
    ],
)
def test_errors(data, adapter, refused, given, message):
    (data / "short.txt").write_text("Too short. " * 9)
    assert message in refused(passkey.main, arguments(data, *(text.format(data=data) for text in given)))
    assert not (data / "out").exists()


def test_nan_is_no_answer(data, refused):
    base = AutoModelForCausalLM.from_pretrained(data / "base")
    base.lm_head.weight.data.fill_(float("nan"))
    base.save_pretrained(data / "broken")
    AutoTokenizer.from_pretrained(data / "base").save_pretrained(data / "broken")
    with pytest.raises(SystemExit, match="The model's scores are NaN"):
        passkey.main(arguments(data, f"--base={data / 'broken'}"))
    assert not any(answers(data).values()) and not (data / "out" / "result.json").exists()


# Documents to train on


def test_training_documents_teach_the_task_in_other_words(data, byte_tokenizer, capsys):
    out, makes = data / "passkeys" / "train.jsonl", script("recipes/make_passkeys.py")
    given = [str(out), f"--base={data / 'base'}", "--documents=6", "--tokens=512", "--keys=2"]
    makes.main([*given, f"--books={data / 'book.txt'}"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 6 and sum("Sentence " in row["text"] for row in rows) == 3
    held_out = [INTRO, *REPEATED.strip().split(". "), *(word.question for word in NEEDLES.values())]
    held_out += ["pass key", "magic number", "secret word", "Remember it"]
    for row in rows:
        assert not any(sentence in row["text"] for sentence in held_out)
        questions = row["text"].encode()[512:].decode()
        assert questions.startswith("\n") and questions.count("\n") == 2
        found = [row["text"][start:end] for start, end in row["answers"]]
        assert len(set(found)) == 2
        assert all(row["text"].encode()[:512].decode().count(answer.strip(" .")) >= 1 for answer in found)
    documents = open_documents([str(out)], byte_tokenizer, DataOptions([], label_field="answers"))
    learned = documents.learned(0)
    assert byte_tokenizer.decode(documents.tokens(0)[learned]) == "".join(
        rows[0]["text"][start:end] for start, end in sorted(rows[0]["answers"])
    )
    train_adapt.main(
        [f"--train={out}", f"--base={data / 'base'}", f"--output={data / 'trained'}", "--label_field=answers"]
        + ["--segment_tokens=128", "--cache_size=512", "--retrieval_map=1", "--r=4", "--steps=3", "--device=cpu"]
    )
    trained = json.loads((data / "trained" / "train_result.json").read_text())
    assert np.isfinite(trained["losses"]).all() and trained["tokens"] > 3 * 512
    passkey.main(arguments(data, f"--adapter={data / 'trained'}", "--lengths=512"))
    assert len(result(data)["cases"]) == 3
    with pytest.raises(SystemExit):
        makes.main(given)
    assert "exists already" in capsys.readouterr().err
