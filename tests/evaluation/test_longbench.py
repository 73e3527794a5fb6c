"""`eval_longbench.py`: records, methods, batches, predictions that survive everything, results."""

import gzip
import json
import os

import datasets
import evaluate
import numpy as np
import pytest
import torch
from conftest import SHARED
from longbench_cases import KILLED, TESTED, arguments, predictions, prompt_maker, result
from recipe import Recipe, make_text, run
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

from cacheformers import eval_longbench
from cacheformers.evaluation.longbench import longbench_score
from cacheformers.evaluation.longbench.answers import answer, generation_config
from cacheformers.evaluation.longbench.methods import LongBenchOptions, PromptMaker, make_method
from cacheformers.evaluation.longbench.prompts import Encoded
from cacheformers.evaluation.longbench.records import limited, load_records
from cacheformers.evaluation.longbench.report import paired_difference
from cacheformers.evaluation.longbench.retrieval import UNIT, chunks, make_retriever, retrieved
from cacheformers.evaluation.longbench.tasks import TASKS, load_templates

# Results


def test_a_run_writes_predictions_in_the_official_layout_and_a_result(bench, capsys):
    given = arguments(bench)
    eval_longbench.main(given)
    files = predictions(bench)
    assert set(files) == {f"{task}.jsonl" for task in TESTED}
    for task in TESTED:
        lines = [json.loads(line) for line in files[f"{task}.jsonl"].splitlines()]
        assert [line["_id"] for line in lines] == [f"{task}-{number}" for number in range(5)]
        assert all(list(line) == ["pred", "answers", "all_classes", "length", "_id"] for line in lines)
    found = result(bench)
    assert found["command"] == ["eval_longbench.py", *given] and found["settings"]["max_length"] == 200
    assert found["environment"]["torch"] == torch.__version__ and found["scored_with"]["rouge"] == "1.0.1"
    assert found["seconds_per_record"] > 0 and found["peak_bytes"] > 1e6
    config = AutoModelForCausalLM.from_pretrained(bench / "base").config
    token = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    times = [json.loads(line) for line in (bench / "out" / "pred" / "base-truncation" / "times.ndjson").open()]
    for line in times:  # no padding here; the last token is not held
        assert line["state_bytes"] == token * (line["prompt_tokens"] + line["new_tokens"] - 1)
    assert found["state_bytes_per_record"] == pytest.approx(np.mean([line["state_bytes"] for line in times]))
    assert list(found["tasks"]) == list(TESTED)
    parts = found["tasks"]["hotpotqa"]["buckets"]
    assert {name: part["records"] for name, part in parts.items()} == {"0-4k": 2, "4-8k": 2, "8k+": 1}
    assert found["average"] == pytest.approx(np.mean([task["score"] for task in found["tasks"].values()]))
    table = (bench / "out" / "base-truncation" / "table.md").read_text()
    assert table in capsys.readouterr().out
    order = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert [name for name in order if name in TASKS] == list(TESTED)


def test_methods_side_by_side_and_compared_later(bench, remembering, capsys):
    methods = ["--methods", "truncation", "full", "retrieval", "position-interpolation", "memory"]
    more = [f"--adapter={remembering}", "--rope_factor=4", "--chunk_words=10", "--chunks=2", "--plots=true"]
    eval_longbench.main([*arguments(bench), *methods, *more, "--tasks", "trec", "passage_count", "--limit=3"])
    titles = [f"base-{method}" for method in ("truncation", "full", "retrieval-bm25", "position-interpolation")]
    titles.append("remembering-memory")
    files = [predictions(bench, title) for title in titles]
    texts = ["".join(each.values()) for each in files]
    assert texts[0] == texts[1] and len(set(texts)) == 4  # full with a max_length is truncation
    out = bench / "out"
    pictures = ("tasks.png", "length.png", "bytes.png")
    assert all((out / title / name).exists() for title in titles for name in ("table.md", *pictures))
    held = {title: json.loads((out / title / "result.json").read_text())["state_bytes_per_record"] for title in titles}
    assert held["remembering-memory"] < held["base-full"] == held["base-truncation"]
    table = (out / "table.md").read_text()
    assert f"| task | records | {' | '.join(titles)} |" in table
    assert f"| task | {' | '.join(titles[1:])} |" in table and "Difference from *base-truncation*" in table
    capsys.readouterr()
    eval_longbench.main(["--compare", *(str(out / title) for title in titles)])
    assert table in capsys.readouterr().out
    eval_longbench.main(["--compare", str(out / titles[0] / "result.json"), f"--output={out / 'alone'}"])
    assert (out / "alone" / "length.png").exists()


