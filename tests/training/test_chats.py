"""Chats, a field `messages`, in the tokenizer's template: only what assistants say is learned."""

import json

import pytest
from longbench_cases import write_rows
from recipe import arguments
from tokenizers import processors

from cacheformers import train_adapt
from cacheformers.common.chats import write_chat
from cacheformers.common.documents import DataOptions, open_documents

PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Earlier answers lose what they begin with, as models that think have it.
FORGETFUL = PLAIN.replace("m.content +", "(m.content[2:] if m.role == 'assistant' and not loop.last else m.content) +")
CHATS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who paints?"},
        {"role": "assistant", "content": "Boris paints."},
        {"role": "user", "content": "Boris paints. What?"},  # the same words, but not an answer
        {"role": "assistant", "content": "A red window, and so on, and so on."},
    ],
    [{"role": "user", "content": "Nobody answers this one."}],
    [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Ärger — naïve"}],
]
ANSWERS = ["Boris paints.<|end|>", "A red window, and so on, and so on.<|end|>"], [], ["Ärger — naïve<|end|>"]


def write(path, chats, **more):
    return write_rows(path, [{"messages": chat, **more} for chat in chats])


def adding_bos(tokenizer):
    """A tokenizer that puts <bos> before every text by itself, as Llama's does."""
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [bos])
    return tokenizer


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_are_learned_and_nothing_else(tmp_path, byte_tokenizer, template):
    tokenizer = adding_bos(byte_tokenizer)
    tokenizer.chat_template = template
    file = write(tmp_path / "chats.jsonl", CHATS)
    documents = open_documents([file], tokenizer, DataOptions([file], messages_field="messages"))
    documents.check(16)
    for index, (chat, answers) in enumerate(zip(CHATS, ANSWERS, strict=True)):
        ids, learned = documents.tokens(index), documents.learned(index)
        assert ids.tolist() == tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]  # one <bos>
        assert ids.tolist().count(tokenizer.bos_token_id) == 1
        assert tokenizer.decode(ids[learned]) == "".join(answers)
    assert documents.total_tokens() == pytest.approx(sum(len(documents.tokens(i)) for i in range(3)), abs=3)


def test_a_field_of_messages_need_not_be_named(tmp_path, byte_tokenizer):
    """Unless there are texts beside it, or another field is named; a folder of texts goes on as before."""
    byte_tokenizer.chat_template = PLAIN
    (tmp_path / "chats").mkdir()
    write(tmp_path / "chats" / "train.jsonl", CHATS, rating=1)
    for place in (f"{tmp_path}/chats", f"{tmp_path}/chats/train.jsonl", f"{tmp_path}/chats::train"):
        documents = open_documents([place], byte_tokenizer, DataOptions([place]))
        assert byte_tokenizer.decode(documents.tokens(0)[documents.learned(0)]) == "".join(ANSWERS[0])
        assert documents.text(0) == write_chat(byte_tokenizer, CHATS[0])[0]
    with pytest.raises(ValueError, match="'messages' holds chats: they take .*neither --stream"):
        open_documents([place], byte_tokenizer, DataOptions([place], stream=True))
    with pytest.raises(ValueError, match="no field 'story', only"):
        open_documents([place], byte_tokenizer, DataOptions([place], text_field="story"))
    both = write(tmp_path / "both.jsonl", CHATS, text="a text")
    documents = open_documents([both], byte_tokenizer, DataOptions([both]))
    assert documents.text(0) == "a text" and documents.learned(0) is None


def test_answers_that_change_take_marks(byte_tokenizer):
    byte_tokenizer.chat_template = FORGETFUL
    with pytest.raises(ValueError, match="writes an answer otherwise once more turns follow.*{% generation %}"):
        write_chat(byte_tokenizer, CHATS[0])
    assert write_chat(byte_tokenizer, CHATS[2])[1]  # the last answer is whole
    byte_tokenizer.chat_template = MARKED.replace("{{ m.content +", "{{ (m.content if loop.last else m.content[2:]) +")
    text, places = write_chat(byte_tokenizer, CHATS[0])
    assert "".join(text[start:end] for start, end in places) == "ris paints.<|end|>" + ANSWERS[0][1]


