"""An adapter and its export to one model folder compute the same, in a fresh process, with the package and without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENLARGED, other_cases, save_adapter
from golden import base_model, cases, load, publish
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.adapters.export import export, main, to_model
from cacheformers.methods.neurocache.convert import convert


@pytest.fixture
def saved(make_base, tmp_path):
    """A base and an adapter on disk: the adapted model and the adapter's folder."""

    def build(name="llama_gqa", dtype=torch.float32, base=None, **options):
        make_base(name, dtype, **(base or {})).save_pretrained(tmp_path / "base")
        return save_adapter(tmp_path / "base", tmp_path / "adapter", **options), tmp_path / "adapter"

    return build


def run(code, *arguments, cwd, absent=False):
    """Run Python code in a fresh process, on request in one for which this package is not installed."""
    environment = {**os.environ, "HF_HOME": str(cwd / "hf"), "HF_HUB_OFFLINE": "1"}
    if absent:
        code = ABSENT + code
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cacheformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
COMPARE = """
import sys, torch
if sys.argv[1] == "import":
    import cacheformers
    remote = {}
else:
    remote = {"trust_remote_code": True}
from transformers import AutoModelForCausalLM

for folder, expected in zip(sys.argv[2::2], sys.argv[3::2]):
    model, expected = AutoModelForCausalLM.from_pretrained(folder, **remote), torch.load(expected)
    ids = expected["ids"]
    with torch.no_grad():
        difference = (model(ids).logits - expected["logits"]).abs().max() / expected["logits"].abs().max()
    asked = {"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1]), "pad_token_id": 0}
    tokens = model.generate(**asked, max_new_tokens=20, do_sample=False)
    print(type(model).__name__, float(difference), tokens.tolist() == expected["tokens"].tolist())
"""


@torch.no_grad()
@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("llama_gqa", {}),
        ("llama_gqa", {"target_modules": []}),
        ("mistral", {"local_window": "sliding"}),
        ("mistral", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
        ("llama_gqa", {"target_modules": ["q_proj"], "rank_pattern": {"1.self_attn.q_proj": 2}}),
        ("llama_gqa", {"trainable_token_indices": [5, 6]}),
        ("opt", {"compression_factor": 1, "retrieval_map": {0: 1, 1: 2}}),
        ("opt", {}),
        *((base, {"method": method}) for base, method in other_cases()),
    ],
    ids=str,
)
def test_same_logits(saved, ids, base, options, tmp_path):
    model, adapter = saved(base, **options)
    expected = model(ids).logits
    export(adapter, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    bound = 1e-5 * ENLARGED.get(options.get("method"), 1)
    assert float((loaded(ids).logits - expected).abs().max() / expected.abs().max()) <= bound
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    memory = cacheformers.read(model, ids, progress=False)  # of the adapter; the exported model goes on with it
    question = ids[:, :6]
    answers = [door(question, past_key_values=memory.clone()).logits for door in (model, loaded)]
    assert torch.allclose(*answers, atol=1e-4)


@torch.no_grad()
def test_biases_that_were_trained_are_exported(make_base, ids, tmp_path, capsys):
    """Those of the base, and LoRA's own, which a base without biases cannot take."""
    options = {"segment_tokens": 16, "bias": "all", "lora_bias": True}
    for base, targets in (("opt", ["fc1", "fc2"]), ("llama_gqa", ["down_proj"])):
        make_base(base).save_pretrained(tmp_path / base)
        config = cacheformers.NeurocacheAdapterConfig(target_modules=targets, **options)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / base), config).eval()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_mem" not in name:
                parameter.normal_(0, 0.3)
        model.save_pretrained(tmp_path / f"{base}_adapter")
        expected = model(ids).logits
        if base == "llama_gqa":
            with pytest.raises(
                SystemExit, match="lora_bias=True cannot be merged: .*down_proj of the base has no bias"
            ):
                main([str(tmp_path / f"{base}_adapter"), str(tmp_path / "refused")])
            assert not (tmp_path / "refused").exists()
        else:
            export(tmp_path / f"{base}_adapter", tmp_path / "model")
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            assert float((loaded(ids).logits - expected).abs().max() / expected.abs().max()) <= 1e-5
            assert float((make_base(base)(ids[:, :16]).logits - expected[:, :16]).abs().max()) > 0.1