def test_intervals_are_of_the_paired_difference():
    def scores(*values):
        return {"records": [{"_id": str(place), "score": value} for place, value in enumerate(values)]}

    noisy = np.random.default_rng(0).random(50)
    points, interval = paired_difference({"trec": scores(*noisy)}, {"trec": scores(*(noisy - 0.1))})
    assert points == pytest.approx(10) and interval == pytest.approx((10, 10))
    mixed = {"trec": scores(1, 1), "lcc": scores(0.5)}
    points, (low, high) = paired_difference(mixed, {"trec": scores(0, 1), "lcc": scores(0)})
    assert points == pytest.approx(50) and (low, high) == pytest.approx((25, 75))
    assert paired_difference({"lcc": scores(1)}, {"lcc": scores(0)}) == (100, None)


def test_results_of_different_records_are_not_compared(bench, error_of):
    eval_longbench.main(arguments(bench, "--limit=2", "--tasks", "trec"))
    eval_longbench.main(arguments(bench, "--limit=3", "--tasks", "trec", f"--output={bench / 'more'}"))
    given = ["--compare", str(bench / "out" / "base-truncation"), str(bench / "more" / "base-truncation")]
    assert "different records of trec" in error_of(given)
    assert "no result of eval_longbench.py" in error_of(["--compare", str(bench / "base" / "config.json")])


def test_module_of_evaluate(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path))
    path = longbench_score.__file__
    metric = evaluate.load(path, "hotpotqa", cache_dir=tmp_path)
    metric.add_batch(predictions=["the red mill", "no"], references=[["a mill", "Red mill"], ["yes"]])
    assert metric.compute() == {"hotpotqa": 50.0}
    both = evaluate.combine([evaluate.load(path, task, cache_dir=tmp_path) for task in ("hotpotqa", "gov_report")])
    assert both.compute(predictions=["red mill"], references=[["red mill"]]) == {"hotpotqa": 100.0, "gov_report": 100.0}
    labels = evaluate.load(path, "trec", cache_dir=tmp_path)
    named = {"predictions": ["Food\nQuestion"], "references": [["Food"]], "all_classes": ["Food", "Date"]}
    assert labels.compute(**named) == {"trec": 100.0}
    with pytest.raises(ValueError, match="one of narrativeqa"):
        evaluate.load(path, "nothing", cache_dir=tmp_path)


# Batches and processes


@pytest.mark.parametrize("method", ["truncation", "memory"])
def test_two_processes_equal_one(bench, remembering, method):
    tasks = ("hotpotqa", "trec", "passage_count")
    given = [f"--adapter={remembering}", "--tasks", *tasks]
    eval_longbench.main(arguments(bench, *given, f"--output={bench / 'one'}", method=method))
    recipe = run(arguments(bench, *given, method=method), bench / "two.log", 2, recipe="eval_longbench")
    title = "remembering-memory" if method == "memory" else "base-truncation"
    one = {file.name: file.read_text() for file in (bench / "one" / "pred" / title).glob("*.jsonl")}
    assert predictions(bench, title) == one and len(one) == 3
    assert result(bench, title)["environment"]["processes"] == 2
    assert "average of tasks" in recipe.output(0) and "average of tasks" not in recipe.output(1)
    times = [json.loads(line) for line in (bench / "out" / "pred" / title / "times.ndjson").read_text().splitlines()]
    assert sorted(line["_id"] for line in times) == sorted(f"{task}-{n}" for task in tasks for n in range(5))


