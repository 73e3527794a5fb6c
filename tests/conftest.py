"""Tiny random models for every test, and NaN in every tensor that nobody filled."""

import os
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models; the test workers are the parallelism
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import pytest
import torch
import toy_method  # noqa: F401  # registers itself, and so goes through every shared test
from cacheformer_models import tiny_model
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
from recipe import WORDS, write_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from cacheformers.modeling import method as method_registry

pytest_plugins = ["longbench_cases"]
SHARED = Path(__file__).resolve().parents[2] / "shared"
SEGMENT = 16

COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
# A configuration's name is its model type where it names no other.
BASES = {
    "llama_mha": {"model_type": "llama", "num_key_value_heads": 4},
    "llama_gqa": {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 12},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 9},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "use_sliding_window": False},
}
SLIDING_ABOVE = {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
MORE_BASES = {
    "qwen2": SLIDING_ABOVE,
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "gpt_neox": {"hidden_dropout": 0.0},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Families that one line in `ARCHITECTURES` adds.
ONE_LINE = {
    "olmo2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2, "attention_multiplier": 0.4, "logits_scaling": 3.0},
    "ministral": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 9},
    "seed_oss": {"num_key_value_heads": 2, "head_dim": 8},
    "hunyuan": {"model_type": "hunyuan_v1_dense", "num_key_value_heads": 2, "head_dim": 8},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": None},
    "arcee": {"num_key_value_heads": 2},
    "apertus": {"num_key_value_heads": 2, "rope_parameters": ROPE},
}
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
BY_LAYER_TYPE = {"num_key_value_heads": 2, "sliding_window": 9, "layer_types": LAYER_TYPES}
GEMMA = {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9}
ROPES = {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 500.0}}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 8, "experts_implementation": "eager"}
QWEN_MOE = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 9}
# Families with something of their own, which a part of the shared tests takes.
SPECIAL = {
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3": {"model_type": "gemma3_text", **GEMMA, "layer_types": LAYER_TYPES},
    "olmo3": {**BY_LAYER_TYPE, "rope_parameters": ROPES},
    "phi3": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "smollm3": {"num_key_value_heads": 2, "no_rope_layers": [1, 1, 0], "use_sliding_window": False},
    "exaone4": BY_LAYER_TYPE,
    "cohere2": BY_LAYER_TYPE,
    "glm4": {"num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.5},
    "helium": {"num_key_value_heads": 2, "head_dim": 8},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 8},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {**QWEN_MOE, "shared_expert_intermediate_size": 24, "max_window_layers": 1},
    "qwen3_moe": QWEN_MOE,
    "gpt_oss": {**EXPERTS, **BY_LAYER_TYPE, "num_local_experts": 4, "rope_parameters": ROPE},
    "llama4": {
        **{"model_type": "llama4_text", **EXPERTS, "num_experts_per_tok": 1, "num_local_experts": 4},
        **{"attention_chunk_size": 40, "floor_scale": 120, "no_rope_layers": [1, 1, 0]},
        **{"intermediate_size_mlp": 48, "moe_layers": [1]},
    },
}
# Where attention to everything is possible: no window of the base's own, positions for every token.
FULL_BASES = {"mistral": "mistral_full", "opt": "opt_long"}
BASES_IN_FULL = {
    "mistral_full": {"model_type": "mistral", **BASES["mistral"], "sliding_window": None},
    "opt_long": {"model_type": "opt", **BASES["opt"], "max_position_embeddings": 128},
}
CONFIGS = {**BASES, **MORE_BASES, **ONE_LINE, **SPECIAL, **BASES_IN_FULL}
EAGER = ("gemma2", "gpt_oss")  # transformers has no other attention for them on a CPU
METHODS = {name: dict(method.test_settings) for name, method in method_registry.METHODS.items()}
OTHERS = [method for method in METHODS if method != "neurocache"]
# Factors by which random models enlarge rounding: memory tokens go through all layers again in each segment.
ENLARGED = {"recurrent_memory": 100}
# They train nothing, and what they have read changes nothing that the model computes.
UNCHANGED = ("windowed", "retrieval_heads")
# They attend to everything in a way of their own.
OWN_WINDOW = [name for name, method in method_registry.METHODS.items() if method.stores == "everything"]
# Models whose own attention is their memory. The last holds few tokens, in 8 bits.
WHOLE = {
    "cacheformer": {"neighbors": 2},
    "transformer_ls": {"overlap": False, "cache": False},
    "cacheformer_int8": {"cache_tokens": 16, "cache_int8": True, "sink": True, "tied": False},
}
# What reads texts of any length within a base's positions: CacheFormer's cache with nothing to train, and gated
# attention; with partial rotary (phi), too.
RETRIEVAL = {"method": "cacheformer_on_base", "long": False, "overlap": False, "selection": "prefix"}
GATED = {"method": "gated_attention", "window_tokens": 6, "far_distance": 9}
WITHIN_POSITIONS = [
    pytest.param("llama_gqa", {**RETRIEVAL, "representatives": "mean", "far_distance": 8}, id="llama_gqa mean not far"),
    pytest.param("phi", {**RETRIEVAL, "representatives": "tokens", "far_distance": 8}, id="phi tokens not far"),
    pytest.param("qwen3", {**RETRIEVAL, "representatives": "bounds", "packed": True}, id="qwen3 bounds packed"),
    pytest.param("llama_gqa", {**GATED, "threshold": 0.3}, id="llama_gqa gates not far"),
    pytest.param("phi", {**GATED, "far_heads": {0: [1], 2: [0, 1]}}, id="phi gates not far"),
]