@pytest.fixture
def exported(saved, ids, tmp_path):
    """Exports of adapters on three bases, each with a file of what the adapter computes."""
    paths = []
    for base in ("llama_gqa", "mistral", "opt"):
        model, adapter = saved(base)
        expect(model, ids, tmp_path / f"{base}_expected")
        paths += [export(adapter, tmp_path / base / "model"), tmp_path / f"{base}_expected"]
    return paths


@torch.no_grad()
def expect(model, ids, path):
    """Write what an adapted model computes."""
    asked = {"input_ids": ids[:1], "attention_mask": torch.ones_like(ids[:1]), "pad_token_id": 0}
    tokens = model.generate(**asked, max_new_tokens=20, do_sample=False)
    torch.save({"ids": ids, "logits": model(ids).logits, "tokens": tokens}, path)


def check_lines(done, count):
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if "ForCausalLM" in line]
    assert len(lines) == count
    for kind, difference, same_tokens in lines:
        assert kind == "NeurocacheForCausalLM" and float(difference) <= 1e-5 and same_tokens == "True"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["import", "remote code"])
def test_fresh_process(exported, how, tmp_path):
    check_lines(run(COMPARE, how, *exported, cwd=tmp_path), 3)


@pytest.mark.slow
def test_smollm2(smollm2, tmp_path):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32),
        cacheformers.NeurocacheAdapterConfig(segment_tokens=128, cache_size=512, search="exact"),
    ).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_mem_gate" in name or "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.05)
    model.save_pretrained(tmp_path / "adapter")
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    ids = AutoTokenizer.from_pretrained(smollm2)(text, return_tensors="pt").input_ids[:, :700]
    expect(model, ids, tmp_path / "expected")
    export(tmp_path / "adapter", tmp_path / "model", dtype="float32")
    check_lines(run(COMPARE, "import", tmp_path / "model", tmp_path / "expected", cwd=tmp_path), 1)


SAVE_AGAIN = """
import sys
from transformers import AutoModelForCausalLM, pipeline
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
answer = pipeline("text-generation", sys.argv[1], trust_remote_code=True)("w3 w4", max_new_tokens=3)
print(answer[0]["generated_text"])
"""


