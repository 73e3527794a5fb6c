"""`cacheformers lm-eval`: lm-eval's own command line on models with a memory."""

import json
import re
import subprocess
import sys

import pytest
import torch
from cacheformer_models import tiny_model
from conftest import SHARED, save_adapter
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from recipe import make_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheformers.adapters.export import export
from cacheformers.evaluation import harness  # makes our models known to lm-eval

STORIES = SHARED / "data" / "models" / "stories260K-llama"

LENGTHS = (60, 90, 20, 75)  # words of a context: none to five segments of 16
NAMES = ("local_choice", "local_answer", "local_rolling")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
"""
CHOICE = """doc_to_choice: "{{choices}}"
target_delimiter: " "
metric_list:
  - metric: acc
"""
ANSWER = """generation_kwargs:
  until: ["w7"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
"""
ROLLING = """metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""


@pytest.fixture
def tasks(folder):
    """Three tasks on local data: one of choices, one of answers, one of rolling log-likelihoods."""
    rows = [
        {
            "context": make_text(length, length),
            "choices": [make_text(3, 200 + number), make_text(20, 300 + number)],
            "answer": number % 2,
        }
        for number, length in enumerate(LENGTHS)
    ]
    return write_tasks(folder / "tasks", rows)


def write_tasks(folder, rows):
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, text, target, more in (
        ("local_choice", "multiple_choice", "{{context}}", "{{answer}}", CHOICE),
        ("local_answer", "generate_until", "{{context}}", "{{choices[answer]}}", ANSWER),
        ("local_rolling", "loglikelihood_rolling", "", "{{context}}", ROLLING),
    ):
        task = TASK.format(name=name, data=folder / "rows.jsonl", kind=kind, text=text, target=target, more=more)
        (folder / f"{name}.yaml").write_text(task)
    return folder


@pytest.fixture
def adapter(folder):
    save_adapter(folder / "base", folder / "remembering")
    return folder / "remembering"


def evaluated(tasks, batch_size=1, kind="cacheformers", **model_args):
    """What lm-eval gives for the three tasks: the samples of each."""
    found = simple_evaluate(
        kind,
        model_args={"dtype": "float32", **model_args},
        tasks=list(NAMES),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
    )
    return {name: sorted(lines, key=lambda line: line["doc_id"]) for name, lines in found["samples"].items()}


@torch.no_grad()
def in_one_pass(model, ids, scored):
    """The log-likelihood of the last tokens, and whether each is the likeliest."""
    logits = model(torch.tensor([ids])).logits[0, -scored - 1 : -1].double()
    last = torch.tensor(ids[-scored:])
    chosen = logits.log_softmax(-1).gather(1, last[:, None]).sum()
    return float(chosen), bool((logits.argmax(-1) == last).all())


def check(found, model, tokenizer):
    """Every number is that of the model itself, in one pass over everything."""
    for sample in found["local_choice"]:
        context = sample["doc"]["context"]
        for choice, ((nats, greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            ids = tokenizer(f"{context} {choice}").input_ids
            expected, likeliest = in_one_pass(model, ids, len(ids) - len(tokenizer(context).input_ids))
            assert float(nats) == pytest.approx(expected, rel=1e-4) and str(greedy) == str(likeliest)
    for sample in found["local_answer"]:
        given = tokenizer(sample["doc"]["context"], return_tensors="pt").input_ids
        output = model.generate(given, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, given.shape[1] :]
        assert sample["resps"] == [[tokenizer.decode(output, skip_special_tokens=True).split("w7")[0]]]
    for sample in found.get("local_rolling", []):
        ids = [tokenizer.bos_token_id, *tokenizer(sample["doc"]["context"]).input_ids]
        expected, _ = in_one_pass(model, ids, len(ids) - 1)
        assert float(sample["resps"][0][0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("kind", "batch_size"), [("adapter", 1), ("adapter on its base", 3), ("exported", 3)])
def test_every_request_is_read_with_memory(folder, tasks, adapter, tokenizer, kind, batch_size):
    model_args = {"pretrained": str(adapter)}
    if kind == "adapter on its base":
        model_args = {"pretrained": str(folder / "base"), "peft": str(adapter)}
    elif kind == "exported":
        model_args = {"pretrained": str(export(adapter, folder / "model"))}
    found = evaluated(tasks, batch_size, **model_args)
    check(found, AutoModelForCausalLM.from_pretrained(adapter).eval(), tokenizer)


def test_max_length_cuts_on_the_left(folder, tasks, adapter, tokenizer):
    found = evaluated(tasks, pretrained=str(adapter), max_length=40)
    model = AutoModelForCausalLM.from_pretrained(adapter).eval()
    for sample in found["local_choice"]:
        ids = tokenizer(f"{sample['doc']['context']} {sample['doc']['choices'][1]}").input_ids
        expected, _ = in_one_pass(model, ids[-41:], 20)
        assert float(sample["resps"][1][0][0]) == pytest.approx(expected, rel=1e-4)


def test_embeddings_of_the_base_stay_as_they_are(folder, make_base):
    """Many models have more of them than their tokenizer has tokens."""
    make_base("llama_gqa", torch.float32, vocab_size=140).save_pretrained(folder / "base")
    adapter = folder / "remembering"
    save_adapter(folder / "base", adapter)
    own = harness.MemoryLM(str(adapter), device="cpu", dtype="float32").model
    assert own.get_output_embeddings().weight.shape[0] == 140
    ids = torch.arange(3, 53)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(adapter).eval()(ids).logits
        torch.testing.assert_close(own(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrained": "base"}, "base has no memory: evaluate it with --model hf"),
        ({"batch_size": "auto"}, "--batch_size auto: what fits depends on the lengths of the texts"),
        ({"max_length": 19}, "max_length=19 cuts a continuation of 20 tokens"),
    ],
)
def test_what_cannot_work(folder, tasks, adapter, monkeypatch, changes, message):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluated(tasks, **{"pretrained": "remembering", **changes})


def test_a_cacheformer_from_scratch_goes_with_hf(folder, tasks, tokenizer):
    """The message says so, and it is so: with this module imported, lm-eval's own model reads it."""
    tiny_model(torch.float32, vocab_size=128).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with pytest.raises(ValueError, match="trained from scratch.* evaluate it with --model hf"):
        evaluated(tasks, pretrained=str(folder / "model"))
    found = evaluated(tasks, kind="hf", pretrained=str(folder / "model"), max_length=4096)
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    for sample in found["local_choice"]:
        for choice, ((nats, _),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            ids = tokenizer(f"{sample['doc']['context']} {choice}").input_ids
            expected, _ = in_one_pass(model, ids, len(choice.split()))
            assert float(nats) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_command_on_a_trained_model(tmp_path):
    """lm-eval's own command line, with a real tokenizer and a text far longer than the base's 512 positions."""
    if not STORIES.is_dir():
        pytest.skip("stories260K is not there")
    adapter = tmp_path / "adapter"
    save_adapter(STORIES, adapter, segment_tokens=128, cache_size=512)
    text = "Once upon a time there was a little girl who lived by the sea." * 60
    rows = [{"context": text, "choices": ["She was happy.", "Zebra zebra zebra."], "answer": 0}]
    tasks = write_tasks(tmp_path / "tasks", rows)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "cacheformers.evaluation.harness", "--model", "cacheformers", "--device", "cpu"]
    command += ["--model_args", f"pretrained={adapter},dtype=float32", "--include_path", str(tasks), "--log_samples"]
    command += ["--tasks", ",".join(NAMES[:2]), "--output_path", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "|local_choice" in done.stdout
    found = {name: json.loads(next(out.rglob(f"samples_{name}_*")).read_text()) for name in NAMES[:2]}
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    assert len(tokenizer(text).input_ids) > 1000
    check(
        {name: [sample] for name, sample in found.items()},
        AutoModelForCausalLM.from_pretrained(adapter).eval(),
        tokenizer,
    )
