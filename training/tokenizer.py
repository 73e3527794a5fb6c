"""A tokenizer for a model from scratch: byte-level, so that it knows every text; bytes alone, or merges learned."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|endoftext|>"
BYTES = 257  # every byte and END


def open_tokenizer(name: str, vocabulary: int | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer `name`: "bytes", a folder or a Hub id.

    Args:
        vocabulary: entries of the model that it is for. With 256, as in the literature on enwik8, "bytes" has no END.

    Raises:
        OSError: there is none.
    """
    return byte_tokenizer(end=vocabulary != BYTES - 1) if name == "bytes" else AutoTokenizer.from_pretrained(name)


def byte_tokenizer(end: bool = True) -> PreTrainedTokenizerFast:
    """Ids are the bytes of UTF-8, 0 to 255.

    Args:
        end: 256 is END, which text that says so also becomes; without it such text is bytes like any other.
    """
    # The library writes printable bytes as themselves, and the others, in their order, as characters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(character) for character in alphabet if ord(character) < 256]
    order = printable + [byte for byte in range(256) if byte not in printable]
    tokenizer = Tokenizer(models.BPE(dict(zip(alphabet, order, strict=True)), []))
    return finished(tokenizer, end)


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding over bytes, learned from texts.

    Args:
        size: of the vocabulary, at most; at least 257.

    Raises:
        ValueError: the size does not suffice for the bytes.
    """
    if size < BYTES:
        raise ValueError(f"A byte-level vocabulary has at least {BYTES} entries, got {size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return finished(tokenizer)


def finished(tokenizer: Tokenizer, end: bool = True) -> PreTrainedTokenizerFast:
    """For transformers: text to bytes and back, and what begins, ends and pads a text."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END) if end else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
