"""The command that shows which segments a CacheFormer retrieves."""

import json
from dataclasses import replace

import pytest
import torch
from cacheformer_golden import MODES, needs_golden, recorded
from cacheformer_models import recorded_model, tiny_config, tiny_model
from safetensors.torch import load_file
from transformers import AutoTokenizer

from cacheformers import eval_longbench
from cacheformers.evaluation.longbench.answers import answer
from cacheformers.evaluation.longbench.prompts import Encoded
from cacheformers.evaluation.longbench.tasks import TASKS
from cacheformers.evaluation.passkey.main import main as passkey
from cacheformers.evaluation.segments import blocks, main, retrieved, shares, table


@pytest.mark.parametrize("name", recorded("cf_cache"))
def test_recorded_lists(name):
    """Of an independent implementation, for every layer, head and token."""
    recording = load_file(needs_golden(f"{name}.safetensors"))
    model = recorded_model(torch.float64, **MODES[name.rsplit("_", 1)[0]])
    for layer, lists in enumerate(retrieved(model, recording["input_ids"][None])):
        assert torch.equal(lists.int(), recording[f"layer{layer}.selected_segments"])
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def test_the_rows_of_table_5():
    """Blocks of 256 rows of 1,024 tokens: none, then at most 15, 31 and 47; without neighbors 7 segments each."""
    sizes = {"window_tokens": 128, "pool_tokens": 16, "topk": 7, "select_rows": 256, "wide_blocks": True}
    model = tiny_model(torch.float32, num_hidden_layers=1, **sizes)
    ids = torch.randint(0, 48, (1, 1024), generator=torch.Generator().manual_seed(1))
    (lists,) = retrieved(model, ids)
    rows = [line.split(maxsplit=2) for line in table(model.model.options, lists[0]).splitlines()[1:]]
    assert [row[:2] for row in rows] == [["0-255", "none"], ["256-511", "15"], ["512-767", "31"], ["768-1023", "47"]]
    chosen = [json.loads(row[2]) for row in rows]
    assert chosen[0] == [-1] * 7
    for segments, last in zip(chosen[1:], (15, 31, 47), strict=True):
        assert segments == sorted(set(segments)) and segments[0] >= 0 and segments[-1] <= last


def test_blocks_and_shares():
    lists = torch.tensor([[[-1, -1], [-1, -1], [0, 2], [0, 2]], [[-1, -1], [1, -1], [2, -1], [0, 2]]])
    options = tiny_config(window_tokens=4, pool_tokens=2).attention_options()
    assert blocks(options, lists[0]) == [((0, 1), [-1, -1]), ((2, 3), [0, 2])]
    assert blocks(options, lists[1])[-1] == ((3, 3), [0, 2])
    alike = lists[0, 2:].repeat(3, 1)  # a block ends where another begins, also where both retrieve the same
    assert [rows for rows, _ in blocks(options, alike)] == [(0, 3), (4, 5)]
    each = replace(options, selection="token")
    assert [rows for rows, _ in blocks(each, alike)] == [(0, 5)]
    assert table(each, alike).splitlines()[1].split()[:2] == ["0-5", "1"]  # what its last row may retrieve
    assert shares(lists, 3).tolist() == [[0, 0, 0], [0, 0.5, 0], [0.5, 0, 1], [1, 0, 1]]


@pytest.fixture
def saved(tmp_path):
    model = tiny_model(torch.float32, vocab_size=256)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("Call me Ishmael. " * 10)
    return tmp_path, model


