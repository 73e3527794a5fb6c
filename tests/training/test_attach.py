"""`cacheformers attach`: an adapter that nobody trained, for every method, and what is refused."""

import pytest
import torch
from conftest import method_options
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import cacheformers
from cacheformers.modeling.method import METHODS
from cacheformers.training.attach import main

MEANS = ["--method", "cacheformer_on_base", "--representatives", "mean", "--long", "false", "--overlap", "false"]
SIZES = ["--window_tokens", "8", "--pool_tokens", "4", "--topk", "2", "--selection", "prefix", "--segment_tokens", "16"]


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_attached(folder, method, ids):
    """The folder loads as any adapter does, holds no LoRA, and within its window computes the base, or nearly so."""
    out = folder / "adapter"
    given = [
        f"--{name}={value}" for name, value in method_options(method).items() if not isinstance(value, list | dict)
    ]
    main(["--base", str(folder / "base"), "--output", str(out), "--method", method, *given])
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    short = base(ids[:, :8]).logits
    loaded = PeftModel.from_pretrained(base, out).eval()
    assert not any("lora_A" in name for name, _ in loaded.named_parameters())
    assert torch.allclose(loaded(ids[:, :8]).logits, short, atol=0.05)  # gates of gated attention begin at 0.98
    assert (out / "tokenizer.json").is_file()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mean", "tokens", "bounds"])
def test_what_is_attached_reads_and_answers(folder, ids, kind):
    """Far beyond the positions of the base, and the same from a memory file."""
    chosen = [*MEANS, "--representatives", kind, "--pool_vectors", "2", *SIZES, "--far_distance", "8"]
    main(["--base", str(folder / "base"), "--output", str(folder / "means"), *chosen])
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, folder / "means").eval()
    assert sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name) == 0
    text = ids[:1].repeat(1, 8)
    assert text.shape[1] > base.config.max_position_embeddings
    memory = cacheformers.read(model, text, progress=False)
    memory.save(folder / "text.memory")
    again = cacheformers.load_memory(folder / "text.memory", model)
    wanted = {"attention_mask": torch.ones_like(ids[:1, :5]), "max_new_tokens": 6, "do_sample": False}
    first = model.generate(ids[:1, :5], past_key_values=memory, **wanted)
    assert torch.equal(model.generate(ids[:1, :5], past_key_values=again, **wanted), first)


@torch.no_grad()
@pytest.mark.parametrize("method", ["windowed", "neurocache", "retrieval_heads"])
def test_the_lora_of_another_adapter_goes_along(folder, ids, opener, refused, method):
    """Within the window the new adapter computes what that one does; what else was trained is refused."""
    more = ["--retrieval_weight=1"] if method == "retrieval_heads" else []  # which gives it something to train
    given = ["--base", str(folder / "base"), "--method", method, "--segment_tokens=16", *more, "--output"]
    chosen = {"r": 2, "target_modules": ["up_proj", "q_proj"], "task_type": "CAUSAL_LM"}
    for name, more in {"lora": {"layers_to_transform": [1]}, "head": {"modules_to_save": ["lm_head"]}}.items():
        learned = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(**chosen, **more))
        opener(learned)
        learned.save_pretrained(folder / name)
        if name == "lora":
            wanted = learned.eval()(ids[:, :8]).logits
    main([*given, str(folder / "both"), "--lora", str(folder / "lora")])
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    plain = base(ids[:, :8]).logits
    found = PeftModel.from_pretrained(base, folder / "both").eval()(ids[:, :8]).logits
    assert torch.equal(found, wanted) and not torch.allclose(found, plain, atol=0.1)
    message = refused(main, [*given, str(folder / "more"), "--lora", str(folder / "head")])
    assert "does not fit: 1 tensors are missing" in message and "lm_head" in message
    main([*given, str(folder / "none")])
    learned = get_peft_model(base, IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM"))
    learned.save_pretrained(folder / "ia3")
    for name, message in {"none": "none holds no LoRA", "ia3": "ia3 is an adapter of type IA3, not LoRA"}.items():
        assert message in refused(main, [*given, str(folder / "more"), "--lora", str(folder / name)])


@torch.no_grad()
def test_a_trained_memory_gets_more_to_train(folder, ids, opener, refused):
    """It computes what it did, and has another part; other methods and missing places are refused."""
    given = ["--base", str(folder / "base"), "--segment_tokens=16", "--method"]
    scores = ["neurocache", "--topk=2", "--cache_size=64", "--hit_scores"]
    main([*given, *scores, "--output", str(folder / "start")])
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    learned = PeftModel.from_pretrained(base, folder / "start", is_trainable=True)
    opener(learned)
    wanted = learned.eval()(ids).logits
    learned.save_pretrained(folder / "learned")
    known = ["--memory_from", str(folder / "learned"), "--output"]
    main([*given, *scores, "--hit_order", *known, str(folder / "order")])
    plain, loaded = (AutoModelForCausalLM.from_pretrained(folder / "base") for _ in range(2))
    assert not torch.allclose(plain(ids).logits, wanted, atol=1e-3)
    loaded = PeftModel.from_pretrained(loaded, folder / "order").eval()
    assert torch.equal(loaded(ids).logits, wanted)
    before, now = ({name for name, _ in model.named_parameters()} for model in (learned, loaded))
    assert now > before and all("order" in name for name in now - before)
    message = refused(main, [*given, "neurocache", "--topk=2", "--cache_size=64", *known, str(folder / "more")])
    assert "learned does not fit" in message and "tensors have no place, such as base_model" in message
    message = refused(main, [*given, "memorizing", *known, str(folder / "more")])
    assert "learned is an adapter of NEUROCACHE, not of MEMORIZING" in message
    main([*given, "windowed", "--output", str(folder / "nothing")])
    known[1] = str(folder / "nothing")
    assert "its memory trains nothing" in refused(main, [*given, "windowed", *known, str(folder / "more")])


def test_what_is_refused(folder, refused):
    base = ["--base", str(folder / "base")]
    new = ["--output", str(folder / "new")]
    assert "holds files: choose a new --output" in refused(main, [*base, "--output", str(folder / "base")])
    assert "--method must be one of cacheformer_on_base" in refused(main, [*base, *new, "--method", "nothing"])
    assert "set long=False and overlap=False" in refused(main, [*base, *new, *MEANS[:4]])
    many = [*MEANS, *SIZES, "--representatives", "tokens", "--pool_vectors", "5"]
    assert "cannot be represented by 5 of its tokens" in refused(main, [*base, *new, *many])
    assert "must be at least pool_tokens 4" in refused(main, [*base, *new, *MEANS, *SIZES, "--far_distance", "2"])
    assert "at most" in refused(main, [*base, *new, *MEANS, *SIZES, "--far_distance", "5000"])
    assert "did you mean 'topk'" in refused(main, [*base, *new, "--topkk", "2"])
    assert not (folder / "new").exists()
