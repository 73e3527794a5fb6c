"""`eval_longbench.py`: what cannot work is said before a model is loaded, and where."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from longbench_cases import arguments, predictions, result, row, write_rows
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cacheformers import eval_longbench
from cacheformers.evaluation.compare import load_result
from cacheformers.evaluation.longbench.records import Record, records_identity


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "trec", "squad"], "squad does not exist; LongBench has narrativeqa, qasper"),
        (["--tasks", "narrativeqa"], "no narrativeqa.jsonl, .jsonl.gz or .parquet. Choose with --tasks among what "),
        (["--longbench_e=true", "--tasks", "lsht"], "lsht does not exist; LongBench-E has qasper"),
        (["--longbench_e=true", "--tasks", "trec"], "holds no trec_e.jsonl"),
        (["--data=no/such/folder/here"], "no/such/folder/here does not exist"),
        (["--methods", "magic"], "magic is none of truncation, full"),
        (["--methods", "memory"], "takes a model with a memory: give an --adapter"),
        (["--methods", "position-interpolation"], "needs --rope_factor greater than 1"),
        (["--limit=0"], "limit must be at least 1"),
        (["--seed=3"], "give --limit, too"),
        (["--chat=true"], "has no chat template: leave out --chat"),
        (["--max_length=1000"], "exceed the 1,024 positions of the model: give a smaller --max_length"),
        (["--methods", "retrieval", "--retriever=no/such/encoder"], "no/such/encoder"),
        (["--prompts=no_such.json"], "no_such.json"),
    ],
)
def test_options_that_cannot_work(bench, error_of, more, message):
    assert message in error_of(arguments(bench, *more))
    assert not (bench / "out").exists()


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("hotpotqa", {"answers": []}, "hotpotqa.jsonl, line 3 has no answers: it cannot be scored"),
        ("hotpotqa", {"context": " \n"}, "hotpotqa.jsonl, line 3 has an empty context"),
        ("hotpotqa", {"input": None}, "line 3 has no input of LongBench's form"),
        ("hotpotqa", {"_id": "hotpotqa-0"}, "several records of hotpotqa have the _id 'hotpotqa-0'"),
        ("trec", {"all_classes": None}, "line 3 has no all_classes, which trec is scored with"),
        ("trec", {"all_classes": ["x", 3]}, "trec.jsonl, line 3 has all_classes that are not a list of texts"),
        ("trec", {"all_classes": "xyz"}, "trec.jsonl, line 3 has all_classes that are not a list of texts"),
        ("passage_retrieval_en", {"answers": ["3"]}, "passage_retrieval_en.jsonl, line 3 has the answer '3', in which"),
        ("passage_retrieval_zh", {"answers": ["Paragraph 3"]}, "in which no number follows '段落'"),
        ("hotpotqa", {"context": "a \ud800 b"}, "hotpotqa.jsonl, line 3 has half a surrogate pair in its context"),
        ("hotpotqa", {"answers": ["\udc00"]}, "hotpotqa.jsonl, line 3 has half a surrogate pair in its answers"),
        ("hotpotqa", {"_id": "\udc00"}, "hotpotqa.jsonl, line 3 has half a surrogate pair in its _id"),
    ],
)
def test_records_that_cannot_be_used(bench, error_of, task, change, message):
    rows = [{**row(task, number, 20), "answers": ["Paragraph 1 段落1"]} for number in range(5)]
    rows[2] |= change
    write_rows(bench / "data" / f"{task}.jsonl", rows)
    assert message in error_of(arguments(bench, "--tasks", task))


def test_a_set_has_one_template(bench, error_of):
    """Metrics and lengths of answers are the template's."""
    shutil.rmtree(bench / "data")
    rows = [{**row("hotpotqa", number, 20), "template": form} for number, form in enumerate(["qasper", "samsum"])]
    write_rows(bench / "data" / "own.jsonl", rows)
    assert "the records of own name several templates (qasper, samsum)" in error_of(arguments(bench, "--tasks", "own"))


