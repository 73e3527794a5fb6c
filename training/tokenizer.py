"""A tokenizer for a model from scratch: byte-level, so that no text is unknown to it; with merges learnt, or none."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|endoftext|>"
BYTES = 257  # entries of the smallest one: every byte and END


def open_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer `name`: "bytes", a folder or a Hub id.

    Raises:
        OSError: there is none.
    """
    return train_tokenizer([], BYTES) if name == "bytes" else AutoTokenizer.from_pretrained(name)


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding over bytes, learnt from texts.

    Args:
        size: of the vocabulary, at most; at least 257.

    Raises:
        ValueError: the size does not suffice for the bytes.
    """
    if size < BYTES:
        raise ValueError(f"A byte-level vocabulary has at least {BYTES} entries, got {size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)
