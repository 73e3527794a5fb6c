"""The 21 tasks in the papers' order, and what the official configuration says of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One data set.

    Attributes:
        category: the heading it stands under in the papers' tables.
        metric: a name of `metrics.METRICS`.
        new_tokens: how long an answer may be.
        chat: chat models get the prompt in their chat template.
        first_line: only the first line of a prediction is scored.
        stops_at_newline: generation ends at the first newline, after at least one token.
    """

    name: str
    category: str
    metric: str
    new_tokens: int
    chat: bool = True
    first_line: bool = False
    stops_at_newline: bool = False


SINGLE, MULTI, SUMMARIES = "Single-document QA", "Multi-document QA", "Summarization"
FEW_SHOT, SYNTHETIC, CODE = "Few-shot learning", "Synthetic tasks", "Code completion"

TASKS = {
    task.name: task
    for task in (
        Task("narrativeqa", SINGLE, "qa_f1_score", 128),
        Task("qasper", SINGLE, "qa_f1_score", 128),
        Task("multifieldqa_en", SINGLE, "qa_f1_score", 64),
        Task("multifieldqa_zh", SINGLE, "qa_f1_zh_score", 64),
        Task("hotpotqa", MULTI, "qa_f1_score", 32),
        Task("2wikimqa", MULTI, "qa_f1_score", 32),
        Task("musique", MULTI, "qa_f1_score", 32),
        Task("dureader", MULTI, "rouge_zh_score", 128),
        Task("gov_report", SUMMARIES, "rouge_score", 512),
        Task("qmsum", SUMMARIES, "rouge_score", 512),
        Task("multi_news", SUMMARIES, "rouge_score", 512),
        Task("vcsum", SUMMARIES, "rouge_zh_score", 512),
        Task("trec", FEW_SHOT, "classification_score", 64, chat=False, first_line=True),
        Task("triviaqa", FEW_SHOT, "qa_f1_score", 32, chat=False, first_line=True),
        Task("samsum", FEW_SHOT, "rouge_score", 128, chat=False, first_line=True, stops_at_newline=True),
        Task("lsht", FEW_SHOT, "classification_score", 64, chat=False, first_line=True),
        Task("passage_count", SYNTHETIC, "count_score", 32),
        Task("passage_retrieval_en", SYNTHETIC, "retrieval_score", 32),
        Task("passage_retrieval_zh", SYNTHETIC, "retrieval_zh_score", 32),
        Task("lcc", CODE, "code_sim_score", 64, chat=False),
        Task("repobench-p", CODE, "code_sim_score", 64, chat=False),
    )
}
# LongBench-E: 13 of them, with records of all lengths.
NOT_IN_E = {
    *("narrativeqa", "multifieldqa_zh", "musique", "dureader"),
    *("qmsum", "vcsum", "lsht", "passage_retrieval_zh"),
}
E_TASKS = tuple(name for name in TASKS if name not in NOT_IN_E)
# A model's positions -> the official limit of its prompts.
MAX_LENGTHS = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
BUCKETS = ("0-4k", "4-8k", "8k+")


def bucket(length: int) -> str:
    """LongBench-E's bucket of a record by its `length` (words, or characters in Chinese)."""
    return BUCKETS[(length >= 4000) + (length >= 8000)]


def chosen_tasks(names: list[str] | None, e: bool) -> list[Task]:
    """Tasks in the papers' order.

    Args:
        names: default: all.
        e: of LongBench-E.

    Raises:
        ValueError: one does not exist; names those that do.
    """
    known = E_TASKS if e else tuple(TASKS)
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        which = "LongBench-E has" if e else "LongBench has"
        raise ValueError(f"tasks: {', '.join(unknown)} does not exist; {which} {', '.join(known)}.")
    return [TASKS[name] for name in known if names is None or name in names]
