"""Measure whether a process grows while a model with a memory is trained in bfloat16 (autocast), on a CPU.

    python benchmarks/growth.py recipes/model_configs/books_neurocache.json  # two minutes
    python benchmarks/growth.py recipes/model_configs/books_sliding.json

Random tokens, plain gradient descent. Prints the process's resident memory as it is, and what malloc has given out
(its own count, without free blocks and without tensors that it maps by themselves), which grows if something is kept.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import torch
from measuring import held
from transformers import AutoConfig, AutoModelForCausalLM

from cacheformers.modeling.segments import new_memory
from cacheformers.training.scratch import read_config

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of glibc's mallinfo2


class Malloc(ctypes.Structure):
    """What glibc's malloc says of itself."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def main() -> None:
    """Train, and print a line every few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="configuration of a model with a memory")
    parser.add_argument("--steps", type=int, default=60, help="(default: %(default)s)")
    parser.add_argument("--lanes", type=int, default=4, help="(default: %(default)s)")
    options = parser.parse_args()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Malloc
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read_config(options.config))).train()
    memory = new_memory(model, options.lanes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = model.config.get_text_config()
    for step in range(1, options.steps + 1):
        ids = torch.randint(0, text.vocab_size, (options.lanes, model.config.segment_tokens))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, past_key_values=memory).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            found: Malloc = libc.mallinfo2()
            print(f"step {step}: resident {held('VmRSS') >> 20} MiB, given out {found.uordblks >> 20} MiB", flush=True)


if __name__ == "__main__":
    main()
