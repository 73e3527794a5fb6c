"""Turn an adapter on its base model into one model folder: LoRA merged into the weights, the memory kept live.

    cacheformers export ADAPTER OUT

`AutoModelForCausalLM.from_pretrained(OUT)` loads it after `import cacheformers`, and with `trust_remote_code=True`
without that line.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file

from cacheformers.adapters.folders import check_base_folder, load_adapter_config, new_folder
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.composite import CompositeConfig, CompositeForCausalLM
from cacheformers.modeling.method import active_memories, is_method, method_named

DTYPES = ("auto", "float32", "bfloat16", "float16")


def export(
    adapter: str | Path,
    out: str | Path,
    base: str | Path | None = None,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
) -> Path:
    """Write an adapter and its base as one model, with the tokenizer of either.

    Args:
        adapter: folder or Hub id of the adapter.
        out: folder to write; it must be new or empty.
        base: folder or Hub id of the base model; default: the one that the adapter names.
        dtype: of the base's weights ("auto": as saved). LoRA is merged in float32 and rounded to it; the memory's
            weights stay in float32, as in the adapter.
        max_shard_size: of one safetensors file.

    Raises:
        ValueError: not an adapter of this package, or it does not fit its base. Nothing is written.
        OSError: files of the adapter or its base are missing, or cannot be written.
    """
    config: Any = load_adapter_config(adapter)
    if not is_method(config.peft_type):
        raise ValueError(f"{adapter} is an adapter of type {config.peft_type}: only memories can be exported.")
    source = base or config.base_model_name_or_path
    if source is None:
        raise ValueError(f"{adapter} does not name its base model: pass base (--base).")
    check_base_folder(source, "" if base else adapter)
    with new_folder(out) as folder:
        saved = AutoConfig.from_pretrained(source).dtype or torch.float32
        target = saved if dtype == "auto" else getattr(torch, dtype)
        # No copy in float32, which would take twice the memory of a base in half precision.
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.promote_types(saved, target))
        exported = to_model(PeftModel.from_pretrained(model, str(adapter)))
        for name, parameter in exported.named_parameters():
            if ".memory." not in name:
                parameter.data = parameter.data.to(target)
        exported.save_pretrained(folder, max_shard_size=max_shard_size)
        for place in (adapter, source):
            if has_tokenizer(place):
                AutoTokenizer.from_pretrained(place).save_pretrained(folder)
                break
    return Path(out)


def to_model(adapted: PeftModel) -> CompositeForCausalLM:
    """Convert an adapted model into a model class that computes the same. The adapted model is consumed."""
    config: Any = adapted.active_peft_config
    if not is_method(config.peft_type):
        raise ValueError(f"An adapter of type {config.peft_type} is active: only memories can be exported.")
    model = unwrap(adapted)
    if getattr(model, "is_quantized", False):
        raise ValueError("LoRA cannot be merged exactly into a quantized base: load the base without quantization.")
    kind: Any = method_named(config.peft_type).causal_lm
    trained = {memory.layer: memory.active_parts for memory in active_memories(find_decoder(model))}
    options = {field.name for field in fields(kind.config_class)} - {field.name for field in fields(CompositeConfig)}
    base = adapted.base_model.merge_lora()  # type: ignore[operator]  # of our tuner, which PEFT types as a module
    exported: CompositeForCausalLM = kind.from_base(base, **{option: getattr(config, option) for option in options})
    for memory in exported.memories():
        for part, module in trained[memory.layer]._asdict().items():
            if module is not None:
                getattr(memory, part).load_state_dict(module.state_dict())
    exported.eval()  # type: ignore[no-untyped-call]  # transformers leaves it without types
    return exported


def has_tokenizer(place: str | Path) -> bool:
    """Whether a folder or repository holds a tokenizer."""
    return cached_file(str(place), "tokenizer_config.json", _raise_exceptions_for_missing_entries=False) is not None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="cacheformers export",
        description="Write an adapter and its base as one model folder: LoRA merged, the memory kept live.",
    )
    parser.add_argument("adapter", help="folder or Hub id of the adapter")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--base", help="folder or Hub id of the base model; default: the one that the adapter names")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the base's weights; auto: as saved")
    parser.add_argument("--max-shard-size", default="5GB", help="of one safetensors file (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        out = export(given.adapter, given.out, given.base, given.dtype, given.max_shard_size)
    except (ValueError, OSError) as error:
        sys.exit(f"Nothing was written: {error}")
    print(f"Wrote {out}. Load it with `import cacheformers` and AutoModelForCausalLM.from_pretrained({str(out)!r}).")


if __name__ == "__main__":
    main()
