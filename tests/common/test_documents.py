"""Documents from files, folders and datasets; which are left out; in what order they come, whole or streamed."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cacheformers.common import documents as module
from cacheformers.common.documents import DataOptions, Documents, StreamedDocuments, open_documents
from cacheformers.common.sources import load_texts, stream_texts

BLOCK = 4


class CountingTokenizer(PreTrainedTokenizerFast):
    """Keeps what it was asked to tokenize."""

    def __call__(self, text, **options):
        self.__dict__.setdefault("asked", []).append(text)
        return super().__call__(text, **options)


def byte_tokenizer(normalizer=None, space=False):
    """A token a byte, and <bos> before them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(["<bos>", *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    if normalizer:
        made.normalizer = normalizer
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return CountingTokenizer(tokenizer_object=made, bos_token="<bos>")


def words(number, length=3):
    return " ".join([f"w{number}"] * length)


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"title": "t", "text": text}) + "\n" for text in texts))
    return str(path)


def write_parquet(path, texts, kind=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, kind or pa.string())}), path, row_group_size=2)
    return str(path)


@pytest.fixture
def dataset_folder(tmp_path):
    """A folder laid out like a dataset of the Hub, with two configs."""
    folder = tmp_path / "hub"
    for config in ("en", "de"):
        write_parquet(folder / config / "train-0.parquet", [f"{config} {i}" for i in range(10)])
        write_parquet(folder / config / "test.parquet", [f"{config} test"])
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: en\n  data_files: en/train-*.parquet\n"
        "- config_name: de\n  data_files:\n  - split: train\n    path: de/train-*.parquet\n"
        "- config_name: quiz\n  data_files:\n  - split: test\n    path: '*/test.parquet'\n---\n"
    )
    return folder


# Sources


def test_documents_from_files(tmp_path):
    found = ["one", None, "two\nlines"]
    paths = {
        "jsonl": write_jsonl(tmp_path / "a.jsonl", found),
        "gz": str(tmp_path / "b.jsonl.gz"),
        "parquet": write_parquet(tmp_path / "c.parquet", found),
        "large": write_parquet(tmp_path / "d.parquet", found, pa.large_string()),
        "empty": write_parquet(tmp_path / "e.parquet", [None], pa.null()),
    }
    Path(paths["gz"]).write_bytes(gzip.compress(Path(paths["jsonl"]).read_bytes()))
    for name in ("jsonl", "gz", "parquet", "large"):
        assert list(load_texts([paths[name]])) == found
        assert [row["text"] for row in stream_texts([paths[name]])] == found

    plays = tmp_path / "plays"
    plays.mkdir()
    (plays / "hamlet.md").write_text("# Hamlet\n\nWho's there?\n")
    (plays / "notes.txt").write_text("Notes.")
    (plays / "nothing.txt").write_text("")
    (plays / "cover.png").write_bytes(b"\x89PNG")
    everything = [str(plays), paths["large"], paths["empty"], paths["gz"], paths["jsonl"]]
    expected = ["# Hamlet\n\nWho's there?", "Notes.", *found, None, *found, *found]
    assert [text and text.strip() for text in load_texts(everything)] == expected
    assert [row["text"] and row["text"].strip() for row in stream_texts(everything)] == expected
    assert list(load_texts([paths["jsonl"]], "title")) == ["t"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_documents_from_a_dataset(dataset_folder, tokenizer, stream):
    options = DataOptions(train=[], stream=stream, shuffle_block=3)

    def texts(name):
        documents = open_documents([f"{dataset_folder}{name}"], tokenizer, options)
        return [documents.text(index) for index in range(len(documents) if not stream else 10)]

    assert texts(":en") == [f"en {i}" for i in range(10)]
    assert texts(":de:train") == [f"de {i}" for i in range(10)]
    assert set(texts(":quiz:test")) == {"en test", "de test"}
    if not stream:
        assert texts(":en:train[4:6]") == ["en 4", "en 5"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("someone/something", "The dataset someone/something cannot be read: Couldn't reach"),
        ("someone/something@main:en:test", "(?s)someone/something cannot be .* owner/name:config:split"),
        ("{folder}::train", r"available configs: \['en', 'de', 'quiz'\]"),
        ("{folder}:fr", r"'fr' not found. Available: \['en', 'de', 'quiz'\]"),
        ("{folder}:de:test", r"\['train'\]"),
        ("{folder}/fr", "fr does not exist"),
        ("./nothing/here", "here does not exist"),
        ("nothing/here.jsonl", "here.jsonl does not exist"),
        ("{folder}/fr:de", "fr:de does not exist"),
    ],
)
def test_names_that_do_not_exist(dataset_folder, name, message, stream):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        (stream_texts if stream else load_texts)([name.format(folder=dataset_folder)])


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_folder_with_splits_only_the_wanted_one_is_read(tmp_path, tokenizer, stream):
    def texts(folder, split="train"):
        documents = open_documents([str(tmp_path / folder)], tokenizer, DataOptions(train=[], stream=stream), split)
        return {documents.text(index) for index in range(2 if stream else len(documents))}

    for split, number in (("train", 1), ("validation", 2), ("test", 3)):
        write_parquet(tmp_path / "files" / f"{split}-00000-of-00001.parquet", [words(number), words(number, 4)])
        write_jsonl(tmp_path / "folders" / split / "books.jsonl", [words(number), words(number, 4)])
        write_jsonl(tmp_path / "deep" / "en" / f"{split}.jsonl", [words(number), words(number, 4)])
    (tmp_path / "files" / "README.md").write_text("A card is not a document.")
    for folder in ("files", "folders", "deep"):
        assert texts(folder) == {words(1), words(1, 4)}
        assert texts(folder, "validation") == {words(2), words(2, 4)}
    assert texts("folders/validation") == {words(2), words(2, 4)}  # named, so wanted

    write_jsonl(tmp_path / "one" / "train-0.jsonl", [words(1)])
    write_jsonl(tmp_path / "one" / "more.jsonl", [words(2)])
    assert texts("one") == {words(1), words(2)}  # nothing here is held out
    write_jsonl(tmp_path / "test" / "dev.jsonl", [words(2), words(3)])
    assert texts("test") == {words(2), words(3)}  # the only one, and named


