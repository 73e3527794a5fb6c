"""What predictions that stand in one folder must have in common."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from cacheformers.common.base_model import ModelOptions, base_identity
from cacheformers.evaluation.longbench.methods import Method
from cacheformers.evaluation.longbench.options import LongBenchOptions

RETRIEVAL = ("retriever", "chunk_words", "chunks")


def method_settings(
    method: Method,
    model: ModelOptions,
    options: LongBenchOptions,
    config: PretrainedConfig,
    adapter: str | None,
) -> dict[str, Any]:
    """All that predictions depend on, apart from the records, as JSON holds it.

    Args:
        adapter: its identity (`adapter_identity`).
    """
    return {
        "method": method.name,
        "base": Path(model.base).name,
        "base_config": base_identity(config),
        "adapter": adapter if method.adapter is not None else None,
        "dtype": model.dtype,
        "quantize": model.quantize,
        "attn_implementation": model.attn_implementation,
        "chat": options.chat,
        "max_length": method.max_length,
        "batch": options.batch,
        "longbench_e": options.longbench_e,
        **({name: getattr(options, name) for name in RETRIEVAL} if method.name == "retrieval" else {}),
        **({"rope_factor": options.rope_factor} if method.name == "position-interpolation" else {}),
        **({"forget": options.forget} if method.remembers else {}),
    }


def adapter_identity(adapter: str | None) -> str | None:
    """A short hash of a local adapter's files; a Hub id as it is."""
    if adapter is None or not Path(adapter).is_dir():
        return adapter
    digest = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        digest.update((Path(adapter) / name).read_bytes())
    return digest.hexdigest()[:16]
