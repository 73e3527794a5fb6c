"""LongBench's metrics, aggregates, prompts and truncation equal what the official code gave."""

import json

import pytest
from conftest import SHARED
from transformers import AutoTokenizer

from cacheformers.evaluation.longbench.metrics import METRICS, score
from cacheformers.evaluation.longbench.prompts import Prompt, cut_middle, encode, fill, in_chat
from cacheformers.evaluation.longbench.records import Record
from cacheformers.evaluation.longbench.report import task_scores
from cacheformers.evaluation.longbench.tasks import E_TASKS, MAX_LENGTHS, SHA256, TASKS, load_templates

GOLDEN = SHARED / "golden" / "longbench"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden data are not there")


def lines(name):
    file = GOLDEN / name
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def test_tasks_are_the_official_ones():
    assert len(TASKS) == 21 and len(E_TASKS) == 13 and set(SHA256) == set(TASKS)
    assert {name for name, task in TASKS.items() if not task.chat} == {
        *("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
    }
    assert {name for name, task in TASKS.items() if task.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert [name for name, task in TASKS.items() if task.stops_at_newline] == ["samsum"]
    assert {task.metric for task in TASKS.values()} == set(METRICS)
    assert MAX_LENGTHS == {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}


@needs_golden
def test_metrics():
    cases = lines("golden_metrics_public.jsonl")
    assert len(cases) > 250
    for case in cases:
        found = score(case["dataset"], case["prediction"], case["answers"], case["all_classes"] or ())
        assert TASKS[case["dataset"]].metric == case["metric"]
        assert found == pytest.approx(case["score"], abs=1e-12), case["id"]


def test_rouge_of_sentences_that_are_too_long_is_official_whoever_calls():
    """The package recurses once for each word of both texts; the official code scores 0 when that is too deep."""

    def called_from(depth, words):
        if depth:
            return called_from(depth - 1, words)
        return score("gov_report", "yes " + "no " * words, ["yes " + "one " * words])

    assert called_from(0, 400) == pytest.approx(0.5) and called_from(0, 700) == 0
    assert called_from(700, 400) == called_from(0, 400)


@needs_golden
def test_aggregates():
    cases = {case["id"]: case for case in lines("golden_metrics_public.jsonl")}
    groups = json.loads((GOLDEN / "golden_aggregate_public.json").read_text())
    assert {name.partition("/")[0] for name in groups} == set(TASKS)
    for name, group in groups.items():
        chosen = [cases[id] for id in group["ids"]]
        records = [
            Record(case["dataset"], case["id"], "", "-", case["answers"], length, case["all_classes"])
            for case, length in zip(chosen, group["lengths"], strict=True)
        ]
        found = task_scores(records, [case["prediction"] for case in chosen])
        assert found["score"] == group["scorer"], name
        assert {bucket: part["score"] for bucket, part in found["buckets"].items()} == group["scorer_e"], name


def test_all_templates_of_lm_eval_are_official():
    assert list(load_templates(TASKS)) == list(TASKS)


def test_a_quote_is_a_form_of_ones_own():
    """LongBench has no such task: its template is ours, and words are compared as in its question answering."""
    record = Record("mine", "0", "It was the best of times ...", "A TALE", ["it was the worst"], 2, None, "quote")
    text = fill(load_templates(["quote", "trec"])["quote"], record).text
    assert text == f"Here is a text:\nA TALE\n\nContinue this sentence of the text with its next words: {record.input}"
    assert record.form.new_tokens == 32 and "quote" not in TASKS
    assert score("quote", "it was the best", record.answers) == pytest.approx(
        2 / 3
    )  # of "it was best" and "it was worst"


@needs_golden
def test_prompts():
    templates, cases = load_templates(TASKS), lines("golden_prompts.jsonl")
    assert [case["dataset"] for case in cases] == list(TASKS)
    for case in cases:
        name, row = case["dataset"], case["record"]
        record = Record(name, "0", row["input"], row["context"], row["answers"], row["length"], None)
        prompt = fill(templates[name], record)
        assert prompt.text == case["prompt"] and case["max_new_tokens"] == TASKS[name].new_tokens
        assert prompt.text[: prompt.question].endswith(record.context)


@needs_golden
def test_truncation():
    tokenizers = {name: AutoTokenizer.from_pretrained(GOLDEN / name) for name in ("tok_bpe_bos", "tok_bpe_nobos")}
    cases = lines("golden_truncation.jsonl")
    assert len(cases) > 150
    for case in cases:
        tokenizer = tokenizers[case["tokenizer"]]
        cut = cut_middle(Prompt(case["prompt"], len(case["prompt"]) - 20), tokenizer, case["max_length"])
        assert cut.text == case["result"]
        assert len(encode(cut, tokenizer).ids) == case["n_tokens_after"]
        assert case["prompt"].endswith(cut.text[cut.question :]) and len(cut.text) - cut.question <= 20


@needs_golden
@pytest.mark.parametrize("task", ["qasper", "passage_count", "trec", "lcc"])
def test_the_question_is_found_again(task):
    """After truncation, inside a chat template that strips its turns, and among tokens."""
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tok_bpe_bos")
    tokenizer.chat_template = "[U]{{ messages[0]['content'] | trim }}[A]"
    case = next(case for case in lines("golden_prompts.jsonl") if case["dataset"] == task)
    row = case["record"]
    record = Record(task, "0", row["input"], row["context"] * 99, row["answers"], 1, None)
    prompt = fill(load_templates([task])[task], record)
    question = prompt.text[prompt.question :]
    cut = cut_middle(prompt, tokenizer, 300)
    assert len(cut.text) < len(prompt.text) and cut.text[cut.question :] == question
    chat = in_chat(cut, tokenizer)
    assert chat.text == f"[U]{cut.text.strip()}[A]" and chat.text[chat.question :] == f"{question.rstrip()}[A]"
    for whole in (cut, chat):
        encoded = encode(whole, tokenizer, split=True)
        assert encoded.ids == tokenizer(whole.text, add_special_tokens=whole.special).input_ids
        told = tokenizer.decode(encoded.ids[encoded.question :])
        assert whole.text.endswith(told) and len(told) <= len(whole.text) - whole.question
        before = tokenizer.decode(encoded.ids[encoded.question - 1 :])
        assert len(before) > len(whole.text) - whole.question  # the token before is not wholly in the question


@needs_golden
def test_a_question_longer_than_its_half():
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "tok_bpe_bos")
    text = " ".join(f"word{number}" for number in range(200))
    cut = cut_middle(Prompt(text, 10), tokenizer, 64)
    assert text.endswith(cut.text[cut.question :]) and 0 < cut.question < len(cut.text)


def test_changed_templates_are_refused(tmp_path):
    official = load_templates(TASKS)
    file = tmp_path / "dataset2prompt.json"
    file.write_text(json.dumps(official))
    assert load_templates(TASKS, str(file)) == official
    file.write_text(json.dumps({**official, "qasper": official["qasper"] + " "}))
    assert load_templates(["trec"], str(file)) == {"trec": official["trec"]}
    with pytest.raises(ValueError, match="templates of qasper from .* are not the official ones"):
        load_templates(TASKS, str(file))
    file.write_text(json.dumps({"trec": official["trec"]}))
    with pytest.raises(ValueError, match="no template for qasper"):
        load_templates(["trec", "qasper"], str(file))
    file.write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        load_templates(["trec"], str(file))
