"""transformers' `Trainer` with a memory adapter: rates of its parts, logs, evaluation, accumulation, and resuming."""

import pytest
import torch
from conftest import adapter_config
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

import cacheformers
from cacheformers.modeling.method import METHODS

RATES = {"lora_rate": 2e-3, "memory_rate": 4e-3, "gate_factor": 5.0, "weight_decay": 0.1}


def rows(count=12, tokens=40):
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(3, 128, (count, tokens), generator=generator)
    return [{"input_ids": row, "labels": row} for row in drawn]


def make_trainer(model, folder, steps=6, **more):
    given = {
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "logging_steps": 2,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "seed": 1,
        **more,
    }
    return Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **given),
        train_dataset=rows(),
        eval_dataset=rows(2),
        optimizers=(torch.optim.AdamW(cacheformers.parameter_groups(model, **RATES)), None),
        callbacks=[cacheformers.MemoryCallback()],
    )


def adapted(make_base, method="neurocache"):
    torch.manual_seed(5)
    return get_peft_model(make_base("llama_gqa", torch.float32), adapter_config(method))


@pytest.mark.parametrize("method", METHODS)
def test_every_trained_parameter_has_one_group_and_its_rate(make_base, method):
    model = adapted(make_base, method)
    if method == "windowed":
        assert {group["name"] for group in cacheformers.parameter_groups(model)} == {"weights"}
        return
    groups = cacheformers.parameter_groups(model, **RATES)
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    rates = {group["name"]: group["lr"] for group in groups}
    wanted = {"weights": 2e-3, "memory": 4e-3, "gate": 2e-2, "beta": 0.01}
    assert all(rates[name] == pytest.approx(wanted[name]) for name in rates) and len(rates) > 1
    gates = [group for group in groups if group["name"] in ("gate", "beta")]
    assert all(group["weight_decay"] == 0.0 for group in gates)


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
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_resumed_run_is_the_whole_run(make_base, tmp_path):
    """Model, optimizer groups and schedule, with gradients accumulated over two batches."""
    whole = make_trainer(adapted(make_base), tmp_path / "whole", gradient_accumulation_steps=2)
    whole.train()
    model = adapted(make_base)
    resumed = make_trainer(model, tmp_path / "whole", gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (name, ours), theirs in zip(model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6), name


def test_what_is_refused(make_base):
    base = make_base("llama_gqa", torch.float32)
    with pytest.raises(ValueError, match="gate_factor must be at least 0"):
        cacheformers.parameter_groups(base, gate_factor=-1.0)
    with pytest.raises(ValueError, match="no parameter to train"):
        cacheformers.parameter_groups(base.requires_grad_(False))
