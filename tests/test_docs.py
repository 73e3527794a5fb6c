"""The snippets of docs/models.md run, with a tiny model in place of theirs; those of docs/passkey.md are understood."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import cacheformers
from cacheformers import train_adapt
from cacheformers.adapters.export import main
from cacheformers.evaluation.passkey.options import PasskeyOptions
from cacheformers.evaluation.passkey.wordings import INTRO, NEEDLES, REPEATED
from cacheformers.training.base_model import ModelOptions
from cacheformers.training.options import RecipeParser

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)


def test_models_page(make_base, config_factory, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = make_base("llama_gqa", torch.float32, max_position_embeddings=2048)
    for folder in ("data/smollm2-135m-instruct", "runs/base"):
        base.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    get_peft_model(AutoModelForCausalLM.from_pretrained("runs/base"), config_factory()).save_pretrained("runs/adapter")
    names: dict = {}
    blocks = BLOCK.findall((ROOT / "docs" / "models.md").read_text())
    assert len(blocks) == 5
    for language, text in blocks:
        if language == "bash":
            command = text.split()
            assert command[:3] == ["python", "-m", "cacheformers.adapters.export"]
            main(command[3:])
        else:
            exec(text, names)
    assert names["answer"].shape[1] > names["question"].input_ids.shape[1]
    assert "Call me Ishmael." in capsys.readouterr().out
    assert names["model"].config.text_config.num_hidden_layers == 8


def test_passkey_page(monkeypatch):
    """Its commands have options that exist, in forms that are understood; its prompt is that of the code."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "passkey.md").read_text()
    lines = [line.split() for _, text in BLOCK.findall(page) for line in text.splitlines()]
    asked = [line[3:] for line in lines if line[1:3] == ["-m", "cacheformers.evaluation.passkey"]]
    parser = RecipeParser([ModelOptions, PasskeyOptions], "")
    lengths = [parser.parse(line)[1].tokens for line in asked if line != ["--help"]]
    assert [max(tokens) for tokens in lengths] == [2048, 7270, 65536, 4096]
    [made] = [line[2] for line in lines if line[1] == "recipes/make_passkeys.py"]
    [trained] = [line[2:] for line in lines if line[1] == "train_adapt.py"]
    data = train_adapt.Options(*train_adapt.make_parser().parse(trained)).data
    assert data.train == [made] and data.label_field == "answers"
    wording = NEEDLES["passkey"]
    for sentence in (INTRO, REPEATED, wording.needle.format(key="12345"), wording.question):
        assert sentence.strip() in page


def test_the_papers_size():
    """12 layers and 184 M parameters, as many as the same base has with wider feed-forward blocks and no memory."""
    config = AutoConfig.from_pretrained(ROOT / "recipes" / "model_configs" / "neurocache_184m.json")
    assert type(config) is cacheformers.NeurocacheConfig
    options, base = config.options(), config.text_config
    assert options.layers == (9, 10, 11)  # from three quarters up
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        base.intermediate_size = 2736
        plain = AutoModelForCausalLM.from_config(base)
    wide, narrow = base.hidden_size, options.width
    memory = sum(parameter.numel() for name, parameter in model.named_parameters() if ".memory." in name)
    assert memory == 3 * (2 * wide * wide + 2 * wide * narrow) + wide * narrow + 2 * narrow
    assert model.num_parameters() == pytest.approx(184e6, rel=2e-3)
    assert plain.num_parameters() == pytest.approx(model.num_parameters(), rel=2e-3)
