"""Memories that are searched as one, and memories with fewer entries: what they find, and their bytes on disk."""

import json

import pytest
import torch
from memories import assert_equal
from recipe import make_text

import cacheformers
from cacheformers.modeling.thinning import Entries, most_used, pairs, retrievals, thin, together

METHODS = ("neurocache", "memorizing")


def read(model, tokenizer, words, seed=0, **options):
    text = make_text(words, seed=seed)
    return cacheformers.read_text(model, tokenizer, text, name=f"{seed}.txt", progress=False, **options)


def logits(model, memory, ids):
    with torch.no_grad():
        return model(ids[:1, :12], past_key_values=memory.clone()).logits


def found(model, memory, ids):
    """The numbers of the entries that each token of a question retrieves, by layer, `[columns, places]`."""
    memory = memory.clone()
    with torch.no_grad():
        model(ids[:1, :12], past_key_values=memory)
    return {layer: numbers[0].sort().values for layer, numbers in memory.state.retrieved().items()}


def size(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("method", METHODS)
def test_one_store_holds_the_best_of_all(make_model, tokenizer, ids, method):
    """Each token finds in both memories together as many entries as in one, and none that is not among those."""
    model = make_model("llama_gqa", method=method)
    memories = [read(model, tokenizer, words, seed) for words, seed in ((75, 1), (50, 2))]
    first = memories[0].tokens_kept[0]
    joint = together(memories)
    alone = [found(model, memory, ids) for memory in memories]
    shift = memories[0].tokens_read[0] - first  # tokens that the first one has forgotten
    documents = set()
    for layer, numbers in found(model, joint, ids).items():
        assert numbers.shape == alone[0][layer].shape
        for column, chosen in enumerate(numbers.tolist()):
            assert all(number >= 0 for number in chosen)
            for number in chosen:
                document = int(number >= first)
                documents.add(document)
                forgotten = memories[1].tokens_read[0] - memories[1].tokens_kept[0] if document else shift
                own = number - (first if document else 0) + forgotten
                assert own in alone[document][layer][column].tolist()
    assert documents == {0, 1}


@pytest.mark.parametrize("method", METHODS)
def test_a_memory_alone_is_itself_and_the_order_of_others_does_not_matter(make_model, tokenizer, ids, method):
    model = make_model("llama_gqa", method=method, cache_size=400)
    one, other = read(model, tokenizer, 75, 1), read(model, tokenizer, 50, 2)
    assert torch.equal(logits(model, together([one]), ids), logits(model, one, ids))
    if method == "memorizing":  # Neurocache takes the neighbors of a hit along, also across the seam
        forth, back = (logits(model, together(pair), ids) for pair in ((one, other), (other, one)))
        torch.testing.assert_close(forth, back, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(logits(model, together([one, other]), ids), logits(model, one, ids))


def test_passages_name_their_file(make_model, tokenizer):
    model = make_model("llama_gqa")
    memories = [read(model, tokenizer, words, seed) for words, seed in ((75, 1), (50, 2))]
    conversation = cacheformers.Conversation(model, tokenizer, together(memories))
    texts = {"1.txt": make_text(75, seed=1), "2.txt": make_text(50, seed=2)}
    named = set()
    for passage in [
        passage
        for question in ("w5 w6", "w17 w18 w19", "w40 w41")
        for token in conversation.ask(question, max_new_tokens=9, explain=True).passages
        for passage in token
    ]:
        if passage.document in texts:
            named.add(passage.document)
            start, end = passage.characters
            assert texts[passage.document][start:end].split() == passage.text.split()
    assert named == set(texts)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_left_of_the_newest_is_a_smaller_cache(make_model, tokenizer, ids, method, tmp_path):
    """Dropping the oldest entries gives the memory of a ring that never held them."""
    model = make_model("llama_gqa", torch.float32, method=method, cache_size=400)
    memory, small = read(model, tokenizer, 75), read(model, tokenizer, 75, cache_size=20)
    memory.save(tmp_path / "all")
    entry = sum(
        store.shape[2] * 4
        for ring in memory.state.rings.values()
        for store in (ring.keys, ring.values)
        if store is not None
    )
    text = len(make_text(75).encode())
    thinned = thin(memory, 10 * 1024 + text + 20 * (entry + 8) + 1, "oldest", int8=False)
    assert thinned.tokens_read == [20]
    assert torch.equal(logits(model, thinned, ids), logits(model, small, ids))
    assert thinned.origin.sources[0].passage(0, 19) == " ".join(make_text(75).split()[55:])
    thinned.save(tmp_path / "thin")
    assert_equal(cacheformers.load_memory(tmp_path / "thin", model), thinned)
    assert_equal(cacheformers.load_memory(tmp_path / "all", model), memory)


@pytest.mark.parametrize(
    ("options", "int8"),
    [
        *(({"method": method}, int8) for method in METHODS for int8 in (True, False)),
        ({"cache_dtype": "int8"}, False),
    ],
    ids=str,
)
def test_every_rule_fits_its_bytes_and_answers(make_model, tokenizer, tmp_path, options, int8):
    model = make_model("llama_gqa", torch.float32, cache_size=2000, **options)
    memory = read(model, tokenizer, 1500)
    used = torch.arange(1500) % 7
    for most in (14_000, 30_000):
        for rule in ("oldest", "unused", "merge"):
            thinned = thin(memory, most + len(make_text(1500)), rule, int8, used)
            folder = tmp_path / f"{rule} {most}"
            thinned.save(folder, int8=int8)
            assert 0 < thinned.tokens_read[0] < 1500
            assert most / 2 < size(folder) - len(make_text(1500)) <= most
            back = cacheformers.load_memory(folder, model, tokenizer=tokenizer)
            assert back.tokens_read == thinned.tokens_read and back.origin.sources[0].text == make_text(1500)
            answer = cacheformers.Conversation(model, tokenizer, back).ask("w5", max_new_tokens=3, explain=True)
            assert answer.passages[0][0].text in " ".join(make_text(1500).split())
            back = cacheformers.read_text(model, tokenizer, make_text(30), memory=back, progress=False)
            back.save(folder, append=True)  # what is new has its precision, beside what is in 8 bits
            assert_equal(cacheformers.load_memory(folder, model), back)


@pytest.mark.parametrize("method", METHODS)
def test_merged_neighbors_keep_length_and_text(make_model, tokenizer, method):
    model = make_model("llama_gqa", torch.float32, method=method, cache_size=400)
    memory = read(model, tokenizer, 300)
    whole = Entries.of(memory)
    merged = Entries.of(thin(memory, 17_000, "merge", int8=False))
    assert 20 < merged.count < 280
    offsets = merged.source.offsets
    words = [make_text(300)[start:end] for start, end in offsets.tolist()]
    assert " ".join(words) == make_text(300)  # every token is in one of them
    for layer, (keys, values) in merged.stores.items():
        vector = memory.state.key_size or keys.shape[1]
        before, after = (each.unflatten(1, (-1, vector)).norm(dim=-1) for each in (whole.stores[layer][0], keys))
        assert before.min() - 1e-4 <= after.min() and after.max() <= before.max() + 1e-4
        single = [number for number, word in enumerate(words) if " " not in word]
        places = [
            [tuple(pair) for pair in whole.source.offsets.tolist()].index(tuple(offsets[n].tolist())) for n in single
        ]
        assert torch.equal(keys[single], whole.stores[layer][0][places])
        if values is not None:
            parts, start = [len(word.split()) for word in words], 0
            for count, value in zip(parts, values, strict=True):  # each token weighs the same
                torch.testing.assert_close(value, whole.stores[layer][1][start : start + count].mean(0))
                start += count


def test_which_entries_stay():
    assert most_used(torch.tensor([0] * 40 + [3] + [0] * 39), 17).tolist() == list(range(32, 49))
    assert most_used(torch.zeros(10), 3).tolist() == [7, 8, 9]
    assert pairs(torch.tensor([0.1, 0.9, 0.8, 0.2]), 2).tolist() == [1, 3]
    assert retrievals([torch.tensor([0, 2, 2]), torch.tensor([5])], 4).tolist() == [1, 0, 2, 0]


def test_int8_files(make_model, tokenizer, tmp_path):
    """The error of each number is at most half a step of its entry; files without int8 are as before."""
    model = make_model("llama_gqa", torch.float32, method="memorizing", cache_size=400)
    memory = read(model, tokenizer, 300)
    memory.save(tmp_path / "plain")
    memory.save(tmp_path / "small", int8=True)
    versions = [json.loads((tmp_path / name / "index.json").read_text())["version"] for name in ("plain", "small")]
    assert versions == [1, 2]
    back = cacheformers.load_memory(tmp_path / "small", model)
    for layer, ring in back.state.rings.items():
        for mine, theirs in (
            (ring.keys, memory.state.rings[layer].keys),
            (ring.values, memory.state.rings[layer].values),
        ):
            exact = theirs[:, :300]
            assert mine.dtype == exact.dtype and not torch.equal(mine, exact)
            assert bool(((mine - exact).abs() <= exact.abs().amax(2, keepdim=True) / 253).all())
    back.save(tmp_path / "again", int8=True)
    assert_equal(cacheformers.load_memory(tmp_path / "again", model), back)


def test_int8_stores(make_model, tokenizer, ids, tmp_path):
    """What is put together or thinned is not rounded again, and files keep it as it is."""
    model = make_model("llama_gqa", torch.float32, cache_dtype="int8", cache_size=400)
    memory = read(model, tokenizer, 300)
    for copy in (thin(memory, 10**6), thin(memory, 10**6, "merge"), together([memory])):
        assert torch.equal(logits(model, copy, ids), logits(model, memory, ids))
    memory.save(tmp_path / "m", int8=True)
    back = cacheformers.load_memory(tmp_path / "m", model)
    assert_equal(back, memory)
    read_on = cacheformers.read_text(model, tokenizer, make_text(200), memory=back, progress=False)
    read_on.save(tmp_path / "m", append=True)
    assert_equal(cacheformers.load_memory(tmp_path / "m", model), read_on)


def test_what_is_refused(make_model, tokenizer, ids):
    model = make_model("llama_gqa", torch.float32)
    memory = read(model, tokenizer, 75)
    for options, message in [
        ({"rule": "newest"}, "no rule 'newest': choose one of oldest, unused, merge"),
        ({"rule": "unused"}, "needs to know what is used"),
        ({"most_bytes": 9000}, "9,000 bytes hold no entry"),
    ]:
        with pytest.raises(ValueError, match=message):
            thin(memory, **{"most_bytes": 10**6, **options})
    with pytest.raises(ValueError, match="no memory to ask"):
        together([])
    other = make_model("llama_gqa", torch.float32)
    next(weight for name, weight in other.named_parameters() if "lora_mem_down" in name).data.mul_(1.1)
    with pytest.raises(ValueError, match="different models"):
        together([memory, read(other, tokenizer, 50)])
    with pytest.raises(ValueError, match="A segment is open"):
        together([read(model, tokenizer, 75, flush=False)])
    with pytest.raises(ValueError, match="holds 2 documents"):
        together([cacheformers.read(model, ids, progress=False)])
    for method in ("infini_attention", "recurrent_memory", "windowed", "cacheformer_on_base"):
        model = make_model("llama_gqa", torch.float32, method=method)
        with pytest.raises(ValueError, match=f"method {method} keeps no entry"):
            together([read(model, tokenizer, 75), read(model, tokenizer, 50)])
    with pytest.raises(ValueError, match=r"Only a memory made by read\(\)"):
        together([memory]).save("nowhere")