@pytest.mark.slow
def test_without_the_package(saved, tokenizer, tmp_path):
    _, adapter = saved()
    tokenizer.save_pretrained(adapter)
    folder = export(adapter, tmp_path / "model")
    load = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1]%s)"
    trusted = run(load % ", trust_remote_code=True", folder, cwd=tmp_path, absent=True)
    assert trusted.returncode != 0
    assert "pip install cacheformers" in trusted.stderr
    untrusted = run(load % "", folder, cwd=tmp_path, absent=True)
    assert "trust_remote_code=True" in untrusted.stderr
    done = run(SAVE_AGAIN, folder, tmp_path / "again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("w3 w4")
    written = {path.name for path in (tmp_path / "again").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors", "modeling_cacheformers.py"}
    first, second = (path / "modeling_cacheformers.py" for path in (folder, tmp_path / "again"))
    assert first.read_text() == second.read_text()


@torch.no_grad()
def test_folder(saved, tokenizer, ids, tmp_path):
    model, adapter = saved()
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").generation_config.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    main([str(adapter), str(tmp_path / "out" / "model"), "--max-shard-size", "30KB"])
    folder = tmp_path / "out" / "model"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    assert AutoTokenizer.from_pretrained(folder).encode("w3 w4") == tokenizer.encode("w3 w4")
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-5)


@torch.no_grad()
def test_half_precision(saved, ids, tmp_path):
    model, adapter = saved(dtype=torch.bfloat16)
    export(adapter, tmp_path / "model")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert half.dtype == torch.bfloat16
    losses = [float(door(ids, labels=ids).loss) for door in (model, half)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    export(adapter, tmp_path / "whole", dtype="float32")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    assert whole.dtype == torch.float32
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    exact = PeftModel.from_pretrained(base, adapter).eval()(ids).logits
    assert torch.allclose(whole(ids).logits, exact, atol=1e-5)


@torch.no_grad()
def test_merged_weights_are_rounded_once(saved, tmp_path):
    """A base in half precision stays so: LoRA is added in float32, one matrix at a time."""
    model, adapter = saved(dtype=torch.bfloat16)
    export(adapter, tmp_path / "model")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").state_dict()
    merged = 0
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A") and len(module.lora_A):
            exact = own[f"{name}.weight"].float() + module.get_delta_weight("default")
            assert torch.equal(found[name.replace("model.", "model.language_model.", 1) + ".weight"], exact.bfloat16())
            merged += not torch.equal(exact.bfloat16(), own[f"{name}.weight"])
    assert merged == 6  # the feed-forward blocks of two layers


PEAK = """
import sys
from pathlib import Path
from cacheformers.adapters.export import export

def held(name):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))

before = held("VmRSS")
export(sys.argv[1], sys.argv[2])
print(held("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_base_in_half_precision_is_held_once(saved, tmp_path):
    changes = {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 8, "head_dim": 64}
    _, adapter = saved(dtype=torch.bfloat16, base=changes, retrieval_map={7: 7}, segment_tokens=16)
    size = sum(path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors")) / 2**20
    done = run(PEAK, adapter, tmp_path / "model", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert size > 150 and float(done.stdout.splitlines()[-1]) < 1.8 * size  # and merged matrices, and libraries


@torch.no_grad()
def test_saved_modules_and_tied_weights(saved, ids, tmp_path):
    model, adapter = saved(base={"tie_word_embeddings": True}, modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.mul_(1.5)
    model.save_pretrained(adapter)
    expected = model(ids).logits
    export(adapter, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("end", ("lm_head", "embed_tokens"))
def test_lora_on_one_end_of_a_tied_weight_changes_that_end_alone(saved, ids, tmp_path, end):
    model, adapter = saved(base={"tie_word_embeddings": True}, target_modules=[end, "down_proj"])
    expected = model(ids).logits
    export(adapter, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)


def test_what_cannot_be_exported_says_why(saved, make_base, tmp_path, capsys):
    _, adapter = saved()
    get_peft_model(make_base("llama_gqa"), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    with pytest.raises(ValueError, match="only memories can be exported"):
        export(tmp_path / "lora", tmp_path / "out", base=tmp_path / "base")
    with pytest.raises(ValueError, match="only memories"):
        to_model(get_peft_model(make_base("llama_gqa"), LoraConfig(target_modules=["q_proj"])))
    with pytest.raises(SystemExit, match="Nothing was written: .* exists already"):
        main([str(adapter), str(adapter)])
    with pytest.raises(SystemExit, match="base holds a model, not an adapter.*--base"):
        main([str(tmp_path / "base"), str(tmp_path / "out")])
    nowhere = tmp_path / "nowhere"
    with pytest.raises(SystemExit, match=f"Nothing was written: The adapter .* was not found: .*no folder {nowhere}"):
        main([str(nowhere), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=f"Nothing was written: The base model .*no folder {nowhere}. Check the path"):
        main([str(adapter), str(tmp_path / "out"), "--base", str(nowhere)])
    (tmp_path / "base").rename(nowhere)
    with pytest.raises(SystemExit, match="Nothing was written: The base .* names this base: give .* with --base"):
        main([str(adapter), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@torch.no_grad()
@pytest.mark.parametrize(("base", "name"), cases("segments"))
def test_published_checkpoints(base, name, tmp_path):
    """Converted, and then through both doors: the adapter, and its export."""
    fixture = load(base, name)
    base_model(base).save_pretrained(tmp_path / "base")
    published = publish(tmp_path / "published", fixture.config, fixture.weights)
    heads = "fixed" if fixture.fixed_heads else "published"
    convert(published, tmp_path / "adapter", tmp_path / "base", heads)
    export(tmp_path / "adapter", tmp_path / "model")
    for door in ("adapter", "model"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / door, attn_implementation="eager").eval()
        memory = cacheformers.new_memory(model, 2)
        for segment, ids in fixture.segments(memory):
            logits = model(ids, past_key_values=memory, use_cache=False).logits
            if f"seg{segment}.logits" in fixture.tensors:
                golden = fixture.tensors[f"seg{segment}.logits"]
                assert float((logits - golden).abs().max()) <= fixture.tolerance, (door, segment)
