"""`cacheformers heads`: which heads find passages, against adapters that keep one head each."""

import json

import numpy as np
import pytest
import torch
from longbench_cases import row, write_rows
from peft import get_peft_model
from recipe import run
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

import cacheformers
from cacheformers.evaluation import heads
from cacheformers.evaluation.longbench.retrieval import Recalling, chunks
from cacheformers.methods.retrieval_heads import RetrievalHeadsAdapterConfig
from cacheformers.training import attach

WORDS = 8  # of a passage


@pytest.fixture(name="asked")
def asked_fixture(bench):
    """Three questions, each with the place of a passage; the arguments of a run."""
    rows = []
    for number in range(3):
        record = row("hotpotqa", number, 60)
        start = record["context"].index(chunks(record["context"], WORDS)[number + 2])
        record["template"] = "hotpotqa"
        rows.append({**record, "gold": [[start, start + len(chunks(record["context"], WORDS)[number + 2])]]})
    data = bench / "gold"
    data.mkdir()
    write_rows(data / "mine.jsonl", [*rows, {**row("hotpotqa", 3, 60), "template": "hotpotqa"}])  # the last has no gold
    window = ("--segment_tokens=20", "--window_tokens=12")
    given = [f"--base={bench / 'base'}", f"--data={data}", f"--output={bench / 'heads'}", "--device=cpu", *window]
    return rows, [*given, f"--chunk_words={WORDS}"]


@torch.no_grad()
def test_every_head_is_ranked_as_if_it_were_alone(bench, asked, capsys):
    rows, given = asked
    heads.main(given)
    result = json.loads((bench / "heads" / "result.json").read_text())
    assert result["records"] == [each["_id"] for each in rows] and len(result["bm25"]) == 3
    tokenizer = AutoTokenizer.from_pretrained(bench / "base")
    window = {"local_window": "sliding", "segment_tokens": 20, "window_tokens": 12, "sink_tokens": 4}
    base = AutoModelForCausalLM.from_pretrained(bench / "base")
    assert len(result["heads"]) == base.config.num_hidden_layers * base.config.num_key_value_heads
    for found in result["heads"]:
        kept = {found["layer"]: [found["head"]]}
        config = RetrievalHeadsAdapterConfig(heads=kept, target_modules=[], **window)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(bench / "base"), config).eval()
        for number, (record, rank) in enumerate(zip(rows, found["ranks"], strict=True)):
            memory = cacheformers.read_text(model, tokenizer, record["context"], progress=False)
            places = memory.origin.sources[0].offsets.tolist()
            texts = chunks(record["context"], WORDS)
            scores = Recalling(model, tokenizer, memory, record["context"], places).scores(record["input"], texts)
            right = scores[number + 2]
            assert rank == sum(score >= right for score in scores), (kept, number)
    quality = [float(np.mean([1 / rank for rank in found["ranks"]])) for found in result["heads"]]
    assert quality == sorted(quality, reverse=True) and quality[0] > quality[-1]
    shown, best = capsys.readouterr().out, result["heads"][0]
    assert f"layer {best['layer']}, head {best['head']}" in shown and "BM25" in shown and "attach" in shown
    assert (bench / "heads" / "heads.png").stat().st_size > 1000


def test_two_processes_share_the_questions(bench, asked, tmp_path):
    heads.main(asked[1])
    alone = json.loads((bench / "heads" / "result.json").read_text())
    given = [*asked[1], f"--output={bench / 'shared'}"]
    run(given, tmp_path / "heads.log", 2, recipe="evaluation.heads")
    shared = json.loads((bench / "shared" / "result.json").read_text())
    for name in ("records", "bm25", "heads"):
        assert shared[name] == alone[name], name
    assert shared["environment"]["processes"] == 2


def test_a_base_without_rotary_positions(bench, asked, make_base, capsys):
    """Its texts are read in segments alone, and the command that is printed says so."""
    base = make_base("opt", torch.float32, vocab_size=len(AutoTokenizer.from_pretrained(bench / "base")))
    base.save_pretrained(bench / "base")
    heads.main([*asked[1], "--best=1"])
    config = attached(bench, capsys)
    assert (config["local_window"], config["segment_tokens"]) == ("segment", 20)


def test_places_of_words_must_be_known(bench, asked, refused):
    for file in (bench / "base").glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(bench / "base")
    assert "a fast tokenizer, which" in refused(heads.main, asked[1])


def test_what_a_run_says_can_be_attached(bench, asked, capsys):
    """The last line that it prints is a command that makes an adapter, which reads as the heads were measured."""
    heads.main([*asked[1], "--best=3"])
    config = attached(bench, capsys)
    assert sum(map(len, config["heads"].values())) == 3
    assert (config["segment_tokens"], config["window_tokens"]) == (20, 12)


def attached(bench, capsys):
    """The adapter that the last line makes."""
    last = capsys.readouterr().out.rstrip().splitlines()[-1].split()
    assert last[:2] == ["cacheformers", "attach"] and last[-2:] == ["--output", "runs/heads"]
    attach.main([*last[2:-1], str(bench / "attached")])
    return json.loads((bench / "attached" / "adapter_config.json").read_text())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "trec"], "trec"),
        (["--best=0"], "best must be at least 1"),
        (["--best=99"], "key-value heads"),
        (["--chunk_words=0"], "chunk_words must be at least 1"),
        (["--segment_tokens=4000"], "positions"),
        (["--data=nowhere"], "--data nowhere is no folder"),
    ],
)
def test_errors_come_before_anything_is_read(asked, refused, more, message):
    assert message in refused(heads.main, [*asked[1], *more])


def test_records_without_the_place_of_their_answers(bench, asked, refused):
    assert "recipes/make_facts.py" in refused(heads.main, [*asked[1], f"--data={bench / 'data'}"])


def test_ties_are_no_success():
    assert heads.rank(np.array([1.0, 1.0, 0.5]), np.array([False, True, False])) == 2
    assert heads.rank(np.array([1.0, 0.0, 0.5]), np.array([True, True, False])) == 1
    assert heads.overlap((0, 10), (8, 28)) == 0.2 and heads.overlap((0, 10), (10, 12)) == 0
