"""`cacheformers ruler`: texts that solve themselves, lengths, prompts and scores of lm-eval, going on."""

import json
import random
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
from conftest import SHARED
from lm_eval.tasks.ruler import common_utils
from longbench_cases import result, write_rows

from cacheformers.evaluation.lengths.books import load_books
from cacheformers.evaluation.longbench.prompts import cut_beginning, cut_middle, encode, fill, in_chat
from cacheformers.evaluation.ruler import main as ruler
from cacheformers.evaluation.ruler import tasks
from cacheformers.evaluation.ruler.tasks import NEEDLES, NEW_TOKENS, QUESTIONS, load_wordings, score
from cacheformers.evaluation.ruler.texts import COMMON, DEPTHS, distinct, listed, longest, words_of

TOKENS = 3000  # of a byte each
DRAW = random.Random(0)
WORDS = ["".join(DRAW.choices("abcdefghijklmnoprstuvw", k=DRAW.randint(4, 9))) for _ in range(300)]
SENTENCES = [f"Sentence {number} says {' '.join(DRAW.sample(WORDS, 6))}." for number in range(1500)]
CHAT = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def passage(number):
    return f"Passage {number} tells of {WORDS[number]} and {WORDS[number + 50]}."


def pools():
    """Ten SQuAD-like passages of two articles, of which six have questions, others, and six times ten passages."""
    rows = [
        {
            **{"task": "wiki_qa", "source": "xquad", "title": f"Article {number % 2}", "context": passage(number)},
            "questions": [{"input": f"What does {number} tell of?", "answers": [WORDS[number], WORDS[number + 50]]}]
            * (number < 6),
        }
        for number in range(10)
    ]
    rows += [
        {
            **{"task": "wiki_qa", "source": "nq", "title": "", "context": passage(number)},
            "questions": [{"input": "who?", "answers": ["nobody"]}],
        }
        for number in range(10, 45)
    ]
    for number in range(6):
        context = "\n\n".join(f"Title {number}.{place}\n{passage(10 * number + place)}" for place in range(10))
        asked = {"input": f"What of {number}?", "answers": [WORDS[10 * number + 3]], "passages": [3, 7]}
        rows.append({"task": "multihop_qa", "source": "hotpotqa", "context": context, "questions": [asked]})
    return rows


