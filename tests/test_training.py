"""Documents, lanes, loss, rates, evaluation, and `train_adapt.py` as a user runs it."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import cacheformers
from cacheformers import train_adapt
from cacheformers.training.documents import Documents, load_texts
from cacheformers.training.evaluate import document_losses, evaluate, held_out
from cacheformers.training.lanes import IGNORED, Lanes
from cacheformers.training.loss import mean_loss, token_losses
from cacheformers.training.optim import Rates, make_optimizer, parameter_groups
from cacheformers.training.options import layer_map

ROOT = Path(__file__).resolve().parents[1]
WORDS = 125  # with <pad>, <bos>, <eos> the 128 ids of the tiny models


def make_text(length: int, seed: int = 0) -> str:
    """`length` words, one token each."""
    numbers = torch.randint(0, WORDS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{number}" for number in numbers)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def make_documents(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Documents]:
    def build(*lengths: int, min_tokens: int = 2) -> Documents:
        return Documents([make_text(length, seed) for seed, length in enumerate(lengths)], tokenizer, min_tokens)

    return build


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def folder(tmp_path: Path, make_base, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny base model with its tokenizer in `base`, and documents in `train.jsonl` and `valid.jsonl`."""
    make_base("llama_gqa", torch.float32).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for name, lengths in (("train", (60, 90, 20)), ("valid", (70, 50))):
        lines = [json.dumps({"title": name, "text": make_text(length, length)}) for length in lengths]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    options = {
        "base": folder / "base",
        "train": folder / "train.jsonl",
        "output": folder / "adapter",
        "segment_tokens": 16,
        "cache_size": 40,
        "topk": 4,
        "retrieval_map": 1,
        "r": 4,
        "steps": 5,
        "lanes": 2,
    }
    return [*(f"--{key}={value}" for key, value in options.items()), *more]


# Documents


def test_documents_from_files(tmp_path):
    rows = [{"text": "one"}, {"text": None, "year": 1900}, {"text": "two\nlines"}]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "plays").mkdir()
    (tmp_path / "plays" / "hamlet.md").write_text("# Hamlet\n\nWho's there?\n")
    (tmp_path / "plays" / "notes.txt").write_text("Notes.")
    (tmp_path / "plays" / "cover.png").write_bytes(b"\x89PNG")
    found = ["one", None, "two\nlines"]
    assert list(load_texts([str(tmp_path / "a.jsonl")])) == found
    assert list(load_texts([str(tmp_path / "b.jsonl.gz")])) == found
    texts = list(load_texts([str(tmp_path / "plays"), str(tmp_path / "a.jsonl")]))
    assert [text and text.strip() for text in texts] == ["# Hamlet\n\nWho's there?", "Notes.", *found]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist"),
        ("a.jsonl", '{"body": "x"}\n', "no field 'text', only body"),
        ("a.jsonl", '{"text": "x"\n', "cannot be read as json"),
        ("a.jsonl", "", "the files are empty"),
        ("a.pdf", "x", "is none of .jsonl"),
        ("", None, "holds no documents"),
    ],
)
def test_files_that_are_no_documents(tmp_path, name, content, message):
    (tmp_path / "data").mkdir()
    if content is not None:
        (tmp_path / "data" / name).write_text(content)
    with pytest.raises((ValueError, OSError), match=message):
        load_texts([str(tmp_path / "data" / name)])


def test_documents_that_are_of_no_use(make_documents, tokenizer):
    make_documents(3, 17).check(16)
    with pytest.raises(ValueError, match="The longest of 2 documents has 16 tokens"):
        make_documents(16, 3).check(16)
    with pytest.raises(ValueError, match="All 2 documents are empty"):
        Documents(["", None], tokenizer).check(16)
    with pytest.raises(ValueError, match="fewer than 30 tokens"):
        make_documents(20, 25, min_tokens=30).check(16)
    with pytest.raises(ValueError, match="no document to evaluate on"):
        held_out(make_documents(20, min_tokens=30))


# Lanes