def test_the_command(saved, capsys):
    folder, model = saved
    options = ["--tokens", "60", "--layer", "1", "--output", str(folder / "out")]
    main([str(folder / "model"), str(folder / "text.txt"), *options])
    printed = capsys.readouterr().out
    ids = torch.tensor([list((folder / "text.txt").read_bytes()[:60])])
    layers = retrieved(model, ids)
    assert table(model.model.options, layers[1][0]) in printed
    found = json.loads((folder / "out" / "segments.json").read_text())
    assert found["tokens"] == 60 and found["options"]["topk"] == 2
    for lists, heads in zip(layers, found["layers"], strict=True):
        for head, stretches in zip(lists, heads, strict=True):
            again = [s["segments"] for s in stretches for _ in range(s["rows"][0], s["rows"][1] + 1)]
            assert again == head.tolist()
    picture = (folder / "out" / "segments.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_what_cannot_be_shown(saved, make_base, refused):
    folder, _ = saved
    make_base("llama_mha", torch.float32).save_pretrained(folder / "llama")
    tiny_model(torch.float32, vocab_size=256, cache=False).save_pretrained(folder / "no_cache")
    tiny_model(torch.float32).save_pretrained(folder / "words")
    (folder / "empty.txt").write_text("")
    for model, text, more, message in (
        ("llama", "text.txt", [], "is a llama model, not a cacheformer one"),
        ("no_cache", "text.txt", [], "retrieves no segments"),
        ("words", "text.txt", [], "has no tokenizer, and its 48 tokens are not bytes"),
        ("model", "empty.txt", [], "nothing to read"),
        ("model", "missing.txt", [], "No such file"),
        ("model", "text.txt", ["--tokens", "-5"], "--tokens is not positive"),
        ("model", "text.txt", ["--layer", "2"], "--layer must be from 0 to 1, got 2"),
    ):
        given = [str(folder / model), str(folder / text), *more, "--output", str(folder / "out")]
        assert message in refused(main, given)
        assert not (folder / "out").exists()


@pytest.fixture
def commands(saved, folder):
    """Passkey and LongBench, as they are called with the saved model."""
    model = saved[0] / "model"
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(model)
    record = {"_id": "1", "input": "Who?", "context": "A miller.", "answers": ["a miller"], "length": 2}
    (folder / "qasper.jsonl").write_text(json.dumps({**record, "dataset": "qasper", "language": "en"}))
    given = ["--base", str(model), "--output", str(folder / "out"), "--device=cpu"]
    longbench = ["--data", str(folder), "--tasks", "qasper", "--no_plots", "--methods"]
    return {
        "passkey": lambda: passkey([*given, "--lengths", "300", "--depths", "50"]),
        "longbench": lambda: eval_longbench.main([*given, *longbench, "memory"]),
        "truncation": lambda: eval_longbench.main([*given, *longbench, "truncation"]),
    }


@pytest.mark.parametrize("name", ["passkey", "longbench"])
def test_commands_that_answer_with_it(commands, folder, name):
    commands[name]()
    (lines,) = (folder / "out").glob("**/*.jsonl")
    assert len(lines.read_text().splitlines()) == 1 and list((folder / "out").glob("**/result.json"))


def test_answers_are_those_of_generate(tokenizer):
    """The whole prompt goes in, since the memory is its attention; rows of a batch are padded on the left."""
    model, task = tiny_model(vocab_size=128), replace(TASKS["qasper"], new_tokens=9)
    rows = [torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)) for length in (70, 33)]
    found = answer(model, tokenizer, [Encoded(row.tolist(), 20) for row in rows], task, remembers=True).ids
    for row, ids in zip(rows, found, strict=True):
        plain = model.generate(row[None], max_new_tokens=9, do_sample=False, pad_token_id=0)
        assert ids == plain[0, len(row) :].tolist()


def test_its_memory_cannot_be_taken_off(commands, capsys):
    with pytest.raises(SystemExit):
        commands["truncation"]()
    assert "has a memory that cannot be taken off" in capsys.readouterr().err


def test_a_rule_that_looks_ahead_cannot_answer(commands, saved, capsys):
    config = saved[0] / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "selection": "paper_block"}))
    for name in ("passkey", "longbench"):
        with pytest.raises(SystemExit), pytest.warns(UserWarning, match="paper_block"):
            commands[name]()
        assert "selection='paper_block' cannot generate" in capsys.readouterr().err
