"""`cacheformers app` as a person uses it, in a real browser: drops, clicks and keys alone."""

import http.client
import io
import itertools
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from app_cases import ATTACK, FACT, damage
from conftest import save_adapter

pytest.importorskip("gradio")
pytest.importorskip("selenium")

import browser
from PIL import Image

import cacheformers
from cacheformers.cli.model import load_model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SMOLLM2, ADAPTER = "data/smollm2-135m-instruct", "model_cards/answers_facts"
TEXTS = ROOT / "tests" / "fixtures" / "app"  # the beginnings of two novels, with facts of the adapter's kind
# Everything that a part of the page has shown, however short.
RECORD = """
window.recorded = [];
new MutationObserver(() => window.recorded.push(document.querySelector(arguments[0]).innerText))
  .observe(document.querySelector(arguments[0]), {childList: true, subtree: true, characterData: true});
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    driver = browser.start(tmp_path_factory.mktemp("chromium") / "profile")
    if driver is None:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    yield driver
    driver.quit()


@pytest.fixture
def serve(tmp_path):
    """Start the command in a folder; the address of the page."""
    processes, log = [], tmp_path / "app.log"

    def start(cwd, *arguments):
        environment = {**os.environ, "GRADIO_TEMP_DIR": str(tmp_path / "uploads")}
        command = [sys.executable, "-m", "cacheformers", "app", *map(str, arguments)]
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, env=environment))
        deadline = time.monotonic() + 300
        while processes[-1].poll() is None and time.monotonic() < deadline:
            if found := re.search(r"The page is at (http://127\.0\.0\.1:\d+)", log.read_text()):
                return found[1]
            time.sleep(0.1)
        raise AssertionError(log.read_text())

    yield start
    for process in processes:
        process.kill()
        process.wait()


def files_of(memory):
    return [path for path in memory.iterdir() if path.suffix in (".json", ".safetensors")]


def test_a_model_reads_answers_and_shows_where_from(serve, driver, tmp_path, monkeypatch):
    """With the adapter that ships and its real base; APP_PICTURE names a file for the picture in the docs."""
    if not (ROOT / SMOLLM2).exists():
        pytest.skip("SmolLM2 is not there: cacheformers fetch")
    monkeypatch.chdir(ROOT)
    address = serve(ROOT, "--model", SMOLLM2, "--adapter", ADAPTER, "--dtype", "bfloat16", "--max-new-tokens", 12)
    page = browser.Page(driver, address)

    driver.execute_script(RECORD, "#reading")
    page.drop("#drop", TEXTS / "moby-dick.txt")
    page.wait(lambda: page.text("#text").startswith("LOOMINGS\n\nCall me Ishmael."))
    seen = driver.execute_script("return window.recorded")
    assert any(re.search(r"^0 of 1,170\ntokens read", shown, re.MULTILINE) for shown in seen)
    half = next(shown for shown in seen if "1,024 of 1,170\ntokens read" in shown)
    assert re.search(r"[1-9][\d,]*\ntokens per second\n1\.1 MiB\nsize of the memory", half)
    assert re.search(r"moby-dick\.txt\s+1,170\ntokens read\n.*\n.*\n2\.2 MiB\n", page.text("#reading"))

    assert page.answer("What does Boris paint?", 1) == "red window"
    assert page.answer("What did Greta find in the garden?", 2) == "silver key"
    assert page.text("#conversation .question").splitlines()[0] == "What does Boris paint?"
    page.wait(lambda: "question and answer retrieved most" in page.text("#conversation .latest .chosen"))
    assert any("silver key" in hit.text for hit in page.all("#text .hit"))
    page.drop("#drop-other", TEXTS / "alice.txt")
    page.wait(lambda: "414\ntokens read" in page.text("#reading-other"))
    answers = page.compare("What does Boris paint?", 3)
    assert answers["Memory on"] == "red window" and answers["Another document's"] == "broken bicycle"
    assert answers["Memory off"] and "window" not in answers["Memory off"]

    for word, fact in {
        "key": "once found a silver key in the garden",
        "window": "Every Sunday Boris paints a red",
    }.items():
        page.click("#conversation .answer .token", word)
        page.wait(lambda word=word: f"what “{word}” retrieved" in page.text("#document .legend"))
        assert page.text("#conversation .chosen") == word
        hits = page.all("#text .hit")
        marked = next(hit for hit in hits if fact in hit.text)
        assert len(hits) == len(page.all("#map i")) < 20 and page.visible(marked)
    assert not page.visible(hits[-1])
    page.all("#map i")[-1].click()
    page.wait(lambda: page.visible(page.all("#text .hit")[-1]))
    page.click("#conversation .answer .token", "window")
    page.wait(lambda: page.visible(marked))
    picture = Image.open(io.BytesIO(page.picture())).convert("RGB").quantize(64)
    picture.save(os.environ.get("APP_PICTURE") or tmp_path / "app.png", optimize=True)

    model, tokenizer = load_model(SMOLLM2, ADAPTER, "cpu", "bfloat16")
    text = (TEXTS / "alice.txt").read_text()
    cacheformers.read_text(model, tokenizer, text, "alice.txt", progress=False).save(tmp_path / "alice.memory")
    page.drop("#drop", *files_of(tmp_path / "alice.memory"))
    page.wait(lambda: page.text("#text") == text)
    assert "414\ntokens read" in page.text("#reading") and not page.all("#conversation .question")
    assert page.answer("What does Boris paint?", 1) == "broken bicycle"


def test_texts_memories_and_errors(byte_folder, byte_tokenizer, serve, driver):
    """With a tiny model: what is dropped and asked is shown as it is, and what must not get in says why."""
    model = save_adapter(byte_folder / "base", byte_folder / "adapter")
    (byte_folder / "attack.txt").write_text(ATTACK)
    (byte_folder / "run.py").write_text("raise SystemExit")
    with (byte_folder / "large.txt").open("wb") as large:
        large.truncate(257 * 2**20)
    memory = cacheformers.read_text(model, byte_tokenizer, FACT * 3, "facts", progress=False)
    memory.save(byte_folder / "book.memory")
    address = serve(byte_folder, "--adapter", "adapter", "--dtype", "float32", "--max-new-tokens", 5)
    page = browser.Page(driver, address)

    page.ask("Too early?")
    page.wait(lambda: "nothing to ask about yet" in page.text("#conversation .error"))
    page.drop("#drop", byte_folder / "run.py")
    page.wait(lambda: "Invalid file type: run.py. Only .txt," in page.text("body"))
    page.drop("#drop", byte_folder / "large.txt")
    page.wait(lambda: 'exceed the maximum allowed size of 256.0 Mb: "large.txt"' in page.text("body"))

    page.drop("#drop", byte_folder / "attack.txt")
    page.wait(lambda: page.text("#text") == ATTACK)
    page.answer(ATTACK, 1)
    assert ATTACK in page.text("#conversation .question")
    assert set(page.compare(ATTACK, 2)) == {"Memory on", "Memory off"}
    assert driver.title == "cacheformers" and not page.all("#text img, #conversation img, #conversation script")

    files = files_of(byte_folder / "book.memory")
    page.drop("#drop", *files)
    page.wait(lambda: page.text("#text") == FACT * 3)
    assert re.search(rf"facts\s+{3 * len(FACT)}\ntokens read", page.text("#reading"))
    assert page.text("#text .forgotten") and "the newest 40" in page.text("#reading")
    assert not page.all("#conversation .question")
    damage(files)
    page.drop("#drop", *files)
    page.wait(lambda: re.search("damaged|checksum", page.text("#reading .error")))
    assert page.text("#text") == FACT * 3 and "tokens read" in page.text("#reading")
    page.answer("And what stays?", 1)

    assert driver.window_handles == [driver.current_window_handle]
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in loaded if not name.startswith(address)] == []
    refuses_others(address)


def refuses_others(address):
    """The server listens on the loopback address alone, gives out no files, and takes none that is too large."""
    port = int(address.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; it only finds this machine's own address
        own = probe.getsockname()[0]
    with pytest.raises(OSError):
        socket.create_connection((own, port), timeout=5)
    for path in ("/gradio_api/file=/etc/hostname", "/gradio_api/file=../../setup.cfg"):
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(address + path, timeout=30)
    assert uploaded(port, 1) == 200 and uploaded(port, 257) == 413


def uploaded(port, mebibytes):
    """Upload a file of zeros past the page; the status of the reply."""
    head = b'--part\r\nContent-Disposition: form-data; name="files"; filename="large.txt"\r\n\r\n'
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=180)
    body = itertools.chain([head], itertools.repeat(bytes(2**20), mebibytes), [b"\r\n--part--\r\n"])
    kind = {"Content-Type": "multipart/form-data; boundary=part"}
    connection.request("POST", "/gradio_api/upload", body, kind, encode_chunked=True)
    return connection.getresponse().status
