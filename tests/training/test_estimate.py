"""The estimate of a training step's memory against models that are really built, run and measured."""

import resource
from pathlib import Path

import pytest
import torch
from conftest import METHODS
from peft import LoraConfig, get_peft_model
from recipe import script
from transformers import AutoConfig, AutoModelForCausalLM

import cacheformers
from cacheformers.modeling.architectures import architecture, base_shape
from cacheformers.modeling.memory import EVERYTHING
from cacheformers.modeling.method import method_named
from cacheformers.training.estimate import Work, estimate, on_device, rehearse
from cacheformers.training.tracker import Tracker

# torch lists the factories that a device context redirects at its first use; conftest then replaces one of them.
with torch.device("meta"):
    torch.empty(0)

SLOW = {"cacheformer_on_base"}  # whose estimate takes minutes
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {"llama-2-7b": 6_738_415_616, "mistral-7b": 7_241_732_096, "opt-1.3b": 1_315_758_080}
SEGMENT = 64
SHAPES = {
    "llama": {"num_key_value_heads": 12},
    "mistral": {"num_key_value_heads": 4, "sliding_window": 128},
    "opt": {"ffn_dim": 700, "word_embed_proj_dim": 240, "dropout": 0.0},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 20},
}


def published(name):
    return AutoConfig.from_pretrained(ROOT / "recipes" / "base_configs" / name)


def paper(**changes):
    return cacheformers.NeurocacheAdapterConfig(**{"segment_tokens": 2048, **changes})


def of_7b(name="llama-2-7b", **changes):
    return estimate(published(name), paper(), Work(**{"lanes": 2, "segment_tokens": 2048, **changes}))


def of_small(layers=8, **changes):
    config = small("llama", layers)
    adapter = adapter_of("neurocache", config)
    adapter.cache_size = 4 * SEGMENT
    return estimate(config, adapter, Work(**{"lanes": 2, "segment_tokens": SEGMENT, **changes}))


def small(kind, layers=4):
    common = {"vocab_size": 500, "hidden_size": 240, "num_hidden_layers": layers, "num_attention_heads": 12}
    sizes = {"intermediate_size": 700, "max_position_embeddings": 256}
    return AutoConfig.for_model(kind, **{**common, **sizes, **SHAPES[kind]})


def lora(config):
    names = list(architecture(config).lora_targets)
    return LoraConfig(r=8, target_modules=names, layers_to_transform=[2, 3], task_type="CAUSAL_LM")


def memory_adapter(**options):
    return cacheformers.NeurocacheAdapterConfig(
        segment_tokens=SEGMENT, cache_size=128, topk=4, r=8, retrieval_map={2: 2}, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-2-7b", "mistral-7b"])
def test_a_large_model_takes_little_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = of_7b(name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024  # KiB
    assert found.parameters == PUBLISHED[name]
    assert found.moments["forward"]["weights"] == pytest.approx(2 * PUBLISHED[name], rel=1e-6)
    assert found.moments["forward"]["optimizer"] == pytest.approx(8 * found.trained, rel=1e-4)
    assert found.peak == max(found.totals.values())


@pytest.mark.parametrize(("name", "parameters"), [("opt-1.3b", 1_315_758_080), ("smollm2-135m", 134_515_008)])
def test_base_configs_have_the_published_numbers(name, parameters):
    found = estimate(published(name), paper(cache_size=1024, segment_tokens=1024), Work(1, 1024))
    assert found.parameters == parameters


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize("method", ["neurocache", "lora"])
def test_parameters_are_those_of_a_built_model(kind, method):
    config = small(kind)
    adapter = memory_adapter() if method == "neurocache" else lora(config)
    found = estimate(config, adapter, Work(1, SEGMENT))
    model = get_peft_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), adapter)
    trained, everything = model.get_nb_trainable_parameters()
    assert (found.trained, found.parameters) == (trained, everything - trained)


@pytest.mark.parametrize(
    ("method", "checkpointing"),
    [
        *(pytest.param(name, False, marks=[pytest.mark.slow] * (name in SLOW)) for name in [*METHODS, "lora"]),
        *((name, True) for name in ("neurocache", "lora")),
    ],
)
def test_the_estimate_matches_a_real_step_of_every_method(method, checkpointing):
    """The same code under the same tracker, once with numbers: peaks of forward, backward and update agree."""
    check_against_real(small("llama", layers=3), method, torch.bfloat16, activation_checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("mistral", torch.bfloat16), ("opt", torch.float32), ("qwen3", torch.bfloat16)]
)
def test_the_estimate_matches_a_real_step_on_every_base(kind, dtype):
    check_against_real(small(kind, layers=3), "neurocache", dtype, backprop_segments=2)


