"""`cacheformers app`: what it opens, refuses and escapes, and the page as a person uses it, in a real browser."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from conftest import save_adapter

pytest.importorskip("gradio")

import cacheformers
from cacheformers.app import show
from cacheformers.app.desk import LARGEST_TEXT, Desk, Reading
from cacheformers.app.main import main

ROOT = Path(__file__).resolve().parents[2]
FACT = "Every Sunday Boris paints a red window."
ATTACK = (
    """<script>document.title = "broken"</script><img src=x onerror="document.title='broken'"> ${1+1} {{value}} &amp;"""
)
BROWSER_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--window-size=1280,1080",
]


@pytest.fixture
def desk(make_model, byte_tokenizer):
    model = make_model(
        "llama_gqa", torch.float32, base={"vocab_size": 259, "max_position_embeddings": 1024}, segment_tokens=32
    )
    return Desk(model, byte_tokenizer, longest=6)


def last(readings):
    return list(readings)[-1]


def damage(files):
    """Change one bit of a memory's tensors; the file."""
    file = next(path for path in map(Path, files) if path.suffix == ".safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


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


# What follows starts the app in a process of its own, and Chromium.


@pytest.fixture
def serve(tmp_path):
    """Start the command in a folder; the address of the page."""
    processes = []

    def start(cwd, *arguments):
        environment = {**os.environ, "GRADIO_TEMP_DIR": str(tmp_path / "uploads")}
        command = [sys.executable, "-m", "cacheformers", "app", "--dtype", "float32", *map(str, arguments)]
        log = (tmp_path / "app.log").open("w+")
        process = subprocess.Popen(command, cwd=cwd, stdout=log, stderr=subprocess.STDOUT, env=environment)
        processes.append(process)
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            found = re.search(r"The page is at (http://127\.0\.0\.1:\d+)", (tmp_path / "app.log").read_text())
            if found:
                return found[1]
            time.sleep(0.1)
        raise AssertionError((tmp_path / "app.log").read_text())

    yield start
    for process in processes:
        process.terminate()
        process.wait(30)


class Page:
    """The page in a browser."""

    def __init__(self, driver, address):
        self.driver = driver
        driver.get(address)
        self.wait(lambda: self.all("#drop input[type=file]"))

    def wait(self, condition, seconds=180):
        """Wait until a condition holds, and return its value."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.05)
        return value

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        """The text that a person sees, over all that fits a selector."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join('\\n')"
        return self.driver.execute_script(script, selector)

    def upload(self, selector, *paths):
        """Drop files, in place of those that are there."""
        for button in self.all(f"{selector} button[aria-label='Clear'], {selector} button[aria-label='Remove']"):
            button.click()
        field = self.wait(lambda: self.all(f"{selector} input[type=file]"))[0]
        field.send_keys("\n".join(map(str, paths)))

    def ask(self, question, field="#question", button="#ask"):
        area = self.all(f"{field} textarea, {field} input")[0]
        area.clear()
        area.send_keys(question)
        self.all(button)[0].click()

    def answer(self, question, turns):
        """Ask, and return the answer once it is complete."""
        self.ask(question)
        self.wait(lambda: len(self.all("#conversation .everything")) == turns)
        return self.all("#conversation .answer")[-1].text


@pytest.fixture
def driver(tmp_path):
    """Headless Chromium with an empty profile; it is driven by selenium and reaches this machine alone."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*BROWSER_FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


@pytest.mark.slow
def test_texts_memories_and_errors_in_a_browser(byte_folder, byte_tokenizer, serve, driver):
    model = save_adapter(byte_folder / "base", byte_folder / "adapter")
    (byte_folder / "attack.txt").write_text(ATTACK)
    memory = cacheformers.read_text(model, byte_tokenizer, FACT * 3, "facts", progress=False)
    memory.save(byte_folder / "book.memory")
    address = serve(byte_folder, "--adapter", "adapter", "--max-new-tokens", "5")
    page = Page(driver, address)

    page.ask("Too early?")
    page.wait(lambda: "nothing to ask about yet" in page.text("#conversation .error"))
    page.upload("#drop", byte_folder / "attack.txt")
    page.wait(lambda: page.all("#text"))
    assert page.text("#text") == ATTACK
    page.answer(ATTACK, 1)
    assert ATTACK in page.text("#conversation .question")
    page.ask(ATTACK, "#compared", "#compare")
    page.wait(lambda: len(page.all("#comparison section")) == 2)
    assert driver.title == "cacheformers" and not page.all("#text img, #conversation img, #conversation script")

    files = [path for path in (byte_folder / "book.memory").iterdir() if path.suffix in (".json", ".safetensors")]
    page.upload("#drop", *files)
    page.wait(lambda: page.text("#reading .name") == "facts")
    assert f"{3 * len(FACT)}\ntokens read" in page.text("#reading") and page.text("#text") == FACT * 3
    assert page.text("#text .forgotten") and "the newest 40" in page.text("#reading")
    assert not page.all("#conversation .question")
    damage(files)
    page.upload("#drop", *files)
    page.wait(lambda: re.search("damaged|checksum", page.text("#reading .error")))
    assert not page.all("#text")

    outside = [name for name in requested(driver) if not name.startswith(address)]
    assert outside == []
    refuses_others(address)


def requested(driver):
    """Everything that the browser has loaded for the page."""
    return driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")


def refuses_others(address):
    """The server listens on the loopback address alone, and uploads of other kinds and sizes do not get in."""
    port = int(address.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; it only finds this machine's own address
        own = probe.getsockname()[0]
    with pytest.raises(OSError):
        socket.create_connection((own, port), timeout=5)
    for path in ("/gradio_api/file=/etc/hostname", "/gradio_api/file=../../setup.cfg"):
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(address + path, timeout=30)
