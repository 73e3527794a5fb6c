"""Every snippet of README and docs/ runs on a tiny model, in the order of its page, or `NOT_RUN` says why not.

The shell expands commands itself, with stand-ins for programs that note what they are called with; then they run in
this process. Commands that do not run are parsed by their own parsers, so options, recipes and scripts must exist.
"""

import argparse
import contextlib
import gzip
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from book_files import epub, pdf
from conftest import save_adapter
from recipe import make_text
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

import cacheformers
from cacheformers import eval_longbench, train_adapt
from cacheformers.cli.main import HERE, dashed, main, make_parser, questions_anywhere
from cacheformers.common.recipe import RecipeParser

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)
# What is in a command or in Python, and why it does not run here; a page's name means all of it.
NOT_RUN = {
    "docs/results/": "runs of minutes to days; each is recorded with its numbers",
    "docs/tutorials/": "run in test_tutorials.py, with the real base",
    "docs/passkey.md": "tests/evaluation/test_passkey.py runs the command",
    "docs/ruler.md": "wants books and questions; tests/evaluation/test_ruler.py runs the command",
    "docs/babilong.md": "wants books and questions; tests/evaluation/test_babilong.py runs the command",
    "docs/babilong_measured.md": "wants trained adapters; tests/evaluation/test_babilong.py runs the command",
    "convert PUBLISHED_FOLDER": "wants such a checkpoint; tests/adapters/test_convert.py makes some",
    "--base runs/both": "wants the model that the commands before it train",
    "lm-eval": "downloads its tasks; tests/evaluation/test_harness.py has some",
    "load_dataset(": "downloads gigabytes",
    "pip install": "changes the environment; `make smoke` installs the wheel",
    "torchrun": "wants several GPUs; tests/training/test_processes.py starts processes",
    "accelerate launch": "wants several GPUs; tests/training/test_processes.py starts processes",
    "scontrol": "wants Slurm",
    "train_adapt.py recipes/": "trains for minutes to days; tests/training runs small recipes",
    "train_adapt.py --method": "trains for minutes to days; tests/training runs small recipes",
    "attach/retrieval_heads.yaml": "names layers of SmolLM2; tests/evaluation/test_heads.py attaches others",
    "ask runs/heads.memory": "has longer prompts than a tiny base; tests/cli/test_cli.py has short ones",
    "cacheformers heads": "wants plays; tests/evaluation/test_heads.py runs the command",
    "fetch_plays.py": "downloads plays; `make demo` runs it",
    "make_facts.py": "wants these plays; the demo runs it",
    "train_tokenizer.py": "wants books; tests/training/test_scratch.py runs it",
    "compare_runs.py": "wants two runs; the demo runs it",
    "eval_longbench.py": "wants LongBench; tests/evaluation/test_longbench.py runs it on small sets",
    "cacheformers app": "waits for people; tests/app has a browser",
    "pytest": "makes the picture while tests/app/test_browser.py runs",
    "cacheformers serve": "waits for clients; tests/cli/test_serve.py has one",
    "OpenAI(": "wants that server; tests/cli/test_serve.py asks it",
    "push_to_hub": "wants an account; the tutorial of sharing runs on a Hub on loopback",
}
PROGRAMS = ("cacheformers", "python", "pytest", "torchrun", "accelerate", "pip", "scontrol", "cp")
NOTE = """#!/bin/sh
{ printf '%s\\0' "$(basename "$0")" "$@"; printf '\\n\\0'; } >> "$NOTED"
"""
PAGES = [path for name in ("README.md", "docs/**/*.md") for path in sorted(ROOT.glob(name))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]

pytestmark = pytest.mark.slow


class Understood(Exception):
    """The arguments were parsed, and nothing else was done."""


def reason(page, text):
    """Why a command or a block of Python of a page does not run; None if it does."""
    return next((why for word, why in NOT_RUN.items() if page.startswith(word) or word in text), None)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, built_byte_folder):
    """A folder with everything that pages take for granted, by the names that they give it."""
    folder = tmp_path_factory.mktemp("snippets")
    tokenizer = AutoTokenizer.from_pretrained(built_byte_folder / "base")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    base = AutoModelForCausalLM.from_pretrained(built_byte_folder / "base")
    base.generation_config.eos_token_id = list(range(0, 259, 4))  # answers end soon
    for name in ("BASE", "data/smollm2-135m-instruct"):
        base.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name in ("recipes", "benchmarks", "model_cards"):
        (folder / name).symlink_to(ROOT / name)
    here = Path.cwd()
    os.chdir(folder)
    try:
        for name in ("ADAPTER", "data/answers_facts", "runs/smollm2_books", "runs/quickstart", "runs/books"):
            save_adapter("BASE", name, cache_size=4096)
        for method in ("infini_attention", "gated_attention", "retrieval_heads"):
            save_adapter("BASE", f"runs/{method}", method=method)
    finally:
        os.chdir(here)
    for name in ("BOOK.txt", "NOTES.md", "book.txt"):
        (folder / name).write_text(make_text(40, len(name)))
    (folder / "wiki.test.raw.gz").write_bytes(gzip.compress(make_text(1500).encode()))
    (folder / "README.md").write_text((ROOT / "README.md").read_text()[:3000])
    (folder / "longbench.yaml").write_text("base: BASE\ndata: LONGBENCH\nmethods: [truncation]\n")
    epub(folder / "BOOK.epub")
    pdf(folder / "REPORT.pdf", "Page one.")
    programs = folder / "programs"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text(NOTE)
        (programs / name).chmod(0o755)
    return folder