@pytest.mark.parametrize(
    "more", [{"optimizer": "adafactor"}, {"accumulation": 2}, {"quantize": "int8"}, {"questions": 3, "lanes": 1}]
)
def test_the_estimate_matches_other_ways_to_train(more):
    check_against_real(small("llama", layers=3), "neurocache", torch.bfloat16, **more)


@pytest.mark.parametrize(
    ("changes", "grows"),
    [
        ({"cache_tokens": 64}, False),
        ({"cache": False}, False),
        ({}, True),
        ({"cache_tokens": 64, "layers": [0]}, True),
        ({"cache_tokens": 64, "long": True}, True),
        ({"cache_tokens": 64, "overlap": True}, True),
    ],
)
def test_what_grows_with_the_text_is_known(changes, grows):
    config = small("llama", layers=2)
    sizes = {
        "segment_tokens": SEGMENT,
        "window_tokens": 16,
        "pool_tokens": 8,
        "topk": 2,
        "long": False,
        "overlap": False,
    }
    options = cacheformers.CacheFormerAdapterConfig(**{**sizes, **changes}).resolve(base_shape(config))
    assert (options.full_tokens >= EVERYTHING) is grows
    assert grows or options.full_tokens >= 2 * 16 + changes.get("cache_tokens", 0)


@pytest.mark.slow
def test_a_cache_of_segments_is_full_when_the_step_begins():
    """Of a CacheFormer whose retrieved tokens move, which reads texts of any length, with and without a budget."""
    config = small("llama", layers=2)
    chosen = {"representatives": "mean", "long": False, "overlap": False, "packed": True, "sink": True}
    sizes = {"segment_tokens": SEGMENT, "window_tokens": 16, "pool_tokens": 8, "topk": 2, "target_modules": ["up_proj"]}
    held, bytes_kept = {}, {}
    for budget, most in ((128, None), (512, None), (512, 128), (None, None), (None, 512)):
        adapter = cacheformers.CacheFormerAdapterConfig(**chosen, **sizes, cache_tokens=budget)
        found = estimate(config, adapter, Work(1, SEGMENT, max_tokens=most, dtype=torch.float32))
        held[budget, most], bytes_kept[budget, most] = found.tokens, found.moments["update"]["memory"]
    assert held[128, None] >= 128 and held[512, None] >= 512
    assert held[512, 128] == SEGMENT
    assert held[None, None] == config.max_position_embeddings - SEGMENT
    assert held[None, 512] == 512 - SEGMENT
    vector = 2 * 2 * 4 * config.hidden_size  # keys and values of two layers
    assert bytes_kept[512, None] - bytes_kept[128, None] == pytest.approx((512 - 128) * vector, rel=0.2)
    assert bytes_kept[None, 512] - bytes_kept[None, None] > (512 - 256) * vector / 2


def check_against_real(config, method, dtype, **more):
    torch.manual_seed(0)
    adapter = adapter_of(method, config)
    shape = {"lanes": 4, "segment_tokens": SEGMENT, "max_tokens": 4 * SEGMENT, "dtype": dtype, "device_type": "cpu"}
    work = Work(**{**shape, **more})
    found = estimate(config, adapter, work)
    model = get_peft_model(AutoModelForCausalLM.from_config(config, dtype=dtype), adapter).train()
    with Tracker() as tracker:
        tokens, moments = rehearse(tracker, model, on_device(adapter, "cpu"), work)
    assert found.tokens == tokens > 0 or method == "lora"
    for moment, parts in moments.items():
        # Retrieved entries that are the same are encoded once, and searches look where numbers tell them to.
        assert found.totals[moment] == pytest.approx(sum(parts.values()), rel=0.03), moment
        for part in ("weights", "adapter", "optimizer", "memory"):
            assert found.moments[moment].get(part, 0) == pytest.approx(parts.get(part, 0), rel=0.01, abs=4096)