def read_documents(lanes: Lanes, steps: int) -> list[tuple[int, Tensor, Tensor]]:
    """What lanes put out, cut at resets: (document, inputs, labels), by the order in which documents end."""
    ended, running = [], {}
    for _ in range(steps):
        step = lanes.step()
        assert step.input_ids.shape == step.labels.shape == step.attention_mask.shape
        for row, document in enumerate(step.documents):
            if step.reset[row]:
                if row in running:
                    ended.append(running[row])
                running[row] = (document, torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))
            real = step.attention_mask[row].bool()
            assert bool(real.any()) and torch.equal(real, real.sort(descending=True).values)
            assert bool((step.labels[row][~real] == IGNORED).all()) and bool((step.labels[row][real] >= 0).all())
            assert running[row][0] == document
            running[row] = (
                document,
                torch.cat([running[row][1], step.input_ids[row][real]]),
                torch.cat([running[row][2], step.labels[row][real]]),
            )
    return ended


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_lanes_read_every_document_once_an_epoch_and_in_order(make_documents, count):
    """Whatever the number of lanes; labels reach across the cuts between segments."""
    documents = make_documents(2, 17, 33, 1, 40, 16, 18)
    ended = read_documents(Lanes(documents, count, 8, seed=3), 120)
    for document, inputs, labels in ended:
        tokens = documents.tokens(document)
        assert torch.equal(inputs, tokens[:-1])
        assert torch.equal(labels, tokens[1:])
    read = [document for document, _, _ in ended]
    assert min(read.count(document) for document in (0, 1, 2, 4, 5, 6)) > 1
    assert 3 not in read  # one token predicts nothing
    if count == 1:
        epochs = [tuple(read[i : i + 6]) for i in range(0, 24, 6)]
        assert all(sorted(epoch) == [0, 1, 2, 4, 5, 6] for epoch in epochs)
        assert len(set(epochs)) > 1


def test_a_document_belongs_to_its_place_modulo_the_lanes(make_documents):
    documents = make_documents(*[20] * 10)
    order = [document for document, _, _ in read_documents(Lanes(documents, 1, 32, seed=5), 31)]
    for count in (2, 3):
        lanes = Lanes(documents, count, 32, seed=5)
        assert [lanes.step().documents for _ in range(5)] == [order[i * count : (i + 1) * count] for i in range(5)]


@pytest.mark.parametrize("steps", [0, 1, 6, 31])
def test_lanes_go_on_where_they_were(make_documents, steps):
    documents = make_documents(17, 33, 1, 40, 18)
    lanes = Lanes(documents, 3, 8, seed=1)
    for _ in range(steps):
        lanes.step()
    state = json.loads(json.dumps(lanes.state_dict()))
    resumed = Lanes(documents, 3, 8, seed=1)
    resumed.load_state_dict(state)
    for _ in range(12):
        expected, step = lanes.step(), resumed.step()
        for name in ("input_ids", "labels", "attention_mask", "reset"):
            assert torch.equal(getattr(step, name), getattr(expected, name))
        assert step.documents == expected.documents
    with pytest.raises(ValueError, match=r"seed \(1 saved, 2 here\)"):
        Lanes(documents, 3, 8, seed=2).load_state_dict(state)


# Loss, rates, evaluation


