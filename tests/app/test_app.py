"""`cacheformers app` behind the page: what it opens, refuses and escapes. test_browser.py uses the page itself."""

import json
import os
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from app_cases import ATTACK, FACT, damage

pytest.importorskip("gradio")

import gradio

import cacheformers
from cacheformers.app import show
from cacheformers.app.desk import LARGEST_TEXT, Desk, Reading
from cacheformers.app.events import Events
from cacheformers.app.main import main
from cacheformers.modeling.files.index import checksum


@pytest.fixture
def desk(make_model, byte_tokenizer):
    model = make_model(
        "llama_gqa", torch.float32, base={"vocab_size": 259, "max_position_embeddings": 1024}, segment_tokens=32
    )
    return Desk(model, byte_tokenizer, longest=6)


def last(readings):
    return list(readings)[-1]


def retrieved(html):
    """The words that can be clicked, and what they retrieved: `{stretch: times}`."""
    found = re.findall(r'data-retrieved="([\d: ]+)">(.*?)</span>', html)
    return [(word, dict(tuple(map(int, place.split(":"))) for place in places.split())) for places, word in found]


def test_a_text_is_read_segment_by_segment(desk, tmp_path):
    (tmp_path / "book.txt").write_text(FACT * 2)
    seen = [(now.read, now.memory.nbytes, show.progress(now)) for now in desk.open([tmp_path / "book.txt"])]
    assert [read for read, _, _ in seen] == [0, 32, 64, 78]
    assert 'value="32" max="78"' in seen[1][2] and "tokens per second" in seen[1][2] and "<progress" not in seen[-1][2]
    assert show.size(seen[-1][1]) in seen[-1][2] and "the newest 40" in seen[-1][2]
    expected = cacheformers.read_text(desk.model, desk.tokenizer, FACT * 2, progress=False)
    now = last(desk.open([tmp_path / "book.txt"]))
    ring, other = (next(iter(memory.state.rings.values())) for memory in (now.memory, expected))
    assert torch.equal(ring.keys, other.keys)


def test_words_show_what_their_tokens_retrieved(desk, tmp_path):
    (tmp_path / "book.txt").write_text(FACT * 2)
    now = last(desk.open([tmp_path / "book.txt"]))
    talk = desk.talk(now)
    for question in ("Boris?", "And?"):
        said = list(desk.ask(talk, question))
        assert talk.turns[-1].text == (said[-1] if said else "")
    html = show.conversation(talk, desk.tokenizer)
    assert re.sub(r"<[^>]+>", "", html).count("Boris?") == 1
    words = retrieved(html)
    assert [word for word, _ in words if len(word) == 1][:6] == list("Boris?")
    answer = talk.turns[0]
    for place, numbers in enumerate(answer.asked[-13:-7]):  # "Boris?" before "\nAnswer:" without its last token
        expected = {}
        for number in numbers.tolist():
            if number < now.read:
                expected[number // 8] = expected.get(number // 8, 0) + 1
        assert words[place][1] == expected
    stretches = show.document(now).count('<span id="stretch-')
    assert stretches == 10 and all(stretch < stretches for _, found in words for stretch in found)


@pytest.mark.parametrize(
    "template", ["[U]{{ messages[0].content | trim }}[A]", "[U]{{ messages[0].content | upper }}[A]"]
)
def test_templates_that_change_the_question(desk, tmp_path, template):
    """The question is shown as it was typed, not what stands around it."""
    (tmp_path / "book.txt").write_text(FACT)
    desk.tokenizer.chat_template = template
    talk = desk.talk(last(desk.open([tmp_path / "book.txt"])))
    list(desk.ask(talk, " <b> Boris? "))
    text = re.sub(r"<[^>]+>", "", show.conversation(talk, desk.tokenizer))
    assert "&lt;b&gt; Boris?" in text and "[U]" not in text


def test_memory_off_stays_empty(desk):
    talk = desk.talk(None)
    list(desk.ask(talk, FACT))
    assert talk.cache.state.retrieves and all(ring.capacity == 0 for ring in talk.cache.state.rings.values())
    assert retrieved(show.conversation(talk, desk.tokenizer)) == []


def test_saved_memories_are_opened_with_their_checksums(desk, tmp_path):
    memory = cacheformers.read_text(desk.model, desk.tokenizer, FACT, "facts", progress=False)
    memory.save(tmp_path / "book.memory")
    files = [str(path) for path in (tmp_path / "book.memory").iterdir() if path.suffix in (".json", ".safetensors")]
    now = last(desk.open(files))
    assert now.name == "facts" and now.read == len(FACT) and FACT[:8] in show.document(now)
    tensors = damage(files)
    with pytest.raises(ValueError, match="checksum|damaged") as error:
        last(desk.open(files))
    assert "/tmp" not in str(error.value)
    with pytest.raises(ValueError, match="missing"):
        last(desk.open([file for file in files if Path(file) != tensors]))


def test_a_memory_names_no_files_but_its_own(desk, tmp_path):
    """An index that was altered and signed again opens neither a pickle nor what lies elsewhere."""
    cacheformers.read_text(desk.model, desk.tokenizer, FACT, progress=False).save(tmp_path / "book.memory")
    index = tmp_path / "book.memory" / "index.json"
    saved = json.loads(index.read_text())
    for name in ("weights.pkl", "../elsewhere.safetensors", "/etc/passwd"):
        (tmp_path / "weights.pkl").write_bytes(pickle.dumps(Boom()))
        contents = {**saved, "files": {**saved["files"], name: saved["files"][saved["tail"]]}, "tail": name}
        del contents["sha256"]
        index.write_text(json.dumps({**contents, "sha256": checksum(contents)}))
        with pytest.raises(ValueError, match="damaged: its files are"):
            last(desk.open([str(index), str(tmp_path / "weights.pkl")]))


class Boom:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return os.abort, ()


def test_what_is_refused(desk, tmp_path):
    (tmp_path / "run.py").write_text("raise SystemExit")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "long.txt").write_text("a" * (LARGEST_TEXT + 1))
    for name, reason in {
        "run.py": "Drop one text",
        "latin.txt": "latin.txt is not utf-8 text .* `cacheformers read`",
        "empty.txt": "is empty",
        "long.txt": "at most 2,000,000",
    }.items():
        with pytest.raises(ValueError, match=reason):
            last(desk.open([str(tmp_path / name)]))
    with pytest.raises(ValueError, match="Drop one text"):
        last(desk.open([str(tmp_path / "latin.txt"), str(tmp_path / "empty.txt")]))


