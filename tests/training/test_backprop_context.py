"""Backpropagation through time: gradients of questions go back into the context that was read before them."""

import json
from dataclasses import replace

import pytest
import torch
from peft import get_peft_model
from recipe import largest_difference, make_text
from transformers import AutoModelForCausalLM

from cacheformers import train_adapt
from cacheformers.common.documents import DataOptions, open_documents
from cacheformers.common.loss import IGNORED, token_losses
from cacheformers.methods.cacheformer.memory import CacheFormerMemory
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.method import METHODS
from cacheformers.modeling.segments import close_segments, new_memory
from cacheformers.training.lanes import make_groups
from cacheformers.training.lessons import LessonOptions, Lessons

SEGMENT, SEGMENTS = 192, 3
METHODS_THAT_STORE = {
    "gated_deltanet": {"segment_tokens": SEGMENT},
    "infini_attention": {"segment_tokens": SEGMENT},
    "recurrent_memory": {"segment_tokens": SEGMENT, "memory_tokens": 4},
    "gated_attention": {"segment_tokens": SEGMENT, "window_tokens": 16},
    "cacheformer_on_base": {"segment_tokens": SEGMENT, "window_tokens": 16, "pool_tokens": 8, "topk": 2},
}


@pytest.fixture
def pool(byte_folder):
    """A base that reads bytes, a book, and stories of three facts each."""
    book = "\n".join(make_text(6, line) for line in range(300))
    (byte_folder / "train.jsonl").write_text(json.dumps({"text": book}) + "\n")
    lines = []
    for number in range(10):
        facts = [make_text(16, 10 * number + line).replace("\n", " ") for line in range(3)]
        asked = [{"input": fact[:12], "answers": [fact[-6:]], "supports": [line]} for line, fact in enumerate(facts)]
        document = {"task": "facts", "source": "made", "title": f"story {number}", "questions": asked}
        lines.append(json.dumps({**document, "context": "\n".join(facts)}))
    (byte_folder / "pool.jsonl").write_text("\n".join(lines) + "\n")
    return byte_folder


class WholeSegments(Lessons):
    """Lessons whose contexts are the first whole segments of what they were, so that one forward can read all."""

    def pieces(self, index):
        context, *asked = super().pieces(index)
        kept = SEGMENT * SEGMENTS
        return [replace(context, tokens=context.tokens[:kept], learned=context.learned[:kept]), *asked]


