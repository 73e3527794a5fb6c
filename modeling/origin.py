"""What a memory was read with, and which text its tokens come from."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

SAMPLES = 32  # numbers of each parameter that tell two models apart
# Of a configuration: what changes hidden states but neither the shape of a weight nor its value.
CONFIG_FACTS = (
    "rope_parameters",
    "partial_rotary_factor",
    "hidden_act",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_eps",
    "sliding_window",
    "layer_types",
)
PROBE = "Call me Ishmael. 1851: “Loomings” — naïve\n\n  (3.14)"


@dataclass(frozen=True)
class Source:
    """The text of one row of a memory. It may go on after what the row has read.

    Attributes:
        name: of the file or document.
        text: all of it.
        offsets: first and behind-the-last character of every token in `text`, `[tokens, 2]`, int32.
    """

    name: str
    text: str
    offsets: Tensor

    def passage(self, first: int, last: int) -> str:
        """The text of the tokens `first` to `last`, both included, on one line."""
        start, end = int(self.offsets[first, 0]), int(self.offsets[min(last, len(self.offsets) - 1), 1])
        return " ".join(self.text[start:end].split())

    def followed_by(self, more: Source) -> Source:
        """This text and another one behind it."""
        offsets = torch.cat([self.offsets, more.offsets + len(self.text)])
        return replace(self, text=self.text + more.text, offsets=offsets)


@dataclass
class Origin:
    """What a memory was read with and from.

    Attributes:
        identity: hashes of the base model's configuration and weights and of the adapter, see `identify`.
        checked: a model with this identity has been seen since the memory was loaded.
        tokenizer: hash of the tokenizer, see `tokenizer_hash`.
        base, adapter: folders or Hub ids, by which the command line finds them again.
        sources: each row's text, where it is known.
        saved: the save that this memory goes on from; empty where its rows have changed since.
    """

    identity: dict[str, str] = field(default_factory=dict)
    checked: bool = True
    tokenizer: str = ""
    base: str = ""
    adapter: str = ""
    sources: list[Source | None] = field(default_factory=list)
    saved: str = ""

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was."""
        self.sources, self.saved = [self.sources[row] for row in rows], ""

    def reset(self, rows: Sequence[int]) -> None:
        """The given rows have read nothing."""
        self.sources = [None if row in rows else source for row, source in enumerate(self.sources)]
        self.saved = ""

    def clone(self) -> Origin:
        return copy.copy(self)  # its parts are replaced, never changed


def tokenized(tokenizer: PreTrainedTokenizerBase, text: str, name: str, begins: bool = True) -> tuple[Tensor, Source]:
    """A text's ids `[tokens]`, and where each of them lies in it.

    Args:
        begins: the text begins a document: with the tokens that the tokenizer puts first.

    Raises:
        ValueError: the tokenizer does not tell offsets, or there is no text.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell which characters a token covers: load the fast tokenizer."
        )
    encoded = tokenizer(text, add_special_tokens=begins, return_offsets_mapping=True, verbose=False)
    ids = torch.tensor(encoded.input_ids, dtype=torch.long)
    if not text or not len(ids):
        raise ValueError(f"{name or 'The text'} is empty: there is nothing to read.")
    return ids, Source(name, text, torch.tensor(encoded["offset_mapping"], dtype=torch.int32))


def digest(*parts: bytes | memoryview) -> str:
    """SHA-256 of bytes, one part after another."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """By which two tokenizers differ: their vocabularies, and how they cut a line."""
    facts = [sorted(tokenizer.get_vocab().items()), tokenizer(PROBE).input_ids]
    return digest(json.dumps(facts).encode())


def identify(decoder: nn.Module, adapters: Collection[str]) -> dict[str, str]:
    """By which two readers differ: hashes of configuration, base weights and adapter.

    Of every parameter, shape and a few numbers count, rounded to bfloat16, so that a model is the same in either
    precision and on every device. Empty where parameters are divided among processes (FSDP2).

    Args:
        adapters: names of the active ones.
    """
    sampled: dict[str, list[bytes]] = {"base": [], "adapter": []}
    for name, parameter in decoder.named_parameters():
        if isinstance(parameter, DTensor):
            return {}
        kind, plain = place(name, adapters)
        if kind is not None:
            sampled[kind] += [f"{plain} {tuple(parameter.shape)} ".encode(), sample(parameter)]
    config: Any = decoder.config
    facts = json.dumps([[name, getattr(config, name, None)] for name in CONFIG_FACTS], default=str)
    return {"config": digest(facts.encode()), **{kind: digest(*parts) for kind, parts in sampled.items()}}


def place(name: str, adapters: Collection[str]) -> tuple[str | None, str]:
    """Whether a parameter is of the base or of an active adapter (None: of another), and its name without PEFT's."""
    parts = name.split(".")
    for number, part in enumerate(parts[:-1]):
        if part.startswith("lora_") or part == "modules_to_save":
            active = parts[number + 1] in adapters
            return "adapter" if active else None, ".".join(parts[: number + 1] + parts[number + 2 :])
    return "base", ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def sample(parameter: Tensor) -> bytes:
    """A few numbers of a parameter, evenly spread."""
    if parameter.is_meta:
        return b""
    flat = parameter.detach().flatten()
    chosen = flat[:: max(len(flat) // SAMPLES, 1)][:SAMPLES].to(torch.bfloat16)
    return chosen.cpu().float().numpy().tobytes()