def test_what_is_refused_leaves_what_was_read(desk, tmp_path):
    """Nothing changes but a notice; what ends while a text is being read leaves nothing."""
    events = Events(desk)
    (tmp_path / "book.txt").write_text(FACT * 2)
    (tmp_path / "empty.txt").write_text("")
    _, reading, talk, figures, *_ = last(events.open_document([tmp_path / "book.txt"], None))
    assert reading.read == 78 and talk is not None
    (refused,) = events.open_document([tmp_path / "empty.txt"], reading)
    skip = gradio.skip()
    assert refused[:3] == (None, skip, skip) and refused[4:] == (skip, skip)
    assert "empty.txt" in refused[3] and refused[3].endswith(figures)
    assert [*events.open_other([tmp_path / "empty.txt"], reading)] == [(None, reading, refused[3])]
    assert last(events.open_document([tmp_path / "empty.txt"], None))[1:3] == (skip, skip)

    opening = events.open_document([tmp_path / "book.txt"], reading)
    next(opening)
    desk.model.get_input_embeddings().weight.data.fill_(torch.nan)  # what is read next fails
    *_, ended = opening
    assert ended[:3] == (None, None, None) and "tokens read" not in ended[3]


def test_the_server_refuses_files_of_other_kinds(tmp_path, monkeypatch):
    """Past the page, too, whose browser would not send them."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    page = pytest.importorskip("cacheformers.app.page")
    for name, allowed in {"book.txt": True, "index.json": True, "run.py": False, "pytorch_model.bin": False}.items():
        (tmp_path / name).write_text("raise SystemExit")
        sent = gradio.data_classes.ListFiles([{"path": str(tmp_path / name), "orig_name": name}])
        if allowed:
            assert page.dropzone("", "drop").preprocess(sent) == [str(tmp_path / name)]
        else:
            with pytest.raises(gradio.Error, match="Invalid file type"):
                page.dropzone("", "drop").preprocess(sent)


def test_everything_is_escaped(desk):
    memory = cacheformers.read_text(desk.model, desk.tokenizer, ATTACK, ATTACK, progress=False)
    now = Reading(ATTACK, memory, memory.tokens_read[0], 1.0)
    talk = desk.talk(now)
    list(desk.ask(talk, ATTACK))
    pages = [
        show.progress(now),
        show.document(now),
        show.conversation(talk, desk.tokenizer, ATTACK, ATTACK),
        show.comparison({ATTACK: (ATTACK, ATTACK)}),
        show.notice(ATTACK, "error"),
    ]
    for html in pages:
        assert "<script" not in html and "<img" not in html and "&amp;amp;" in re.sub(r"</?span[^>]*>", "", html)


def test_without_gradio_the_command_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "cacheformers.app.page", raising=False)
    with pytest.raises(SystemExit, match=r'pip install "cacheformers\[app\]"'):
        main(["--adapter", "nowhere"])
