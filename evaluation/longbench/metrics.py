"""The official metrics as plain functions: `metric(prediction, answer, classes) -> 0..1`.

ROUGE is that of the package `rouge`, Chinese words are jieba's, similarity of code is difflib's. Others that bear the
same names give other numbers.
"""

from __future__ import annotations

import difflib
import re
import string
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from cacheformers.evaluation.longbench.tasks import FORMS

Metric = Callable[[str, str, Sequence[str]], float]
# Where the answers of passage retrieval name the paragraph.
PARAGRAPHS = {"passage_retrieval_en": r"Paragraph (\d+)", "passage_retrieval_zh": r"段落(\d+)"}
ASCII_PUNCTUATION = frozenset(string.punctuation)
CHINESE_PUNCTUATION = ASCII_PUNCTUATION | frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def check_scorers() -> None:
    """Raise ImportError if a package that metrics need is missing."""
    missing = [name for name in ("rouge", "jieba") if find_spec(name) is None]
    if missing:
        raise ImportError(f'Scoring takes {" and ".join(missing)}. Run: pip install "cacheformers[eval]"')


def score(task: str, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Return the best score of a prediction against the reference answers.

    Args:
        task: a name of `FORMS`.
        classes: all labels of a classification task.
    """
    if FORMS[task].first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = METRICS[FORMS[task].metric]
    return max(metric(prediction, answer, classes) for answer in answers)


def qa_f1_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return F1 of words, without case, punctuation and articles."""
    return f1(normalized(prediction).split(), normalized(answer).split())


def qa_f1_zh_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return F1 of Chinese words, without case and punctuation."""
    return f1(chinese_words(prediction), chinese_words(answer))


def rouge_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return F of ROUGE-L; 0 where the package fails: for empty texts, and sentences too long for its recursion."""
    call = RougeCall(prediction, answer)
    call.start()
    call.join()
    return call.value


def rouge_zh_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return F of ROUGE-L of Chinese words."""
    return rouge_score(" ".join(segmented(prediction)), " ".join(segmented(answer)))


def classification_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return 1 / labels named in the prediction if the right one is named; labels within it do not count."""
    named = [label for label in classes if label in prediction]
    for label in named:  # as the official code: what follows a removed label is passed over
        if label in answer and label != answer:
            named.remove(label)
    return 1 / len(named) if answer in named else 0.0


def retrieval_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the numbers in the prediction that are the paragraph's."""
    return share_of_numbers(prediction, re.findall(PARAGRAPHS["passage_retrieval_en"], answer)[0])


def retrieval_zh_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the same for Chinese."""
    return share_of_numbers(prediction, re.findall(PARAGRAPHS["passage_retrieval_zh"], answer)[0])


def count_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the numbers in the prediction that are right."""
    return share_of_numbers(prediction, answer)


def code_sim_score(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Return the similarity, in whole percents, of the first line that is not a comment or a Markdown fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


METRICS: dict[str, Metric] = {
    function.__name__: function
    for function in (
        qa_f1_score,
        qa_f1_zh_score,
        rouge_score,
        rouge_zh_score,
        classification_score,
        retrieval_score,
        retrieval_zh_score,
        count_score,
        code_sim_score,
    )
}


def f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of words."""
    same = sum((Counter(prediction) & Counter(answer)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(answer)
    return 2 * precision * recall / (precision + recall)


def normalized(text: str) -> str:
    """Lower the case, and remove punctuation and articles."""
    kept = "".join(character for character in text.lower() if character not in ASCII_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", kept)


def segmented(text: str) -> list[str]:
    """Split Chinese text into words, with nothing left out."""
    import jieba

    words: list[str] = jieba.lcut(text)
    return words


def chinese_words(text: str) -> list[str]:
    """Split into words in lower case, without punctuation and white space."""
    cleaned = (
        "".join(
            character for character in word.lower() if character not in CHINESE_PUNCTUATION and not character.isspace()
        )
        for word in segmented(text)
    )
    return [word for word in cleaned if word]


def share_of_numbers(prediction: str, wanted: str) -> float:
    """Return the share of the numbers in a text that equal `wanted`."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


class RougeCall(threading.Thread):
    """One call of the package in a thread, so that its recursion limit does not depend on the caller.

    As many frames are above it as in the official script, which scores 0 where the recursion does not end in time.
    """

    def __init__(self, prediction: str, answer: str) -> None:
        super().__init__(daemon=True)
        self.texts = [prediction], [answer]
        self.value = 0.0

    def run(self) -> None:
        from rouge import Rouge

        rouge: Any = Rouge(["rouge-l"])
        try:
            self.value = rouge.get_scores(*self.texts, avg=True)["rouge-l"]["f"]
        except (ValueError, RecursionError):  # ValueError: an empty text
            self.value = 0.0