@pytest.fixture
def data(byte_folder):
    """A tiny base that reads bytes, of 4,096 positions, in `base`; a book, and documents with questions."""
    config = json.loads((byte_folder / "base" / "config.json").read_text())
    (byte_folder / "base" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    write_rows(byte_folder / "books.jsonl", [{"text": " ".join(SENTENCES)}])
    write_rows(byte_folder / "pools.jsonl", pools())
    return byte_folder


@pytest.fixture
def make(data, byte_tokenizer):
    """Make the samples of tasks; return them by cell, and the prompts."""

    def cells(*names, lengths=(TOKENS,), records=6, seed=0, chat=False, **files):
        given = {"books": [str(data / "books.jsonl")], "questions": [str(data / "pools.jsonl")]} | files
        which = {"tasks": list(names or NEW_TOKENS), "lengths": [str(length) for length in lengths]}
        options = ruler.RulerOptions(methods=["full"], **given, **which, records=records, seed=seed, chat=chat)
        return ruler.make_cells(options, byte_tokenizer)

    return cells


# Solvers, which see nothing but the prompt


def needles_of(text):
    """Return (key, value) of every needle, and the keys that are asked for."""
    asked = re.search(r"\nWhat (?:is|are all) the special magic \w+ for (.*) mentioned in the provided text\?", text)
    return re.findall(r"One of the special magic \w+ for (\S+) is: ([\w-]+)\.", text), re.split(r", and |, ", asked[1])


def solve_needles(text):
    found, asked = needles_of(text)
    return [[value for key, value in found if key == each] for each in asked]


def solve_chain(text):
    """Run the assignments of the last text, and find the variables that have the value."""
    text = text[text.rindex("Memorize and track") :]
    values = {}
    for name, variable, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
        values[name] = values[variable] if variable else number
    asked = re.search(r"assigned the value (\d+) in", text)[1]
    return [name for name, value in values.items() if value == asked]


def solve_common(text):
    text = text[text.rindex("Below is a numbered list") :].partition("\nQuestion:")[0]
    return {word for word, _ in Counter(re.findall(r"\d+\. (\S+)", text)).most_common(10)}


def solve_frequent(text):
    text = text.partition("coded words. ")[2].partition("\nQuestion:")[0]
    counts = Counter(word for word in text.split() if word != "...")
    assert counts.most_common(4)[-1][1] < counts.most_common(3)[-1][1]
    return [word for word, _ in counts.most_common(3)]


def prompts_of(made):
    cells, templates = made
    for name, (samples, _) in cells.items():
        for sample in samples:
            yield sample, fill(templates[name], sample)


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_are_found_by_who_looks_for_them(make, task):
    settings, in_order = NEEDLES[task], []
    for sample, prompt in prompts_of(make(task)):
        told, asked = needles_of(prompt.text)
        assert asked == re.split(r", and |, ", sample.input) and len(asked) == settings.queries
        own = solve_needles(prompt.text)
        assert [len(row) for row in own] == [settings.values] * settings.queries
        # A key's values stand in the text in another order, but keys are answered in the order of the question.
        rows = [
            sample.answers[place : place + settings.values] for place in range(0, len(sample.answers), settings.values)
        ]
        assert [sorted(row) for row in rows] == [sorted(row) for row in own]
        in_order.append([value for _, value in told if value in sample.answers] == sample.answers)
        others = [value for key, value in told if key not in asked]
        assert len({value for _, value in told}) == len(told) and not set(others) & set(sample.answers)
        assert len(others) == (settings.keys - settings.queries) * settings.values or settings.haystack == "needles"
        kind = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}[settings.value]
        assert all(re.fullmatch(kind, value) for _, value in told)
        key = {"words": r"[a-z]+-[a-z]+", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}[settings.key]
        assert all(re.fullmatch(key, name) for name, _ in told)
        gold = [sample.context[start:end] for start, end in sample.gold]
        assert sorted(re.findall(r"is: (\S+)\.", " ".join(gold))) == sorted(sample.answers)
    assert all(in_order) == (settings.queries * settings.values == 1)


@pytest.mark.parametrize("task", [task for task, settings in NEEDLES.items() if settings.haystack == "books"])
def test_needles_stand_at_ruler_s_depths_between_sentences_of_the_book(make, task):
    seen = set()
    for sample, _ in prompts_of(make(task, records=20)):
        pieces = re.split(r"(?<=\.) (?=[SO])", sample.context)
        places = [place for place, piece in enumerate(pieces) if piece.startswith("One of")]
        rest = [piece for piece in pieces if not piece.startswith("One of")]
        assert " ".join(rest) in " ".join(SENTENCES)
        depths = [place - number for number, place in enumerate(places)]
        assert (
            set(depths) <= {len(rest) * depth // 100 for depth in DEPTHS}
            and len(places) == NEEDLES[task].keys * NEEDLES[task].values
        )
        seen.update(depth / len(rest) for depth in depths)
    assert min(seen) < 0.3 and max(seen) > 0.6
    assert DEPTHS[0] == 0 and DEPTHS[-1] == 100 and len(set(DEPTHS)) == 40


def test_noise_and_other_needles_are_lines(make):
    cells, _ = make("niah_single_1", "niah_multikey_2")
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    for sample in cells[f"niah_single_1-{TOKENS}"][0]:
        kinds = Counter(line if line == noise else "needle" for line in sample.context.split("\n"))
        assert kinds["needle"] == 1 and kinds[noise] > 20
    for sample in cells[f"niah_multikey_2-{TOKENS}"][0]:
        assert all(line.startswith("One of the special magic numbers for ") for line in sample.context.split("\n"))


def test_variables_are_found_by_an_interpreter(make):
    for sample, prompt in prompts_of(make("vt")):
        assert solve_chain(prompt.text) == sample.answers and len(set(sample.answers)) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.answers)
        assert [
            re.fullmatch(r"VAR (\w+) = .*", sample.context[start:end])[1] for start, end in sample.gold
        ] == sample.answers
        example = prompt.text[: prompt.text.rindex("Memorize and track")]
        solved = example.rpartition("they are: ")[2].split()
        assert solve_chain(example) == solved and all(re.fullmatch("[A-Z]{3}", name) for name in solved)
        assert len(solved) == 5


