"""Every recipe and launch file that ships can be read, and each recipe's estimate fits the GPU it is written for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType

from cacheformers import train_adapt
from cacheformers.common.base_model import base_config
from cacheformers.common.documents import check_lengths
from cacheformers.common.sources import DATASET, HUB_ID
from cacheformers.evaluation.held_out import HeldOut
from cacheformers.evaluation.model import check_evaluation
from cacheformers.modeling.method import method_named
from cacheformers.training.adapter import adapter_config
from cacheformers.training.settings import check_train_options

# torch lists the factories that a device context redirects at its first use; conftest then replaces one of them.
with torch.device("meta"):
    torch.empty(0)

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SCRATCH = sorted(RECIPES.glob("scratch_*.yaml"))
ADAPTERS = sorted(set(RECIPES.glob("*.yaml")) - set(SCRATCH))
METHODS = sorted((RECIPES / "methods").glob("*.yaml"))
GIB = 2**30
# Recipe -> the configuration of its base that ships, the processes and the GPU (GiB) that its header speaks of.
ESTIMATED = {
    "demo": ("smollm2-135m", 1, 3),
    "llama2_7b_answers": ("llama-2-7b", 8, 80),
    "llama2_7b_longpile": ("llama-2-7b", 8, 80),
    "mistral_7b_longpile": ("mistral-7b", 8, 80),
    "opt_1.3b_pg19": ("opt-1.3b", 8, 80),
    "passkey": ("smollm2-135m", 1, 2),
    "qlora_7b": ("mistral-7b", 1, 24),
    "smollm2_answers": ("smollm2-135m", 1, 3),
    "smollm2_babi": ("smollm2-135m", 1, 6),
    "smollm2_books": ("smollm2-135m", 1, 2),
    "smollm2_facts": ("smollm2-135m", 1, 3),
}
OTHER_METHODS = {
    **dict.fromkeys(
        ("smollm2_babi_memories", "smollm2_cacheformer", "smollm2_retrieval"), "cacheformer_on_base"
    ),  # slow estimates
    "smollm2_babi_heads": "retrieval_heads",
}


def read(recipe, *more):
    given = [str(recipe), *more]
    return train_adapt.Options(*train_adapt.make_parser(given).parse(given))


@pytest.mark.parametrize("recipe", [*ADAPTERS, *SCRATCH], ids=lambda path: path.stem)
def test_recipes_name_existing_options(recipe):
    options = read(recipe)
    assert options.model.init == ("scratch" if recipe in SCRATCH else "pretrained")
    assert options.train.method == OTHER_METHODS.get(recipe.stem, "neurocache") and options.memory.segment_tokens > 0
    check_train_options(options.train, options.run)
    for source in [*options.data.train, *(options.evaluation.valid or [])]:
        match = DATASET.fullmatch(source)
        assert source.startswith(("data/", "../shared/")) or (match and HUB_ID.fullmatch(match["name"]))


def test_recipes_of_methods_differ_by_the_method_alone():
    """All read the same text with the same optimizer, and change the top 8 layers; so does LoRA alone."""
    above = tuple(f"{layer}.mlp.{name}_proj" for layer in range(22, 30) for name in ("gate", "up", "down"))
    shared, layers = [], []
    base = base_config(str(RECIPES / "base_configs" / "smollm2-135m"))
    for recipe in METHODS:
        for more in ((), ("--method=lora",)):
            options = read(recipe, *more)
            check_train_options(options.train, options.run)
            adapter, memory = adapter_config(base, options.train, options.memory)
            assert options.memory.method == method_named(recipe.stem).name and memory.segment_tokens == 512
            check_lengths(options.data, memory)
            ids = torch.zeros(2, dtype=torch.long)
            check_evaluation([HeldOut(ids, 1, "one"), HeldOut(ids, 1, "two")], options.evaluation, memory)
            if recipe.stem == "windowed":  # a method of all layers, whose LoRA is named layer by layer
                assert tuple(options.train.lora_targets) == above
            else:
                assert options.train.lora_targets is None
                layers.append((adapter.layers_to_transform, adapter.r, adapter.lora_alpha))
            if hasattr(memory, "sink_tokens"):
                window = memory.local_window, memory.window.kept_tokens, memory.window.sink_tokens
                assert window == ("sliding", 512, 4)
        train = replace(read(recipe).train, method="lora", output="", memory_start="copies", lora_targets=None)
        train = replace(train, **dict.fromkeys(("memory_rate", "gate_factor"), 0.0))
        shared.append((read(recipe).model, read(recipe).data, train))
        assert read(recipe).train.output == f"runs/methods_{recipe.stem}"
    assert len(METHODS) == 5 and layers == [(list(range(22, 30)), 16, 32)] * 8
    assert all(each == shared[0] for each in shared)


def test_every_recipe_has_an_estimate():
    assert [path.stem for path in ADAPTERS] == sorted([*ESTIMATED, *OTHER_METHODS])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ESTIMATED))
def test_a_recipe_fits_its_gpu(name):
    base, processes, memory = ESTIMATED[name]
    options = read(
        RECIPES / f"{name}.yaml", f"--base={RECIPES / 'base_configs' / base}", f"--estimate_processes={processes}"
    )
    peak = train_adapt.estimated(options).peak
    assert peak < 0.9 * memory * GIB
    title = (RECIPES / f"{name}.yaml").read_text().partition("\nbase:")[0]
    if "(--estimate)" in title:
        assert f"{peak / GIB:.1f} GiB" in title


def test_a_memory_that_is_asked_holds_a_whole_context(byte_folder):
    """Contexts, and books among them, are cut to the longest; a last segment that is not full is closed, too."""

    def memory(**options):
        given = {"base": byte_folder / "base", "segment_tokens": 32, "attention_layers": 2, "retrieval_map": 1}
        given |= {"prompt_tokens": 24, "start_segments": 1, "longest_context": 256, "books_share": 0.1, **options}
        recipe = read(RECIPES / "smollm2_facts.yaml", *(f"--{name}={value}" for name, value in given.items()))
        return train_adapt.estimated(recipe).moments["forward"]["memory"]

    assert memory(cache_size=128) < memory(cache_size=512) == memory(cache_size=1024)
    assert memory(longest_context=129) == memory(longest_context=256) > memory(longest_context=128)


@pytest.mark.parametrize("name", list(ESTIMATED))
def test_a_recipe_divides_among_processes_and_fits_its_base(name):
    base, processes, memory = ESTIMATED[name]
    options = read(RECIPES / f"{name}.yaml")
    assert options.train.lanes == processes * options.train.accumulation  # one row in a micro-batch
    config, resolved = adapter_config(base_config(str(RECIPES / "base_configs" / base)), options.train, options.memory)
    shape = resolved.base
    middle = ("smollm2_answers", "smollm2_babi", "smollm2_facts", "llama2_7b_answers")
    first = shape.layers // 2 if name in middle else 3 * shape.layers // 4
    end = first + 6 if name in middle else shape.layers
    assert resolved.retrieval_map == ((first, first),)
    assert config.layers_to_transform == list(range(first, end))
    assert resolved.segment_tokens + resolved.window.kept_tokens <= shape.max_positions
    ids = torch.zeros(2, dtype=torch.long)
    check_evaluation([HeldOut(ids, 1, "one"), HeldOut(ids, 1, "two")], options.evaluation, resolved)


def test_the_launch_file_loads():
    config = load_config_from_file(str(RECIPES / "accelerate" / "ddp.yaml"))
    assert isinstance(config, ClusterConfig)
    assert (config.distributed_type, config.num_processes, config.num_machines) == (DistributedType.MULTI_GPU, 8, 1)
    assert config.mixed_precision == "no" and not config.fsdp_config


@pytest.mark.parametrize("recipe", METHODS, ids=lambda path: path.stem)
def test_a_recipe_of_a_method_runs(folder, recipe):
    """A step on a tiny base, with options that fit it."""
    small = {
        "neurocache": ["--retrieval_map=1", "--cache_size=40", "--topk=4", "--start_segments=2"],
        "infini_attention": ["--layers", "1", "2"],
        "gated_attention": ["--layers", "1", "2", "--window_tokens=6"],
        "cacheformer": ["--layers", "1", "2", "--window_tokens=16", "--topk=2"],
        "windowed": ["--lora_targets", "down_proj"],
    }[recipe.stem]
    small += [f"--{name}={folder / name}" for name in ("base", "output")]
    small += [f"--{name}={folder / name}.jsonl" for name in ("train", "valid")]
    train_adapt.main([str(recipe), *small, "--segment_tokens=16", "--max_tokens=64", "--steps=1", "--plots=False"])
    assert len(json.loads((folder / "output" / "train_result.json").read_text())["losses"]) == 1