def test_a_run_says_how_much_it_sees_and_shows_the_memory(byte_folder, byte_tokenizer, capsys):
    byte_tokenizer.chat_template = PLAIN
    byte_tokenizer.save_pretrained(byte_folder / "base")
    file = write(byte_folder / "chats.jsonl", CHATS)
    given = [f"--train={file}", f"--valid={file}", "--device=cpu", "--lanes=1"]  # no --messages_field
    train_adapt.main(arguments(byte_folder, *given, "--steps=4", "--log_every=1", "--valid_min_tokens=2"))
    said = capsys.readouterr()
    total = sum(len(write_chat(byte_tokenizer, chat)[0].encode()) - 4 for chat in CHATS)  # <bos> is one token
    there = int(said.out.partition("About ")[2].partition(" tokens in the documents")[0])
    assert there == pytest.approx(total, abs=3)
    assert f"4 steps learn from at most 64: {64 / there:.3g} of an epoch, and segments without" in said.out
    result = json.loads((byte_folder / "adapter" / "train_result.json").read_text())
    assert result["tokens"] > 4 * 16  # questions are read without a step
    last = said.err.rpartition("Training")[2]
    gates, age = result["log"][-1]["gate_mean"], result["log"][-1]["retrieved_age"]
    assert f"tokens/s, gates {gates:.3f}, retrieved {age:,.0f} tokens ago" in last


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, {}, "a tokenizer with a chat template"),
        (PLAIN, {"stream": True}, "neither --stream nor --label_field"),
        (PLAIN, {"label_field": "places"}, "neither --stream nor --label_field"),
        (PLAIN, {"messages_field": "text"}, "the field 'text' must hold lists of messages"),
        (PLAIN, {"messages_field": "nothing"}, "must hold lists of messages .role, content., but holds nothing"),
        ("{{ raise_exception('Roles must alternate') }}", {}, "cannot write a chat that begins .*Roles must alternate"),
    ],
)
def test_what_is_refused(tmp_path, byte_tokenizer, template, options, message):
    byte_tokenizer.chat_template = template
    file = write(tmp_path / "chats.jsonl", CHATS, text="a text")
    with pytest.raises(ValueError, match=message):
        open_documents([file], byte_tokenizer, DataOptions([file], **{"messages_field": "messages", **options}))


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "must be a list of messages, and hold at least one"),
        (None, "must be a list of messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "content of a message must be a text"),
        ([{"role": "user", "content": 5}], "content of a message must be a text, got 5"),
        ([{"role": "user", "content": "And?"}, {"role": "assistant", "content": None}], "cannot write a chat"),
    ],
)
def test_what_is_no_chat_is_named(tmp_path, byte_tokenizer, chat, message):
    byte_tokenizer.chat_template = PLAIN
    alone = bool(chat) and not isinstance(chat[0]["content"], str)  # a file holds contents of one kind
    file = write(tmp_path / "chats.jsonl", [chat] if alone else [CHATS[2], chat])
    with pytest.raises(ValueError, match=f"Chat {1 if alone else 2} of .*chats.jsonl: .*{message}"):
        open_documents([file], byte_tokenizer, DataOptions([file], messages_field="messages"))


def test_an_assistant_may_begin_and_messages_may_differ_in_their_fields(tmp_path, byte_tokenizer):
    byte_tokenizer.chat_template = PLAIN
    called = {"role": "assistant", "content": "Wait.", "tool_calls": [{"name": "look", "arguments": "window"}]}
    chats = [
        [{"role": "assistant", "content": "Hello."}, *CHATS[2]],
        [CHATS[2][0], called, {"role": "tool", "content": "red"}, {"role": "assistant", "content": "Red."}],
    ]
    for number, chat in enumerate(chats):
        file = write(tmp_path / f"{number}.jsonl", [chat])
        documents = open_documents([file], byte_tokenizer, DataOptions([file], messages_field="messages"))
        said = byte_tokenizer.decode(documents.tokens(0)[documents.learned(0)])
        assert said == "".join(f"{turn['content']}<|end|>" for turn in chat if turn["role"] == "assistant")
