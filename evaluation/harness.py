"""The models of this package in lm-eval (lm-evaluation-harness): its own command line, to which they are registered.

    cacheformers lm-eval --model cacheformers --model_args pretrained=ADAPTER --tasks TASK

Texts longer than a segment are read into the memory: contexts, prompts, and the whole documents of rolling
log-likelihoods. They are not cut, unless `--model_args` has `max_length`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers.utils.peft_utils import find_adapter_config_file

from cacheformers.common.loss import IGNORED, token_losses
from cacheformers.evaluation.readers import unfinished
from cacheformers.modeling.architectures import find_decoder, is_whole, unwrap
from cacheformers.modeling.method import active_options
from cacheformers.modeling.segments import new_memory

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}. lm-eval is in an extra: pip install "cacheformers[eval]"') from error

UNLIMITED = 2**40  # tokens
Request = tuple[Any, list[int], list[int]]  # what lm-eval calls it; ids of the context and of its continuation


@register_model("cacheformers")
class MemoryLM(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """lm-eval's model of Hugging Face, for models with a memory.

    Args:
        pretrained: a memory adapter, which names its base, or a model of this package; folder or Hub id.
        peft: a memory adapter, whose base is `pretrained`.
        max_length: cut inputs on the left to this many tokens. Default: they are not cut.
        options: those of lm-eval's `hf`.

    Raises:
        ValueError: the model has no memory, or the batch size is not a number.
    """

    _model: Any

    def __init__(
        self,
        pretrained: str,
        peft: str | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        **options: Any,
    ) -> None:
        if not str(batch_size).isdigit():
            raise ValueError(
                f"--batch_size {batch_size}: what fits depends on the lengths of the texts. Give a number."
            )
        if peft is None and find_adapter_config_file(pretrained) is not None:
            pretrained, peft = PeftConfig.from_pretrained(pretrained).base_model_name_or_path or "", pretrained
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained, "causal", peft=peft, batch_size=batch_size, device=device, **options)
        if is_whole(unwrap(self.model)):
            raise ValueError(
                f"{pretrained} was trained from scratch and has its own attention for a memory: evaluate it with "
                "--model hf, in this command."
            )
        if active_options(find_decoder(unwrap(self.model))) is None:
            raise ValueError(f"{peft or pretrained} has no memory: evaluate it with --model hf.")

    def _create_model(self, *arguments: Any, peft: str | None = None, **options: Any) -> None:
        """Load the base, then the adapter: lm-eval would cut embeddings to the tokenizer's size in between."""
        super()._create_model(*arguments, **options)
        if peft is not None:
            self._model = PeftModel.from_pretrained(self._model, peft)

    @property
    def max_length(self) -> int:
        return self._max_length or UNLIMITED

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether the model would have chosen it."""
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index][1]) - len(requests[index][2]))
        rows = override_bs or int(self.batch_size)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Log-likelihoods") as bar:
            for start in range(0, len(order), rows):
                batch = order[start : start + rows]
                found = self._continuations([requests[index][1:] for index in batch])
                for index, answer in zip(batch, found, strict=True):
                    answers[index] = answer
                    if requests[index][0] is not None:  # rolling windows are cached as a whole
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                bar.update(len(batch))
        return [answers[index] for index in range(len(requests))]

    @torch.no_grad()
    def _continuations(self, batch: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Read one batch of contexts and continuations (ids, longest first) from the beginning, in segments."""
        ids = [torch.tensor((context + continuation)[-self.max_length - 1 :]) for context, continuation in batch]
        labels = [row[1:].clone() for row in ids]
        for row, (_, continuation) in zip(labels, batch, strict=True):
            if len(continuation) > len(row):
                raise ValueError(f"max_length={self.max_length} cuts a continuation of {len(continuation)} tokens.")
            row[: len(row) - len(continuation)] = IGNORED
        nats, greedy = [0.0] * len(batch), [True] * len(batch)
        memory = new_memory(self.model, len(batch))
        step = memory.window.segment_tokens
        for start in range(0, len(labels[0]), step):
            going = len(unfinished(ids, start))
            if going < memory.batch_size:
                memory.select(range(going))
            inputs = pad_sequence([row[:-1][start : start + step] for row in ids[:going]], batch_first=True)
            rows = [row[start : start + step] for row in labels[:going]]
            wanted = pad_sequence(rows, batch_first=True, padding_value=IGNORED).to(self.device)
            scored = wanted != IGNORED
            if not bool(scored.any()):
                wanted, scored = wanted[:, -1:], scored[:, -1:]
            logits = self.model(
                input_ids=inputs.to(self.device),
                past_key_values=memory,
                use_cache=not memory.state.forward_is_segment,
                logits_to_keep=wanted.shape[1],
            ).logits
            lost, right = token_losses(logits, wanted).double().sum(1), (logits.argmax(-1) == wanted) | ~scored
            for place in range(going):
                nats[place] += float(lost[place])
                greedy[place] = greedy[place] and bool(right[place].all())
        return [(-lost, chosen) for lost, chosen in zip(nats, greedy, strict=True)]


if __name__ == "__main__":
    cli_evaluate()
