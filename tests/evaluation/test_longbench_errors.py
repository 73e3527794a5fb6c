"""`eval_longbench.py`: what cannot work is said before a model is loaded, and where."""

import gzip
import json
from pathlib import Path

import pytest
from longbench_cases import adapter_fixture, arguments, data_fixture, error_of, predictions, row, write_rows  # noqa: F401
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cacheformers import eval_longbench


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "trec", "squad"], "squad does not exist; LongBench has narrativeqa, qasper"),
        (
            ["--tasks", "narrativeqa"],
            "holds no narrativeqa.jsonl, .jsonl.gz or .parquet. Choose with --tasks among what ",
        ),
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
def test_options_that_cannot_work(data, capsys, more, message):
    assert message in error_of(arguments(data, *more), capsys)
    assert not (data / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, "hotpotqa.jsonl, line 3 has no answers: it cannot be scored"),
        ({"context": " \n"}, "hotpotqa.jsonl, line 3 has an empty context"),
        ({"input": None}, "line 3 has no input of LongBench's form"),
        ({"_id": "hotpotqa-0"}, "several records of hotpotqa have the _id 'hotpotqa-0'"),
    ],
)
def test_records_that_cannot_be_used(data, capsys, change, message):
    rows = [row("hotpotqa", number, 20) for number in range(5)]
    rows[2] |= change
    write_rows(data / "data" / "hotpotqa.jsonl", rows)
    assert message in error_of(arguments(data), capsys)


def test_a_file_that_is_cut_off(data, capsys):
    path = data / "data" / "hotpotqa.jsonl"
    path.write_text(path.read_text()[:-30])
    assert "hotpotqa.jsonl, line 5 is not valid JSON" in error_of(arguments(data), capsys)


@pytest.mark.parametrize("part", [slice(-30), slice(9, None), slice(3)])
def test_a_damaged_archive(data, capsys, part):
    """Cut off at its end, without its beginning, and hardly there."""
    path = data / "data" / "hotpotqa.jsonl"
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes())[part])
    path.unlink()
    assert "hotpotqa.jsonl.gz cannot be read" in error_of(arguments(data), capsys)


def test_labels_are_needed_for_classification(data, capsys):
    rows = [{**row("trec", number, 20), "all_classes": None} for number in range(2)]
    write_rows(data / "data" / "trec.jsonl", rows)
    assert "line 1 has no all_classes, which trec is scored with" in error_of(arguments(data), capsys)


def test_no_official_limit(data, capsys):
    given = [argument for argument in arguments(data) if not argument.startswith("--max_length")]
    assert "no official limit for a model of 1,024 positions: give --max_length" in error_of(given, capsys)


def test_prompts_that_do_not_fit(data, adapter, capsys):
    """Found by reading all prompts, before the model is loaded."""
    rows = [row("hotpotqa", 0, 20), row("hotpotqa", 1, 500)]
    write_rows(data / "data" / "hotpotqa.jsonl", rows)
    given = [argument for argument in arguments(data) if not argument.startswith("--max_length")]
    said = error_of([*given, "--methods", "full"], capsys)
    assert "hotpotqa, record hotpotqa-1: prompt and answer take" in said and "the model has 1,024. Cut prompts" in said
    memory = [*given, "--methods", "memory", f"--adapter={adapter}"]
    said = error_of(memory, capsys)
    assert "hotpotqa-1: " in said and "tokens stand before the question, but the memory holds 800" in said
    assert not (data / "out").exists()
    eval_longbench.main([*memory, "--forget=true", "--tasks", "hotpotqa"])
    assert len(predictions(data, "remembering-memory")["hotpotqa.jsonl"].splitlines()) == 2


def test_a_folder_of_other_settings(data, capsys):
    eval_longbench.main(arguments(data, "--tasks", "trec"))
    before = predictions(data)
    said = error_of(arguments(data, "--batch=3", "--dtype=bfloat16"), capsys)
    assert "written with other settings: batch (2 in the checkpoint, 3 here), dtype ('auto'" in said
    write_rows(data / "data" / "trec.jsonl", [row("trec", 8, 20)])
    assert "records of trec" in error_of(arguments(data), capsys)
    assert predictions(data) == before
    eval_longbench.main(arguments(data, "--tasks", "trec", "--overwrite=true"))
    assert [json.loads(line)["_id"] for line in predictions(data)["trec.jsonl"].splitlines()] == ["trec-8"]
    (data / "out" / "pred" / "base-truncation" / "settings.json").unlink()
    assert "predictions of unknown settings" in error_of(arguments(data), capsys)


def test_every_adapter_file_counts(data, adapter, capsys):
    """Predictions of an adapter are not continued with another one of the same name."""
    given = [f"--adapter={adapter}", "--tasks", "trec"]
    eval_longbench.main(arguments(data, *given, method="memory"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(data / "base"), adapter)
    for name, parameter in model.named_parameters():
        if "lora_mem_gate" in name:
            parameter.data.add_(0.1)
    model.save_pretrained(adapter)
    assert "adapter (" in error_of(arguments(data, *given, method="memory"), capsys)
