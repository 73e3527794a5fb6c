"""Compare estimated with measured memory of a training step; every setting trains in a process of its own.

    python benchmarks/estimate_memory.py  # half an hour on two cores
    python benchmarks/estimate_memory.py --only 3 4 --output /tmp/estimate

Weights are random, of SmolLM2-135M's shape; memory does not depend on their values. The child reads until the memory is
full, then takes three optimizer steps. On the CPU the measure is the peak of resident memory over the last two,
minus what was resident after a model of two layers was trained the same way (pages and scratch of libraries, 20 to 46
MiB), with malloc told to give memory back at once; on CUDA it is `torch.cuda.max_memory_allocated`. Results:
estimate.json and .md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring import opening, parser, peak_extra, save, table, trimmed
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import cacheformers
from cacheformers.common.base_model import checkpoint_activations
from cacheformers.modeling.architectures import architecture, base_shape
from cacheformers.modeling.method import method_named
from cacheformers.train_adapt import read_segment
from cacheformers.training.estimate import Estimate, Work, estimate, segments_before
from cacheformers.training.lanes import Group, Step

ROOT = Path(__file__).resolve().parents[1]
# glibc then maps and unmaps every larger tensor by itself: resident memory follows live tensors.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Setting:
    """Settings of one training to estimate and to measure."""

    method: str = "neurocache"
    base: str = "smollm2-135m"
    lanes: int = 1
    segment_tokens: int = 1024
    cache_size: int = 16384
    dtype: str = "bfloat16"
    activation_checkpointing: bool = False
    accumulation: int = 1
    backprop_segments: int = 1
    max_tokens: int | None = None
    optimizer: str = "adamw"
    vocab_size: int = 49152  # a small one shows the layers, which the loss hides otherwise
    layers: int = 30

    def config(self) -> PretrainedConfig:
        folder = ROOT / "recipes" / "base_configs" / self.base
        return AutoConfig.from_pretrained(folder, vocab_size=self.vocab_size, num_hidden_layers=self.layers)

    def adapter(self) -> Any:
        config = self.config()
        targets, upper = list(architecture(config).lora_targets), list(range(3 * self.layers // 4, self.layers))
        if self.method == "lora":
            return LoraConfig(
                r=16, lora_alpha=32, target_modules=targets, layers_to_transform=upper, task_type="CAUSAL_LM"
            )
        kind = method_named(self.method).adapter_config
        sizes = {"cache_size": self.cache_size} if hasattr(kind, "cache_size") else {}
        adapter = kind(segment_tokens=self.segment_tokens, target_modules=targets, task_type="CAUSAL_LM", **sizes)
        adapter.layers_to_transform = list(adapter.resolve(base_shape(config)).attention_layers)
        return adapter

    def work(self, device_type: str) -> Work:
        return Work(
            lanes=self.lanes,
            segment_tokens=self.segment_tokens,
            accumulation=self.accumulation,
            backprop_segments=self.backprop_segments,
            max_tokens=self.max_tokens,
            dtype=getattr(torch, self.dtype),
            optimizer=self.optimizer,
            activation_checkpointing=self.activation_checkpointing,
            device_type=device_type,
        )

    def estimate(self, device_type: str) -> Estimate:
        return estimate(self.config(), self.adapter(), self.work(device_type))


SMALL: dict[str, Any] = {"segment_tokens": 512, "cache_size": 2048, "vocab_size": 2048}
OTHERS: dict[str, dict[str, Any]] = {
    "memorizing": {},
    "infini_attention": {"backprop_segments": 2},
    "gated_attention": {"max_tokens": 4096},
    "windowed": {},
    "cacheformer_on_base": {"max_tokens": 4096},
}
SETTINGS = [
    Setting(),
    Setting(activation_checkpointing=True),
    Setting(lanes=2),
    Setting(lanes=2, accumulation=2),
    Setting(lanes=6, accumulation=6, segment_tokens=512, cache_size=2048, vocab_size=2048),
    Setting(segment_tokens=512, cache_size=2048),
    Setting(segment_tokens=512, cache_size=2048, backprop_segments=2),
    Setting(segment_tokens=512, cache_size=2048, dtype="float32"),
    Setting(segment_tokens=512, cache_size=2048, optimizer="adafactor"),
    Setting(method="lora"),
    Setting(vocab_size=2048),
    Setting(vocab_size=2048, activation_checkpointing=True),
    Setting(vocab_size=2048, lanes=2),
    Setting(vocab_size=2048, lanes=2, activation_checkpointing=True),
    Setting(method="lora", vocab_size=2048),
    Setting(base="opt-1.3b", layers=6, **SMALL),
    *(
        Setting(method=method, activation_checkpointing=checkpointing, **more, **SMALL)
        for method, more in OTHERS.items()
        for checkpointing in (False, True)
    ),
]


def main() -> None:
    """Estimate, measure, write."""
    given = parser(__doc__, "")
    given.add_argument("--device", default="cpu")
    given.add_argument("--only", type=int, nargs="+", help="numbers of the settings to run, from 0")
    given.add_argument("--child", help=argparse.SUPPRESS)
    options = given.parse_args()
    if options.child:
        setting = Setting(**json.loads(options.child))
        train(replace(setting, layers=2, vocab_size=512), options.device)
        print(train(setting, options.device))
        return
    rows = []
    for setting in [SETTINGS[number] for number in options.only] if options.only else SETTINGS:
        found = setting.estimate(torch.device(options.device).type)
        moment, measured = max(found.totals, key=found.totals.__getitem__), measure(setting, options.device)
        rows.append({"setting": asdict(setting), "moment": moment, "estimate": found.peak, "measured": measured})
        print(rows[-1], flush=True)
    save("estimate", options, {"rows": rows}, page)


def measure(setting: Setting, device: str = "cpu") -> int:
    """Return the peak bytes of a training in a new process."""
    command = [sys.executable, __file__, "--device", device, "--child", json.dumps(asdict(setting))]
    done = subprocess.run(command, env={**os.environ, **MALLOC}, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def train(setting: Setting, device: str) -> int:
    """Fill the memory and take three optimizer steps; return the peak of the last two in bytes."""
    gc.collect()
    before = trimmed()
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(setting.config(), dtype=getattr(torch, setting.dtype)).to(device)
    adapter = setting.adapter()
    model = get_peft_model(base, adapter).train()
    if setting.activation_checkpointing:
        checkpoint_activations(base)
        base.disable_input_require_grads()  # or every frozen layer below the adapter would be run backwards
    kind = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}[setting.optimizer]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = kind(trained, lr=1e-4)
    rows, place = setting.lanes // setting.accumulation, torch.device(device)
    options = None if setting.method == "lora" else adapter.resolve(base_shape(setting.config()))
    # With three steps to come, a document that is read whole ends with the last.
    segments = segments_before(options, setting.work(place.type))
    segments -= 2 * setting.backprop_segments if setting.max_tokens else 0
    groups = [
        Group(None, None if options is None else cacheformers.new_memory(model, rows))  # type: ignore[arg-type]  # no lanes are read
        for _ in range(setting.accumulation)
    ]

    def losses(group: Group, segments: int) -> torch.Tensor:
        ids = torch.randint(3, setting.vocab_size, (rows, segments * setting.segment_tokens))
        step = Step(ids, ids, torch.ones_like(ids), torch.zeros(rows, dtype=torch.bool), [0] * rows)
        return read_segment(model, group, step, place)

    for group in groups:
        for _ in range(segments):
            with torch.no_grad():
                losses(group, 1)

    def step() -> None:
        for group in groups:
            loss = losses(group, setting.backprop_segments).mean() / setting.accumulation
            (loss + group.own_loss()).backward()
            del loss
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # mere reading keeps more of a segment than a step does
    already = trimmed() - before if place.type == "cpu" else torch.cuda.memory_allocated(place)
    return already + max(peak_extra(step, place.type) for _ in range(2))


def page(result: dict[str, Any]) -> str:
    """Format the result as a page."""
    usual = asdict(Setting())
    text = (
        "Every line trains in a process of its own; it names what differs from: "
        f"{', '.join(f'{name} {value}' for name, value in usual.items())}. `moment` is where the estimate has its peak."
    )
    rows = []
    for row in result["rows"]:
        changes = [f"{name} {value}" for name, value in row["setting"].items() if value != usual[name]]
        sizes = f"{row['estimate'] / 2**20:,.0f}", f"{row['measured'] / 2**20:,.0f}"
        rows.append(
            [", ".join(changes) or "as it is", row["moment"], *sizes, f"{row['estimate'] / row['measured']:.3f}"]
        )
    lines = opening("Estimated and measured memory of a training step", result, text)
    return "\n".join(lines + table(["setting", "moment", "estimate MiB", "measured MiB", "ratio"], rows))


if __name__ == "__main__":
    main()
