"""`cacheformers serve` in a process of its own, asked by OpenAI's client and by transformers' chat."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch
from conftest import save_adapter
from recipe import make_text
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.adapters.export import export
from cacheformers.cli.main import main
from cacheformers.cli.server import FromMemory, give_chat_template, make_app
from cacheformers.modeling.conversation import follow_up, opening

NEW = 12  # tokens of an answer
FIRST = [{"role": "user", "content": "w5 w6 w7"}]
LATER = [{"role": "system", "content": "w1"}, *FIRST, {"role": "assistant", "content": "w9 w2"}, *FIRST]
LONG = [{"role": "user", "content": make_text(50, seed=4)}]  # longer than a segment and the base's window


@pytest.fixture
def served(folder, tokenizer, monkeypatch):
    """An adapter over `base`, what it remembers of a book in `book.memory`, and its export in `model`."""
    monkeypatch.chdir(folder)
    (folder / "book.txt").write_text(make_text(120))
    adapter = save_adapter("base", "adapter")
    for name, gate in adapter.named_parameters():
        if "lora_mem_gate" in name:
            gate.data.mul_(20)  # so far that words of the answer change
    adapter.save_pretrained("adapter")
    main(["read", "book.txt", "-o", "book.memory", "--adapter", "adapter"])
    export(folder / "adapter", folder / "model")
    return folder


@contextmanager
def server(folder, *arguments):
    """A server in a process of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / f"server_{port}.log"
    command = [sys.executable, "-m", "cacheformers", "serve", *arguments, "--port", str(port)]
    with log.open("w") as file, subprocess.Popen(command, cwd=folder, stdout=file, stderr=file) as process:
        try:
            deadline = time.monotonic() + 300
            while not healthy(port):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def healthy(port):
    try:
        return post(f"http://127.0.0.1:{port}/health", None) == '{"status":"ok"}'
    except OSError:
        return False


def post(url, body):
    """What a server says to JSON, or to a GET where there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def expected(folder, messages, memory=True, template=None):
    """What the adapter answers here, without a server."""
    model = AutoModelForCausalLM.from_pretrained(folder / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = template
    give_chat_template(tokenizer)
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    kept = {"past_key_values": cacheformers.load_memory(folder / "book.memory", model)} if memory else {}
    answer = model.generate(**chat, **kept, max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(answer[0, chat["input_ids"].shape[1] :], skip_special_tokens=True)


def asked(url, messages, model, stream=False):
    """The answer of a server, whole or put together from its pieces, and the number of pieces."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    options = {"model": model, "messages": messages, "max_tokens": NEW, "temperature": 0}
    if not stream:
        return client.chat.completions.create(**options).choices[0].message.content
    pieces = [part.choices[0].delta.content or "" for part in client.chat.completions.create(**options, stream=True)]
    assert len([piece for piece in pieces if piece]) > 1
    return "".join(pieces)


@pytest.mark.slow
def test_an_adapter_and_its_memory(served):
    wanted = {json.dumps(messages): expected(served, messages) for messages in (FIRST, LATER, LONG)}
    assert len(set(wanted.values())) == 3
    assert expected(served, FIRST, memory=False) != wanted[json.dumps(FIRST)]  # the memory is seen in the answer
    with server(served, "adapter", "--memory", "book.memory") as url:
        for messages in (FIRST, LATER, LONG, FIRST):  # nothing of one request is left for the next
            assert asked(url, messages, "adapter") == wanted[json.dumps(messages)]
            assert asked(url, messages, "adapter", stream=True) == wanted[json.dumps(messages)]
        with ThreadPoolExecutor(3) as pool:
            requests = [(messages, stream) for stream in (True, False) for messages in (FIRST, LATER, LONG)] * 2
            for (messages, _), answer in zip(
                requests, pool.map(lambda case: asked(url, case[0], "adapter", case[1]), requests), strict=True
            ):
                assert answer == wanted[json.dumps(messages)]

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["adapter"]
        with pytest.raises(openai.BadRequestError) as refusal:
            asked(url, FIRST, "base")
        assert "pinned to 'adapter'; requested 'base'" in refusal.value.response.text
        assert "This server has one model" in post(f"{url}/load_model", {"model": "base"})
        post(f"{url}/reset", {})
        assert asked(url, FIRST, "adapter") == wanted[json.dumps(FIRST)]
        raw = client.completions.create(model="adapter", prompt="w5 w6", max_tokens=NEW, temperature=0)
        limit = {"max_output_tokens": NEW, "temperature": 0, "stream": False}  # this server streams unless told not to
        response = client.responses.create(model="adapter", input=FIRST, **limit)
        assert raw.choices[0].text and response.output_text == wanted[json.dumps(FIRST)]

        talk = chat(url, "w5 w6 w7\nn\n!exit\n")  # "n": at the limit of tokens it asks whether to go on
        assert talk.returncode == 0, talk.stderr
        assert " ".join(wanted[json.dumps(FIRST)].split()[:4]) in talk.stdout


