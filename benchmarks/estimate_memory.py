"""Estimated against measured memory of a training step: every setting trains in a process of its own.

    python benchmarks/estimate_memory.py  # half an hour on two cores; writes docs/results/estimate.md
    python benchmarks/estimate_memory.py --only 3 4 --out /tmp/estimate.md

Weights are random, of SmolLM2-135M's shape; memory does not depend on their values. The child reads until the memory is
full, then takes three optimizer steps. On the CPU the measure is the peak of resident memory over the last two,
minus what was resident after the imports, with malloc told to give memory back at once; on CUDA it is
`torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import cacheformers
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
    """One training to estimate and to measure."""

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
        targets, upper = list(architecture(config).feed_forward), list(range(3 * self.layers // 4, self.layers))
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
    Setting(method="memorizing", **SMALL),
    Setting(method="memorizing", activation_checkpointing=True, **SMALL),
    Setting(method="infini_attention", backprop_segments=2, **SMALL),
    Setting(method="infini_attention", backprop_segments=2, activation_checkpointing=True, **SMALL),
    Setting(method="gated_attention", max_tokens=4096, **SMALL),
    Setting(method="gated_attention", max_tokens=4096, activation_checkpointing=True, **SMALL),
    Setting(method="windowed", **SMALL),
    Setting(method="windowed", activation_checkpointing=True, **SMALL),
    Setting(method="cacheformer", max_tokens=4096, **SMALL),
    Setting(method="cacheformer", max_tokens=4096, activation_checkpointing=True, **SMALL),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the settings to run, from 0")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "estimate.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps({"measured": train(Setting(**json.loads(arguments.child)), arguments.device)}))
        return
    chosen = [SETTINGS[number] for number in arguments.only] if arguments.only else SETTINGS
    rows = []
    for setting in chosen:
        rows.append(
            row(setting, setting.estimate(torch.device(arguments.device).type), measure(setting, arguments.device))
        )
        print(rows[-1], flush=True)
    arguments.out.write_text(page(rows), encoding="utf-8")


def measure(setting: Setting, device: str = "cpu") -> int:
    """Peak bytes of a training in a fresh process."""
    command = [sys.executable, __file__, "--device", device, "--child", json.dumps(asdict(setting))]
    done = subprocess.run(command, env={**os.environ, **MALLOC}, stdout=subprocess.PIPE, text=True, check=True)
    measured: int = json.loads(done.stdout.splitlines()[-1])["measured"]
    return measured


def train(setting: Setting, device: str) -> int:
    """Fill the memory and take three optimizer steps; return the peak of the last two in bytes."""
    process = psutil.Process()
    before = process.memory_info().rss
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(setting.config(), dtype=getattr(torch, setting.dtype)).to(device)
    adapter = setting.adapter()
    model = get_peft_model(base, adapter).train()
    if setting.activation_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
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
        Group(None, None if options is None else cacheformers.new_memory(model, rows))  # type: ignore[arg-type]
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
    for number in range(3):
        if number == 1:  # mere reading keeps more of a segment than a step does
            reset_peak(device)
        for group in groups:
            loss = losses(group, setting.backprop_segments).mean() / setting.accumulation
            (loss + group.own_loss()).backward()
            del loss
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return peak(device) - (before if place.type == "cpu" else 0)


def reset_peak(device: str) -> None:
    """Forget the peak of building and filling."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: str) -> int:
    """Peak bytes: allocated tensors on CUDA, resident memory on the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def row(setting: Setting, estimated: Estimate, measured: int) -> str:
    """One line of the table."""
    plain = Setting()
    changes = [
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
        for name, value in asdict(setting).items()
        if value != getattr(plain, name)
    ]
    sizes = f"{estimated.peak / 2**20:,.0f} | {measured / 2**20:,.0f} | {estimated.peak / measured:.3f}"
    moment = max(estimated.totals, key=estimated.totals.__getitem__)
    return f"| {', '.join(changes) or 'as it is'} | {moment} | {sizes} |"


def page(rows: list[str]) -> str:
    """The results as Markdown."""
    plain = ", ".join(f"{name} {value}" for name, value in asdict(Setting()).items())
    lines = [
        "# Estimated and measured memory of a training step",
        "",
        f"`{shlex.join(['python', *sys.argv])}` on {datetime.date.today()}, commit {commit()}, "
        f"{platform.machine()} with {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.",
        "",
        f"Every line trains in a process of its own; it names what differs from: {plain}. `moment` is where the "
        "estimate has its peak. The docstring of the benchmark says how the peak is measured.",
        "",
        "| setting | moment | estimate MiB | measured MiB | ratio |",
        "|---|---|---:|---:|---:|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
