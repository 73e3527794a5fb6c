"""transformers' `Trainer` and TRL's `SFTTrainer` with a memory adapter: rates, logs, evaluation, saving, resuming."""

import pytest
import torch
from conftest import adapter_config
from datasets import Dataset
from peft import PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import cacheformers
from cacheformers.common.loss import token_losses

RATES = {"lora_rate": 2e-3, "memory_rate": 4e-3, "gate_factor": 5.0, "weight_decay": 0.1}
KINDS = {"Trainer": (Trainer, TrainingArguments), "SFTTrainer": (SFTTrainer, SFTConfig)}


def rows(count=12, tokens=40):
    """Of two segments and a half each."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(3, 128, (count, tokens), generator=generator).tolist()
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in drawn])


def make_trainer(model, folder, kind="Trainer", tokenizer=None, callbacks=(cacheformers.MemoryCallback,), **more):
    given = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "logging_steps": 2,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "seed": 1,
        "bf16": False,
        **more,
    }
    trainer, arguments = KINDS[kind]
    return trainer(
        model,
        arguments(output_dir=str(folder), **given),
        train_dataset=rows(),
        eval_dataset=rows(2),
        optimizers=(torch.optim.AdamW(cacheformers.parameter_groups(model, **RATES)), None),
        callbacks=[callback() for callback in callbacks],
        processing_class=tokenizer,
    )


def adapted(make_base, method="neurocache"):
    torch.manual_seed(5)
    return get_peft_model(make_base("llama_gqa", torch.float32), adapter_config(method))


def test_gates_move_far_and_are_logged(make_base, tmp_path):
    """As far as the rates say, where one rate for all leaves them near zero."""
    trainer = make_trainer(adapted(make_base), tmp_path)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 3 and all("gate_mean" in entry for entry in logged)
    assert logged[-1]["gate_max"] > logged[0]["gate_max"] > 0
    plain = adapted(make_base)
    given = TrainingArguments(str(tmp_path / "plain"), max_steps=6, learning_rate=2e-3, report_to=[], use_cpu=True)
    Trainer(plain, given, train_dataset=rows(), callbacks=[cacheformers.MemoryCallback()]).train()

    def largest(model):
        gates = [parameter for name, parameter in model.named_parameters() if "lora_mem_gate" in name]
        return max(float(gate.detach().abs().max()) for gate in gates)

    assert largest(trainer.model) > 3 * largest(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluated_and_saved(make_base, tokenizer, tmp_path, kind):
    """The loss is that of whole rows, read with the memory; the saved adapter gives it again."""
    trainer = make_trainer(adapted(make_base), tmp_path / kind, kind, tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["gate_max"] > 0
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(tmp_path / "saved"))
    model = PeftModel.from_pretrained(make_base("llama_gqa", torch.float32), tmp_path / "saved").eval()
    ids = torch.tensor(rows(2)["input_ids"][:])
    with torch.no_grad():
        whole = token_losses(model(ids).logits[:, :-1], ids[:, 1:])
        off = token_losses(model(ids, past_key_values=cacheformers.new_memory(model, 2, 0)).logits[:, :-1], ids[:, 1:])
    assert evaluated == pytest.approx(float(whole.mean()), rel=1e-5)
    assert torch.equal(off[:, :15], whole[:, :15]) and not torch.equal(off[:, 16:], whole[:, 16:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_whole_run(make_base, tokenizer, tmp_path, kind):
    """Model, optimizer groups and schedule, with gradients accumulated over two batches."""
    whole = make_trainer(adapted(make_base), tmp_path, kind, tokenizer, gradient_accumulation_steps=2)
    whole.train()
    model = adapted(make_base)
    resumed = make_trainer(model, tmp_path, kind, tokenizer, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(model, whole.model) and not same(model, adapted(make_base))


def test_trl_and_accumulation_train_the_same(make_base, tokenizer, tmp_path):
    """As `Trainer` with batches of four does: `SFTTrainer`, which replaces the forward, and two batches of two."""
    wanted = adapted(make_base)
    make_trainer(wanted, tmp_path / "four", per_device_train_batch_size=4).train()
    for kind in KINDS:
        model = adapted(make_base)
        make_trainer(model, tmp_path / kind, kind, tokenizer, gradient_accumulation_steps=2).train()
        assert same(model, wanted, 1e-4), kind  # Adam divides the first gradients by their size


def same(model, other, within=1e-6):
    return all(
        torch.allclose(ours, theirs, rtol=0, atol=within)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packing_is_refused(make_base, tokenizer, tmp_path, strategy):
    packed = {"packing": True, "packing_strategy": strategy, "max_length": 120}
    with pytest.raises(ValueError, match="a document would read the memory of the one before it"):
        make_trainer(adapted(make_base), tmp_path, "SFTTrainer", tokenizer, **packed)
    trainer = make_trainer(adapted(make_base), tmp_path, "SFTTrainer", tokenizer, padding_free=True, max_length=None)
    with pytest.raises(ValueError, match="position_ids restart within a row"):
        trainer.train()


def test_packing_without_the_callback(make_base, tokenizer, tmp_path):
    """Positions tell of packed documents; rows that are wrapped have none, so nothing can notice them."""

    def packed(strategy):
        options = {"packing": True, "packing_strategy": strategy, "max_length": 120, "callbacks": ()}
        return make_trainer(adapted(make_base), tmp_path / strategy, "SFTTrainer", tokenizer, **options)

    with pytest.raises(ValueError, match="position_ids restart within a row"):
        packed("bfd").train()
    wrapped = packed("wrapped")
    batch = next(iter(wrapped.get_train_dataloader()))
    assert batch["input_ids"].shape[1] == 120 and batch.get("position_ids") is None  # three documents of 40
    assert bool(batch["attention_mask"].all())


def test_what_is_refused(make_base):
    base = make_base("llama_gqa", torch.float32)
    with pytest.raises(ValueError, match="gate_factor must be at least 0"):
        cacheformers.parameter_groups(base, gate_factor=-1.0)
    with pytest.raises(ValueError, match="no parameter to train"):
        cacheformers.parameter_groups(base.requires_grad_(False))
