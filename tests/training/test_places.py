"""`--label_field`: documents of which only some places are learned, such as answers."""

import json

import pytest
import torch
from conftest import adapter_config
from longbench_cases import write_rows
from peft import get_peft_model
from recipe import adapter_weights, arguments, largest_difference, make_text, run
from transformers import AutoModelForCausalLM

from cacheformers import train_adapt
from cacheformers.common.documents import DataOptions, Documents, open_documents
from cacheformers.common.loss import IGNORED, token_losses
from cacheformers.training.lanes import Lanes, make_groups


def place_of(text, first, last):
    """Where words `first` to `last` stand in a text."""
    words = text.split()
    return [len(" ".join([*words[:first], ""])), len(" ".join(words[:last]))]


def test_labels_are_the_tokens_that_lie_in_places(tokenizer):
    texts = [make_text(40, 1), make_text(20, 2), make_text(25, 3)]
    places = [[place_of(texts[0], 5, 8), place_of(texts[0], 33, 34)], [], [[0, 1]]]
    documents = Documents(texts, tokenizer, places=places)
    assert documents.learned(0).nonzero()[:, 0].tolist() == [5, 6, 7, 33]
    assert not documents.learned(1).any() and documents.learned(2).nonzero().tolist() == [[0]]  # a part of a word
    lanes, found = Lanes(documents, 1, 16, seed=0), {}
    for _ in range(3 + 2 + 2):
        step = lanes.step()
        start = found.setdefault(step.documents[0], [])
        start += step.labels[0, : step.tokens].tolist()
        assert step.targets == int((step.labels != IGNORED).sum())
    for index, labels in found.items():
        ids, learned = documents.tokens(index), documents.learned(index)
        expected = [int(ids[i]) if learned[i] else IGNORED for i in range(1, len(ids))]
        assert labels == expected


def test_only_places_are_learned(folder, tokenizer):
    """A step is a document's segment with labels; its loss is that of these labels, the segments before were read."""
    text = make_text(60, 7)
    rows = [{"text": text, "answers": [place_of(text, 55, 58)]}]
    given = [f"--train={write_rows(folder / 'one.jsonl', rows)}", "--label_field=answers", "--steps=3", "--lanes=1"]
    train_adapt.main(arguments(folder, *given, "--device=cpu"))
    result = json.loads((folder / "adapter" / "train_result.json").read_text())
    assert len(result["losses"]) == 3 and result["tokens"] == 3 * 59

    torch.manual_seed(0)  # the adapter is still the base model: its gates are zero, and so is LoRA's B
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = get_peft_model(base, adapter_config()).eval()
    ids = tokenizer(text, return_tensors="pt").input_ids
    labels = ids[:, 49:].clone()
    labels[:, :6], labels[:, 9:] = IGNORED, IGNORED
    with torch.no_grad():
        losses = token_losses(model(ids[:, 48:59]).logits, labels)
    assert result["losses"][0] == pytest.approx(float(losses.sum() / 3), rel=1e-5)
    assert result["losses"][2] < result["losses"][0]


def test_places_everywhere_are_the_same_as_none(folder):
    texts = [make_text(length, length) for length in (60, 40)]
    file = write_rows(folder / "all.jsonl", [{"text": text, "all": [[0, len(text)]]} for text in texts])
    for name, more in (("with", ["--label_field=all"]), ("without", [])):
        train_adapt.main(arguments(folder, f"--train={file}", "--device=cpu", *more, output=name))
    with_places, without = adapter_weights(folder / "with"), adapter_weights(folder / "without")
    assert all(torch.equal(with_places[name], without[name]) for name in without)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two_processes_equal_one(folder, sharding):
    """Also where one of them has labels and the other has none, and where neither has."""
    rows = []
    for length in (60, 40, 75, 33, 50, 90):
        text = make_text(length, length)
        rows.append(
            {"text": text, "answers": [place_of(text, length - 9, length - 6), place_of(text, 20, 22)][: length % 4]}
        )
    given = [f"--train={write_rows(folder / 'some.jsonl', rows)}", "--label_field=answers", "--lanes=2", "--steps=12"]
    given += ["--memory_rate=1e-2", "--lora_rate=1e-2"]
    train_adapt.main(arguments(folder, *given, "--device=cpu", output="alone"))
    run(arguments(folder, *given, f"--sharding={sharding}"), folder / "two.log", 2)
    assert largest_difference(folder / "adapter", folder / "alone") <= 1e-4  # of steps of 1e-2
    one, two = (json.loads((folder / name / "train_result.json").read_text()) for name in ("alone", "adapter"))
    assert one["tokens"] == two["tokens"] > 12 * 2 * 16
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)


@pytest.mark.parametrize("teacher_tokens", [100, 10])
def test_a_teacher_predicts_the_tokens_that_are_learned(make_model, make_base, tokenizer, teacher_tokens):
    """With `--distill_all`: labels in the middle of a segment, against the base's whole forward, in float64."""
    text, segment = make_text(40, 1), 16
    documents = Documents([text], tokenizer, places=[[place_of(text, 3, 6), place_of(text, 9, 11)]])
    model, base = make_model("llama_gqa", torch.float64), make_base("llama_gqa", torch.float64)
    [group] = make_groups(model.eval(), documents, 1, segment, 0, remembers=True, teacher_tokens=teacher_tokens)
    batch = group.lanes.step()
    group.begin(model, batch)
    found = train_adapt.read_segment(model, group, batch, torch.device("cpu"), model, 1.0)[0]

    ids = documents.tokens(0)
    own = model(input_ids=ids[None, :segment]).logits[0].log_softmax(-1)
    first = max(0, segment - teacher_tokens)  # what the teacher reads begins here
    taught = base(input_ids=ids[None, first:segment]).logits[0].log_softmax(-1)
    expected = []
    for place in (3, 4, 5, 9, 10):
        if place - 1 < first:  # the teacher has read nothing before it
            expected.append(-own[place - 1, ids[place]])
        else:
            wanted = taught[place - 1 - first]
            expected.append((wanted.exp() * (wanted - own[place - 1])).sum())
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-4, atol=1e-6)


def test_identity_knows_places(tokenizer):
    texts = [make_text(40, 1)]
    one, other = (Documents(texts, tokenizer, places=[[[0, end]]]).identity() for end in (5, 6))
    assert one != other and "places" not in Documents(texts, tokenizer).identity()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "the field 'places' must hold lists of"),
        ({"places": ["w1"]}, "must hold lists of"),
        ({"places": [[3, 10_000]]}, r"\[3, 10000\] is no \[start, end\] in"),
        ({"places": [[9, 9]]}, "is no"),
        ({"places": [[1, 2, 3]]}, "is no"),
        ({"places": [[0, 2]]}, "nothing would ever be learned"),  # there is nothing before the first token
    ],
)
def test_bad_places(folder, tokenizer, row, message):
    file = write_rows(folder / "bad.jsonl", [{"text": make_text(40), **row}])
    options = DataOptions([file], label_field="places")
    with pytest.raises(ValueError, match=message):
        open_documents([file], tokenizer, options).check(16)


def test_places_of_a_stream_are_refused(tokenizer):
    with pytest.raises(ValueError, match="leave out --stream"):
        open_documents(["x.jsonl"], tokenizer, DataOptions([], label_field="places", stream=True))
