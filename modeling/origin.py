"""The model, tokenizer and text of a memory: hashes to recognize them by, and where each token is in the text."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from cacheformers.modeling.offloading import stored

SAMPLES = 32  # numbers of each parameter that tell two models apart
# Fields of a configuration that change hidden states, but neither the shapes nor the values of weights.
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
_HASHES: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, list[int], str]] = WeakKeyDictionary()
PROBE = "Call me Ishmael. 1851: “Loomings” — naïve\n\n  (3.14)"


@dataclass(frozen=True)
class Source:
    """The text of one row of a memory, which may be longer than what the row has read.

    Attributes:
        name: of the file or document.
        offsets: start and end of every token in `text`, in characters, `[tokens, 2]`, int32.
    """

    name: str
    text: str
    offsets: Tensor

    def passage(self, first: int, last: int) -> str:
        """Return the text of the tokens `first` to `last`, both included, on one line."""
        start, end = int(self.offsets[first, 0]), int(self.offsets[min(last, len(self.offsets) - 1), 1])
        return " ".join(self.text[start:end].split())

    def covering(self, tokens: int) -> Source:
        """Return this text with at least so many tokens: those that were read after it take no characters."""
        more = tokens - len(self.offsets)
        if more <= 0:
            return self
        return replace(self, offsets=torch.cat([self.offsets, self.offsets.new_full((more, 2), len(self.text))]))

    def followed_by(self, more: Source) -> Source:
        """Return this text with another one appended."""
        offsets = torch.cat([self.offsets, more.offsets + len(self.text)])
        return replace(self, text=self.text + more.text, offsets=offsets)


@dataclass
class Origin:
    """The model, tokenizer and texts that a memory comes from.

    Attributes:
        identity: hashes of the base model's configuration and weights and of the adapter, see `identify`.
        checked: a model with this identity has been seen since the memory was loaded.
        tokenizer: hash of the tokenizer, see `tokenizer_hash`.
        base, adapter: folders or Hub ids, from which the command line loads them again.
        sources: each row's text, None if unknown.
        parts: of a memory that was put together: the number of the first token of every text, and the text.
        saved: name of the save that this memory continues; empty if its rows have changed since.
    """

    identity: dict[str, str] = field(default_factory=dict)
    checked: bool = True
    tokenizer: str = ""
    base: str = ""
    adapter: str = ""
    sources: list[Source | None] = field(default_factory=list)
    parts: tuple[tuple[int, Source | None], ...] = ()
    saved: str = ""

    def texts(self, row: int) -> Sequence[tuple[int, Source | None]]:
        """Return the texts of a row, each with the number of its first token."""
        return self.parts or ((0, self.sources[row]),)

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was."""
        self.sources, self.saved = [self.sources[row] for row in rows], ""

    def join(self, others: Sequence[Origin]) -> None:
        """Append the rows of others."""
        self.sources, self.saved = [source for origin in (self, *others) for source in origin.sources], ""

    def reset(self, rows: Sequence[int]) -> None:
        """Forget the texts of the given rows."""
        self.sources = [None if row in rows else source for row, source in enumerate(self.sources)]
        self.saved = ""

    def clone(self) -> Origin:
        return copy.copy(self)  # its parts are replaced, never changed in place


def tokenized(tokenizer: PreTrainedTokenizerBase, text: str, name: str, begins: bool = True) -> tuple[Tensor, Source]:
    """Return the ids `[tokens]` of a text, and where each of them is in it.

    Args:
        begins: the text begins a document, so that the tokenizer adds its first tokens.

    Raises:
        ValueError: the tokenizer does not report offsets, or the text is empty.
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
    """Return the SHA-256 of all parts together."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash a tokenizer's vocabulary, and how it cuts one line. A vocabulary takes 0.2 s, so hashes are remembered."""
    ids = tokenizer(PROBE).input_ids
    known = _HASHES.get(tokenizer)
    if known is None or known[:2] != (len(tokenizer), ids):
        facts = [sorted(tokenizer.get_vocab().items()), ids]
        known = _HASHES[tokenizer] = (len(tokenizer), ids, digest(json.dumps(facts).encode()))
    return known[2]


def identify(decoder: nn.Module, adapters: Collection[str]) -> dict[str, str]:
    """Hash the configuration, base weights and adapter of a model that reads.

    Of every parameter the shape and a few numbers count, rounded to bfloat16, so that the hash depends neither on the
    precision nor on the device. Empty if parameters are divided among processes (FSDP2).

    Args:
        adapters: names of the active adapters.
    """
    sampled: dict[str, list[bytes]] = {"base": [], "adapter": []}
    for name, parameter in decoder.named_parameters():
        if isinstance(parameter, DTensor):
            return {}
        kind, plain = place(name, adapters)
        if kind is not None:
            values = stored(decoder, name) if parameter.is_meta else parameter
            sampled[kind] += [f"{plain} {tuple(parameter.shape)} ".encode(), sample(values)]
    config: Any = decoder.config
    facts = json.dumps([[name, getattr(config, name, None)] for name in CONFIG_FACTS], default=str)
    return {"config": digest(facts.encode()), **{kind: digest(*parts) for kind, parts in sampled.items()}}


def place(name: str, adapters: Collection[str]) -> tuple[str | None, str]:
    """Return whether a parameter is of the base or an active adapter (None: of another), and its name without PEFT."""
    parts = name.split(".")
    for number, part in enumerate(parts[:-1]):
        if part.startswith("lora_") or part == "modules_to_save":
            active = parts[number + 1] in adapters
            return "adapter" if active else None, ".".join(parts[: number + 1] + parts[number + 2 :])
    return "base", ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def sample(parameter: Tensor) -> bytes:
    """Return a few numbers of a parameter, evenly spread."""
    if parameter.is_meta:
        return b""
    flat = parameter.detach().flatten()
    chosen = flat[:: max(len(flat) // SAMPLES, 1)][:SAMPLES].to(torch.bfloat16)
    return chosen.cpu().float().numpy().tobytes()
