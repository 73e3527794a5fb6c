"""DeepSpeed ZeRO-2 against one process: the same training, stopped and resumed, on two CPU processes.

    pip install deepspeed        # not a dependency
    python benchmarks/check_zero2.py

Accelerate starts DeepSpeed on accelerators only, so this script tells it how many processes there are; everything else
is as in train_adapt.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import cacheformers
from cacheformers.training.checkpoints import Checkpoints
from cacheformers.training.groups import make_groups
from cacheformers.training.history import History
from cacheformers.training.loop import TrainingRun, train
from cacheformers.training.optim import Rates, make_optimizer, make_schedule
from cacheformers.training.run_state import inner, trained_state

LANES, STEPS = 4, 20


class RandomDocuments:
    """Six documents of random tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(3, 128, (length,), generator=generator) for length in (60, 90, 20, 133, 70, 45)]

    def at(self, position: int, seed: int) -> int:
        epoch, place = divmod(position, len(self.ids))
        return int(np.random.default_rng((seed, epoch)).permutation(len(self.ids))[place])

    def tokens(self, index: int) -> torch.Tensor:
        return self.ids[index]

    def learnt(self, index: int) -> None:
        """All tokens are."""

    def release(self, position: int) -> None:
        """All of them stay."""


def work(output: Path, end: int, zero: bool) -> None:
    """Train up to step `end`, from the newest checkpoint if there is one."""
    torch.manual_seed(0)
    accelerator = start_zero() if zero else Accelerator(cpu=True)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=64,
        )
    )
    adapter = cacheformers.NeurocacheAdapterConfig(segment_tokens=16, cache_size=40, topk=4, search="exact", r=4)
    torch.manual_seed(0)
    model = get_peft_model(base, adapter)
    model.train()
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model, Rates(1e-2, 1e-2, 1e-1)))
    documents: Any = RandomDocuments()
    process, processes = accelerator.process_index, accelerator.num_processes
    groups = make_groups(model, documents, LANES, 16, 0, True, process=process, processes=processes)
    checkpoints = Checkpoints(output / "checkpoints")
    run = TrainingRun(accelerator, wrapped, model, optimizer, groups, checkpoints, {}, end, 1.0, History())
    newest = checkpoints.newest()
    if newest is not None:
        run.restore(newest)
    schedule = make_schedule(inner(optimizer), STEPS, 2, run.history.steps)
    train(run, schedule, checkpoint_every=0, log_every=STEPS, stop_after=None)
    weights = trained_state(model)
    if process == 0:
        save_file(weights, output / "weights.safetensors")


def start_zero() -> Accelerator:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    settings = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": LANES // 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    rank = int(os.environ["RANK"])
    known = {"num_processes": 2, "process_index": rank, "local_process_index": rank}
    PartialState._shared_state.update(known)
    accelerator.state.__dict__.update(known)
    return accelerator


def main() -> None:
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]), int(sys.argv[2]), zero="RANK" in os.environ)
        return
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for output, launcher, ends in (
            ("one", [], [STEPS]),
            ("zero", several, [STEPS]),
            ("resumed", several, [9, STEPS]),
        ):
            (folder / output).mkdir()
            for end in ends:
                command = [sys.executable, *launcher, __file__, str(folder / output), str(end)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
        one, zero, resumed = (load_file(folder / name / "weights.safetensors") for name in ("one", "zero", "resumed"))
    for title, other in (("ZeRO-2 against one process", one), ("resumed against uninterrupted", resumed)):
        difference = max(float((zero[name] - other[name]).abs().max()) for name in zero)
        print(f"{title}: largest difference of {len(zero)} trained tensors {difference:.1e}")
        if difference > 1e-5:
            sys.exit("That is more than 1e-5.")


if __name__ == "__main__":
    main()
