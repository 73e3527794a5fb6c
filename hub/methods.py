"""What model cards say of each memory method."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """A memory method, for people.

    Attributes:
        title: its name.
        summary: one sentence; may name the method's options in braces.
        limits: what its users must know, a sentence each.
        citation: of the paper, as BibTeX.
    """

    title: str
    summary: str
    limits: tuple[str, ...]
    citation: str


# By PEFT type or model type, in lower case.
METHODS = {
    "neurocache": Method(
        title="Neurocache",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; of what was read before, up to {cache_size:,} "
            "compressed states are kept, and every token retrieves the {topk} nearest (Neurocache, arXiv 2407.02486)."
        ),
        limits=(
            "Self-attention sees the open segment only; everything before it comes through the memory.",
            "What is older than the memory's capacity is forgotten.",
            "The paper reports text retrieval ahead of this method on questions about several documents.",
        ),
        citation="""@inproceedings{safaya2024neurocache,
  title = {Neurocache: Efficient Vector Retrieval for Long-range Language Modeling},
  author = {Safaya, Ali and Yuret, Deniz},
  booktitle = {NAACL},
  year = {2024}
}""",
    ),
}
