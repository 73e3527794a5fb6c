"""Read the published package's recorded runs, build the models they were recorded with, and look inside a forward."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import cacheformers
from cacheformers.modeling.architectures import attention_modules, find_decoder, unwrap

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "golden" / "neurocache"
PARTS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}


@dataclass(frozen=True)
class Fixture:
    """One recorded run: its settings, and its tensors under the names that the folder's README lists."""

    base: str
    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    fixed_heads: bool

    @property
    def config(self):
        """The settings under the published package's names."""
        return self.meta["neurocache_config"]

    @property
    def retrieval_map(self):
        return {int(retrieval): storing for retrieval, storing in sorted(self.config["retrieval_map"].items())}

    @property
    def storing_layers(self):
        """In the order in which the package numbers its caches."""
        return sorted(set(self.retrieval_map.values()))

    @property
    def weights(self):
        """Trained weights, as the package names them."""
        prefix = "neurocache."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    @property
    def tolerance(self):
        """Of logits and hidden states."""
        return 5e-5 if self.base == "opt" else 1e-5

    def segments(self, memory):
        """The number and the ids of each recorded segment; rows of the memory are reset where a document begins."""
        for segment in range(1, len(self.meta["segment_lengths"]) + 1):
            memory.reset([row for row, starts in enumerate(self.meta["restarts"].get(str(segment), [])) if starts])
            yield segment, self.inputs(segment)

    def inputs(self, segment):
        if f"seg{segment}.input_ids" not in self.tensors:
            pytest.skip(f"the ids of segment {segment} were not recorded")
        return self.tensors[f"seg{segment}.input_ids"]


def cases(kind):
    """A test parameter for every recorded run of a kind: "segments", "16 bit" (segments too) or "generate"."""
    found = []
    for path in sorted(FOLDER.glob("*/*.safetensors")):
        if path.stem == "base":
            continue
        config = json.loads(path.with_suffix(".json").read_text())["neurocache_config"]
        sixteen = config["cache_dtype"] != "float32"
        if kind != ("generate" if path.stem.startswith("generate") else "16 bit" if sixteen else "segments"):
            continue
        refused = config["cache_type"] != "FIFO"
        marks = [pytest.mark.skip(reason="least-recently-used caches are not offered")] if refused else []
        found.append(pytest.param(path.parent.name, path.stem, id=f"{path.parent.name} {path.stem}", marks=marks))
    absent = pytest.mark.skip(reason=f"no recorded run of this kind ({kind}) is in ../shared/golden/neurocache")
    return found or [pytest.param(None, None, id="none", marks=absent)]


@cache
def load(base, name):
    path = FOLDER / base / name
    meta = json.loads(path.with_suffix(".json").read_text())
    return Fixture(base, meta, load_file(path.with_suffix(".safetensors")), name.endswith("_fixedheads"))


def base_model(base):
    """The base model of a folder, with the attention that it was recorded with."""
    described = json.loads((FOLDER / base / "base.json").read_text())
    config = AutoConfig.for_model(described["model_type"], **described["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    result = model.load_state_dict(load_file(FOLDER / base / "base.safetensors"), strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert result.missing_keys in ([], tied) and not result.unexpected_keys
    model.tie_weights()
    return model.eval()


def adapted(fixture):
    """The base with an adapter that holds the recorded weights."""
    config = fixture.config
    settings = ("attention_layers", "cache_size", "compression_factor", "topk", "neighborhood_size", "context_size")
    model = get_peft_model(
        base_model(fixture.base),
        cacheformers.NeurocacheAdapterConfig(
            **{name: config[name] for name in settings},
            target_modules=[],
            retrieval_map=fixture.retrieval_map,
            similarity=config["similarity_fn"],
            cache_dtype=config["cache_dtype"],
            segment_tokens=16,
            gate="none",
            compatibility="reference-fixed-heads" if fixture.fixed_heads else "reference",
        ),
    )
    parameters = trained(model, fixture)
    assert parameters.keys() == fixture.weights.keys()
    for name, weight in fixture.weights.items():
        parameters[name].data.copy_(weight)
    return model.eval()


def trained(model, fixture):
    """The adapter's parameters under the package's names."""
    attentions = attention_modules(find_decoder(unwrap(model)))
    found = {}
    for number, layer in enumerate(sorted(fixture.config["attention_layers"])):
        parts = attentions[layer].memory.parts("default")
        for theirs, ours in PARTS.items():
            found[f"cache_attns.{number}.{theirs}.weight"] = getattr(parts, ours).weight
    parts = attentions[min(fixture.retrieval_map)].memory.parts("default")
    if parts.down is not None:
        found["h_proj.weight"] = parts.down.weight
        found["h_norm.weight"], found["h_norm.bias"] = parts.norm.weight, parts.norm.bias
    return found


@contextmanager
def watch(model):
    """Observe forwards: self-attention's input, its output before and after the memory's branch, and the reading.

    The first three by layer: `hidden`, `alone` and `together`.
    """
    seen = SimpleNamespace(hidden={}, alone={}, together={}, reading=None)
    handles = []
    for layer, attention in enumerate(attention_modules(find_decoder(unwrap(model)))):
        if not hasattr(attention, "memory"):
            continue

        def before(module, args, kwargs, output, layer=layer):
            seen.hidden[layer], seen.alone[layer] = kwargs["hidden_states"], output[0]
            seen.reading = kwargs["memory_state"].reading

        def after(module, args, output, layer=layer):
            seen.together[layer] = output[0]

        handles += [
            attention.register_forward_hook(before, prepend=True, with_kwargs=True),
            attention.register_forward_hook(after),
        ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def publish(folder, settings, weights, suffix="bin"):
    """Write a folder as the package's `save_pretrained` does."""
    folder.mkdir()
    rest = {
        "neurocache_type": "ONDEVICE",
        "task_type": "CAUSAL_LM",
        "auto_mapping": None,
        "base_model_name_or_path": "somewhere/else",
        "inference_mode": True,
    }
    (folder / "neurocache_config.json").write_text(json.dumps({**rest, **settings}, indent=2, sort_keys=True))
    path = folder / f"neurocache_model.{suffix}"
    if suffix == "bin":
        torch.save(weights, path)
    else:
        save_file(weights, path, metadata={"format": "pt"})
    return folder