def test_a_file_that_is_cut_off(bench, error_of):
    path = bench / "data" / "hotpotqa.jsonl"
    path.write_text(path.read_text()[:-30])
    assert "hotpotqa.jsonl, line 5 is not valid JSON" in error_of(arguments(bench))


@pytest.mark.parametrize("part", [slice(-30), slice(9, None), slice(3)])
def test_a_damaged_archive(bench, error_of, part):
    """Cut off at its end, without its beginning, and hardly there."""
    path = bench / "data" / "hotpotqa.jsonl"
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes())[part])
    path.unlink()
    assert "hotpotqa.jsonl.gz cannot be read" in error_of(arguments(bench))


def test_no_official_limit(bench, error_of):
    given = [argument for argument in arguments(bench) if not argument.startswith("--max_length")]
    assert "no official limit for a model of 1,024 positions: give --max_length" in error_of(given)


def test_prompts_that_do_not_fit(bench, remembering, error_of):
    """Found by reading all prompts, before the model is loaded."""
    rows = [row("hotpotqa", 0, 20), row("hotpotqa", 1, 500)]
    write_rows(bench / "data" / "hotpotqa.jsonl", rows)
    given = [argument for argument in arguments(bench) if not argument.startswith("--max_length")]
    said = error_of([*given, "--methods", "full"])
    assert "hotpotqa, record hotpotqa-1: prompt and answer take" in said and "the model has 1,024. Cut prompts" in said
    memory = [*given, "--methods", "memory", f"--adapter={remembering}"]
    said = error_of(memory)
    assert "hotpotqa-1: " in said and "tokens stand before the question, but the memory holds 800" in said
    assert "the memory holds 900. Give a larger --cache_size" in error_of([*memory, "--cache_size=900"])
    assert not (bench / "out").exists()
    eval_longbench.main([*memory, "--forget=true", "--tasks", "hotpotqa"])
    eval_longbench.main([*memory, "--memory_content=none", "--tasks", "hotpotqa"])  # of which nothing needs room
    for name in ("remembering-memory", "remembering-memory-none"):
        assert len(predictions(bench, name)["hotpotqa.jsonl"].splitlines()) == 2


def test_a_larger_memory_than_the_adapter_has(bench, remembering, config_factory, error_of):
    """Answers after as many entries as asked for are those of an adapter that is configured with them."""
    write_rows(bench / "data" / "hotpotqa.jsonl", [row("hotpotqa", 0, 500)])
    given = [*arguments(bench, method="memory"), "--max_length=8000", "--tasks", "hotpotqa"]
    shutil.copytree(remembering, bench / "larger")
    config = json.loads((bench / "larger" / "adapter_config.json").read_text())
    (bench / "larger" / "adapter_config.json").write_text(json.dumps({**config, "cache_size": 8192}))
    eval_longbench.main([*given, f"--adapter={bench / 'larger'}"])
    eval_longbench.main([*given, f"--adapter={remembering}", "--cache_size=8192"])
    assert predictions(bench, "remembering-memory") == predictions(bench, "larger-memory")
    assert result(bench, "remembering-memory")["settings"]["cache_size"] == 8192
    eval_longbench.main([*given, f"--adapter={remembering}", "--forget=true", "--overwrite"])
    changed = error_of([*given, f"--adapter={remembering}", "--forget=true", "--cache_size=8192"])
    assert "written with other settings: cache_size (None in the checkpoint, 8192 here)" in changed
    assert predictions(bench, "remembering-memory") != predictions(bench, "larger-memory")
    base = AutoModelForCausalLM.from_pretrained(bench / "base")
    get_peft_model(base, config_factory(method="infini_attention", segment_tokens=32)).save_pretrained(bench / "matrix")
    assert "memory of limited size" in error_of([*given, f"--adapter={bench / 'matrix'}", "--cache_size=8192"])
    recalling = [*given, f"--adapter={bench / 'matrix'}", "--memory_prompt=recalled"]
    assert "this memory's method retrieves nothing" in error_of(recalling)