def chat(url, typed):
    """What `transformers chat` says, given lines instead of a terminal; offline it refuses even this machine."""
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", "adapter", url]
    flags = [f"max_new_tokens={NEW}", "do_sample=False"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return subprocess.run([*command, *flags], input=typed, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_an_exported_model_and_its_chat_template(served):
    """Without a file a conversation starts from an empty memory; a tokenizer's own template is left."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (served / "model" / "chat_template.jinja").write_text(template)
    wanted = expected(served, LONG, memory=False, template=template)
    assert wanted != expected(served, LONG, memory=False)
    with server(served, "model") as url:
        assert asked(url, LONG, "model") == asked(url, LONG, "model", stream=True) == wanted


@pytest.mark.slow
def test_heads_are_served_with_what_they_recall(make_model, folder, tokenizer, monkeypatch):
    """Passages come before the last question, and the memory's window is wide enough for them."""
    monkeypatch.chdir(folder)
    model = make_model("llama_gqa", torch.float32, method="retrieval_heads", cache_size=400)
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained("adapter")
    (folder / "book.txt").write_text(make_text(30))
    main(["read", "book.txt", "-o", "book.memory", "--adapter", "adapter"])
    memory = cacheformers.load_memory("book.memory", model, tokenizer=tokenizer)
    wanted = cacheformers.PassageConversation(model, tokenizer, memory).ask("w5 w6 w7", max_new_tokens=NEW).text
    assert wanted != cacheformers.Conversation(model, tokenizer, memory).ask("w5 w6 w7", max_new_tokens=NEW).text
    with server(folder, "adapter", "--memory", "book.memory") as url:
        assert asked(url, FIRST, "adapter") == asked(url, FIRST, "adapter", stream=True) == wanted
        with ThreadPoolExecutor(3) as pool:
            assert set(pool.map(lambda _: asked(url, FIRST, "adapter"), range(6))) == {wanted}
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        limit = {"max_output_tokens": NEW, "temperature": 0, "stream": False}
        assert client.responses.create(model="adapter", input=FIRST, **limit).output_text == wanted
        with pytest.raises(openai.BadRequestError) as refusal:
            asked(url, [{"role": "user", "content": make_text(80)}], "adapter")
        assert "the base has 64" in refusal.value.response.text
        long = client.chat.completions.create(model="adapter", messages=FIRST, temperature=0)  # at least 1,024 tokens
        assert long.choices[0].finish_reason == "length" and long.usage.total_tokens == 64


def test_a_search_for_passages_lets_other_requests_pass(served):
    """It runs in the thread that generates, question after question, and each answer has its own passages."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained("adapter").eval(), AutoTokenizer.from_pretrained("base")
    give_chat_template(tokenizer)
    passed, searches = threading.Event(), []

    def passages(question):
        searches.append(threading.current_thread())
        if not passed.wait(20):
            raise ValueError("Nothing else was answered.")
        return {"w5 w6": "w1 w2 w3 w4", "w7": ""}[question]

    def request(question):
        return {"messages": [{"role": "user", "content": question}], "max_tokens": NEW, "temperature": 0}

    async def talk():
        here = httpx.ASGITransport(make_app("adapter", model, tokenizer, passages))
        async with httpx.AsyncClient(transport=here, base_url="http://here", timeout=60) as client:
            chats = [
                asyncio.create_task(client.post("/v1/chat/completions", json=request(question)))
                for question in ("w5 w6", "w7")
            ]
            while not searches:
                await asyncio.sleep(0.01)
            models = await client.get("/v1/models")
            passed.set()
            return models.json(), [(await chat).json() for chat in chats]

    models, answers = asyncio.run(talk())
    assert [one["id"] for one in models["data"]] == ["adapter"]
    assert len(searches) == 2 and len(set(searches)) == 1 and searches[0] is not threading.current_thread()
    lengths = [answer["usage"]["prompt_tokens"] for answer in answers]
    assert lengths == [len(opening(tokenizer, "w5 w6", shown="w1 w2 w3 w4")), len(opening(tokenizer, "w7"))]


def test_a_memory_is_cloned_for_each_answer(served):
    model = AutoModelForCausalLM.from_pretrained("adapter").eval()
    memory = cacheformers.load_memory("book.memory", model)
    before = memory.state_dict()
    ids = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    asking = FromMemory(model, memory)
    for _ in range(2):
        asking.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert memory.tokens_read == [120]
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())
    assert asking.config is model.config
    model.generate(input_ids=ids, past_key_values=memory, max_new_tokens=3, do_sample=False)
    assert memory.visible  # and so it would wait for the ids of that conversation
    given = {"input_ids": ids[:, 5:20], "attention_mask": torch.ones(1, 15, dtype=torch.long), "max_new_tokens": 3}
    assert FromMemory(model, memory).generate(**given).shape == (1, 18)


def test_questions_are_written_as_ask_writes_them(byte_tokenizer):
    asked = opening(byte_tokenizer, "Who?"), byte_tokenizer(" Ann.").input_ids, follow_up(byte_tokenizer, "When?")
    give_chat_template(byte_tokenizer)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann."}]
    turns.append({"role": "user", "content": "When?"})
    written = byte_tokenizer.apply_chat_template(turns, add_generation_prompt=True).input_ids
    assert written == sum(asked, [])
    byte_tokenizer.chat_template = "mine"
    give_chat_template(byte_tokenizer)
    assert byte_tokenizer.chat_template == "mine"
