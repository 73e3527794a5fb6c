"""Model cards: one template for adapters and whole models, saved from memory or trained by a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from peft import LoraConfig, PeftConfig
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers import AutoConfig, PretrainedConfig

from cacheformers.common.gguf_base import base_origin
from cacheformers.modeling.composite import CompositeConfig
from cacheformers.modeling.method import MemoryMethod, is_method, method_named

CARD, ADAPTER, MODEL, TOKENIZER = "README.md", "adapter_config.json", "config.json", "tokenizer_config.json"
TEMPLATE = Template((files("cacheformers") / "model_cards" / "template.md").read_text(encoding="utf-8"))
MARK = "<!-- Written by cacheformers, which writes it anew at each push. Delete this line to keep what you change. -->"
EMPTY = "[More Information Needed]"  # in the cards that PEFT and transformers write
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
NAME = "THIS_FOLDER_OR_HUB_ID"  # replaced when a card is pushed
UNRECORDED = (
    "Not recorded: this was saved from memory. `train_adapt.py` writes data, command and commit here, and what it "
    "measured below."
)
LOCAL_BASE = "The base was a local folder, which nobody else can load"
INHERITED = "It inherits the errors of its base and the gaps in its data."
NAME_THE_BASE = (
    'push the base, then push this again and name it: `cacheformers.push_to_hub(..., base_model="owner/name")`, or '
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
RECALL = """memory = cacheformers.read_text(model, tokenizer, open("book.txt").read())
question = "Who tells this story?"
print(cacheformers.PassageConversation(model, tokenizer, memory).ask(question, max_new_tokens=40).text)"""
ASK = """question = tokenizer("Who tells this story?", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(question, max_new_tokens=40)[0]))"""

LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform")
NOT_SETTINGS = ("architectures", "dtype", "transformers_version", "model_type", "text_config", "auto_map")


@dataclass(frozen=True)
class Card:
    """The contents of a card.

    Attributes:
        kind: "adapter" or "model".
        method: of its memory, None without a memory.
        base: the pretrained model, a Hub id or a folder; None for a model without one.
        settings: hyper-parameters.
        has_tokenizer: there is a tokenizer beside the weights.
        trained, measured: Markdown.
        summary: a sentence on what it is, after the method's.
        limits: sentences on what a user must know besides the method's limits.
        reads: `cacheformers.read` reads a document for it; otherwise the model takes the document itself.
    """

    kind: str
    method: MemoryMethod | None
    base: str | None
    settings: dict[str, Any]
    has_tokenizer: bool
    trained: str
    measured: str = "Nothing is recorded."
    summary: str = ""
    limits: tuple[str, ...] = ()
    reads: bool = True

    def text(self) -> str:
        """Return Markdown with the Hub's metadata; `NAME` is in place of its address."""
        own = "That of the base model holds here too" if self.base else "See the metadata; without one, ask the owner"
        rows = [cells(f"`{name}`", f"`{value}`") for name, value in self.settings.items() if value is not None]
        return TEMPLATE.substitute(
            metadata=self.metadata().to_yaml(),
            mark=MARK,
            title=self.title(),
            summary=self.what(),
            snippet=self.snippet(),
            trained=self.trained,
            settings="\n".join([cells("option", "value"), cells("---", "---"), *rows]),
            measured=self.measured,
            limits="\n".join(f"- {limit}" for limit in self.all_limits()),
            license=f"{own}. The package cacheformers is Apache-2.0.",
            citation=f"```bibtex\n{self.method.citation}\n```" if self.method else "Nothing of its own.",
        )

    def metadata(self) -> ModelCardData:
        memory = [] if self.method is None else [self.method.name, "long-context"]
        return ModelCardData(
            library_name="peft" if self.kind == "adapter" else "transformers",
            pipeline_tag="text-generation",
            base_model=None if self.base is None or is_local(self.base) else self.base,
            tags=["cacheformers", *(["lora"] if self.kind == "adapter" else []), *memory],
        )

    def title(self) -> str:
        parts = [self.method.title] if self.method else []
        if self.kind == "adapter":
            parts.append("LoRA")
        title = " and ".join(parts) or "Language model"
        return title if self.base is None else f"{title} on {short(self.base)}"

    def what(self) -> str:
        package = f"{'An' if self.kind == 'adapter' else 'A'} {self.kind} of the package cacheformers."
        memory = self.method.summary.format(**self.settings) if self.method else "It has no memory."
        return " ".join(filter(None, [package, memory, self.summary]))

    def snippet(self) -> str:
        tokenizer = NAME if self.has_tokenizer or self.base is None else self.base
        question = ASK
        if self.method is not None and self.reads:
            question = READ if self.method.attends else RECALL
        return SNIPPET.format(name=NAME, tokenizer=tokenizer, question=question)

    def all_limits(self) -> list[str]:
        known = self.method.limits if self.method else ()
        local = [f"{LOCAL_BASE}: {NAME_THE_BASE}"] if self.base is not None and is_local(self.base) else []
        own = "It inherits the gaps in its data." if self.base is None else INHERITED
        return [*known, *local, *self.limits, own]


