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
            "Self-attention sees the open segment, and what the local window keeps; all else comes through the memory.",
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
    "memorizing": Method(
        title="Memorizing Transformer",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; of what was read before, each head keeps up to "
            "{cache_size:,} pairs of a key and a value, and attends to the {topk} nearest of each token (Memorizing "
            "Transformer, arXiv 2203.08913)."
        ),
        limits=(
            "Self-attention sees the open segment, and what the local window keeps; all else comes through the memory.",
            "What is older than the memory's capacity is forgotten.",
        ),
        citation="""@inproceedings{wu2022memorizing,
  title = {Memorizing Transformers},
  author = {Wu, Yuhuai and Rabe, Markus N. and Hutchins, DeLesley and Szegedy, Christian},
  booktitle = {ICLR},
  year = {2022}
}""",
    ),
    "windowed": Method(
        title="Local window",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; self-attention sees the open segment and what the "
            "local window ({local_window}) keeps of what was before. There is no memory: it is what memories are "
            "compared with."
        ),
        limits=("What the local window does not keep is forgotten.",),
        citation="""@inproceedings{dai2019transformerxl,
  title = {Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context},
  author = {Dai, Zihang and Yang, Zhilin and Yang, Yiming and Carbonell, Jaime and Le, Quoc and Salakhutdinov, Ruslan},
  booktitle = {ACL},
  year = {2019}
}""",
    ),
}
