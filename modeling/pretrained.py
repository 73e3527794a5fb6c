"""The base of this package's configurations and model classes: how they are saved, uploaded, loaded and called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple
from transformers.utils.hub import PushToHubMixin

# Called with the folder in which an adapter or a model was saved. `cacheformers.hub` writes model cards here.
AFTER_SAVING: list[Callable[[Path], None]] = []

SHIM = "modeling_cacheformers"
SHIM_TEXT = '''"""This model's classes are in the package cacheformers; this file only names them."""

from cacheformers import {config}, {model}, {causal}

__all__ = ["{config}", "{model}", "{causal}"]
'''


def saved(folder: str | Path) -> None:
    """Call every function of `AFTER_SAVING`."""
    for act in AFTER_SAVING:
        act(Path(folder))


class SavedConfig(PretrainedConfig):
    """A configuration that is saved with a small file which names its model's classes.

    Through that file transformers finds the classes with `trust_remote_code`, without an import of this package.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # transformers leaves it without types
        autos = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
        self.auto_map = {auto: f"{SHIM}.{name}" for auto, name in zip(autos, self.class_names(), strict=True)}

    def class_names(self) -> tuple[str, str, str]:
        """Return the names of the configuration and of the models without and with a head."""
        name = type(self).__name__
        return name, name.replace("Config", "Model"), name.replace("Config", "ForCausalLM")

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `config.json` and the file that names the classes."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        config, model, causal = self.class_names()
        (folder / f"{SHIM}.py").write_text(SHIM_TEXT.format(config=config, model=model, causal=causal))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy this package's files beside every saved model."""


class Uploads(PushToHubMixin):
    """Makes `push_to_hub` upload a model folder within the context manager `uploading(folder, repository name)`."""

    uploading: Callable[[Path, str], AbstractContextManager[None]] = staticmethod(lambda folder, name: nullcontext())

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **options: Any) -> Any:
        with Uploads.uploading(Path(working_dir), repo_id):
            return super()._upload_modified_files(working_dir, repo_id, *args, **options)


class MemoryPreTrainedModel(Uploads, PreTrainedModel):
    """Base of all model classes.

    Loading raises ValueError where transformers would only warn: if tensors are missing in the file, or if the file
    holds memories that the configuration does not describe.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        # Not in from_pretrained: its report differs if it goes on to load an adapter.
        super()._adjust_missing_and_unexpected_keys(loading_info)
        missing = sorted(loading_info.missing_keys)
        foreign = sorted(key for key in loading_info.unexpected_keys if ".memory." in key)
        if missing or foreign:
            what = "has no tensors for" if missing else "holds tensors that the configuration does not describe:"
            keys = missing or foreign
            raise ValueError(
                f"The file {what} {', '.join(keys[:5])}{f' and {len(keys) - 5} more' if len(keys) > 5 else ''}. It is "
                "damaged, or belongs to another configuration or version: save or export the model again."
            )


class ForwardWithHead:
    """The forward of a causal language model: the model without a head, the head, and the loss."""

    model: Any
    lm_head: Any
    loss_function: Any

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits `[rows, time, vocabulary]` of the last hidden states."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    @can_return_tuple  # type: ignore[untyped-decorator]  # transformers'
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss where labels are given.

        Args:
            input_ids: `[rows, time]`, of any length.
            attention_mask: `[rows, time]`, 0 for padding.
            past_key_values: the cache of this package to continue with.
            labels: `[rows, time]`, -100 where there is no loss (padding, and the first token of a packed document).
            logits_to_keep: how many of the last logits to compute (0: all), or which.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(outputs.last_hidden_state[:, wanted])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
