"""Conversations: several questions are one long text after what was read, streamed or not, in any thread."""

import threading

import pytest
import torch
from memories import assert_equal
from recipe import make_text
from transformers import LogitsProcessor

import cacheformers
from cacheformers.modeling.conversation import CONVERSATION

TEMPLATE = (
    "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<bos> assistant {% endif %}"
)
QUESTIONS = ("w5 w6 w7 ?", "w9 w11", "w20 w21 w22 w23 w24")


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


@pytest.fixture
def model(make_model):
    return make_model("llama_gqa")


def said(conversation, count=11, **options):
    """Ask three questions; the answers, and the logits from which each of their tokens was chosen."""
    logits, me = [], threading.get_ident()

    def keep(head, args, output):
        if threading.get_ident() == me:
            logits.append(output[0, -1])

    handle = conversation.model.get_output_embeddings().register_forward_hook(keep)
    try:
        return [conversation.ask(text, max_new_tokens=count, **options) for text in QUESTIONS], torch.stack(logits)
    finally:
        handle.remove()


def read(model, tokenizer, words=75):
    return cacheformers.read_text(model, tokenizer, make_text(words), name="book.txt", progress=False)


@pytest.mark.parametrize(
    "method", ["neurocache", "memorizing", "infini_attention", "recurrent_memory", "cacheformer_on_base"]
)
def test_questions_are_one_forward_over_the_whole_chat(make_model, chat_tokenizer, method):
    """Segments close in the middle of questions and of answers."""
    model = make_model("llama_gqa", method=method)
    memory = read(model, chat_tokenizer)
    before = memory.clone()
    conversation = cacheformers.Conversation(model, chat_tokenizer, memory)
    answers, logits = said(conversation)
    once = memory.clone()
    with torch.no_grad():
        expected = model(torch.tensor([conversation.ids]), past_key_values=once).logits[0]
    place, places = 0, []
    for answer in answers:
        place += answer.prompt_tokens
        places += range(place - 1, place - 1 + len(answer.tokens))
        place += len(answer.tokens) - answer.finished
    assert place == len(conversation.ids) > 2 * 16
    torch.testing.assert_close(logits, expected[places], rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    assert_equal(memory, before)


def test_the_stream_is_the_chat_in_the_template(model, chat_tokenizer):
    """As if the whole chat had been put into the template at once; and each answer is that of `generate`."""
    conversation = cacheformers.Conversation(model, chat_tokenizer, read(model, chat_tokenizer))
    turns, plain = [], {"suppress_tokens": [0, 1, 2]}
    for answer in said(conversation, **plain)[0]:
        turns += [{"role": "user", "content": answer.question}]
        ids = chat_tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        produced = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            past_key_values=read(model, chat_tokenizer),
            max_new_tokens=11,
            do_sample=False,
            **plain,
        )
        assert produced[0, len(ids) :].tolist() == answer.tokens
        turns += [{"role": "assistant", "content": answer.text}]
    assert conversation.ids[: len(ids)] == ids


def test_an_answer_that_ends_by_itself(model, chat_tokenizer):
    """The token that ends it is the template's; it is not read twice."""
    memory = read(model, chat_tokenizer)
    first = cacheformers.Conversation(model, chat_tokenizer, memory).ask(QUESTIONS[0], max_new_tokens=11)
    ending = first.tokens[4]
    assert not first.finished and ending not in first.tokens[:4]
    conversation = cacheformers.Conversation(model, chat_tokenizer, memory)
    short = conversation.ask(QUESTIONS[0], max_new_tokens=11, eos_token_id=ending)
    assert short.finished and short.tokens == first.tokens[:5]
    assert conversation.ids[-4:] == first.tokens[:4]
    conversation.ask(QUESTIONS[1], max_new_tokens=3)
    assert conversation.ids[short.prompt_tokens + 4] == chat_tokenizer.eos_token_id
    assert ending not in conversation.ids[short.prompt_tokens : short.prompt_tokens + 5]


def test_without_a_template_and_without_a_memory(make_base, model, tokenizer):
    """The words Question and Answer, the first tokens of a text once; a plain model keeps a plain cache."""
    base = make_base("llama_gqa")
    conversation = cacheformers.Conversation(base, tokenizer)
    answers, logits = said(conversation, count=3)
    with torch.no_grad():
        expected = base(torch.tensor([conversation.ids])).logits[0]
    assert torch.allclose(logits[-1], expected[-2], atol=1e-9)
    assert not conversation.retrieves and [len(answer.tokens) for answer in answers] == [3, 3, 3]
    empty = cacheformers.Conversation(model, tokenizer)
    assert empty.retrieves and empty.ask("w5", max_new_tokens=20, explain=True).retrieved[-1].numel()


def test_streaming_is_the_same_answer(model, tokenizer):
    memory = read(model, tokenizer)
    plain, streamed = (cacheformers.Conversation(model, tokenizer, memory) for _ in range(2))
    for question in QUESTIONS:
        answer = plain.ask(question, max_new_tokens=9, explain=True)
        pieces = list(streamed.ask(question, max_new_tokens=9, stream=True, explain=True))
        assert len(pieces) > 1 and "".join(pieces) == answer.text
        assert streamed.turns[-1].tokens == answer.tokens and streamed.turns[-1].passages == answer.passages
    assert streamed.ids == plain.ids
    assert_equal(streamed.cache, plain.cache)


