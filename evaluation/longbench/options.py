"""What is evaluated, as options of the recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from cacheformers.training.options import option

METHODS = ("truncation", "full", "retrieval", "position-interpolation", "memory")


@dataclass
class LongBenchOptions:
    """Data, methods, and how prompts are made and answered.

    Raises:
        ValueError: a method that does not exist, or a number that makes no sense.
    """

    data: str = option(
        help="LongBench: a folder with TASK.jsonl, .jsonl.gz or .parquet for each task, or a dataset of the Hub."
    )
    methods: list[str] = option(
        help="Which methods are run, one after the other: 'truncation' (base model, prompts cut in the middle), 'full' "
        "(base model, whole prompts), 'retrieval' (base model, the chunks nearest the question), "
        "'position-interpolation' (base model with scaled rotary positions), 'memory' (a model with a memory: the "
        "context is read in segments, then the question)."
    )
    output: str = option("runs/longbench", help="Folder for predictions, results, tables and plots.")
    adapter: str | None = option(
        None,
        help="Adapter folder or Hub id. One with a memory is for the method 'memory', any other for the other methods.",
    )
    tasks: list[str] | None = option(None, help="Tasks by name. Default: all.")
    longbench_e: bool = option(False, help="LongBench-E: 13 tasks with records of all lengths, from TASK_e files.")
    limit: int | None = option(
        None, help="Only this many records of each task. A larger limit later goes on from those that are answered."
    )
    seed: int | None = option(None, help="With limit: a random choice of records. Default: the first ones.")
    prompts: str | None = option(
        None, help="The official config/dataset2prompt.json. Default: templates of the installed lm-eval."
    )
    chat: bool = option(
        False,
        help="Put prompts into the tokenizer's chat template, but for the tasks that the official code excepts. For "
        "chat models.",
    )
    max_length: int | None = option(
        None,
        help="Cut longer prompts in the middle to so many tokens. Default: for truncation and retrieval the official "
        "limit of a model with as many positions (3500 of 4096, 7500 of 8192, ...); for other methods no limit.",
    )
    batch: int = option(1, help="Records answered together. Which ones does not depend on the number of processes.")
    retriever: str = option("bm25", help="'bm25', or an encoder for embeddings: a folder or a Hub id.")
    chunk_words: int = option(200, help="Retrieval: words (Chinese: characters) of a chunk.")
    chunks: int = option(7, help="Retrieval: how many chunks the prompt gets.")
    rope_factor: float | None = option(None, help="Position interpolation: by how much positions are squeezed.")
    forget: bool = option(
        False, help="Memory: let it forget the beginning of contexts that it cannot hold. Default: that is an error."
    )
    overwrite: bool = option(False, help="Start anew where there are predictions of other settings.")
    plots: bool = option(True, help="Draw plots (needs matplotlib).")

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"methods: {', '.join(unknown)} is none of {', '.join(METHODS)}.")
        given = asdict(self)
        for name, least in (("limit", 1), ("max_length", 2), ("batch", 1), ("chunk_words", 1), ("chunks", 1)):
            if given[name] is not None and given[name] < least:
                raise ValueError(f"{name} must be at least {least}, got {given[name]}.")
        if self.seed is not None and self.limit is None:
            raise ValueError("seed is for the choice of records: give --limit, too.")
        if "position-interpolation" in self.methods and (self.rope_factor is None or self.rope_factor <= 1):
            raise ValueError("position-interpolation needs --rope_factor greater than 1, such as 4.")


@dataclass
class CompareOptions:
    """Results side by side."""

    compare: list[str] = option(
        help="Nothing is run: put these result.json files side by side, each compared with the first one."
    )
    output: str | None = option(None, help="Folder for table.md and plots. Default: print the table only.")


LongBenchOptions._argument_group_name = "LongBench"  # type: ignore[attr-defined]
