"""GGUF files as model folders: converted once, because an adapter records where its base is and a folder is enough."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

# What must be there for a folder to count as finished (a large model has an index of several safetensors files).
FINISHED = ("config.json", "tokenizer.json", "model.safetensors*")
ORIGIN = "origin.json"  # in a model folder: where its weights come from
# Types that are kept; all others become bfloat16.
LOSSLESS = {"F32": torch.float32, "F16": torch.float16}
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
EDGE = 1 << 20  # bytes at a file's beginning and end that tell it from others


def is_gguf(base: str) -> bool:
    return base.endswith(".gguf")


def check_file(gguf: Path) -> None:
    """Raise FileNotFoundError if there is no such file."""
    if not gguf.is_file():
        raise FileNotFoundError(f"{gguf} does not exist. Download it first: hf download OWNER/NAME FILE.gguf")


def converted(gguf: Path) -> Path:
    """Return the safetensors folder of a GGUF file, converting it first if needed.

    It lies beside the file, or in the Hugging Face cache where that is read-only. Its name holds a hash of the file, so
    another file of the same name gets a folder of its own.

    Raises:
        FileNotFoundError: no such file.
        ImportError, ValueError: see `convert`.
    """
    check_file(gguf)
    name = f"{gguf.stem}-{file_hash(gguf)}"
    beside, cached = gguf.parent / name, Path(HF_HOME) / "cacheformers" / name
    for folder in (beside, cached):
        if is_finished(folder):
            return folder
    out = beside if os.access(gguf.parent, os.W_OK) else cached
    print(f"Converting {gguf} to a model folder, once: {out}", flush=True)
    convert(gguf, out)
    return out


def convert(gguf: Path, out: Path, package: str | None = None) -> None:
    """Unpack a GGUF file's model and tokenizer into a new folder, which appears whole or not at all.

    Quantized weights become bfloat16; float16 and float32 stay what they are. `origin.json` says what they were.

    Args:
        package: where the file comes from, if anybody knows.

    Raises:
        ImportError: the package gguf is missing.
        ValueError: the file is broken, or holds a model that transformers cannot read.
    """
    if find_spec("gguf") is None:
        raise ImportError("Reading GGUF files takes the package gguf. Run: pip install 'cacheformers[gguf]'")
    out.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system as the result, so that a rename is enough.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / "model"
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            set_special_tokens(tokenizer, gguf)
            kind = weight_kind(gguf)
            dtype = LOSSLESS.get(kind, torch.bfloat16)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
            )
        except Exception as error:  # a broken file fails in many ways
            raise ValueError(f"{gguf} cannot be converted: {type(error).__name__}: {error}") from error
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        drop_unknown_tokens(folder, model.config.vocab_size)
        source = f"the {kind} weights of {gguf.name}" + (f" from {package}" if package else "")
        stored = str(dtype).removeprefix("torch.")
        write_origin(folder, source if kind in LOSSLESS else f"{source}, dequantized to {stored}")
        try:
            folder.rename(out)
        except OSError:
            if not is_finished(out):  # another process may have been faster
                raise


def set_special_tokens(tokenizer: PreTrainedTokenizerBase, gguf: Path) -> None:
    """Give a tokenizer the special tokens that the file names.

    transformers 5.17 takes the first token for the last one: answers would be taught an end that nothing stops at.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    for name, field in SPECIAL_TOKENS.items():
        found = reader.get_field(f"tokenizer.ggml.{field}_token_id")
        if found is not None and getattr(tokenizer, f"{name}_id") != found.contents():
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(found.contents())))


def drop_unknown_tokens(folder: Path, vocabulary: int) -> None:
    """Take out tokens that the model has no place for.

    transformers gives every byte-level tokenizer of a GGUF file an `<|endoftext|>`, also where the model has none.
    """
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    known = [token for token in content["added_tokens"] if token["id"] < vocabulary]
    if known != content["added_tokens"]:
        content["added_tokens"] = known
        file.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def is_finished(folder: Path) -> bool:
    return all(any(folder.glob(name)) for name in FINISHED)


def weight_kind(gguf: Path) -> str:
    """Return the name of the type that most of a file's matrices have, such as Q4_1."""
    from gguf import GGUFReader

    kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(gguf).tensors if len(tensor.shape) > 1)
    return kinds.most_common(1)[0][0]


def write_origin(folder: Path, origin: str) -> None:
    """Record in a model folder where its weights come from."""
    (folder / ORIGIN).write_text(json.dumps({"origin": origin}) + "\n", encoding="utf-8")


def base_origin(base: str) -> str | None:
    """Return what a base's folder says of where its weights come from; None for a Hub id and where nothing is known."""
    file = Path(converted(Path(base)) if is_gguf(base) else base) / ORIGIN
    return json.loads(file.read_text(encoding="utf-8"))["origin"] if file.exists() else None


def file_hash(file: Path) -> str:
    """Hash a file's size, beginning and end, because files of many gigabytes take too long to read."""
    size = file.stat().st_size
    with file.open("rb") as content:
        beginning = content.read(EDGE)
        content.seek(max(0, size - EDGE))
        return hashlib.sha256(b"%d %b %b" % (size, beginning, content.read())).hexdigest()[:8]