def every_method(bases, others=("llama_gqa", "opt")):
    """Test cases (base, options of the adapter).

    Neurocache and the Memorizing Transformer, one memory beside attention and one inside it, on all bases, each other
    method on some.
    """
    cases = [pytest.param(base, {}, id=base) for base in bases]
    pairs = [(base, "memorizing") for base in bases] + [case for case in other_cases(others) if case[1] != "memorizing"]
    return cases + [pytest.param(base, {"method": method}, id=f"{base} {method}") for base, method in pairs]


def other_cases(bases=("llama_gqa", "mistral", "opt")):
    """Every other method on some bases, as they are where it can work."""
    return [
        (FULL_BASES.get(base, base) if method in OWN_WINDOW else base, method) for method in OTHERS for base in bases
    ]


def pytest_addoption(parser):
    parser.addoption("--bases", help="comma-separated base models: leave out cases of the other ones (`make quick`)")


def pytest_collection_modifyitems(config, items):
    """Deselect cases of bases that `--bases` does not name; a base's variant for full attention goes with it."""
    if not config.getoption("--bases"):
        return
    chosen = set(config.getoption("--bases").split(","))
    others = {"stories260k", *CONFIGS} - chosen - {FULL_BASES.get(base) for base in chosen}
    left_out = {item for item in items if others.intersection(case_words(item))}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def case_words(item):
    """The strings among the parameters of a test case."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [value for value in parameters.values() if isinstance(value, str)]


@pytest.fixture(scope="session", autouse=True)
def poisoned_empty():
    """Uninitialized floating-point memory reads as NaN, so whoever forgets to fill it fails."""
    empty = torch.empty
    with torch.device("cpu"):  # device contexts learn which functions make tensors when the first one is used
        empty(0)

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta" and not torch.compiler.is_compiling():
            tensor.detach().fill_(float("nan"))
        return tensor

    torch.empty = poisoned
    yield
    torch.empty = empty


@pytest.fixture(scope="session", autouse=True)
def cache_of_datasets(tmp_path_factory):
    """What a test reads does not come from the cache of an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setenv("HF_DATASETS_CACHE", str(datasets.config.HF_DATASETS_CACHE))
        yield


@pytest.fixture(scope="session")
def make_base():
    """Build a tiny random base model by its name in the tables above."""

    def build(name, dtype=torch.float64, **changes):
        torch.manual_seed(0)
        if name == "stories260k":
            return trained_base(dtype, **changes)
        config = AutoConfig.for_model(**{"model_type": name, **COMMON, **CONFIGS[name], **changes})
        attention = changes.pop("attn_implementation", "eager" if name in EAGER else "sdpa")
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        for parameter in model.parameters():  # larger than the default initialization, so that every layer matters
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.15)
        return model.to(dtype).eval()

    return build


def trained_base(dtype, attn_implementation="sdpa"):
    """A real, trained model of five layers."""
    folder = SHARED / "data" / "models" / "stories260K-llama"
    if not folder.is_dir():
        pytest.skip("stories260K is not there")
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attn_implementation, dtype=dtype).eval()


@pytest.fixture(scope="session")
def make_model(make_base):
    """Build a tiny base with an adapter (default: Neurocache's) whose gates are open, so that the memory shows.

    Or a model of `WHOLE`, which has no adapter.
    """

    def build(name, dtype=torch.float64, base=None, **options):
        if name in WHOLE:
            return tiny_model(dtype, vocab_size=COMMON["vocab_size"], **{**WHOLE[name], **options})
        model = get_peft_model(make_base(name, dtype, **(base or {})), adapter_config(**options))
        open_gates(model)
        return model.eval()

    return build


