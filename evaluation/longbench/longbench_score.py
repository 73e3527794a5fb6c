"""LongBench as a module of `evaluate`: `evaluate.load(longbench_score.__file__, "qasper")`, offline as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from cacheformers.evaluation.longbench.metrics import score
from cacheformers.evaluation.longbench.tasks import TASKS

DESCRIPTION = """The official score of a LongBench task, 0 to 100. The task is the module's configuration.
Args: predictions, a text each; references, a list of answers each; all_classes, the labels of a classification task."""


class LongBenchScore(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """The official score of one task, under the task's name."""

    def _info(self) -> Any:
        if self.config_name not in TASKS:
            raise ValueError(f"Name a task of LongBench as the configuration: one of {', '.join(TASKS)}.")
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Bai et al. 2023, arXiv 2308.14508",
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(
        self, predictions: Sequence[str], references: Sequence[Sequence[str]], all_classes: Sequence[str] = ()
    ) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        total = sum(score(self.config_name, prediction, answers, all_classes) for prediction, answers in pairs)
        return {self.config_name: round(100 * total / len(predictions), 2)}