def test_common_words_are_found_by_who_counts(make):
    for tokens, often, seldom, shown in ((TOKENS, 6, 1, (3, 1)), (8192, 30, 3, (10, 3))):
        for sample, prompt in prompts_of(make("cwe", lengths=[tokens], records=2)):
            assert solve_common(prompt.text) == set(sample.answers) and len(sample.answers) == COMMON
            counts = Counter(re.findall(r"\. (\w+)", sample.context))
            assert Counter(counts.values()) == {often: COMMON, seldom: len(counts) - COMMON}
            assert [int(number) for number in re.findall(r"(\d+)\.", sample.context)] == [*range(1, counts.total() + 1)]
            example = prompt.text[: prompt.text.rindex("Below is")]
            solved = re.findall(r"\. (\w+)", example.rpartition("in the list are: ")[2])
            assert solve_common(example) == set(solved) and not set(solved) & set(counts)
            assert set(Counter(re.findall(r"\d\. (\w+)", example.partition("\nQuestion")[0])).values()) == set(shown)


def test_frequent_words_are_found_by_who_counts(make):
    for sample, prompt in prompts_of(make("fwe", lengths=[1200, TOKENS], records=4)):
        assert solve_frequent(prompt.text) == sample.answers
        counts = [count for _, count in Counter(sample.context.split()).most_common(4)]
        assert sample.context.split().count("...") == counts[0]
        assert [count / counts[0] for count in counts] == pytest.approx([1, 1 / 4, 1 / 9, 1 / 16], abs=0.03)


def test_questions_come_with_their_documents_and_others(make):
    cells, _ = make(*QUESTIONS, lengths=[1500, TOKENS])
    for sample in cells["qa_1-1500"][0]:
        shown = re.findall(r"Document (\d+):\n(.*)", sample.context)
        own = int(re.search(r"\d+", sample.input)[0])
        assert [int(number) for number, _ in shown] == [*range(1, len(shown) + 1)] and 8 < len(shown) < 40
        texts = [text for _, text in shown]
        assert len(set(texts)) == len(texts) and texts.count(passage(own)) == 1
        assert set(texts) >= {passage(number) for number in range(own % 2, 10, 2)}  # of the same article
        assert [sample.context[start:end].partition("\n")[2] for start, end in sample.gold] == [passage(own)]
        assert sample.answers == [WORDS[own], WORDS[own + 50]]
    for sample in cells[f"qa_2-{TOKENS}"][0]:
        own = re.search(r"\d+", sample.input)[0]
        assert all(f"Title {own}.{place}\n" in sample.context for place in range(10))
        gold = [sample.context[start:end].split("\n")[1] for start, end in sample.gold]
        assert sorted(gold) == [f"Title {own}.3", f"Title {own}.7"]
    assert len({sample.input for sample in cells["qa_1-1500"][0]}) == 6


# Lengths


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_and_answer_take_no_more_than_the_length_and_almost_all_of_it(make, byte_tokenizer, chat):
    byte_tokenizer.chat_template = CHAT
    units = {"cwe": 30, "fwe": 250, "qa_1": 700, "qa_2": 900, "vt": 110}
    for sample, prompt in prompts_of(make(lengths=[2600, TOKENS], records=2, chat=chat)):
        text = in_chat(prompt, byte_tokenizer) if chat else prompt
        tokens = len(encode(text, byte_tokenizer).ids) + NEW_TOKENS[sample.template]
        room = int(sample.task.rpartition("-")[2]) - tokens
        assert 0 <= room < units.get(sample.template, 180), sample.task


