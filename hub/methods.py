"""What model cards say of each memory method."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Method:
    """A memory method, for people.

    Attributes:
        title: its name.
        summary: one sentence; may name the method's options in braces.
        limits: what its users must know, a sentence each.
        citation: of the paper, as BibTeX.
        remembers: `cacheformers.read` reads a document for it; otherwise the model takes the document itself.
    """

    title: str
    summary: str
    limits: tuple[str, ...]
    citation: str
    remembers: bool = True


# By PEFT type or model type, in lower case. (The PEFT type CACHEFORMER is not the model type: see `card.method_of`.)
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
    "cacheformer": Method(
        title="CacheFormer",
        summary=(
            "A token sees its own and the previous window of {window_tokens:,} tokens, older ones as {pool_vectors} "
            "vectors for each {pool_tokens}, and what else the options below say (CacheFormer, arXiv 2504.13981; "
            "without cache and overlap it is Transformer-LS)."
        ),
        limits=(
            "The keys of every token are kept, and the compressed vectors that each step reads grow with the text.",
            "The paper's rule for choosing segments looks into the future; what it reports of the cache is unverified.",
        ),
        citation="""@article{singh2025cacheformer,
  title = {CacheFormer: High-Attention-Based Segment Caching},
  author = {Singh, Sushant and Mahmood, Ausif},
  journal = {AI},
  volume = {6},
  number = {4},
  pages = {85},
  year = {2025}
}""",
        remembers=False,
    ),
    "infini_attention": Method(
        title="Infini-attention",
        summary=(
            "Text is read in segments of {segment_tokens:,} tokens; what was read before is in a matrix of constant "
            "size a head, which each head mixes into its attention (Infini-attention, arXiv 2404.07143)."
        ),
        limits=(
            "Self-attention sees the open segment, and what the local window keeps; all else comes through the memory.",
            "The memory does not grow: the more it has read, the less of each token is left in it.",
        ),
        citation="""@article{munkhdalai2024infini,
  title = {Leave No Context Behind: Efficient Infinite Context Transformers with Infini-attention},
  author = {Munkhdalai, Tsendsuren and Faruqui, Manaal and Gopal, Siddharth},
  journal = {arXiv preprint arXiv:2404.07143},
  year = {2024}
}""",
    ),
    "gated_attention": Method(
        title="Gated attention",
        summary=(
            "Every token decides by a gate whether attention looks beyond the last {window_tokens:,} tokens (gated "
            "attention, after Liao and Chang's course report)."
        ),
        limits=(
            "All keys and values are kept: bytes grow with the text, whatever gates do. What closed gates save is "
            "reading them, and with the default threshold of 0 nothing is saved.",
            "Text may be as long as the base model's positions allow.",
        ),
        citation="""@misc{liao2024gated,
  title = {Optimizing Long-Context Understanding with Gated Attention Mechanisms},
  author = {Liao and Chang},
  howpublished = {Course report, MIT 6.7960}
}""",
    ),
}
METHODS["cacheformer_on_base"] = replace(METHODS["cacheformer"], remembers=True)