def saved_card(folder: Path, base_model: str | None = None) -> Card:
    """Make the card of an adapter or a model from its configuration.

    Args:
        base_model: overrides the base that the configuration names.

    Raises:
        ValueError: the folder holds neither.
    """
    has_tokenizer = (folder / TOKENIZER).exists()
    versions = ", ".join(f"{name} {version(name)}" for name in ("cacheformers", "torch", "transformers", "peft"))
    trained = f"{UNRECORDED} Saved with {versions}."
    if (folder / ADAPTER).exists():
        config = PeftConfig.from_pretrained(str(folder))
        base = base_model or config.base_model_name_or_path
        method = method_named(config.peft_type) if is_method(config.peft_type) else None
        origin = base_origin(config.base_model_name_or_path) if config.base_model_name_or_path else None
        trained += f"\n\nBase: {origin}." if origin else ""
        return Card("adapter", method, base, settings_of(config), has_tokenizer, trained)
    if (folder / MODEL).exists():
        model: PretrainedConfig = AutoConfig.from_pretrained(folder)
        method = method_named(model.model_type) if is_method(model.model_type) else None
        found = {name: getattr(model, name) for name in beyond(PretrainedConfig, model)} if method else {}
        settings = {key: value for key, value in (found or model.to_diff_dict()).items() if key not in NOT_SETTINGS}
        reads = isinstance(model, CompositeConfig)
        kind = f"Its type is `{model.model_type}`."
        return Card("model", method, base_model, settings, has_tokenizer, trained, summary=kind, reads=reads)
    raise ValueError(
        f"{folder} holds neither {ADAPTER} nor {MODEL}. Save an adapter or a model there; an adapter whose name is not "
        "'default' is saved in a folder of its own: push that one."
    )


def refresh_card(folder: Path) -> None:
    """Write the card of a folder, unless a person wrote the one that is there."""
    old = earlier_card(folder)
    if old is None or is_generated(old.content):
        (folder / CARD).write_text(renewed(saved_card(folder).text(), old), encoding="utf-8")


def earlier_card(folder: Path) -> ModelCard | None:
    """Load the card of a folder, if there is one."""
    return ModelCard.load(folder / CARD) if (folder / CARD).exists() else None


def renewed(card: str, old: ModelCard | None) -> str:
    """Replace an older card by a generated one, which takes over its metadata; a person's own card stays as it is."""
    return merged(card, old) if old is None or is_generated(old.content) else old.content


def is_generated(card: str) -> bool:
    """Return whether this package or another program wrote a card, so that it may be replaced."""
    return MARK in card or EMPTY in card


def merged(card: str, old: ModelCard | None, base_model: str | None = None, license: str | None = None) -> str:
    """Complete a generated card.

    Args:
        old: the card that it replaces: the license, the tags and the results in its metadata stay.
        base_model: the Hub id of a base that was a local folder when the card was written.
        license: the Hub's name of a license.
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
    if license is not None:
        data.license = license
    if base_model is not None:
        data.base_model = base_model
        lines = parsed.text.splitlines(keepends=True)
        parsed.text = "".join(line for line in lines if not line.startswith(f"- {LOCAL_BASE}"))
    return str(parsed)


def joined(old: Iterable[EvalResult], new: Sequence[EvalResult]) -> list[EvalResult]:
    """Join old and new results; a new one replaces an old one of the same name on the same data."""
    replaced = {identity(each) for each in new}
    return [*(each for each in old if identity(each) not in replaced), *new]


def identity(result: EvalResult) -> tuple[Any, ...]:
    return (*result.unique_identifier, result.dataset_name, result.metric_type, result.metric_name)


def is_local(base: str) -> bool:
    """Return whether a base is a folder (of this machine or another), not a Hub id."""
    return HUB_ID.fullmatch(base) is None or Path(base).exists()


def short(base: str) -> str:
    """Return a base's name without its folder."""
    return Path(base).name if is_local(base) else base


def settings_of(config: PeftConfig) -> dict[str, Any]:
    """Return an adapter's hyper-parameters: its method's own fields, and those of LoRA that matter."""
    own = beyond(LoraConfig, config) if is_method(str(config.peft_type)) else []
    values = {name: getattr(config, name, None) for name in [*own, *LORA]}
    if values["target_modules"] == DUMMY_TARGET_MODULES:
        values["target_modules"] = "none"
    elif isinstance(values["target_modules"], set):
        values["target_modules"] = sorted(values["target_modules"])
    return values


def beyond(common: type, config: Any) -> list[str]:
    """Return the fields that a configuration has and its base class does not."""
    known = {field.name for field in fields(common)}
    return [field.name for field in fields(config) if field.name not in known]


def cells(*texts: str) -> str:
    """Format a line of a Markdown table."""
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"