def test_books_hardly_longer_than_a_text_fill_it(make, data, byte_tokenizer):
    """Whatever their sentences: short ones at the beginning, where texts start, and long ones after them."""
    words = WORDS[:120] * 3
    long = [f"Sentence {start} says {' '.join(words[start : start + 6])}." for start in range(0, len(words), 6)]
    book = " ".join(["It is so."] * 25 + long)[: TOKENS * 11 // 10]
    write_rows(data / "short.jsonl", [{"text": book}])
    for sample, prompt in prompts_of(make("niah_single_2", books=[str(data / "short.jsonl")])):
        tokens = len(encode(prompt, byte_tokenizer).ids) + NEW_TOKENS[sample.template]
        assert 0 <= TOKENS - tokens < 180


def test_the_longest_text_is_found_however_uneven_costs_are():
    class Uneven:
        least, most = 3, 900

        def __call__(self, units, draw):
            return units

    for grow in (lambda units: units, lambda units: units**2, lambda units: 5 * units + units % 7, lambda units: 40):
        for room in (0, 40, 47, 300, 5000, 10**6):
            found = longest(Uneven(), lambda: None, grow, room)
            assert found == max((units for units in range(3, 901) if grow(units) <= room), default=None) or grow(
                3
            ) > grow(4)
    asked = []
    longest(Uneven(), lambda: None, lambda units: asked.append(units) or 21 * units, 9000)
    assert len(asked) < 8


def test_a_sample_depends_on_itself_the_data_and_the_seed(make, data):
    first, templates = make()
    again, same = make()
    assert again == first and same == templates
    more, _ = make("vt", "qa_1", "niah_multikey_1", lengths=(2600, TOKENS), records=4)
    for task in ("vt", "qa_1", "niah_multikey_1"):
        cell = f"{task}-{TOKENS}"
        assert more[cell] == (first[cell][0][:4], first[cell][1])
    other, _ = make(seed=1)
    for cell, (samples, identity) in first.items():
        assert other[cell][1] != identity
        assert not {each.context for each in other[cell][0]} & {each.context for each in samples}, cell
        assert len({each.context for each in samples}) == len(samples), cell
    write_rows(data / "other.jsonl", [{"text": " ".join(SENTENCES[1:])}])
    assert make("vt", books=[str(data / "other.jsonl")])[0][f"vt-{TOKENS}"][1] != first[f"vt-{TOKENS}"][1]


def test_words_of_books(data, byte_tokenizer):
    write_rows(
        data / "few.jsonl", [{"text": "Some words, some Words, twice: twicewords once-word once. Words are words."}]
    )
    assert words_of(load_books([str(data / "few.jsonl")], "text", byte_tokenizer, 5)) == ["once", "words"]


# Prompts and scores


def test_prompts_are_lm_evals(monkeypatch, tmp_path):
    wordings = load_wordings()
    assert wordings.tasks.keys() == NEW_TOKENS.keys() and wordings.document == "Document {i}:\n{document}"
    folder = tasks.lm_eval_folder().parent / "ruler"
    shutil.copytree(folder, tmp_path / "ruler")
    monkeypatch.setattr(tasks, "lm_eval_folder", lambda: tmp_path / "longbench")
    assert load_wordings() == wordings
    file = tmp_path / "ruler" / "vt_utils.py"
    file.write_text(file.read_text().replace("Memorize and track", "Track"))
    with pytest.raises(ValueError, match=r"not the prompts of lm-eval 0\.4\.13"):
        load_wordings()


def test_the_answers_beginning_is_the_models_turn_and_never_cut(make, byte_tokenizer):
    cells, templates = make("niah_multiquery")
    [(name, (samples, _))] = cells.items()
    begun = f"The special magic numbers for {samples[0].input} mentioned in the provided text are"
    prompt = fill(templates[name], samples[0])
    whole = byte_tokenizer.decode(encode(prompt, byte_tokenizer).ids)
    assert whole.endswith(f" mentioned in the provided text? {begun}")
    byte_tokenizer.chat_template = CHAT
    chat = encode(in_chat(prompt, byte_tokenizer), byte_tokenizer, split=True)
    assert byte_tokenizer.decode(chat.asked).strip().startswith("What are all the special magic numbers for")
    assert byte_tokenizer.decode(chat.ids).endswith(f"mentioned in the provided text?</u><a>{begun}")
    for cut in (cut_middle, cut_beginning):
        shorter = cut(prompt, byte_tokenizer, 200)
        assert byte_tokenizer.decode(encode(shorter, byte_tokenizer).ids).endswith(f"text? {begun}")
        assert cut(prompt, byte_tokenizer, 0).text == ""
    assert fill(templates[name], replace(samples[0], begun="")).begun == ""


CASES = [
    ("niah_multivalue", " 1234567, 7654321 and 1111111.", ["1234567", "7654321", "1111111", "2222222"], 0.75),
    ("niah_single_1", "\t 12345678 \n", ["1234567"], 1),
    ("niah_single_1", "123\x074567", ["1234567"], 0),
    ("niah_single_3", "ABCD-Ef", ["abcd-ef"], 1),
    ("niah_single_1", "", ["1234567"], 0),
    ("vt", "AAAAA BBBBB", ["AAAAA", "BBBBB", "CCCCC", "DDDDD", "EEEEE"], 0.4),
    ("cwe", "1. part 2. cartwheel", ["art", "wheel"], 1),
    ("fwe", "abcdef\x00ghijkl", ["abcdef", "ghijkl", "mnopqr"], 2 / 3),
    ("qa_1", "in the Neolithic", ["neolithic"], 1),
    ("qa_2", "no", ["yes"], 0),
    ("vt", "ÉTÉ", ["été"], 1),
    ("fwe", "a" * 5000, ["aaaaaa", "b", ""], 2 / 3),
]


@pytest.mark.parametrize(("task", "prediction", "answers", "expected"), CASES)
def test_scores_are_lm_evals(task, prediction, answers, expected):
    found = score(task, prediction, answers)
    assert found["score"] == found["found"] == pytest.approx(expected)
    process = common_utils.process_results_part if task in QUESTIONS else common_utils.process_results
    assert process({"max_length": 4096, "outputs": answers}, [prediction])["4096"] == found["score"]


def test_of_alternative_answers_one_is_enough_where_lm_eval_counts_their_share():
    """RULER takes the best of a question's answers; lm-eval 0.4.13 the share of them, which is `found`."""
    answers = ["original Neolithic Revolution", "Neolithic Revolution", "farming"]
    for prediction, any_of_them in (("the Neolithic Revolution", 1), ("wheat", 0), ("farming in the neolithic", 1)):
        found = score("qa_1", prediction, answers)
        assert found["score"] == any_of_them
        theirs = common_utils.process_results_part({"max_length": 4096, "outputs": answers}, [prediction])["4096"]
        assert found["found"] == theirs


def check_theirs(task, document, solved):
    """A sample that lm-eval made has the form of our prompts, our solver solves it, and our score is theirs."""
    wording = load_wordings().tasks[task]
    form = re.escape(wording.template).replace(r"\{context\}", "(.*)").replace(r"\{input\}", r"([^\n]*)")
    assert re.search(f"{form}$", document["input"], re.DOTALL), document["input"][-300:]
    assert re.fullmatch(re.escape(wording.begun).replace(r"\{input\}", ".*"), document["gen_prefix"])
    outputs = document["outputs"]
    assert solved == outputs or set(solved) == set(outputs)
    process = common_utils.process_results_part if task in QUESTIONS else common_utils.process_results
    length = str(document["max_length"])
    for text in (
        " ".join(outputs),
        outputs[0].upper(),
        ", ".join(outputs[1:]),
        outputs[0][:-1],
        "\n" + outputs[-1] + "x",
        "",
    ):
        assert score(task, text, outputs)["found"] == process(document, [text])[length]


def test_lm_evals_variables_and_frequent_words(byte_tokenizer):
    from lm_eval.tasks.ruler import fwe_utils, vt_utils

    make = vt_utils.sys_vartrack_w_noise_random
    [example] = make(byte_tokenizer, 1, 2000, incremental=5)
    for document in make(byte_tokenizer, 3, 5000, icl_example=example):
        check_theirs("vt", document, solve_chain(document["input"]))
    for document in fwe_utils.sys_kwext(byte_tokenizer, 6000, num_samples=3):
        check_theirs("fwe", document, solve_frequent(document["input"]))


# Runs


def arguments(folder, *more, methods=("full",), chosen=("niah_single_1", "vt", "qa_1")):
    """A tiny run; `more` overrides."""
    given = {"base": folder / "base", "output": folder / "out", "device": "cpu", "plots": False, "records": 2}
    given |= {"questions": folder / "pools.jsonl", "books": folder / "books.jsonl"}
    given = {key: value for key, value in given.items() if not any(m.startswith(f"--{key}=") for m in more)}
    lists = ["--methods", *methods, "--tasks", *chosen, "--lengths", "2600"]
    return [*(f"--{key}={value}" for key, value in given.items()), *lists, *more]


def test_every_task(data, capsys):
    """Scores are lm-eval's. Other methods, and going on, are tested with BABILong, which shares the run."""
    ruler.main(arguments(data, "--plots=true", "--records=1", chosen=NEW_TOKENS))
    table = (data / "out" / "base-full" / "table.md").read_text()
    assert (data / "out" / "base-full" / "heatmap.png").stat().st_size > 10_000 and table in capsys.readouterr().out
    found = result(data, "base-full")
    assert found["tasks"] == list(NEW_TOKENS) and found["lengths"] == [2600] and len(found["records"]) == 13
    for record in found["records"]:
        task = record["cell"].rpartition("-")[0]
        process = common_utils.process_results_part if task in QUESTIONS else common_utils.process_results
        theirs = process({"max_length": 4096, "outputs": record["answers"]}, [record["prediction"]])["4096"]
        assert record["found"] == theirs and f"| {task} |" in table


def test_a_model_that_has_the_answer(data, monkeypatch):
    """Scores and their mean are what was counted: answers are put in place of a model's, the rest is real."""
    ruler.main(arguments(data, chosen=("vt", "fwe")))
    for file in (data / "out" / "pred" / "base-full").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows[0]["pred"] = " ".join(rows[0]["answers"]).lower()
        rows[1]["pred"] = rows[1]["answers"][0]
        write_rows(file, rows)
    ruler.main(arguments(data, chosen=("vt", "fwe")))
    found = result(data, "base-full")["accuracy"]
    assert [found[name][0]["accuracy"] for name in ("vt", "fwe", "all")] == [60, 66.67, 63.33]


def test_a_trained_model_of_stories(data):
    """The real tokenizer of a small trained model; its 512 positions are squeezed for prompts of 2,048 tokens."""
    base = SHARED / "data" / "models" / "stories260K-llama"
    if not base.is_dir():
        pytest.skip(f"{base} is not there")
    more = [f"--base={base}", "--lengths", "2K", "--rope_factor=8", "--records=1"]
    ruler.main(arguments(data, *more, methods=("position-interpolation",), chosen=("niah_multikey_1", "fwe", "qa_2")))
    found = result(data, "stories260K-llama-position-interpolation")
    assert len(found["records"]) == 3 and 1000 < found["prompt_tokens_per_record"][0] <= 2048 - 32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tasks", "niah_single_1", "niah_single_4"], "tasks: niah_single_4; give some of niah_single_1"),
        (["--lengths", "300"], "the shortest text is longer than 300 tokens. Give longer --lengths."),
        (["--lengths", "1M"], "too few for a text of 1,048,576"),
        (["--lengths", "4K"], "niah_single_1-4K, record 0: prompt and answer take"),
        (["--records=7", "--tasks", "qa_1"], "qa_1: 6 questions whose documents fit into 2600 tokens, which is fewer"),
        (["--questions={data}/nq.jsonl"], "no question of qa_1. It takes documents of the task 'wiki_qa' whose source"),
        (["--books={data}/poor.jsonl"], "2 words that come more than once, too few for 2600 tokens"),
        (["--chat=true"], "The base has no chat template: leave out --chat"),
    ],
)
def test_errors(data, refused, given, message):
    write_rows(data / "nq.jsonl", [row for row in pools() if row["source"] == "nq"])
    write_rows(data / "poor.jsonl", [{"text": "Again these words. " * 200}])
    if "4K" in given:
        config = json.loads((data / "base" / "config.json").read_text())
        (data / "base" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4000}))
    assert message in refused(ruler.main, arguments(data, *(text.format(data=data) for text in given)))
    assert not (data / "out").exists()


def test_questions_are_needed_for_their_tasks_alone(data, refused):
    given = [text for text in arguments(data) if not text.startswith("--questions")]
    assert "qa_1 need --questions" in refused(ruler.main, given)
    ruler.main([*given, "--tasks", "vt", "--records=1"])
    assert result(data, "base-full")["tasks"] == ["vt"]


def test_nothing_is_drawn_twice():
    drawn, known = iter("aabcbad"), {"c"}
    assert distinct(lambda: next(drawn), 3, known) == ["a", "b", "d"] and known == set("abcd")


def test_queries_are_listed_as_in_english():
    assert [listed(list(names)) for names in ("a", "ab", "abc")] == ["a", "a, and b", "a, b, and c"]