@pytest.mark.parametrize(
    ("names", "split", "message"),
    [
        (["train-0.jsonl", "valid-0.jsonl", "more.jsonl"], "train", r"more.jsonl: belongs to none .*train, validation"),
        (["valid.jsonl", "test.jsonl"], "train", r"has no split 'train', only test, validation"),
        (["train.jsonl", "test.jsonl"], "validation", r"has no split 'validation', only test, train"),
        (["train.jsonl", "test.jsonl"], None, r"has several splits \(test, train\)"),
    ],
)
def test_splits_that_do_not_say_what_to_read(tmp_path, names, split, message):
    for name in names:
        write_jsonl(tmp_path / "data" / name, ["x"])
    with pytest.raises(ValueError, match=f"{message}.*such as .*jsonl"):
        load_texts([str(tmp_path / "data")], split=split)


WHOLE = gzip.compress(b'{"text": "x"}\n' * 5000, mtime=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist"),
        ("a.jsonl", b'{"body": "x"}\n', "no field 'text', only body. Name the one that holds the text with text_field"),
        ("a.jsonl", b'{"text": ["x"]}\n', "the field 'text' holds List"),
        ("a.jsonl", b'{"text": 3}\n', "the field 'text' holds int64, not text"),
        ("a.jsonl", b'{"text": "x"\n', "a.jsonl cannot be read as json"),
        ("a.jsonl", b"", "the files are empty"),
        ("a.jsonl.gz", WHOLE[:-40], "a.jsonl.gz cannot be read as json: Compressed file ended"),
        ("a.jsonl.gz", b'{"text": "x"}', "a.jsonl.gz cannot be read as json: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "there is nothing in it"),
        ("a.parquet", b"PAR1", "a.parquet cannot be read as parquet"),
        ("a.pdf", b"x", "is none of .jsonl"),
        ("", None, "holds no documents"),
    ],
)
def test_unreadable_files_are_errors(tmp_path, name, content, message, stream):
    (tmp_path / "data").mkdir()
    if content is not None:
        (tmp_path / "data" / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message):
        (stream_texts if stream else load_texts)([str(tmp_path / "data" / name)])


# Which are left out


