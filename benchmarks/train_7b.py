"""Seconds a step and peak memory of a 7B recipe with random weights: needs neither weights nor documents.

    python benchmarks/train_7b.py --steps 24 --stop 12    # on a GPU of 40 GiB or more
    python benchmarks/train_7b.py --steps 24              # goes on from the checkpoint
    python benchmarks/train_7b.py --base smollm2-135m --segment 256 --cache 1024 --steps 8   # without a GPU

The base is made on the device from its configuration and a seed, so that a second command has the same weights. Each
lane reads one endless document of random tokens; the memory is full after cache / segment steps, and only steps after
that are timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import cacheformers
from cacheformers.training.checkpoints import Checkpoints
from cacheformers.training.estimate import estimate
from cacheformers.training.groups import make_groups
from cacheformers.training.history import History
from cacheformers.training.loop import TrainingRun, step
from cacheformers.training.optim import Rates, make_optimizer, make_schedule
from cacheformers.training.run_state import inner
from cacheformers.training.stopping import Stopping

ROOT = Path(__file__).resolve().parents[1]


class RandomDocument:
    """One document of random tokens for every position of the endless row."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.length = vocab_size, length

    def at(self, position: int, seed: int) -> int:
        return position

    def tokens(self, index: int) -> torch.Tensor:
        return torch.randint(3, self.vocab_size, (self.length,), generator=torch.Generator().manual_seed(index))

    def release(self, position: int) -> None:
        """Nothing is held."""

    def name(self, index: int) -> str:
        return f"random document {index}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="llama-2-7b", help="a folder of recipes/base_configs")
    parser.add_argument("--segment", type=int, default=2048)
    parser.add_argument("--cache", type=int, default=16384)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--activation_checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--stop", type=int, help="write a checkpoint and end after this step")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "train_7b")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device = accelerator.device
    run, estimated = make_run(options, accelerator)
    newest = run.checkpoints.newest()
    if newest is not None:
        run.restore(newest)
        print(f"Going on from {newest}")
    schedule = make_schedule(inner(run.optimizer), options.steps, options.steps // 10, run.history.steps)
    full = options.cache // options.segment + 1
    seconds = []
    end = min(options.stop or options.steps, options.steps)
    with Stopping() as stopping:
        while run.history.steps < end:
            started = time.perf_counter()
            step(run, stopping)
            schedule.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - started
            if run.history.steps > full:
                seconds.append(took)
            print(f"step {run.history.steps}: loss {run.history.losses[-1]:.4f}, {took:.2f} s", flush=True)
            if run.history.steps == 1 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()  # making the weights is over
    started = time.perf_counter()
    path = run.save()
    result: dict[str, Any] = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "losses": run.history.losses,
        "median seconds a step, memory full": median(seconds) if seconds else None,
        "timed steps": len(seconds),
        "seconds to save": time.perf_counter() - started,
        "checkpoint bytes": sum(file.stat().st_size for file in path.iterdir()),
        "estimated peak GiB": estimated / 2**30,
        "measured peak GiB": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }
    print(json.dumps(result, indent=1))


def make_run(options: argparse.Namespace, accelerator: Accelerator) -> tuple[TrainingRun, int]:
    """The run at its start, and its estimated peak in bytes."""
    config = AutoConfig.from_pretrained(ROOT / "recipes" / "base_configs" / options.base)
    adapter = cacheformers.NeurocacheAdapterConfig(
        segment_tokens=options.segment, cache_size=options.cache, task_type="CAUSAL_LM"
    )
    estimated = estimate(
        config,
        adapter,
        lanes=options.lanes,
        segment_tokens=options.segment,
        accumulation=options.accumulation,
        activation_checkpointing=options.activation_checkpointing,
        device_type=accelerator.device.type,
    )
    torch.manual_seed(0)
    with torch.device(accelerator.device):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(base, adapter)
    if options.activation_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
        base.disable_input_require_grads()
    model.train()
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model, Rates(3e-4, 3e-4, 9e-3)))
    documents: Any = RandomDocument(config.vocab_size, options.steps * options.segment + 1)
    groups = make_groups(model, documents, options.lanes, options.segment, 0, True, options.accumulation)
    checkpoints = Checkpoints(options.output, keep=1)
    return TrainingRun(
        accelerator, wrapped, model, optimizer, groups, checkpoints, {}, options.steps, 1.0, History()
    ), estimated.peak


if __name__ == "__main__":
    main()