def method_options(method, **options):
    """A method's options on the tiny bases."""
    return {"segment_tokens": SEGMENT, **METHODS[method], **options}


def adapter_config(method="neurocache", **options):
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[method.upper()]
    return kind(**{"r": 4, **method_options(method, **options)})


OPEN = ("lora_mem_gate", "lora_mem_beta", "lora_mem_token_gate", "lora_mem_value", "lora_B")
OPEN_IN_MODELS = (".memory.gate", ".memory.beta", ".memory.token_gate", ".memory.value")


def open_gates(model, adapter="default"):
    """Give gates, scores and LoRA's B random values: as they start, the memory does not show."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        mine = adapter in name and any(part in name for part in OPEN)
        if mine or any(part in name for part in OPEN_IN_MODELS):
            parameter.data.normal_(0, 0.5)
        if parameter.dim() > 1 and ((adapter in name and "lora_mem_alpha" in name) or ".memory.alpha" in name):
            parameter.data.normal_(0, 0.5)  # tokens differ in what they forget; the bias keeps them near 1
        if adapter in name and "lora_mem_scores" in name:
            parameter.data.normal_(-2.5 if "near" in name or "nothing" in name else 0.0, 0.5)
            if "nothing" in name:
                parameter.data.sub_(4.5)  # the score of nothing is 22 at first


def same_after_loading(found, expected, method):
    """Equal to the last bit; but the product of one gate rounds by where its loaded weights lie in memory."""
    return torch.allclose(found, expected, atol=1e-5) if method == "gated_attention" else torch.equal(found, expected)


@pytest.fixture(scope="session")
def config_factory():
    return adapter_config


@pytest.fixture(scope="session")
def opener():
    return open_gates


def save_adapter(base, out, **options):
    """A model folder with an adapter whose gates are open, which is saved."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapter_config(**options)).eval()
    open_gates(model)
    model.save_pretrained(out)
    return model


@pytest.fixture
def refused(capsys):
    """Call a command that must refuse its arguments; what it says."""

    def call(main, arguments):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return call


@pytest.fixture(scope="session")
def ids():
    """Two rows of 75 random ids: four full segments and a partial one."""
    return torch.randint(3, 128, (2, 75), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def tokenizer():
    """A token a word: w0 to w124."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture(scope="session")
def smollm2():
    """The folder of a real base, where it has been fetched."""
    folder = Path(__file__).resolve().parents[1] / "data" / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip("SmolLM2 is not there: cacheformers fetch")
    return folder


def tokenizer_of_bytes():
    names = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def byte_tokenizer():
    """A token a byte, so that any text goes through it unchanged."""
    return tokenizer_of_bytes()


@pytest.fixture(scope="session")
def built_folder(tmp_path_factory, make_base, tokenizer):
    folder = tmp_path_factory.mktemp("folder")
    make_base("llama_gqa", torch.float32).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    write_documents(folder / "train.jsonl", 60, 90, 20)
    write_documents(folder / "valid.jsonl", 70, 50)
    return folder


@pytest.fixture
def folder(tmp_path, built_folder):
    """A tiny base model with its tokenizer in `base`, and documents in `train.jsonl` and `valid.jsonl`."""
    return shutil.copytree(built_folder, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def built_byte_folder(tmp_path_factory, make_base):
    folder = tmp_path_factory.mktemp("bytes")
    base = make_base("llama_gqa", torch.float32, vocab_size=259, max_position_embeddings=1024)
    base.generation_config.eos_token_id = None  # random models end where they like
    base.save_pretrained(folder / "base")
    tokenizer_of_bytes().save_pretrained(folder / "base")
    return folder


@pytest.fixture
def byte_folder(tmp_path, built_byte_folder):
    """A tiny base model that reads bytes, of 1,024 positions, with its tokenizer in `base`."""
    return shutil.copytree(built_byte_folder, tmp_path, dirs_exist_ok=True)


MORE = (60, 90, 20, 33, 47, 70)  # lengths of documents, so many that lanes change documents between checkpoints


@pytest.fixture(scope="session")
def built_documents(tmp_path_factory, built_folder):
    folder = shutil.copytree(built_folder, tmp_path_factory.mktemp("documents"), dirs_exist_ok=True)
    write_documents(folder / "train.jsonl", *MORE)
    return folder


@pytest.fixture
def documents(folder):
    """More documents than `folder` has; `built_documents`, for fixtures of modules, is the same."""
    write_documents(folder / "train.jsonl", *MORE)
    return folder