def test_documents_that_are_too_short_are_errors(tokenizer):
    def build(*lengths, min_tokens=2):
        return Documents([words(1, length) for length in lengths], tokenizer, min_tokens)

    build(3, 18).check(16)
    with pytest.raises(ValueError, match="The longest of 2 documents has 16 tokens"):
        build(16, 3).check(16)
    with pytest.raises(ValueError, match="All 2 documents are empty"):
        Documents(["", None], tokenizer).check(16)
    with pytest.raises(ValueError, match="All 2 documents have fewer than 30 tokens"):
        build(20, 25, min_tokens=30).check(16)


@pytest.mark.parametrize(
    ("normalizer", "space", "text", "count"),
    [
        (None, False, "abcdefgh", 9),
        (None, False, "äöü", 7),
        (None, True, "abcdefgh", 10),
        (normalizers.NFKC(), False, "\ufdfa", 34),  # three bytes become 33
        (normalizers.NFKC(), True, "ﬃ" * 5, 17),  # fifteen become fifteen
    ],
)
def test_short_documents_are_left_out_without_tokenizing(normalizer, space, text, count):
    """One that has just enough tokens stays, though it has fewer bytes than tokens."""
    tokenizer = byte_tokenizer(normalizer, space)
    assert len(tokenizer(text)["input_ids"]) == count
    assert len(Documents([text], tokenizer, count).tokens(0)) == count
    tokenizer.asked.clear()
    for more in range(1, 40):
        assert len(Documents([text], tokenizer, count + more).tokens(0)) == 0
    assert len(tokenizer.asked) <= 1  # where no space was put before it, it might have had one token more


def test_names_of_documents(tokenizer):
    documents = Documents([None, "It was the best  of times,\nit was the worst of times, ..."], tokenizer)
    assert documents.name(0) == "document 0 (empty)"
    assert documents.name(1) == 'document 1 ("It was the best of times, it was ...")'


# In what order they come


def test_documents_are_permuted_anew_each_epoch(tokenizer):
    documents = Documents([words(i) for i in range(7)], tokenizer)
    for epoch in (0, 1, 5):
        order = [documents.at(position, seed=3) for position in range(7 * epoch, 7 * epoch + 7)]
        assert order == np.random.default_rng((3, epoch)).permutation(7).tolist()