def test_who_stops_taking_pieces_stops_the_answer(model, tokenizer):
    """What was said until then is a part of the conversation."""
    memory = read(model, tokenizer)
    whole = cacheformers.Conversation(model, tokenizer, memory)
    whole.ask(QUESTIONS[0], max_new_tokens=60)
    conversation = cacheformers.Conversation(model, tokenizer, memory)
    pieces = conversation.ask(QUESTIONS[0], max_new_tokens=4000, stream=True)
    next(pieces)
    pieces.close()
    (answer,) = conversation.turns
    assert 0 < len(answer.tokens) < 4000
    assert answer.tokens[:60] == whole.turns[0].tokens[: len(answer.tokens)]
    conversation.ask(QUESTIONS[1], max_new_tokens=3)
    once = memory.clone()
    with torch.no_grad():
        expected = model(torch.tensor([conversation.ids]), past_key_values=once).logits[0, -2]
    assert int(expected.argmax()) == conversation.ids[-1]


def test_conversations_in_threads_do_not_mix(model, tokenizer):
    memories = [read(model, tokenizer, words) for words in (75, 50)]
    alone = [said(cacheformers.Conversation(model, tokenizer, memory), 40)[1] for memory in memories]
    together = [None, None]
    start = threading.Barrier(2)

    def work(number):
        conversation = cacheformers.Conversation(model, tokenizer, memories[number])
        start.wait()
        together[number] = said(conversation, 40)[1]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch.equal(alone[0], alone[1])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_explain_names_passages_of_the_book_and_of_the_conversation(model, tokenizer):
    memory = read(model, tokenizer)
    conversation = cacheformers.Conversation(model, tokenizer, memory)
    answers = [conversation.ask(text, max_new_tokens=11, explain=True) for text in QUESTIONS]
    words = make_text(75).split()
    documents = set()
    for answer in answers:
        assert len(answer.passages) == len(answer.tokens) == len(answer.retrieved)
        for token, numbers in zip(answer.passages, answer.retrieved, strict=True):
            assert 0 < len(token) <= 2 and token[0].times >= token[-1].times
            for passage in token:
                assert passage.times == int(((numbers >= passage.first) & (numbers <= passage.last)).sum())
        for passage in [*sum(answer.passages, []), *answer.retrieved_most]:
            documents.add(passage.document)
            if passage.document == "book.txt":
                assert passage.text.split() == words[passage.first : passage.last + 1]
                start, end = passage.characters
                assert make_text(75)[start:end] == passage.text
            else:
                said = conversation.ids[passage.first - 75 : passage.last + 1 - 75]
                assert passage.document == CONVERSATION and passage.text == "".join(map(tokenizer.decode, said))
    assert documents == {"book.txt", CONVERSATION}


def test_an_error_leaves_the_conversation_as_it_was(model, tokenizer):
    class Breaks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise MemoryError("broken")

    memory = read(model, tokenizer)
    conversation = cacheformers.Conversation(model, tokenizer, memory)
    conversation.ask(QUESTIONS[0], max_new_tokens=5)
    ids = list(conversation.ids)
    with pytest.raises(MemoryError, match="broken"):
        conversation.ask(QUESTIONS[1], logits_processor=[Breaks()])
    with pytest.raises(MemoryError, match="broken"):
        list(conversation.ask(QUESTIONS[1], stream=True, logits_processor=[Breaks()]))
    assert conversation.ids == ids and len(conversation.turns) == 1
    undisturbed = cacheformers.Conversation(model, tokenizer, memory)
    undisturbed.ask(QUESTIONS[0], max_new_tokens=5)
    answer, other = (each.ask(QUESTIONS[1], max_new_tokens=5) for each in (conversation, undisturbed))
    assert answer.tokens == other.tokens
    conversation.reset()
    assert conversation.ask(QUESTIONS[0], max_new_tokens=5).tokens == undisturbed.turns[0].tokens


def test_what_is_refused(make_model, model, tokenizer, byte_tokenizer, ids):
    memory = read(model, tokenizer)
    conversation = cacheformers.Conversation(model, tokenizer, memory)
    for question, options, message in [
        (" ", {}, "empty question"),
        ("w5", {"max_new_tokens": 0}, "at least 1"),
        ("w5", {"num_beams": 2}, "one answer a question"),
    ]:
        with pytest.raises(ValueError, match=message):
            conversation.ask(question, **options)
        with pytest.raises(ValueError, match=message):
            conversation.ask(question, stream=True, **options)
    with pytest.raises(ValueError, match="another tokenizer"):
        cacheformers.Conversation(model, byte_tokenizer, memory)
    with pytest.raises(ValueError, match="holds 2"):
        cacheformers.Conversation(model, tokenizer, cacheformers.read(model, ids, progress=False))
    with pytest.raises(ValueError, match="no chat template"):
        cacheformers.Conversation(model, tokenizer, memory, [{"role": "system", "content": "w5"}])
    windowed = make_model("llama_gqa", method="windowed")
    with pytest.raises(ValueError, match="retrieves nothing"):
        cacheformers.Conversation(windowed, tokenizer, read(windowed, tokenizer)).ask("w5", explain=True)


def test_one_question_at_a_time(model, tokenizer):
    conversation = cacheformers.Conversation(model, tokenizer, read(model, tokenizer))
    pieces = conversation.ask(QUESTIONS[0], max_new_tokens=4000, stream=True)
    next(pieces)
    with pytest.raises(RuntimeError, match="answering"):
        conversation.ask(QUESTIONS[1])
    pieces.close()
    assert conversation.ask(QUESTIONS[1], max_new_tokens=2).tokens