def test_loss_counts_labels_only():
    logits = torch.randn(2, 5, 11, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    labels[1, 2:] = IGNORED
    losses = token_losses(logits, labels)
    assert losses.dtype == torch.float32
    assert bool((losses[1, 2:] == 0).all())
    expected = F.cross_entropy(logits.float()[labels != IGNORED], labels[labels != IGNORED])
    torch.testing.assert_close(mean_loss(logits, labels), expected)


def test_gates_memory_and_lora_have_their_own_rates(make_base, config_factory):
    model = get_peft_model(make_base("opt"), config_factory())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, Rates(lora=1.0, memory=2.0, gate=60.0, weight_decay=0.1))
    seen = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert sorted(seen) == sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    for group in groups:
        for name in (names[id(parameter)] for parameter in group["params"]):
            kind = "gate" if "mem_gate" in name else "memory" if "lora_mem_" in name else "lora"
            assert group["lr"] == {"gate": 60.0, "memory": 2.0, "lora": 1.0}[kind]
            assert group["weight_decay"] == (0.0 if kind == "gate" or "mem_norm" in name else 0.1)
    optimizer, schedule = make_optimizer(model, Rates(1.0, 2.0, 60.0), steps=10, warmup_steps=2)
    rates = []
    for _ in range(10):
        rates.append(max(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    assert rates[0] == 0 and max(rates) == rates[2] == 60.0 and rates[-1] < 5
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        parameter_groups(model, Rates(1.0, 2.0, 60.0))


def test_evaluation(make_model, make_documents):
    model = make_model("llama_gqa").train()
    both = held_out(make_documents(60, 45))
    together = evaluate(model, both, 16)
    alone = [evaluate(model, [document], 16) for document in both]
    assert model.training
    assert together.tokens == 59 + 44
    assert together.nats == pytest.approx(sum(score.nats for score in alone), rel=1e-12)
    assert together.perplexity == pytest.approx(math.exp(together.nats / 103))

    text = make_text(60, 0)
    characters = len(text) - len(text.split()[0]) - 1
    assert alone[0].bits_per_character == pytest.approx(alone[0].nats / math.log(2) / characters)

    ids = both[0].ids
    model.eval()
    with torch.no_grad():
        whole = token_losses(model(ids[None, :-1]).logits, ids[None, 1:])[0]
    assert float(whole.sum()) == pytest.approx(alone[0].nats, rel=1e-6)
    off, on = (torch.cat(list(document_losses(model, ids, 16, size))) for size in (0, None))
    assert torch.equal(off[:16], on[:16]) and not torch.isclose(off[16:], on[16:]).any()
    with model.disable_adapter():
        plain = evaluate(model, both[:1], 16)
    base = model.unload()
    pieces = [(ids[None, i : min(i + 16, 59)], ids[None, i + 1 : i + 17]) for i in range(0, 59, 16)]
    with torch.no_grad():
        expected = sum(float(token_losses(base(inputs).logits, labels).sum()) for inputs, labels in pieces)
    assert plain.nats == pytest.approx(expected, rel=1e-6)


def test_held_out_documents_are_cut(make_documents):
    chosen = held_out(make_documents(40, 1, 30, 50), count=2, tokens=33)
    assert [len(document.ids) for document in chosen] == [34, 30]


# The recipe


@pytest.mark.slow
@pytest.mark.parametrize("method", ["neurocache", "lora"])
def test_a_run(folder, method):
    """Train, save, reload through both doors: the loaded adapter scores what the trained one scored."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"method: {method}\nvalid: [{folder / 'valid.jsonl'}]\nsteps: 2\nlora_rate: 1e-2\nlanes: 3\n")
    command = [sys.executable, str(ROOT / "train_adapt.py"), str(recipe), *arguments(folder), "--memory-rate", "1e-2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout

    result = json.loads((folder / "adapter" / "train_result.json").read_text())
    assert len(result["losses"]) == 5 and all(map(math.isfinite, result["losses"]))
    assert result["options"]["lanes"] == 2 and result["options"]["lora_rate"] == 1e-2
    assert result["command"][0] == "train_adapt.py" and result["environment"]["torch"] == torch.__version__
    sizes = {"neurocache": {"cache off": 0, "cache 40": 40}, "lora": {"lora": None}}[method]
    assert set(result["scores"]) == {"base", *sizes}

    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    by_peft = PeftModel.from_pretrained(base, folder / "adapter")
    by_transformers = AutoModelForCausalLM.from_pretrained(folder / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    valid = held_out(Documents([make_text(70, 70), make_text(50, 50)], tokenizer))
    for name, size in sizes.items():
        for model in (by_peft, by_transformers):
            assert evaluate(model, valid, 16, size).nats == pytest.approx(result["scores"][name]["nats"], rel=1e-6)
    ids = valid[0].ids[None]
    with torch.no_grad():
        assert torch.equal(by_peft(ids[:, :16]).logits, by_transformers(ids[:, :16]).logits)
    assert result["scores"]["base"]["nats"] != pytest.approx(result["scores"][name]["nats"], rel=1e-4)


def losses_of(folder: Path, *more: str) -> list[float]:
    train_adapt.main(arguments(folder, "--overwrite", *more))
    return json.loads((folder / "adapter" / "train_result.json").read_text())["losses"]


def test_activation_checkpointing_changes_nothing(folder):
    plain = losses_of(folder, "--memory_rate=1e-2")
    assert losses_of(folder, "--memory_rate=1e-2", "--activation_checkpointing") == pytest.approx(plain, rel=1e-6)
    assert losses_of(folder, "--memory_rate=1e-2", "--seed", "1") != pytest.approx(plain, rel=1e-3)


def test_training_remembers_from_step_to_step(folder):
    """How much a memory holds shows in the loss once segments have closed and the gates have opened."""
    options = ("--memory_rate=1e-2", "--lanes", "1", "--warmup", "0")
    large, small = losses_of(folder, *options), losses_of(folder, *options, "--cache_size", "5")
    assert large[:2] == pytest.approx(small[:2], rel=1e-6)
    assert abs(large[3] - small[3]) > 1e-4 * small[3]


def test_without_lora(folder):
    losses_of(folder, "--lora_targets", "none")
    config = cacheformers.NeurocacheAdapterConfig.from_pretrained(str(folder / "adapter"))
    assert config.retrieval_map == {1: 1}
    with pytest.raises(SystemExit):
        losses_of(folder, "--lora_targets", "none", "--method", "lora")


def test_a_loss_that_is_not_finite_stops_the_run(folder):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    base.lm_head.weight.data[5] = float("inf")
    base.save_pretrained(folder / "base")
    with pytest.raises(FloatingPointError, match="loss of step 1 is"):
        train_adapt.main(arguments(folder))
    assert not (folder / "adapter").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--stepz", "3"], "unknown option '--stepz': did you mean 'steps'?"),
        (["--method", "nerocache"], "invalid choice: 'nerocache'"),
        (["--steps", "0"], "steps must be greater than 0"),
        (["--retrieval_map", "9"], "Layers [9] do not exist"),
        (["--retrieval_map", "top"], "'top' is neither a layer"),
        (["--segment_tokens", "65"], "Choose a smaller segment_tokens"),
        (["--topk", "41"], "must not exceed cache_size"),
        (["--lora_targets", "fc9"], "fc9"),
        (["--train", "{folder}/empty"], "holds no documents"),
        (["--train", "{folder}/short.jsonl"], "is not more than one segment of 16"),
        (["--train", "{folder}/blank.jsonl"], "All 1 documents are empty"),
        (["--valid", "{folder}/nowhere"], "does not exist"),
        (["--output", "{folder}/taken"], "already holds an adapter"),
        (["--base", "{folder}/nowhere"], "nowhere"),
    ],
)
def test_bad_options(folder, capsys, more, message):
    (folder / "empty").mkdir()
    (folder / "short.jsonl").write_text(json.dumps({"text": make_text(10)}))
    (folder / "blank.jsonl").write_text(json.dumps({"text": " "}))
    (folder / "taken").mkdir()
    (folder / "taken" / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        train_adapt.main(arguments(folder, *(word.format(folder=folder) for word in more)))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (folder / "adapter").exists()


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        ("a.yaml", "cachesize: 3", "unknown option 'cachesize': did you mean 'cache_size'?"),
        ("a.yaml", "steps: many", "invalid int value: 'many'"),
        ("a.yaml", "steps: [", "is not valid YAML"),
        ("a.yaml", "- steps", "must hold lines"),
        ("a.json", "{}", "is no recipe"),
        ("a.yaml", None, "does not exist"),
    ],
)
def test_bad_recipes(folder, capsys, name, recipe, message):
    if recipe is not None:
        (folder / name).write_text(recipe)
    with pytest.raises(SystemExit):
        train_adapt.main([str(folder / name), *arguments(folder)])
    assert message in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        train_adapt.main(["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "RECIPE.yaml" in shown and "Entries a document may keep (m)" in shown and "None" not in shown


def test_layer_maps():
    assert layer_map(["6", "12:14"]) == {6: 6, 12: 14}


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_name_existing_options(recipe):
    parser = train_adapt.make_parser()
    options, memory_options = parser.parse([str(recipe)])
    assert options.method == "neurocache" and memory_options.segment_tokens > 0
