"""What predictions that stand in one folder must have in common."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.utils.hub import cached_file

from cacheformers.evaluation.longbench.methods import Method
from cacheformers.evaluation.longbench.options import LongBenchOptions
from cacheformers.training.base_model import ModelOptions, base_identity, weights_identity

RETRIEVAL = ("retriever", "chunk_words", "chunks")
CUT = "in the middle, as the official code does; then again, shorter, until prompt and answer fit"


def model_settings(model: ModelOptions, config: PretrainedConfig, adapter: str | None) -> dict[str, Any]:
    """Describe what answers, as JSON holds it.

    Args:
        adapter: its identity (`adapter_identity`).

    Raises:
        OSError, ValueError: the base model's weights cannot be found or read.
    """
    return {
        "base": Path(model.base).name,
        "base_config": base_identity(config),
        "base_weights": weights_identity(model.base, config),
        "adapter": adapter,
        "dtype": model.dtype,
        "quantize": model.quantize,
        "attn_implementation": model.attn_implementation,
    }


def method_settings(
    method: Method,
    answering: dict[str, Any],
    options: LongBenchOptions,
) -> dict[str, Any]:
    """Describe all that predictions depend on, apart from the records, as JSON holds it.

    Args:
        answering: base and adapter (`model_settings`).
    """
    return {
        "method": method.name,
        **answering,
        "adapter": answering["adapter"] if method.adapter is not None else None,
        "chat": options.chat,
        "max_length": method.max_length,
        "cut": None if method.max_length is None else CUT,
        "batch": options.batch,
        "longbench_e": options.longbench_e,
        **(retrieval_settings(options) if method.name == "retrieval" else {}),
        **({"rope_factor": options.rope_factor} if method.name == "position-interpolation" else {}),
        **({"forget": options.forget} if method.remembers else {}),
    }


def retrieval_settings(options: LongBenchOptions) -> dict[str, Any]:
    """Describe what chooses chunks."""
    given = {name: getattr(options, name) for name in RETRIEVAL}
    if options.retriever == "bm25":
        return given
    encoder = AutoConfig.from_pretrained(options.retriever)
    return {**given, "retriever_weights": weights_identity(options.retriever, encoder)}


def adapter_identity(adapter: str | None) -> str | None:
    """Hash the files of an adapter, which may be a folder or a Hub id.

    Raises:
        OSError: they are not there.
    """
    if adapter is None:
        return None
    digest = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        digest.update(Path(str(cached_file(adapter, name))).read_bytes())
    return digest.hexdigest()[:16]