@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 1)])
def test_killed_three_times_and_resumed_equals_uninterrupted(bench, processes, rank):
    eval_longbench.main(arguments(bench, f"--output={bench / 'whole'}"))
    title = "base-truncation"
    for moment, half in ((2, True), (4, True), (2, False)):
        before = KILLED.format(rank=rank, moment=moment, half=half)
        killed = Recipe(arguments(bench), bench / "killed.log", processes, before, "eval_longbench")
        codes = killed.wait()
        assert codes[rank] == -9 and 0 not in codes, killed.output(rank)
    assert "".join(predictions(bench).values())
    run(arguments(bench), bench / "resumed.log", processes, recipe="eval_longbench")
    assert predictions(bench) == {
        file.name: file.read_text() for file in (bench / "whole" / "pred" / title).glob("*.jsonl")
    }
    whole = json.loads((bench / "whole" / title / "result.json").read_text())
    assert result(bench)["tasks"] == whole["tasks"]


def test_a_batch_of_which_a_part_is_done_is_answered_as_it_would_have_been(bench):
    """Rows that are padded differently may differ in half precision."""
    half = arguments(bench, "--dtype=bfloat16", "--batch=3", "--tasks", "hotpotqa")
    eval_longbench.main(half)
    files = predictions(bench)
    path = bench / "out" / "pred" / "base-truncation" / "hotpotqa.jsonl"
    lines = files["hotpotqa.jsonl"].splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[3][:15])
    eval_longbench.main(half)
    assert predictions(bench) == files


def test_a_finished_run_is_only_scored_again_and_tasks_can_be_added(bench):
    eval_longbench.main(arguments(bench, "--tasks", "trec"))
    times, files = bench / "out" / "pred" / "base-truncation" / "times.ndjson", predictions(bench)
    once = times.read_text()
    (bench / "out" / "base-truncation" / "result.json").unlink()
    eval_longbench.main(arguments(bench, "--tasks", "trec"))
    assert times.read_text() == once and predictions(bench) == files and result(bench)["average"] >= 0
    eval_longbench.main(arguments(bench, "--tasks", "hotpotqa"))
    assert set(predictions(bench)) == {"trec.jsonl", "hotpotqa.jsonl"} and list(result(bench)["tasks"]) == ["hotpotqa"]
    settings = json.loads((bench / "out" / "pred" / "base-truncation" / "settings.json").read_text())
    assert set(settings["data"]) == {"trec", "hotpotqa"}


# Methods


@pytest.mark.parametrize("name", ["hotpotqa", "samsum"])
def test_full_equals_plain_generate(bench, name):
    """A batch with left padding against one prompt at a time, with ends in the middle."""
    task, maker = TASKS[name], prompt_maker(bench, "full")
    model = AutoModelForCausalLM.from_pretrained(bench / "base").eval()
    prompts = [maker(record) for record in load_records(str(bench / "data"), name)]
    assert len({len(prompt.ids) for prompt in prompts}) == 5
    endless = answer(model, maker.tokenizer, prompts, task, remembers=False).ids
    assert {len(row) for row in endless} == {task.new_tokens}
    options = {"max_new_tokens": task.new_tokens, "do_sample": False}
    if name == "samsum":  # the end token would come first
        maker.tokenizer.eos_token = maker.tokenizer.convert_ids_to_tokens(endless[0][0])
        newline = maker.tokenizer.convert_tokens_to_ids("Ċ")
        options |= {"eos_token_id": [maker.tokenizer.eos_token_id, newline], "min_new_tokens": 1}
    else:
        model.generation_config.eos_token_id = [endless[0][7], endless[1][20]]
    found = answer(model, maker.tokenizer, prompts, task, remembers=False).ids
    for row, prompt in zip(found, prompts, strict=True):
        assert row == model.generate(torch.tensor([prompt.ids]), **options)[0, len(prompt.ids) :].tolist()
    assert len(found[0]) < task.new_tokens if name == "hotpotqa" else found[0][0] != endless[0][0]


