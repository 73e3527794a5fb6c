"""Predictions of `eval_longbench.py` on disk: whose they are, what is missing or damaged, and going on with them."""

import json
import shutil
from unittest import mock

import pytest
import torch
from longbench_cases import arguments, predictions, result
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

from cacheformers import eval_longbench
from cacheformers.common import base_model
from cacheformers.common.base_model import BLOCKS, base_config, hashed_tensors, sampled, weights_identity

TITLE = "base-truncation"
ONE_TASK = ("--tasks", "trec")


def folder_of(bench, title=TITLE):
    return bench / "out" / "pred" / title


def times(bench):
    return [json.loads(line) for line in (folder_of(bench) / "times.ndjson").read_text().splitlines()]


def identity(folder):
    return weights_identity(str(folder), base_config(str(folder)))


def train_further(folder, **options):
    """Change one number of one matrix of the model in a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 0.01
    model.save_pretrained(folder, **options)


# Whose predictions they are


def test_predictions_are_those_of_the_weights(bench, error_of):
    """Neither another model in a folder of the same name nor the same one, trained further, takes them over."""
    eval_longbench.main(arguments(bench, *ONE_TASK))
    shutil.copytree(bench / "base", bench / "other" / "base")
    eval_longbench.main(arguments(bench, *ONE_TASK, f"--base={bench / 'other' / 'base'}"))  # the same model elsewhere
    before = predictions(bench)
    train_further(bench / "other" / "base")
    assert "base_weights (" in error_of(arguments(bench, *ONE_TASK, f"--base={bench / 'other' / 'base'}"))
    train_further(bench / "base")
    assert "base_weights (" in error_of(arguments(bench, *ONE_TASK))
    assert predictions(bench) == before


def test_large_tensors_are_sampled(tmp_path):
    """Some blocks of each, so that a model of many gigabytes takes a moment; training changes those as all others."""
    weights, path = {"large": torch.zeros(1000, 1000), "small": torch.zeros(8)}, tmp_path / "model.safetensors"

    def hashed():
        save_file(weights, path)
        return sorted(hashed_tensors(path))

    before = hashed()
    assert [line[:3] for line in before] == [["large", "F32", [1000, 1000]], ["small", "F32", [8]]]
    weights["large"] += 1e-6
    after = hashed()
    assert after[0] != before[0] and after[1] == before[1]
    weights["small"][3] = 1e-6
    assert hashed()[1] != before[1]
    with path.open("rb") as file, mock.patch.object(base_model, "digest", lambda *parts: str(sum(map(len, parts)))):
        assert int(sampled(file, 0, 4_000_000, BLOCKS)) < 300_000


def test_weights_are_the_same_in_any_files(bench, tmp_path):
    whole = identity(bench / "base")
    model = AutoModelForCausalLM.from_pretrained(bench / "base")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert identity(tmp_path / "sharded") == whole
    train_further(tmp_path / "sharded", max_shard_size="20KB")
    assert identity(tmp_path / "sharded") != whole


def test_weights_that_are_not_there_or_damaged(bench, tmp_path):
    shutil.copytree(bench / "base", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(ValueError, match=r"damaged/model.safetensors is not a safetensors file: .* again"):
        identity(tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"damaged holds no model.safetensors"):
        identity(tmp_path / "damaged")


# Damaged files


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"pred": "x"}', "has no _id"),
        (b'{"_id": "trec-1"}', "has no pred"),
        (b'{"_id": "trec-1", "pred": 3}', "has no pred"),
        (b'["trec-1"]', "not a JSON object"),
        (b'{"_id": "trec-1", "pred": "\xff"}', "utf-8"),
    ],
)
def test_a_damaged_line_of_predictions(bench, error_of, line, message):
    eval_longbench.main(arguments(bench, *ONE_TASK))
    path = folder_of(bench) / "trec.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line + b"\n", *lines[2:]]))
    said = error_of(arguments(bench, *ONE_TASK))
    assert "trec.jsonl, line 2 is damaged" in said and message in said and "remove the line" in said


@pytest.mark.parametrize("contents", [b"", b"[]", b'{"data": {}}', b'{"settings": {}, "data": []}', b"\xff"])
def test_damaged_settings(bench, error_of, contents):
    eval_longbench.main(arguments(bench, *ONE_TASK))
    (folder_of(bench) / "settings.json").write_bytes(contents)
    said = error_of(arguments(bench, *ONE_TASK))
    assert "settings.json is damaged" in said and "--overwrite" in said
    eval_longbench.main(arguments(bench, *ONE_TASK, "--overwrite=true"))


def test_times_that_are_missing(bench, error_of):
    """All of them: an error before anything is loaded. Those of a record: it is answered again."""
    eval_longbench.main(arguments(bench, *ONE_TASK))
    whole, path = predictions(bench), folder_of(bench) / "times.ndjson"
    lines = path.read_text().splitlines(keepends=True)
    path.unlink()
    said = error_of(arguments(bench, *ONE_TASK))
    assert "times.ndjson is missing" in said and "--overwrite" in said
    path.write_text("".join(lines[:3]))
    eval_longbench.main(arguments(bench, *ONE_TASK))
    assert predictions(bench) == whole and len({line["_id"] for line in times(bench)}) == 5
    path.write_text("{}\n")
    assert "times.ndjson, line 1 is damaged (it has no _id" in error_of(arguments(bench, *ONE_TASK))


# Going on with more records


def test_a_larger_limit_goes_on(bench):
    more = ("--limit=2", "--batch=1", *ONE_TASK)
    eval_longbench.main(arguments(bench, *more))
    first = times(bench)
    assert len(first) == 2
    eval_longbench.main(arguments(bench, *more, "--limit=4"))
    assert len(times(bench)) == 4 and times(bench)[:2] == first
    eval_longbench.main(arguments(bench, "--batch=1", *ONE_TASK))
    assert len(times(bench)) == 5 and len(result(bench)["tasks"]["trec"]["records"]) == 5
    eval_longbench.main(arguments(bench, "--batch=1", *ONE_TASK, f"--output={bench / 'at_once'}"))
    at_once = (bench / "at_once" / "pred" / TITLE / "trec.jsonl").read_text()
    assert predictions(bench) == {"trec.jsonl": at_once}


def test_a_smaller_limit_keeps_what_was_answered(bench):
    eval_longbench.main(arguments(bench, *ONE_TASK))
    whole = predictions(bench)
    eval_longbench.main(arguments(bench, *ONE_TASK, "--limit=2"))
    assert predictions(bench) == whole and len(times(bench)) == 5
    found = result(bench)
    assert [record["_id"] for record in found["tasks"]["trec"]["records"]] == ["trec-0", "trec-1"]
    mine = [line["seconds"] for line in times(bench) if line["_id"] in ("trec-0", "trec-1")]
    assert found["seconds_per_record"] == pytest.approx(sum(mine) / 2)


# What the table and the pictures say


def test_chunks_are_those_of_the_encoders_weights(bench, error_of):
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = BertModel(BertConfig(**sizes, intermediate_size=16, max_position_embeddings=2048))
    encoder.save_pretrained(bench / "encoder")
    AutoTokenizer.from_pretrained(bench / "base").save_pretrained(bench / "encoder")
    given = arguments(bench, *ONE_TASK, f"--retriever={bench / 'encoder'}", "--limit=1", method="retrieval")
    eval_longbench.main(given)
    encoder.embeddings.word_embeddings.weight.data[5] += 0.1
    encoder.save_pretrained(bench / "encoder")
    assert "retriever_weights (" in error_of(given)
