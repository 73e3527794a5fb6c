"""A byte-level tokenizer for a model from scratch, which encodes any text: bytes alone, or with learned merges."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|endoftext|>"
BYTES = 257  # every byte and END


def open_tokenizer(name: str, vocabulary: int | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer `name`: "bytes", a folder or a Hub id.

    Args:
        vocabulary: size of the model's vocabulary. With 256, as in the literature on enwik8, "bytes" has no END.

    Raises:
        OSError: the tokenizer does not exist.
    """
    return byte_tokenizer(end=vocabulary != BYTES - 1) if name == "bytes" else AutoTokenizer.from_pretrained(name)


def byte_tokenizer(end: bool = True) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose ids 0 to 255 are the bytes of UTF-8.

    Args:
        end: add END as 256, also where the text contains it; without it such text is bytes like any other.
    """
    # The library writes printable bytes as themselves, and the others, in their order, as characters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(character) for character in alphabet if ord(character) < 256]
    order = printable + [byte for byte in range(256) if byte not in printable]
    tokenizer = Tokenizer(models.BPE(dict(zip(alphabet, order, strict=True)), []))
    return finished(tokenizer, end)


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Learn byte-pair encoding over bytes from texts.

    Args:
        size: largest size of the vocabulary; at least 257.

    Raises:
        ValueError: the size is smaller than that.
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
    """Wrap a tokenizer for transformers, with byte-level decoding and END as begin, end and padding."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END) if end else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
