"""Model cards: one template for adapters and whole models, saved from memory or trained by a recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import peft
import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig, PeftConfig
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers import AutoConfig, PretrainedConfig

import cacheformers
from cacheformers.hub.methods import METHODS
from cacheformers.hub.model_index import joined
from cacheformers.training.gguf_base import base_origin

CARD, ADAPTER, MODEL, TOKENIZER = "README.md", "adapter_config.json", "config.json", "tokenizer_config.json"
TEMPLATE = Template((files("cacheformers") / "model_cards" / "template.md").read_text(encoding="utf-8"))
MARK = "<!-- Written by cacheformers, which writes it anew at each push. Delete this line to keep what you change. -->"
EMPTY = "[More Information Needed]"  # in the cards that PEFT and transformers write for want of a better one
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
NAME = "THIS_FOLDER_OR_HUB_ID"  # until it is known where the weights will lie
UNRECORDED = (
    "Not recorded: this was saved from memory. `train_adapt.py` writes data, command and commit here, and what it "
    "measured below."
)
LOCAL_BASE = "The base was a local folder, which nobody else can load"
INHERITED = "It inherits what its base gets wrong, and what its data lack."
NAME_THE_BASE = (
    'push the base, then this again with its Hub id: `cacheformers.push_to_hub(..., base_model="owner/name")`, or '
    "`--hub_base_model owner/name` for `train_adapt.py`."
)

SNIPPET = """import cacheformers  # makes its adapter and model types known
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}").eval()
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
{question}"""
READ = """memory = cacheformers.read(model, tokenizer(open("book.txt").read(), return_tensors="pt").input_ids)
question = tokenizer("Who tells this story?", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(question, past_key_values=memory.clone(), max_new_tokens=40)[0]))"""
ASK = """question = tokenizer("Who tells this story?", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(question, max_new_tokens=40)[0]))"""

LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform")
NOT_SETTINGS = ("architectures", "dtype", "transformers_version", "model_type", "text_config", "auto_map")


@dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
        kind: "adapter" or "model".
        method: the key of its memory in `METHODS`, None without a memory.
        base: the pretrained model, a Hub id or a folder; None for a model that has none.
        settings: hyper-parameters.
        has_tokenizer: a tokenizer lies beside the weights.
        trained, measured: Markdown.
        summary: a sentence on what it is, after the method's.
        limits: sentences on what a user must know beside the method's limits.
    """

    kind: str
    method: str | None
    base: str | None
    settings: dict[str, Any]
    has_tokenizer: bool
    trained: str
    measured: str = "Nothing is recorded."
    summary: str = ""
    limits: tuple[str, ...] = ()

    def text(self) -> str:
        """Markdown with the Hub's metadata; `NAME` stands where its place will be."""
        return TEMPLATE.substitute(
            metadata=self.metadata().to_yaml(),
            mark=MARK,
            title=self.title(),
            summary=self.what(),
            snippet=self.snippet(),
            trained=self.trained,
            settings=settings_table(self.settings),
            measured=self.measured,
            limits="\n".join(f"- {limit}" for limit in self.all_limits()),
            licence=self.licence(),
            citation=self.citation(),
        )

    def metadata(self) -> ModelCardData:
        memory = [] if self.method is None else [self.method, "long-context"]
        return ModelCardData(
            library_name="peft" if self.kind == "adapter" else "transformers",
            pipeline_tag="text-generation",
            base_model=None if self.base is None or is_local(self.base) else self.base,
            tags=["cacheformers", *(["lora"] if self.kind == "adapter" else []), *memory],
        )

    def title(self) -> str:
        parts = [METHODS[self.method].title] if self.method else []
        if self.kind == "adapter":
            parts.append("LoRA")
        title = " and ".join(parts) or "Language model"
        return title if self.base is None else f"{title} on {short(self.base)}"

    def what(self) -> str:
        package = f"An {self.kind}" if self.kind == "adapter" else f"A {self.kind}"
        memory = METHODS[self.method].summary.format(**self.settings) if self.method else "It has no memory."
        return " ".join(filter(None, [f"{package} of the package cacheformers.", memory, self.summary]))

    def snippet(self) -> str:
        tokenizer = NAME if self.has_tokenizer or self.base is None else self.base
        remembers = self.method is not None and METHODS[self.method].remembers
        return SNIPPET.format(name=NAME, tokenizer=tokenizer, question=READ if remembers else ASK)

    def all_limits(self) -> list[str]:
        known = METHODS[self.method].limits if self.method else ()
        local = [f"{LOCAL_BASE}: {NAME_THE_BASE}"] if self.base is not None and is_local(self.base) else []
        own = "It lacks what its data lack." if self.base is None else INHERITED
        return [*known, *local, *self.limits, own]

    def licence(self) -> str:
        own = "That of the base model holds here too" if self.base else "See the metadata; without one, ask the owner"
        return f"{own}. The package cacheformers is Apache-2.0."

    def citation(self) -> str:
        if self.method is None:
            return "Nothing of its own."
        return f"```bibtex\n{METHODS[self.method].citation}\n```"


