"""Prompts fit the model's positions before a run, however their tokens grow when cut prompts are tokenized again."""

import json

import pytest
import torch
from conftest import save_adapter
from longbench_cases import arguments, prompt_maker, result, row, write_rows
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from cacheformers import eval_longbench
from cacheformers.evaluation.longbench.prompts import cut_middle, encode, fill
from cacheformers.evaluation.longbench.records import load_records
from cacheformers.evaluation.longbench.tasks import TASKS
from cacheformers.evaluation.passkey import main as passkey

TASK = "multifieldqa_zh"
POSITIONS = 512


@pytest.fixture
def fallback(bench, make_base):
    """An OPT in `base`, whose tokenizer takes Chinese as bytes, and records in Chinese."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "\n"]
    bytes_of = models.BPE({token: place for place, token in enumerate(tokens)}, [], byte_fallback=True)
    tokenizer = Tokenizer(bytes_of)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    base = make_base("opt", torch.float32, vocab_size=len(tokens), max_position_embeddings=POSITIONS)
    base.generation_config.eos_token_id = None
    base.save_pretrained(bench / "base")
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="</s>", bos_token="<s>", eos_token="</s>")
    whole.save_pretrained(bench / "base")
    rows = [{**row(TASK, number, 1), "context": "长文" * (90 + 50 * number), "answers": ["文"]} for number in range(3)]
    write_rows(bench / "data" / f"{TASK}.jsonl", rows)
    return bench


def test_a_prompt_that_grows_is_cut_again(fallback):
    maker = prompt_maker(fallback, "truncation", max_length=440)
    record = load_records(str(fallback / "data"), TASK)[2]
    official = cut_middle(fill(maker.templates[TASK], record), maker.tokenizer, 440)
    assert len(encode(official, maker.tokenizer).ids) > POSITIONS
    found = maker(record)
    assert 200 < len(found.ids) <= POSITIONS - TASKS[TASK].new_tokens
    assert found.cut is not None and found.cut < 440


def test_a_prompt_that_fits_stays_as_the_official_code_cuts_it(fallback):
    """Also where it has grown beyond max_length, but not beyond the positions."""
    maker = prompt_maker(fallback, "truncation", max_length=200)
    record = load_records(str(fallback / "data"), TASK)[2]
    official = encode(cut_middle(fill(maker.templates[TASK], record), maker.tokenizer, 200), maker.tokenizer)
    assert 200 < len(official.ids) < POSITIONS - TASKS[TASK].new_tokens
    assert maker(record) == official and official.cut is None


def test_a_run_says_what_was_cut_again(fallback):
    more = ("--tasks", TASK, "--max_length=440", "--batch=1")
    eval_longbench.main(arguments(fallback, *more))
    found = result(fallback)
    assert "until prompt and answer fit" in found["settings"]["cut"] and 1 <= found["records_cut_again"] <= 3
    lines = (fallback / "out" / "pred" / "base-truncation" / "times.ndjson").read_text().splitlines()
    cut = [json.loads(line) for line in lines]
    assert sum(line["cut_again_to"] is not None for line in cut) == found["records_cut_again"]
    assert all(line["prompt_tokens"] + TASKS[TASK].new_tokens <= POSITIONS for line in cut)


def test_a_limit_that_cannot_fit_is_an_error_and_no_cut(fallback, error_of):
    """`full` would be truncation under another name."""
    given = arguments(fallback, "--tasks", TASK, "--max_length=5000", method="full")
    assert "prompt and answer take" in error_of(given)


@pytest.mark.parametrize(
    ("method", "options"),
    [("gated_attention", {}), ("cacheformer_on_base", {"window_tokens": 64, "segment_tokens": 64})],
)
def test_a_text_that_a_memory_on_learned_positions_cannot_read(fallback, error_of, refused, method, options):
    """Its positions count on: found before the run, with the record's name."""
    save_adapter(fallback / "base", fallback / "remembering", method=method, **options)
    given = [f"--adapter={fallback / 'remembering'}", "--tasks", TASK]
    plain = [one for one in arguments(fallback, *given, method="memory") if not one.startswith("--max_length")]
    said = " ".join(error_of(plain).split())
    assert f"{TASK}, record {TASK}-0: prompt and answer take" in said and "the model has 512" in said
    assert not (fallback / "out").exists()
    more = ["--lengths", "600", "--device=cpu", "--plots=false"]
    said = refused(passkey.main, [f"--base={fallback / 'base'}", given[0], f"--output={fallback / 'out'}", *more])
    assert "A prompt of 600 tokens and its answer take" in said and "the model has 512" in said