def adapter_of(method, config):
    """An adapter with LoRA in the feed-forward blocks of the layers that the method changes."""
    names = list(architecture(config).lora_targets)
    if method == "lora":
        return LoraConfig(r=8, target_modules=names, layers_to_transform=[1, 2], task_type="CAUSAL_LM")
    kind = method_named(method).adapter_config
    adapter = kind(segment_tokens=SEGMENT, target_modules=names, r=8, **METHODS[method])
    adapter.layers_to_transform = list(adapter.resolve(base_shape(config)).attention_layers)
    return adapter


@pytest.mark.slow
def test_more_takes_more_and_dividing_takes_less():
    plain = of_small()
    assert of_small(lanes=4).peak > plain.peak
    assert of_small(backprop_segments=2).peak > plain.peak
    assert of_small(activation_checkpointing=True).peak < plain.peak
    assert of_small(optimizer="adafactor").peak < plain.peak
    assert of_small(quantize="nf4").peak < of_small(quantize="int8").peak < plain.peak
    assert of_small(max_tokens=SEGMENT).moments["update"]["memory"] < plain.moments["update"]["memory"]
    assert of_small(processes=4, sharding="fsdp2").peak < of_small(processes=4).peak
    assert of_small(processes=4).peak > plain.peak  # DDP's buckets


def test_a_prompt_longer_than_a_segment_takes_more():
    segment, longer = (of_small(layers=3, questions=2, question_tokens=tokens) for tokens in (SEGMENT, 3 * SEGMENT))
    assert longer.moments["backward"]["activations"] > 2.5 * segment.moments["backward"]["activations"]


def test_each_segment_that_gradients_go_back_through_takes_the_same():
    """Of a context of four segments, whose others are read without a graph."""
    config = small("llama", layers=3)

    def activations(segments):
        options = {"questions": 2, "question_tokens": SEGMENT, "max_tokens": 4 * SEGMENT}
        work = Work(1, SEGMENT, backprop_context=segments, **options)
        return estimate(config, adapter_of("gated_deltanet", config), work).moments["forward"]["activations"]

    none, one, two, four, more = (activations(segments) for segments in (0, 1, 2, 4, 8))
    assert none < one < two < four == more
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)


def test_accumulation_keeps_every_memory_but_one_micro_batch():
    whole, parts = of_small(layers=3, lanes=8), of_small(layers=3, lanes=8, accumulation=8)
    assert whole.moments["update"]["memory"] == pytest.approx(parts.moments["update"]["memory"], rel=0.05)
    assert whole.moments["backward"]["activations"] > 6 * parts.moments["backward"]["activations"]
    assert parts.moments["forward"]["gradients"] == 4 * parts.trained
    with pytest.raises(ValueError, match="do not divide"):
        of_small(layers=3, lanes=3, accumulation=2)


def test_the_table_names_every_part_and_the_peak():
    found = of_small(layers=3)
    table = found.table()
    parts = ("weights", "adapter", "optimizer", "memory", "gradients", "activations", "working copies", "total")
    assert all(f"\n{part} " in table for part in parts)
    assert f"Peak: {found.peak / 2**30:.2f} GiB" in table
    assert f"{found.trained:,} to train" in table
    assert "malloc" not in table


def test_on_a_cpu_malloc_may_keep_freed_activations():
    """In a model of 7B's width it held 0.30 GiB of freed tensors in the update: as much as the activations had been."""
    found = of_small(layers=3, device_type="cpu")
    assert found.most - found.peak == found.moments["backward"]["activations"] > 0
    assert f"Peak: {found.peak / 2**30:.2f} GiB" in found.table()
    assert f"Up to {found.most / 2**30:.2f} GiB where malloc keeps" in found.table()


def benchmark():
    """benchmarks/estimate_memory.py, which is not part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return script("benchmarks/estimate_memory.py")


# A process of its own does not know the toy method.
# Both kinds of numbers take part: without instructions for bfloat16 a processor needs four times as long for it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "checkpointing", "dtype"),
    [
        *((name, False, "float32") for name in METHODS if name != "toy"),
        ("neurocache", True, "bfloat16"),
        ("lora", True, "bfloat16"),
    ],
)
def test_the_peak_is_within_10_percent_of_the_measured_one(method, checkpointing, dtype):
    measurement = benchmark()
    setting = measurement.Setting(
        method=method,
        segment_tokens=512,
        cache_size=1024,
        max_tokens=2048,
        backprop_segments=1,
        layers=12,
        vocab_size=8192,
        dtype=dtype,
        activation_checkpointing=checkpointing,
    )
    assert setting.estimate("cpu").peak == pytest.approx(measurement.measure(setting), rel=0.1)