def saved_card(folder: Path, base_model: str | None = None) -> Card:
    """The card of an adapter or a model, as far as its configuration tells.

    Args:
        base_model: goes before what the configuration says of the base.

    Raises:
        ValueError: the folder holds neither.
    """
    has_tokenizer = (folder / TOKENIZER).exists()
    trained = f"{UNRECORDED} Saved with {versions()}."
    if (folder / ADAPTER).exists():
        config = PeftConfig.from_pretrained(str(folder))
        base = base_model or config.base_model_name_or_path
        method = method_of(str(config.peft_type))
        origin = base_origin(config.base_model_name_or_path) if config.base_model_name_or_path else None
        trained += f"\n\nBase: {origin}." if origin else ""
        return Card("adapter", method, base, settings_of(config), has_tokenizer, trained)
    if (folder / MODEL).exists():
        model: PretrainedConfig = AutoConfig.from_pretrained(folder)
        method = method_of(model.model_type)
        settings = {key: value for key, value in model.to_diff_dict().items() if key not in NOT_SETTINGS}
        if method is not None:
            settings = {
                name: getattr(model, name) for name in beyond(PretrainedConfig, model) if name not in NOT_SETTINGS
            }
        kind = f"Its type is `{model.model_type}`."
        return Card("model", method, base_model, settings, has_tokenizer, trained, summary=kind)
    raise ValueError(
        f"{folder} holds neither {ADAPTER} nor {MODEL}. Save an adapter or a model there; an adapter whose name is not "
        "'default' is saved in a folder of its own: push that one."
    )


def refresh_card(folder: Path) -> None:
    """Write the card of what lies in a folder, unless a person wrote the one that is there."""
    old = earlier_card(folder)
    if old is None or is_generated(old.content):
        (folder / CARD).write_text(renewed(saved_card(folder).text(), old), encoding="utf-8")


def earlier_card(folder: Path) -> ModelCard | None:
    """The card that lies in a folder."""
    return ModelCard.load(folder / CARD) if (folder / CARD).exists() else None


def renewed(card: str, old: ModelCard | None) -> str:
    """A generated card in place of an older one: a person's own stays as it is, and of others what is known besides."""
    return merged(card, old) if old is None or is_generated(old.content) else old.content


def is_generated(card: str) -> bool:
    """Whether a program wrote a card, this package or another: nothing of a person's is lost with it."""
    return MARK in card or EMPTY in card


def merged(card: str, old: ModelCard | None, base_model: str | None = None, licence: str | None = None) -> str:
    """A generated card with what is known besides.

    Args:
        old: the card that it replaces: the licence, the tags and the results in its metadata stay.
        base_model: the Hub id of a base that was a local folder when the card was written.
        licence: the Hub's name of a licence.
    """
    parsed = ModelCard(card)
    data: Any = parsed.data
    if old is not None:
        before: Any = old.data
        # PEFT derives tags from the base, whose path may be a local one.
        tags = [tag for tag in before.get("tags") or [] if not tag.startswith("base_model:")]
        data.tags = [*dict.fromkeys([*data.tags, *tags])]
        data.license = before.get("license")
        if before.eval_results:
            data.model_name = data.model_name or before.model_name
            data.eval_results = joined(before.eval_results, data.eval_results or [])
    if licence is not None:
        data.license = licence
    if base_model is not None:
        data.base_model = base_model
        lines = parsed.text.splitlines(keepends=True)
        parsed.text = "".join(line for line in lines if not line.startswith(f"- {LOCAL_BASE}"))
    return str(parsed)


def is_local(base: str) -> bool:
    """Whether a base is a folder (of this machine or another), not a Hub id."""
    return HUB_ID.fullmatch(base) is None or Path(base).exists()


def short(base: str) -> str:
    """A base's name without its folder."""
    return Path(base).name if is_local(base) else base


def method_of(kind: str) -> str | None:
    """The key in `METHODS` of a PEFT type or a model type."""
    name = "cacheformer_on_base" if kind == "CACHEFORMER" else kind.lower()
    return name if name in METHODS else None


def settings_of(config: PeftConfig) -> dict[str, Any]:
    """An adapter's hyper-parameters: its method's own fields, and those of LoRA that matter."""
    own = beyond(LoraConfig, config) if method_of(str(config.peft_type)) else []
    values = {name: getattr(config, name, None) for name in [*own, *LORA]}
    if values["target_modules"] == DUMMY_TARGET_MODULES:
        values["target_modules"] = "none"
    elif isinstance(values["target_modules"], set):
        values["target_modules"] = sorted(values["target_modules"])
    return values


def beyond(common: type, config: Any) -> list[str]:
    """The fields that a configuration has and its base class has not."""
    known = {field.name for field in fields(common)}
    return [field.name for field in fields(config) if field.name not in known]


def settings_table(settings: dict[str, Any]) -> str:
    """A Markdown table of what is set; what is not set has its default."""
    rows = [cells(f"`{name}`", f"`{value}`") for name, value in settings.items() if value is not None]
    return "\n".join([cells("option", "value"), cells("---", "---"), *rows])


def cells(*texts: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def versions() -> str:
    """Of the libraries that matter."""
    return ", ".join(f"{module.__name__} {module.__version__}" for module in (cacheformers, torch, transformers, peft))
