"""Tiny runs of `eval_longbench.py`: a base model, records, and what a run leaves behind."""

import json

import pytest
from conftest import save_adapter
from recipe import make_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheformers import eval_longbench
from cacheformers.adapters.folders import load_adapter_config
from cacheformers.evaluation.longbench.methods import LongBenchOptions, PromptMaker, make_method
from cacheformers.evaluation.longbench.tasks import TASKS, load_templates

TESTED = ("hotpotqa", "trec", "samsum", "passage_count")
LENGTHS = (70, 20, 50, 130, 33)  # of contexts, in words


def row(task, number, length):
    """A record in LongBench's form."""
    return {
        "input": make_text(4, 100 + number),
        "context": make_text(length, number),
        "answers": [make_text(3, number), make_text(2, number)],
        "length": 2000 * number,
        "dataset": task,
        "language": "en",
        "all_classes": ["w1", "w2 w3"] if task == "trec" else None,
        "_id": f"{task}-{number}",
    }


def write_rows(path, rows):
    """JSON lines; returns their path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


@pytest.fixture
def bench(byte_folder):
    """A tiny base model with its tokenizer in `base`, and five records of each of four tasks in `data`."""
    for task in TESTED:
        rows = [row(task, number, length) for number, length in enumerate(LENGTHS)]
        write_rows(byte_folder / "data" / f"{task}.jsonl", rows)
    return byte_folder


def arguments(folder, *more, method="truncation"):
    """A tiny run; `more` overrides."""
    given = {
        "base": folder / "base",
        "data": folder / "data",
        "output": folder / "out",
        "max_length": 200,
        "batch": 2,
        "device": "cpu",
        "plots": False,
    }
    given = {key: value for key, value in given.items() if not any(m.startswith(f"--{key}=") for m in more)}
    return [*(f"--{key}={value}" for key, value in given.items()), "--methods", method, *SHORT, *more]


SHORT = ("--tasks", *TESTED)


@pytest.fixture
def remembering(bench):
    """A memory adapter with open gates."""
    save_adapter(bench / "base", bench / "remembering", cache_size=800, segment_tokens=128)
    return bench / "remembering"


def predictions(folder, title="base-truncation"):
    """The contents of the prediction files."""
    return {file.name: file.read_text() for file in sorted((folder / "out" / "pred" / title).glob("*.jsonl"))}


def result(folder, title="base-truncation"):
    return json.loads((folder / "out" / title / "result.json").read_text())


@pytest.fixture
def error_of(capsys):
    """What a run says that must fail."""

    def call(given):
        with pytest.raises(SystemExit) as stopped:
            eval_longbench.main(given)
        said = capsys.readouterr().err
        return said if stopped.value.code == 2 else str(stopped.value.code)

    return call


# Process `rank` kills itself when it appends for the n-th time (times and predictions in turn): before, or half way.
KILLED = """
from cacheformers.evaluation.longbench import predictions
writes, whole = 0, predictions.append
def append(path, lines):
    global writes
    writes += 1
    if rank == {rank} and writes == {moment}:
        if {half}:
            text = predictions.as_text(lines).encode()
            open(path, "ab").write(text[: len(text) // 2])
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    whole(path, lines)
predictions.append = append
"""


def prompt_maker(folder, method, **more):
    options = LongBenchOptions(data="", methods=[method], **more)
    base = str(folder / "base")
    config = AutoModelForCausalLM.from_pretrained(base).config
    tokenizer = AutoTokenizer.from_pretrained(base)
    adapter = None if options.adapter is None else load_adapter_config(options.adapter)
    return PromptMaker(make_method(method, options, base, config, adapter), options, tokenizer, load_templates(TASKS))