@pytest.fixture(params=["parquet", "jsonl", "txt"])
def make_stream(request, tmp_path, tokenizer):
    """Opens a stream of documents in two files or more, of the same texts each time."""

    def build(count, shuffle_block=BLOCK, min_tokens=2):
        texts, folder = [words(i) for i in range(count)], tmp_path / f"stream{count}"
        if request.param == "txt":
            folder.mkdir(exist_ok=True)
            for number, text in enumerate(texts):
                (folder / f"{number:02}.txt").write_text(text)
        else:
            write = {"parquet": write_parquet, "jsonl": write_jsonl}[request.param]
            for number, part in enumerate((texts[: count // 3], texts[count // 3 :])):
                write(folder / f"{number}.{request.param}", part)
        options = DataOptions([str(folder)], min_tokens=min_tokens, stream=True, shuffle_block=shuffle_block)
        documents = open_documents(options.train, tokenizer, options)
        assert isinstance(documents, StreamedDocuments)
        return documents

    return build


def read(documents, positions, seed=5):
    """The texts at places of the endless row, letting go of what is behind."""
    texts = []
    for position in positions:
        documents.release(position)
        texts.append(documents.text(documents.at(position, seed)))
    return texts


def test_a_stream_is_shuffled_block_by_block_and_begins_again(make_stream):
    """As if its documents stood in one endless list; also where they are fewer than a block."""
    for count in (11, 8, 3):
        expected = []
        for block in range(9):
            order = np.random.default_rng((5, block)).permutation(BLOCK)
            expected += [words((block * BLOCK + int(place)) % count) for place in order]
        documents = make_stream(count)
        assert read(documents, range(9 * BLOCK)) == expected
        assert len(documents._blocks) == 1
        # Going on after a restart, within the first epoch and later: the position is all that is known.
        for start in (1, 7, 8, 11, 17, 30):
            assert read(make_stream(count), range(start, 36)) == expected[start:]
    assert read(make_stream(11), range(8), seed=6) != read(make_stream(11), range(8), seed=5)


def test_the_order_does_not_depend_on_the_number_of_processes(make_stream):
    """Each process reads the stream by itself and takes the places of its own lanes."""
    alone = read(make_stream(11), range(40))
    for count in (2, 3, 6):  # the last leaves out whole blocks
        for rank in range(count):
            assert read(make_stream(11), range(rank, 40, count)) == alone[rank::count]


def test_lanes_of_different_speed_find_their_blocks(make_stream):
    """Blocks are held from the slowest lane to the fastest, and no longer."""
    alone = read(make_stream(11), range(40))
    documents = make_stream(11)
    positions = [0, 1, 2]
    rng = np.random.default_rng(0)
    while max(positions) < 37:
        lane = int(rng.integers(3)) if max(positions) - min(positions) < 18 else positions.index(min(positions))
        assert documents.text(documents.at(positions[lane], 5)) == alone[positions[lane]]
        positions[lane] += 3
        documents.release(min(positions))
        assert all(min(positions) // BLOCK <= block <= max(positions) // BLOCK for block in documents._blocks)
    assert documents.text(documents.at(0, 5)) == alone[0]  # what was let go is read again

    resumed = make_stream(11)
    resumed.release(6)
    for position in (22, 6, 13):
        assert resumed.text(resumed.at(position, 5)) == alone[position]


def test_streams_of_no_use(make_stream, tokenizer, monkeypatch):
    make_stream(11).check(1)
    with pytest.raises(ValueError, match="The longest of 11 documents has 3 tokens"):
        make_stream(11).check(2)
    with pytest.raises(ValueError, match="All 11 documents have fewer than 4 tokens"):
        make_stream(11, min_tokens=4).check(3)
    monkeypatch.setattr(module, "CHECKED", 5)
    with pytest.raises(ValueError, match="The longest of the first 5 documents has 3 tokens"):
        make_stream(11).check(2)
    with pytest.raises(ValueError, match="shuffle_block must be greater than 0"):
        make_stream(11, shuffle_block=0)


def test_a_stream_that_breaks_off_says_where(tmp_path, tokenizer):
    path = Path(write_jsonl(tmp_path / "a.jsonl", [words(1)] * 30))
    stream = stream_texts([str(path)])
    path.write_text(path.read_text()[:-10])
    documents = StreamedDocuments(stream, tokenizer, shuffle_block=BLOCK, sources=["a.jsonl"])
    with pytest.raises(ValueError, match="Document 0 of the documents streamed from a.jsonl cannot be read"):
        documents.tokens(0)


# What a checkpoint must find again


def test_identity(tmp_path, tokenizer):
    texts = [words(i) for i in range(20)]
    paths = [write_jsonl(tmp_path / "a" / "x.jsonl", texts), write_parquet(tmp_path / "b" / "x.jsonl.parquet", texts)]
    (tmp_path / "c").mkdir()
    moved = str(tmp_path / "c" / "x.jsonl")
    Path(moved).write_bytes(Path(paths[0]).read_bytes())

    def identity(path, tokenizer=tokenizer, **options):
        documents = open_documents([path], tokenizer, DataOptions([path], **options))
        made = documents.identity()
        assert json.loads(json.dumps(made)) == made
        return made

    for stream in (False, True):
        first = identity(paths[0], stream=stream)
        assert first == identity(moved, stream=stream)
        assert first["texts"] == identity(paths[1], stream=stream)["texts"]
        assert first["tokenizer"] != identity(paths[0], byte_tokenizer(), stream=stream)["tokenizer"]
        for changes in ({"min_tokens": 3}, {"stream": not stream}, {"text_field": "title"}):
            assert first != identity(paths[0], **{"stream": stream, **changes})
        write_jsonl(Path(moved), ["other", *texts[1:]])
        assert first["texts"] != identity(moved, stream=stream)["texts"]
        Path(moved).write_bytes(Path(paths[0]).read_bytes())
    assert identity(paths[0], stream=True) != identity(paths[0], stream=True, shuffle_block=7)
    # A tokenizer that cuts texts in another way differs, though it has the same vocabulary.
    spaced = identity(paths[0], byte_tokenizer(space=True))["tokenizer"]
    assert spaced != identity(paths[0], byte_tokenizer())["tokenizer"]