def test_generation_settings(bench, byte_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(bench / "base")
    model.generation_config.update(eos_token_id=[7, 8], temperature=0.6, top_p=0.9, do_sample=True, pad_token_id=0)
    config = generation_config(model, byte_tokenizer, TASKS["hotpotqa"])
    assert (config.eos_token_id, config.max_new_tokens, config.do_sample, config.num_beams) == ([7, 8], 32, False, 1)
    config = generation_config(model, byte_tokenizer, TASKS["samsum"])
    newline = byte_tokenizer.encode("\n", add_special_tokens=False)[-1]
    assert config.eos_token_id == [byte_tokenizer.eos_token_id, newline] and config.min_new_tokens == 1
    assert model.generation_config.do_sample and model.generation_config.max_new_tokens is None


def test_memory_reads_the_context_and_answers_from_the_question(make_model, tokenizer):
    """Row by row and in a batch; what is read shows in the answer."""
    model = make_model("llama_gqa", torch.float32)
    task = TASKS["hotpotqa"]
    texts = [torch.tensor(tokenizer(make_text(length, length)).input_ids) for length in (75, 48, 33)]
    prompts = [Encoded(ids.tolist(), len(ids) - 9 - place) for place, ids in enumerate(texts)]
    together = answer(model, tokenizer, prompts, task, remembers=True).ids
    for row, prompt in zip(together, prompts, strict=True):
        [alone] = answer(model, tokenizer, [prompt], task, remembers=True).ids
        assert row == alone
    memory_of_another = [Encoded(texts[0].tolist()[:66] + prompts[1].ids[prompts[1].question :], 66)]
    assert answer(model, tokenizer, memory_of_another, task, remembers=True).ids != [together[1]]


def test_chat_templates_are_for_some_tasks_only(bench, byte_tokenizer):
    byte_tokenizer.chat_template = "<User>{{ messages[0]['content'] }}<Model>"
    byte_tokenizer.save_pretrained(bench / "base")
    more = ("--tasks", "trec", "passage_count")
    eval_longbench.main(arguments(bench, *more))
    eval_longbench.main(arguments(bench, *more, "--chat=true", f"--output={bench / 'chat'}"))
    plain, chat = predictions(bench), {file.name: file.read_text() for file in (bench / "chat").rglob("*.jsonl")}
    assert chat["trec.jsonl"] == plain["trec.jsonl"] and chat["passage_count.jsonl"] != plain["passage_count.jsonl"]


# Retrieval


def test_chunks_are_whole_sentences():
    text = "One two three. Four five!\nSix seven eight nine ten eleven twelve. 十三十四。十五 end"
    found = chunks(text, 5)
    assert "".join(found) == text
    assert [len(UNIT.findall(chunk)) for chunk in found] == [5, 5, 2, 4, 3]
    assert found[0] == "One two three. Four five!\n"
    assert chunks("x " * 450, 200) == ["x " * 200, "x " * 200, "x " * 50]
    assert chunks("汉" * 450, 200) == ["汉" * 200, "汉" * 200, "汉" * 50]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_bm25_finds_the_passage(language):
    filler = "The weather was fine and nothing happened. " if language == "en" else "天气很好什么都没有发生。"
    fact = "The secret password is walrus. " if language == "en" else "秘密的口令是海象。"
    question = "What is the secret password?" if language == "en" else "口令是什么？"
    found = retrieved(filler * 40 + fact + filler * 40, question, make_retriever("bm25", torch.device("cpu")), 30, 2)
    assert fact.strip() in found.split("\n\n")[0] and len(UNIT.findall(found)) <= 60


def test_passages_in_the_order_of_the_text():
    """The same passages, in the order in which they stand: what was said last comes last."""
    text = "Mary went home. Rain fell on the roof. Mary and John went to the garden with Mary. John slept. Rain fell."
    retriever = make_retriever("bm25", torch.device("cpu"))
    nearest = retrieved(text, "Mary", retriever, 5, 3).split("\n\n")
    ordered = retrieved(text, "Mary", retriever, 5, 3, text_order=True).split("\n\n")
    assert sorted(nearest) == sorted(ordered) and nearest != ordered
    assert [text.index(each) for each in ordered] == sorted(text.index(each) for each in ordered)


def test_an_encoder_retrieves_by_cosine(tmp_path, tokenizer):
    """Texts that are the query come first, whatever they are batched with."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = BertModel(BertConfig(**sizes, intermediate_size=48, max_position_embeddings=40))
    encoder.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    retriever = make_retriever(str(tmp_path / "encoder"), torch.device("cpu"))
    texts = [make_text(length, length) for length in (5, 60, 12, 30) * 10]
    scores = retriever.scores(texts[2], texts)
    assert scores[2] == pytest.approx(1, abs=1e-5) and set(np.flatnonzero(scores > 0.9999)) == set(range(2, 40, 4))
    alone = retriever.embed([texts[0]])
    assert torch.allclose(retriever.embed(texts)[0], alone[0], atol=1e-5)


# Data


def test_forms_of_data(bench, tmp_path):
    """JSON lines, compressed ones and parquet hold the same records; a limit takes the first or, seeded, some."""
    expected = load_records(str(bench / "data"), "trec")
    assert [record.id for record in expected] == [f"trec-{number}" for number in range(5)]
    rows = [json.loads(line) for line in (bench / "data" / "trec.jsonl").read_text().splitlines()]
    (tmp_path / "zipped" / "data").mkdir(parents=True)
    with gzip.open(tmp_path / "zipped" / "data" / "trec_e.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)
    (tmp_path / "columns").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "columns" / "trec.parquet")
    assert load_records(str(tmp_path / "zipped"), "trec", e=True) == expected
    assert load_records(str(tmp_path / "columns"), "trec") == expected
    assert limited(expected, 2, None) == expected[:2] and limited(expected, 9, 2) == expected
    chosen = limited(expected, 2, seed=2)
    assert chosen == limited(expected, 2, seed=2) != expected[:2]


def test_longbench_e_goes_into_folders_of_its_own(bench):
    os.rename(bench / "data" / "trec.jsonl", bench / "data" / "trec_e.jsonl")
    eval_longbench.main(arguments(bench, "--longbench_e=true", "--tasks", "trec"))
    assert (bench / "out" / "pred_e" / "base-truncation" / "trec.jsonl").exists()
    assert (bench / "out" / "base-truncation_e" / "result.json").exists()


@pytest.mark.slow
def test_real_records_with_a_real_model(smollm2):
    """`full` is plain `generate`, token for token, in float32 and in batches."""
    data = SHARED / "data" / "longbench_mini"
    if not data.is_dir():
        pytest.skip("longbench_mini is not there")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    options = LongBenchOptions(data=str(data), methods=["full"], chat=True, max_length=250)
    maker = PromptMaker(
        make_method("full", options, str(smollm2), model.config, None), options, tokenizer, load_templates(TASKS)
    )
    for name, count in (("hotpotqa", 3), ("triviaqa", 3), ("passage_count", 3), ("samsum", 1)):
        prompts = [maker(record) for record in load_records(str(data), name)[:count]]
        found = answer(model, tokenizer, prompts, TASKS[name], remembers=False).ids
        for row, prompt in zip(found, prompts, strict=True):
            config = generation_config(model, tokenizer, TASKS[name])
            plain = model.generate(torch.tensor([prompt.ids]), generation_config=config)[0, len(prompt.ids) :]
            assert row == plain.tolist()