def made_model(pool, method, dtype=torch.float64):
    """An adapter whose every weight is away from zero, in training mode."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(pool / "base", dtype=dtype)
    config = METHODS[method].adapter_config(r=4, **METHODS_THAT_STORE[method])
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    for parameter in model.parameters():
        if parameter.requires_grad and not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def made_lessons(pool, tokenizer):
    options = LessonOptions(
        questions=[str(pool / "pool.jsonl")],
        shortest_context=650,
        longest_context=800,
        questions_per_context=3,
        books_share=0.0,
        prompt="question",
    )
    books = open_documents([str(pool / "train.jsonl")], tokenizer, DataOptions(train=[]))
    return WholeSegments(options, books, tokenizer, 300, 700, 0)


def gradients_of(loss, model):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def asked(model, made, segments):
    """Read the first context as the recipe does, and ask everything about it: losses and their gradients."""
    [group] = make_groups(model, made, 1, SEGMENT, 0, True, questions=3, backprop_context=segments * SEGMENT)
    kept = []
    while True:
        batch = group.begin(model, group.lanes.step())
        if batch.targets:
            break
        kept.append(batch.keeps_graph)
        with torch.set_grad_enabled(batch.keeps_graph):
            train_adapt.read_segment(model, group, batch, torch.device("cpu"))
            close_segments(find_decoder(unwrap(model)), group.memory, [0])
    assert batch.input_ids.shape[1] <= SEGMENT, "otherwise questions are asked in a window of their own"
    losses = train_adapt.read_segment(model, group, batch, torch.device("cpu")).sum(1)
    assert len(losses) == 3 and kept == [False] * (SEGMENTS - segments) + [True] * segments
    found = gradients_of(losses.sum(), model)
    group.end()
    return losses.detach(), found


@pytest.mark.parametrize("segments", (SEGMENTS, 1))
@pytest.mark.parametrize("method", METHODS_THAT_STORE)
def test_gradients_are_those_of_one_forward_over_context_and_question(pool, byte_tokenizer, method, segments):
    """Against a model that reads each question right behind these segments in one forward; losses are of float32."""
    model, made = made_model(pool, method), made_lessons(pool, byte_tokenizer)
    losses, found = asked(model, made, segments)
    context, *questions = made.pieces(0)
    cut = (SEGMENTS - segments) * SEGMENT
    memory = new_memory(model, 1)
    if cut:
        with torch.no_grad():
            model(input_ids=context.inputs[None, :cut], past_key_values=memory)
            close_segments(find_decoder(unwrap(model)), memory, [0])
    expected = []
    for question in questions:
        ids = torch.cat([context.inputs[cut:], question.inputs])
        labels = torch.cat([torch.full_like(context.inputs[cut:], IGNORED), question.labels(0, len(ids), IGNORED)])
        logits = model(input_ids=ids[None], past_key_values=memory.clone()).logits
        expected.append(token_losses(logits, labels[None]).sum())
    torch.testing.assert_close(losses, torch.stack(expected).detach(), rtol=1e-6, atol=1e-5)
    moved = 0
    for ours, theirs in zip(found, gradients_of(sum(expected), model), strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
        moved += bool(ours.any())
    assert moved > 4


@pytest.mark.parametrize("method", METHODS_THAT_STORE)
def test_what_is_stored_is_learned_from_questions(pool, byte_tokenizer, method):
    """Without it, gradients stay in the segment that asks, and are others."""
    model, made = made_model(pool, method), made_lessons(pool, byte_tokenizer)
    (losses, far), (same, near) = asked(model, made, SEGMENTS), asked(model, made, 0)
    torch.testing.assert_close(losses, same, rtol=1e-6, atol=1e-5)
    further = [bool((one - other).norm() > 1e-3 * one.norm()) for one, other in zip(far, near, strict=True)]
    assert sum(further) > len(further) // 2


def given(pool, output, method="gated_deltanet", **more):
    """The recipe's arguments for four steps of one question each, three about a context."""
    options = {"base": pool / "base", "train": pool / "train.jsonl", "output": pool / output, "method": method}
    options |= {"questions": pool / "pool.jsonl", "steps": 4, "r": 4, "books_share": 0.0, "prompt": "question"}
    options |= {"shortest_context": 500, "longest_context": 830, "questions_per_context": 3, "max_tokens": 1024}
    options |= {**METHODS_THAT_STORE[method], "backprop_context": 2, **more}
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.mark.parametrize("method", METHODS_THAT_STORE)
def test_a_run_is_the_same_when_resumed(pool, method):
    """The first question of a context goes back into it, those after it do not; a checkpoint may lie between them."""

    def train(output, **more):
        train_adapt.main(given(pool, output, method, **more))
        result = pool / output / "train_result.json"
        return json.loads(result.read_text())["losses"] if result.exists() else None

    whole, _ = train("whole"), train("near", backprop_context=0)
    assert largest_difference(pool / "near", pool / "whole") > 0
    for _ in range(3):
        assert train("parts", stop_after=1e-6, resume=(pool / "parts").exists()) is None
    assert train("parts", resume=True) == whole and largest_difference(pool / "parts", pool / "whole") == 0


def test_what_is_refused(pool, refused):
    for more, message in (
        ({"backprop_context": -1}, "backprop_context must be at least 0, got -1"),
        ({"lanes": 2}, "of 2 lanes some ask while others are in the middle of theirs: choose lanes 1"),
        ({"lanes": 2, "accumulation": 2}, "of 2 lanes some ask"),
        ({"method": "lora"}, "LoRA alone stores nothing"),
    ):
        assert message in refused(train_adapt.main, [*given(pool, "never"), *(f"--{k}={v}" for k, v in more.items())])
    assert not (pool / "never").exists()


@pytest.mark.parametrize("backprop_context", (0, 8))
def test_contexts_are_texts_that_are_read(pool, monkeypatch, backprop_context):
    """As by `read()`: with `reading_retrieves` off, only questions retrieve in training, too."""
    seen = []

    def noted(state):
        seen.append((torch.is_grad_enabled(), state.reading))
        return begin(state)

    begin = CacheFormerMemory.begin
    monkeypatch.setattr(CacheFormerMemory, "begin", noted)
    train_adapt.main(given(pool, "run", "cacheformer_on_base", backprop_context=backprop_context))
    assert {True, False} == {reading for _, reading in seen}
    assert all(grad for grad, reading in seen if not reading), "questions are asked with gradients"
    assert {grad for grad, reading in seen if reading} == {backprop_context > 0}
