"""What each of two processes does in `test_evaluation.py`; a module, so that a new process can import it."""

import gc
import os
import pickle

import torch
from accelerate import Accelerator
from conftest import BASES, COMMON, adapter_config, open_gates
from peft import get_peft_model
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from cacheformers.evaluation.held_out import HeldOut
from cacheformers.evaluation.model import EvalOptions, evaluate_model
from cacheformers.modeling.architectures import base_shape
from cacheformers.training.processes import shard

BASE = {**COMMON, **BASES["llama_gqa"]}


def evaluate():
    """The losses of every run over five documents of different lengths, in this process alone."""
    return losses_of(make_model("none"), documents(), skip_base=False)


def main(environment, wrapper, skip_base, file):
    """Evaluate as one of several processes, and write what came out.

    Args:
        environment: the variables that torchrun sets.
        wrapper: "none", "ddp" or "fsdp2".
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    Accelerator(cpu=True)
    model = make_model(wrapper)
    forwards = 0

    def count(*_):
        nonlocal forwards
        forwards += 1

    model.register_forward_pre_hook(count)
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    result = {"runs": losses_of(model, documents(), skip_base), "error": "", "sharded": sharded}
    try:
        losses_of(model, [*documents(), broken()], skip_base)
    except FloatingPointError as error:
        result["error"] = str(error)
    file.write_bytes(pickle.dumps({**result, "forwards": forwards}))
    del model  # before the connections: a DDP model that outlives them can wait for ever when it is freed
    gc.collect()
    torch.distributed.destroy_process_group()


def losses_of(model, chosen, skip_base):
    options = EvalOptions(controls=["other_document", "shuffled", "longer_window"], valid_rows=2, skip_base=skip_base)
    return {name: list(run.losses) for name, run in evaluate_model(model, chosen, options, memory_options()).items()}


def documents():
    generator = torch.Generator().manual_seed(5)
    lengths = (60, 33, 90, 20, 17)
    return [HeldOut(torch.randint(3, 127, (length,), generator=generator), 1, f"{length}") for length in lengths]


def broken():
    """A document with a token that the model makes NaN of."""
    ids = torch.arange(3, 43)
    ids[20] = 127
    return HeldOut(ids, 1, "broken")


def memory_options():
    return adapter_config().resolve(base_shape(AutoConfig.for_model(**BASE)))


def make_model(wrapper):
    """The same model in every process, its gates open."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**BASE))
    base.get_input_embeddings().weight.data[127] = float("nan")
    model = get_peft_model(base, adapter_config())
    open_gates(model)
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp2":
        shard(model, torch.device("cpu"), torch.distributed.get_world_size())
    return model