@pytest.fixture
def folder(shared, tmp_path, monkeypatch):
    """A copy of it, to work in."""
    monkeypatch.chdir(shutil.copytree(shared, tmp_path / "page", symlinks=True))
    return Path.cwd()


@pytest.fixture
def given(folder):
    """The names that Python of pages takes for granted."""
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    gemma = Gemma3Config(text_config={**text, **heads}, vision_config={**vision, "num_attention_heads": 2})
    tokenizer = AutoTokenizer.from_pretrained("BASE")
    return {
        "model": AutoModelForCausalLM.from_pretrained("ADAPTER").eval(),
        "tokenizer": tokenizer,
        "text": make_text(30),
        "more_text": make_text(10, 1),
        "book_ids": tokenizer(make_text(30), return_tensors="pt").input_ids,
        "question_ids": tokenizer("Who?", return_tensors="pt").input_ids,
        "full": Gemma3ForConditionalGeneration(gemma),
        "cacheformers": cacheformers,
    }


def commands(text, folder):
    """What a shell calls when it runs a snippet."""
    noted = folder / "noted"
    noted.write_text("")
    environment = {"PATH": f"{folder / 'programs'}:/usr/bin:/bin", "NOTED": str(noted), "SLURM_JOB_ID": "1"}
    shell = ["bash", "-euo", "pipefail", "-c", text]
    subprocess.run(shell, check=True, cwd=folder, env=environment, stdin=subprocess.DEVNULL, timeout=20)
    return [call.split("\0")[:-1] for call in noted.read_text().split("\n\0")[:-1]]


def call(command, monkeypatch):
    """Run a command in this process."""
    program, *arguments = command
    while program in ("torchrun", "accelerate"):  # launchers of what follows their own options
        place = next(place for place, word in enumerate(arguments) if word == "-m" or word.endswith(".py"))
        for word in arguments[:place]:
            assert not word.endswith(".yaml") or Path(word).is_file()
        program, arguments = "python", arguments[place:]
        if arguments[0] == "-m":
            program, *arguments = arguments[1:]
    if program == "cacheformers":
        return main(arguments)
    if program != "python" or arguments[0] in ("-", "-c"):
        return None
    script, *arguments = arguments
    if script in ("train_adapt.py", "eval_longbench.py"):
        return {"train_adapt.py": train_adapt, "eval_longbench.py": eval_longbench}[script].main(arguments)
    assert (ROOT / script).is_file(), script
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    return runpy.run_path(str(ROOT / script), run_name="__main__")


def understood(command, monkeypatch):
    """Parse a command's arguments, and do nothing else."""
    if command[0] == "cacheformers" and command[1] in HERE:
        questions_anywhere(make_parser(), dashed(command[1:]))
        return
    with monkeypatch.context() as patch:
        for kind, name in ((argparse.ArgumentParser, "parse_args"), (RecipeParser, "parse")):
            patch.setattr(kind, name, then_stop(getattr(kind, name)))
        with contextlib.suppress(Understood):
            call(command, patch)


def then_stop(parse):
    def stopping(*arguments):
        parse(*arguments)
        raise Understood

    return stopping


def with_exit(function, *arguments):
    """Call what may end with status 0, as `--help` does."""
    try:
        function(*arguments)
    except SystemExit as ended:
        assert not ended.code, ended.code


@pytest.mark.parametrize("name", NAMES)
def test_snippets(name, folder, given, monkeypatch):
    page = (ROOT / name).read_text(encoding="utf-8")
    for kind, text in BLOCK.findall(page):
        if kind == "python":
            if reason(name, text) is None:
                exec(compile(text, name, "exec"), given)
            else:
                compile(text, name, "exec")
            continue
        for command in commands(text, folder):
            gone = command[0] == "python" and command[1].endswith(".py") and not (ROOT / command[1]).exists()
            if gone:
                assert name.startswith("docs/results/") and re.search(r"commit [0-9a-f]{7}", page), command
            elif reason(name, " ".join(command)) is None:
                monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\nAnd then?\n"))
                with_exit(call, command, monkeypatch)
            else:
                with_exit(understood, command, monkeypatch)


def test_every_exception_is_needed():
    blocks = [(page, text) for page in NAMES for _, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]
    assert not [word for word in NOT_RUN if not any(page.startswith(word) or word in text for page, text in blocks)]
