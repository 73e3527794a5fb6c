"""Learning from passages that the memory recalls: the prompts of the evaluation, made as training goes on."""

import json

import pytest
import torch
from peft import get_peft_model
from recipe import largest_difference, make_text, write_documents
from transformers import AutoModelForCausalLM

from cacheformers import train_adapt
from cacheformers.common.documents import DataOptions, open_documents
from cacheformers.common.loss import IGNORED
from cacheformers.evaluation.longbench.answers import recalled, remembered
from cacheformers.evaluation.longbench.records import Record
from cacheformers.modeling.method import METHODS
from cacheformers.training.lanes import make_groups
from cacheformers.training.lessons import LessonOptions, Lessons

SEGMENT = 64
CONTEXTS = {"shortest_context": 400, "longest_context": 700, "questions_per_context": 3, "books_share": 0.0}
PASSAGES = {"chunk_words": 6, "chunks": 3, "text_order": True, "prompt_tokens": 500}
METHOD = {"segment_tokens": SEGMENT, "cache_size": 2000, "topk": 4, "r": 4}
RECALLS = [
    pytest.param("neurocache", {"retrieval_map": {1: 1}, "gate": "none"}, id="neurocache"),
    pytest.param("retrieval_heads", {"heads": {0: [0], 1: [0]}, "retrieval_weight": 0.5}, id="retrieval_heads"),
]


@pytest.fixture
def pool(byte_folder):
    """A base that reads bytes, a book, and stories of five facts each."""
    write_documents(byte_folder / "train.jsonl", 300, 400)
    lines = []
    for number in range(10):
        facts = [make_text(40, 10 * number + line).replace("\n", " ") for line in range(5)]
        asked = [{"input": fact[:12], "answers": [fact[-6:]], "supports": [line]} for line, fact in enumerate(facts)]
        document = {"task": "facts", "source": "made", "title": f"story {number}", "questions": asked}
        lines.append(json.dumps({**document, "context": "\n".join(facts)}))
    (byte_folder / "pool.jsonl").write_text("\n".join(lines) + "\n")
    return byte_folder


def made_lessons(pool, tokenizer, **more):
    options = LessonOptions(questions=[str(pool / "pool.jsonl")], **CONTEXTS, **PASSAGES, **more)
    books = open_documents([str(pool / "train.jsonl")], tokenizer, DataOptions(train=[]))
    return Lessons(options, books, tokenizer, 700, 700, 0)


@pytest.mark.parametrize("prompt", ("recalled", "hybrid"))
@pytest.mark.parametrize(("method", "more"), RECALLS)
def test_questions_show_what_the_evaluation_recalls(pool, byte_tokenizer, method, more, prompt):
    """Rows, labels and the teacher's places; the memory stays as it was, and dropout as it is."""
    made = made_lessons(pool, byte_tokenizer, prompt=prompt, distill=0.5)
    base = AutoModelForCausalLM.from_pretrained(pool / "base", dtype=torch.float64)
    config = METHODS[method].adapter_config(**METHOD, **more, lora_dropout=0.5)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)  # as it starts, LoRA and its dropout change nothing
    [group] = make_groups(model, made, 1, SEGMENT, 0, remembers=True, questions=3)
    exercise = made.exercises.make(0)
    told = [
        Record(exercise.template, str(n), each.input, exercise.context, [each.answer], 0, None, exercise.template)
        for n, each in enumerate(exercise.questions)
    ]
    prompts = [made.maker(record) for record in told]
    memory = remembered(model.eval(), prompts)
    shown = [found.asked for found in recalled(model, made.maker, memory, told, prompts)]
    model.eval()  # what is read has no dropout here, so that it is the evaluation's
    batch = group.lanes.step()
    while batch.pieces[0].context:
        group.begin(model, batch)
        with torch.no_grad():
            train_adapt.read_segment(model, group, batch, torch.device("cpu"))
        batch = group.lanes.step()
    model.train()
    asked = group.begin(model, batch)
    assert model.training and all(module.training for module in model.modules())
    assert group.memory.tokens_read == [len(prompts[0].read)]
    assert len({tuple(ids) for ids in shown}) == 3 and len(asked.pieces) == 3
    for row, (ids, record) in enumerate(zip(shown, told, strict=True)):
        own = asked.input_ids[row][asked.attention_mask[row].bool()]
        assert own[: len(ids)].tolist() == ids
        assert own[: len(ids)].tolist() != batch.input_ids[row, : len(ids)].tolist(), "before, the prompt was cut"
        learned = asked.labels[row][asked.labels[row] != IGNORED]
        assert byte_tokenizer.decode(learned, skip_special_tokens=True).strip() == record.answers[0].strip()
        teacher = asked.teachers[row]
        assert torch.equal(teacher.ids[teacher.places], learned)
        assert asked.gold.asking[row].sum() == batch.gold.asking[row].sum()


def test_a_run_that_recalls_goes_on_where_it_stopped(pool):
    given = {**CONTEXTS, **PASSAGES, **METHOD, "prompt": "recalled", "method": "neurocache", "retrieval_map": 1}
    given |= {"base": pool / "base", "train": pool / "train.jsonl", "steps": 3, "log_every": 1}
    arguments = [*(f"--{name}={value}" for name, value in given.items()), "--questions", str(pool / "pool.jsonl")]
    train_adapt.main([*arguments, f"--output={pool / 'whole'}"])
    parts = [*arguments, f"--output={pool / 'parts'}"]
    train_adapt.main([*parts, "--stop_after=1e-6"])
    train_adapt.main([*parts, "--resume=true"])
    results = [json.loads((pool / name / "train_result.json").read_text()) for name in ("whole", "parts")]
    assert results[0]["losses"] == results[1]["losses"] and len(results[0]["losses"]) == 3
    assert largest_difference(pool / "whole", pool / "parts") == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method=lora"], "LoRA alone retrieves nothing"),
        (["--method=infini_attention"], "this memory retrieves nothing"),
        (["--lanes=2", "--prompt_tokens=20", "--segment_tokens=256"], "asks about one context, but 2 lanes"),
    ],
)
def test_what_cannot_recall_is_refused(pool, refused, more, message):
    given = {**CONTEXTS, **PASSAGES, "segment_tokens": SEGMENT, "r": 4, "prompt": "recalled", "base": pool / "base"}
    given |= {"train": pool / "train.jsonl", "steps": 3, "output": pool / "bad"}
    arguments = [*(f"--{name}={value}" for name, value in given.items()), "--questions", str(pool / "pool.jsonl")]
    assert message in refused(train_adapt.main, [*arguments, *more])