def test_another_tokenizer_or_generation_config_is_another_model(bench, error_of):
    eval_longbench.main(arguments(bench, "--tasks", "trec"))
    file = bench / "out" / "pred" / "base-truncation" / "settings.json"
    saved = file.read_text()
    tokenizer = AutoTokenizer.from_pretrained(bench / "base")
    tokenizer.chat_template = "{{ messages[0].content }}!"
    tokenizer.save_pretrained(bench / "base")
    assert "written with other settings: tokenizer" in error_of(arguments(bench))
    config = GenerationConfig.from_pretrained(bench / "base")
    config.repetition_penalty = 1.7
    config.save_pretrained(bench / "base")
    assert "generation_config" in error_of(arguments(bench))
    settings = json.loads(saved)
    del settings["settings"]["tokenizer"], settings["settings"]["generation_config"]  # as earlier versions wrote it
    file.write_text(json.dumps(settings))
    eval_longbench.main(arguments(bench, "--tasks", "trec"))


@pytest.mark.parametrize("gold", [[3, 10], [[3, 10, 4]], 7])
def test_gold_that_is_no_list_of_pairs(bench, error_of, gold):
    write_rows(bench / "sets" / "own.jsonl", [{**row("hotpotqa", 0, 50), "template": "hotpotqa", "gold": gold}])
    given = [word for word in arguments(bench, f"--data={bench / 'sets'}") if not word.startswith("--tasks")]
    given = [word for word in given if word not in ("hotpotqa", "trec", "samsum", "passage_count")]
    assert "line 1 has a gold that is not a list of [start, end] pairs" in error_of(given)


def test_sets_of_one_s_own_may_have_dots_in_their_names(bench):
    """And their predictions, results and table bear these names."""
    write_rows(bench / "sets" / "law.2024.jsonl", [{**row("hotpotqa", 0, 50), "template": "hotpotqa"}])
    given = [word for word in arguments(bench, f"--data={bench / 'sets'}") if not word.startswith("--tasks")]
    eval_longbench.main([word for word in given if word not in ("hotpotqa", "trec", "samsum", "passage_count")])
    [found] = (bench / "out").glob("*/result.json")
    assert list(json.loads(found.read_text())["tasks"]) == ["law.2024"]


def test_a_record_with_another_template_is_another_record():
    record = Record("own", "1", "q", "c", ["a"], 1, None, "qasper")
    assert records_identity([record]) != records_identity([replace(record, template="quote")])


@pytest.mark.parametrize("tasks", [{"qasper": {}}, {"qasper": {"score": None, "buckets": {}, "records": []}}, {"a": 1}])
def test_a_damaged_result_cannot_be_compared(tmp_path, tasks):
    (tmp_path / "result.json").write_text(json.dumps({"tasks": tasks, "average": 1}))
    with pytest.raises(ValueError, match="result.json is damaged"):
        load_result(str(tmp_path))


def test_a_folder_of_other_settings(bench, error_of):
    eval_longbench.main(arguments(bench, "--tasks", "trec"))
    before = predictions(bench)
    said = error_of(arguments(bench, "--batch=3", "--dtype=bfloat16"))
    assert "written with other settings: batch (2 in the checkpoint, 3 here), dtype ('auto'" in said
    write_rows(bench / "data" / "trec.jsonl", [row("trec", 8, 20)])
    assert "records of trec" in error_of(arguments(bench))
    assert predictions(bench) == before
    eval_longbench.main(arguments(bench, "--tasks", "trec", "--overwrite=true"))
    assert [json.loads(line)["_id"] for line in predictions(bench)["trec.jsonl"].splitlines()] == ["trec-8"]
    (bench / "out" / "pred" / "base-truncation" / "settings.json").unlink()
    assert "predictions of unknown settings" in error_of(arguments(bench))


def test_every_adapter_file_counts(bench, remembering, error_of):
    """Predictions of an adapter are not continued with another one of the same name."""
    given = [f"--adapter={remembering}", "--tasks", "trec"]
    eval_longbench.main(arguments(bench, *given, method="memory"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bench / "base"), remembering)
    for name, parameter in model.named_parameters():
        if "lora_mem_gate" in name:
            parameter.data.add_(0.1)
    model.save_pretrained(remembering)
    assert "adapter (" in error_of(arguments(bench, *given, method="memory"))
