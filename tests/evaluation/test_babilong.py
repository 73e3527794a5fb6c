"""`cacheformers babilong`: facts in books, answers and their scores, official records, going on."""

import gzip
import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import datasets
import pytest
from conftest import SHARED, save_adapter
from longbench_cases import KILLED, predictions, result, write_rows
from recipe import Recipe, run
from reciter import make_reciter
from transformers import AutoTokenizer

from cacheformers.evaluation.babilong import main as babilong
from cacheformers.evaluation.babilong import tasks
from cacheformers.evaluation.babilong.records import load_official
from cacheformers.evaluation.babilong.stories import StoryMaker, load_questions
from cacheformers.evaluation.babilong.tasks import ANSWERS, PLACES, load_prompts, score
from cacheformers.evaluation.lengths import books as books_module
from cacheformers.evaluation.lengths.books import load_books, split
from cacheformers.evaluation.lengths.options import label
from cacheformers.evaluation.lengths.report import accuracy

TITLE, RECIPE = "base-full", "evaluation.babilong.main"
LENGTHS = (400, 700)
SENTENCES = [f"Sentence {number} has {'very ' * (number % 9)}many words." for number in range(300)]
BOOK = " ".join(SENTENCES)


def story(task, number):
    """Six facts with a question after two, four and six of them; the answer is in the last fact."""
    people, places = ("Mary", "John", "Daniel"), [PLACES[(number + place) % 6] for place in range(6)]
    facts = [f"{people[place // 2]} went to the {name}." for place, name in enumerate(places)]
    asked = [
        {"input": f"Where is {people[last // 2 - 1]}?", "answers": [places[last - 1]], "lines": last}
        for last in (2, 4, 6)
    ]
    return {"task": "babi", "source": f"babi_{task}", "context": "\n".join(facts), "questions": asked}


@pytest.fixture
def data(byte_folder):
    """A tiny base that reads bytes, of 4,096 positions, in `base`; stories of qa1 and qa2, and two books."""
    config = json.loads((byte_folder / "base" / "config.json").read_text())
    (byte_folder / "base" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    write_rows(byte_folder / "babi.jsonl", [story(task, number) for number in range(4) for task in ("qa1", "qa2")])
    write_rows(
        byte_folder / "books.jsonl", [{"text": "\n\n".join(SENTENCES[:100])}, {"text": "\n".join(SENTENCES[100:])}]
    )
    return byte_folder


def arguments(folder, *more, methods=("full",)):
    """A tiny run; `more` overrides."""
    given = {"base": folder / "base", "output": folder / "out", "device": "cpu", "plots": False, "records": 3}
    given |= {"questions": folder / "babi.jsonl", "books": folder / "books.jsonl"}
    given = {key: value for key, value in given.items() if not any(m.startswith(f"--{key}=") for m in more)}
    lists = ["--methods", *methods, "--tasks", "qa1", "qa2", "--lengths", "0K", "700"]
    return [*(f"--{key}={value}" for key, value in given.items()), *lists, *more]


# Stories


@pytest.fixture
def make(data, byte_tokenizer):
    """Make the stories of a cell, with their questions."""

    def cell(task="qa1", tokens=700, records=12, seed=0, longest=700, all_tasks=("qa1",), **files):
        given = {"questions": data / "babi.jsonl", "books": data / "books.jsonl"} | files
        questions = load_questions([str(given["questions"])], all_tasks, seed)[task]
        books = load_books([str(given["books"])], "text", byte_tokenizer, longest)
        stories, identity = StoryMaker(byte_tokenizer, seed, records).cell(task, tokens, questions, books)
        return stories, {each.id: each for each in questions}, identity

    return cell


@pytest.mark.parametrize("tokens", LENGTHS)
def test_facts_stay_whole_and_in_order_between_whole_sentences(make, byte_tokenizer, tokens):
    """Without its facts a context is a part of the book, which begins with a sentence, and facts stand at borders."""
    stories, questions, _ = make(tokens=tokens)
    depths = []
    for each in stories:
        assert len(byte_tokenizer(each.context).input_ids) == tokens
        rest, place = each.context, 0
        for fact in questions[each.id].facts:
            place = rest.index(fact, place)
            depths.append(place / tokens)
            before, after = rest[:place], rest[place + len(fact) :]
            assert before == "" or before.endswith(". ")
            rest = before + after[1:] if after else before.rstrip()
            assert (
                rest[place:] == "" or "Sentence".startswith(rest[place : place + 8]) or "went to" in rest[place:][:20]
            )
        assert rest in BOOK and rest.startswith("Sentence ") and "went" not in rest
    assert Counter(depth > 0.5 for depth in depths).keys() == {True, False}
    assert len({each.context[:40] for each in stories}) > 6


def test_a_question_shows_the_facts_up_to_its_line_and_no_later_one(make, data):
    rows = [json.loads(line) for line in (data / "babi.jsonl").read_text().splitlines()]
    for tokens in (0, 700):
        stories, _, _ = make(tokens=tokens)
        for each in stories:
            document, asked = (int(number) for number in each.id.split("-"))
            lines, question = rows[document]["context"].split("\n"), rows[document]["questions"][asked]
            shown = [line in each.context for line in lines]
            assert shown == [place < question["lines"] for place in range(6)]
            assert (each.input, each.answers) == (question["input"], question["answers"])
            assert tokens or each.context == " ".join(lines[: question["lines"]])
        assert {each.id.partition("-")[0] for each in stories} == {"0", "2", "4", "6"}  # those of qa1


def test_a_story_depends_on_itself_the_books_and_the_seed(make, monkeypatch):
    monkeypatch.setattr(books_module, "READ", 1000)
    stories, _, identity = make()  # of the first book; with a length of 5,000, the second one is read, too
    assert make()[::2] == (stories, identity)
    again, _, same = make(records=5, longest=5000, all_tasks=("qa2", "qa1"))
    assert again == stories[:5] and same == identity
    others, _, other = make(seed=1)
    assert other != identity and not {each.context for each in others} & {each.context for each in stories}
    assert [each.id for each in others] != [each.id for each in stories]


def test_questions_about_the_same_facts_are_asked_of_one_text(make, data):
    """Others are as they were: their order, and where their facts are hidden."""
    alone, _, _ = make()
    rows = [json.loads(line) for line in (data / "babi.jsonl").read_text().splitlines()]
    for row in rows:
        row["questions"] += [{"input": "Where is Mary now?", "answers": ["kitchen"], "lines": 4}]
    write_rows(data / "more.jsonl", rows)
    stories, _, identity = make(records=16, questions=data / "more.jsonl")
    assert [each for each in stories if not each.id.endswith("-3")] == alone
    for before, each in pairwise(stories):
        if each.id.endswith("-3"):
            assert before.id == each.id[:-1] + "1" and before.context == each.context and before.input != each.input
    assert len({each.context for each in stories}) == 12
    some, _, same = make(records=5, questions=data / "more.jsonl")
    assert some == stories[:5] and same == identity


def with_supports(folder):
    """Pools whose questions name the facts about the person, of qa1 and qa2."""
    rows = [json.loads(line) for line in (folder / "babi.jsonl").read_text().splitlines()]
    for row in rows:
        for question in row["questions"]:
            question["supports"] = [question["lines"] - 2, question["lines"] - 1]
    write_rows(folder / "supported.jsonl", rows)
    return folder / "supported.jsonl"


@pytest.mark.parametrize("tokens", [0, 700])
def test_where_the_facts_that_answer_are(make, data, tokens):
    """In qa1 the newest of those about the person alone. The stories are the same as without."""
    pool = with_supports(data)
    for task, count in (("qa1", 1), ("qa2", 2)):
        asked = {"task": task, "tokens": tokens, "all_tasks": ("qa1", "qa2")}
        plain, _, before = make(**asked)
        stories, questions, identity = make(**asked, questions=pool)
        assert identity == before and [each.context for each in stories] == [each.context for each in plain]
        for each, other in zip(stories, plain, strict=True):
            told = [each.context[start:end] for start, end in each.gold]
            assert told == questions[each.id].facts[-count:] and other.gold == ()


def test_what_a_memory_retrieves_of_them(data, capsys):
    """By layer; pools that name no facts say nothing."""
    save_adapter(data / "base", data / "remembering", cache_size=4096, segment_tokens=256)
    more = [f"--adapter={data / 'remembering'}", "--batch=2", f"--questions={with_supports(data)}"]
    babilong.main(arguments(data, *more, "--tasks", "qa1", methods=("memory",)))
    (facts, hidden), said = result(data, "remembering-memory")["gold_hits"], capsys.readouterr().out
    shares = [layer["passage"] for layer in hidden["layers"].values()]
    assert facts["records"] == hidden["records"] == 3 and 0 < min(shares) <= max(shares) <= 1
    row = next(line for line in said.splitlines() if "passages retrieved" in line)
    assert row.endswith(f"| {100 * min(shares):.0f} to {100 * max(shares):.0f} |")
    line = json.loads(next((data / "out" / "pred" / "remembering-memory").glob("times*")).read_text().splitlines()[-1])
    assert line["gold_hits"].keys() == hidden["layers"].keys()
    shutil.rmtree(data / "out")
    babilong.main(arguments(data, *more[:2], "--tasks", "qa1", methods=("memory",)))
    assert result(data, "remembering-memory")["gold_hits"] == [{}, {}]
    assert "passages retrieved" not in capsys.readouterr().out


def test_books_that_are_too_short_are_joined(make, data, byte_tokenizer):
    write_rows(data / "short.jsonl", [{"text": "One is short."}] * 80)
    stories, _, _ = make(tokens=400, longest=400, books=data / "short.jsonl")
    assert all(each.context.count("One is") > 10 for each in stories)
    with pytest.raises(ValueError, match="1,040 tokens, too few for a text of 1,000 and 64 to spare"):
        load_books([str(data / "short.jsonl")], "text", byte_tokenizer, 1000)


def test_sentences():
    text = 'CHAPTER I\n\nMr. Smith and\nDr. J. Brown came. "Why?" he said. "Go!" They went...\nNo 3.5 is 4. end.'
    assert list(split(text)) == [
        *(
            "CHAPTER I",
            "Mr. Smith and Dr. J. Brown came.",
            '"Why?" he said.',
            '"Go!"',
            "They went...",
            "No 3.5 is 4. end.",
        )
    ]


def test_real_stories_in_real_books(smollm2):
    shared = SHARED / "data"
    if not (shared / "longqa").is_dir():
        pytest.skip("longqa is not there")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    questions = load_questions([str(shared / "longqa" / "test" / "babi.jsonl.gz")], list(ANSWERS), 0)
    with gzip.open(shared / "books" / "valid.jsonl.gz", "rt") as lines:
        text = json.loads(next(lines))["text"]
    book = Path(datasets.config.HF_DATASETS_CACHE) / "book.txt"
    book.write_text(text)
    books, maker = load_books([str(book)], "text", tokenizer, 2000), StoryMaker(tokenizer, 0, 4)
    for task, own in questions.items():
        known = {each.id: each for each in own}
        for each in maker.cell(task, 2000, own, books)[0]:
            assert len(tokenizer(each.context, add_special_tokens=False).input_ids) == 2000
            assert score(task, f"It is {' and '.join(each.answers[0].split(','))}", each.answers[0], each.input) == 1
            place = 0
            for fact in known[each.id].facts:
                place = each.context.index(fact, place) + len(fact)


# Prompts and scores


def test_prompts_are_the_papers(monkeypatch, tmp_path):
    prompts = load_prompts()
    for task, prompt in prompts.items():
        assert prompt.endswith("\n\n<context>\n{context}\n</context>\n\nQuestion: {input}"), task
        assert prompt.count("<example>\n") == prompt.count("\nAnswer: ") == prompt.count("\n</example>") >= 2
    assert "use the latest location to answer the question.\n\n<example>\n" in prompts["qa1"]
    assert "</example>\n\nYour answer should contain only one word - location." in prompts["qa4"]
    folder = tasks.lm_eval_folder().parent / "babilong"
    shutil.copytree(folder, tmp_path / "babilong")
    monkeypatch.setattr(tasks, "lm_eval_folder", lambda: tmp_path / "longbench")
    assert load_prompts() == prompts
    file = tmp_path / "babilong" / "babilong_qa3.yaml"
    file.write_text(file.read_text().replace("hidden", "to be found"))
    with pytest.raises(ValueError, match=r"not the prompts of lm-eval 0\.4\.13"):
        load_prompts()


@pytest.mark.parametrize(
    ("task", "prediction", "answer", "question", "expected"),
    [
        ("qa1", " The most recent location of Mary is the Kitchen. John is in the office.", "kitchen", "Where?", 1),
        ("qa1", "\nkitchen\nQuestion: Where is John?\nAnswer: office", "kitchen", "Where?", 1),
        ("qa1", "kitchen <example> office", "kitchen", "Where?", 1),
        ("qa1", "garden", "kitchen", "Where?", 0),
        ("qa1", "kitchen or garden", "kitchen", "Where?", 0),
        ("qa1", "I do not know. kitchen", "kitchen", "Where?", 0),
        ("qa1", "kitchens", "kitchen", "Where?", 0),
        ("qa1", "", "kitchen", "Where?", 0),
        (
            "qa3",
            "Before the garden the apple was in the office.",
            "office",
            "Where was the apple before the garden?",
            1,
        ),
        ("qa4", "the garden", "garden", "What is the garden west of?", 0),
        ("qa5", "Mary gave the apple to Fred", "Fred", "Who did Mary give the apple to?", 1),
        ("qa7", "none", "none", "How many objects is Mary carrying?", 1),
        ("qa7", "one", "none", "How many objects is Mary carrying?", 0),
        ("qa8", "the milk and the apple", "apple,milk", "What is Mary carrying?", 1),
        ("qa8", "the apple", "apple,milk", "What is Mary carrying?", 0),
        ("qa8", "apple, milk", "apple", "What is Mary carrying?", 0),
        ("qa9", "No, she is not in the kitchen", "no", "Is Mary in the kitchen?", 1),
        ("qa10", "I know not", "no", "Is Mary in the kitchen?", 0),
    ],
)
def test_the_answer_is_all_that_the_first_sentence_names(task, prediction, answer, question, expected):
    assert score(task, prediction, answer, question) == expected


def test_intervals_are_wilsons():
    assert accuracy([1, 0] * 5) == {"accuracy": 50, "interval": [23.66, 76.34], "records": 10}
    assert accuracy([0] * 10)["interval"] == [0, 27.75] and accuracy([1] * 10)["interval"] == [72.25, 100]


# Runs


def test_a_model_that_always_says_kitchen(data, capsys):
    """It is right where the answer is the kitchen; everything is written down, and the table is what was counted."""
    make_reciter(data, "?kitchen.")  # the prompt ends in "?"
    babilong.main(arguments(data, "--records=12", "--plots=true"))
    found = result(data, TITLE)
    rows = [json.loads(line) for line in (data / "babi.jsonl").read_text().splitlines()]
    answers = [[each["answers"][0] for row in rows[place::2] for each in row["questions"]] for place in (0, 1)]
    right = [sum(answer == "kitchen" for answer in own) for own in answers]
    assert 0 < right[0] < 12
    for name, count, number in (("qa1", 12, right[0]), ("qa2", 12, right[1]), ("all", 24, sum(right))):
        assert [each["accuracy"] for each in found["accuracy"][name]] == [round(100 * number / count, 2)] * 2
        assert all(each["interval"][0] < each["accuracy"] < each["interval"][1] for each in found["accuracy"][name])
        assert [each["records"] for each in found["accuracy"][name]] == [count] * 2
    assert found["lengths"] == [0, 700] and found["tasks"] == ["qa1", "qa2"] and len(found["records"]) == 48
    assert all(each["prediction"] == "kitchen." for each in found["records"])
    assert found["settings"]["seed"] == 0 and found["environment"]["torch"] and min(found["seconds_per_record"]) > 0
    prompt = load_prompts()["qa1"].format(context="", input="Where is Mary?")
    assert found["prompt_tokens_per_record"][1] - 700 > len(prompt) - 50 and found["prompt_tokens_per_record"][0] < 2000
    assert set(predictions(data, TITLE)) == {"qa1-0K.jsonl", "qa1-700.jsonl", "qa2-0K.jsonl", "qa2-700.jsonl"}
    out = data / "out" / "base-full"
    table = (out / "table.md").read_text()
    assert table in capsys.readouterr().out and (out / "heatmap.png").stat().st_size > 10_000
    low, high = found["accuracy"]["qa1"][0]["interval"]
    assert f"\nPeak memory of the run: {found['peak_bytes'] / 2**30:.2f} GiB.\n" in table and found["peak_bytes"] > 1e6
    assert "| task | 0K | 700 |" in table and f"| qa1 | {100 * right[0] / 12:.0f} ({low:.0f} to {high:.0f}) |" in table


def test_methods_are_longbenchs(data, capsys):
    """Whole, cut, with the facts that BM25 finds, and read into a memory; side by side in one table and heat map."""
    save_adapter(data / "base", data / "remembering", cache_size=4096, segment_tokens=256)
    methods = ("full", "truncation", "retrieval", "memory")
    more = [f"--adapter={data / 'remembering'}", "--max_length=900", "--batch=2", "--plots=true", "--chunk_words=9"]
    babilong.main(arguments(data, *more, "--tasks", "qa1", methods=methods))
    titles = ["base-full", "base-truncation", "base-retrieval-bm25", "remembering-memory"]
    table = (data / "out" / "table.md").read_text()
    assert [line.partition(":")[0] for line in table.splitlines() if "right answers" in line] == titles
    assert (data / "out" / "heatmap.png").stat().st_size > 10_000 and table in capsys.readouterr().out
    tokens = {title: result(data, title)["prompt_tokens_per_record"] for title in titles}
    assert tokens["base-full"] == tokens["base-truncation"] and tokens["remembering-memory"][1] <= 910
    texts = {title: predictions(data, title)["qa1-700.jsonl"] for title in titles}
    assert texts["base-full"] == texts["base-truncation"] != texts["remembering-memory"]
    babilong.main(arguments(data, *more, "--tasks", "qa1", "--memory_content=none", methods=("memory",)))
    babilong.main(arguments(data, *more, "--tasks", "qa1", "--memory_content=other", methods=("memory",)))
    with pytest.raises(SystemExit):  # the last record's other text is the first one's, so their number counts
        babilong.main(
            arguments(data, *more, "--tasks", "qa1", "--memory_content=other", "--records=9", methods=("memory",))
        )
    nothing = predictions(data, "remembering-memory-none")["qa1-700.jsonl"]
    assert nothing != texts["remembering-memory"]


def times(folder):
    return (folder / "out" / "pred" / TITLE / "times.ndjson").read_text()


def test_killed_and_resumed_equals_uninterrupted(data):
    """It goes on in two processes."""
    babilong.main(arguments(data))
    whole = predictions(data, TITLE), result(data, TITLE)["accuracy"]
    shutil.rmtree(data / "out")
    before = KILLED.format(rank=0, moment=6, half=True)  # times, answers, times, ...
    killed = Recipe(arguments(data), data / "killed.log", 1, before, RECIPE)
    assert killed.wait() == [-9], killed.output()
    first = times(data).splitlines()[:2]
    resumed = run(arguments(data), data / "resumed.log", 2, recipe=RECIPE)
    assert times(data).splitlines()[:2] == first
    assert (predictions(data, TITLE), result(data, TITLE)["accuracy"]) == whole
    assert result(data, TITLE)["environment"]["processes"] == 2
    assert "| task |" in resumed.output(0) and "| task |" not in resumed.output(1)


def test_records_and_lengths_can_be_added_and_settings_must_be_the_same(data, refused):
    babilong.main(arguments(data))
    first = times(data)
    babilong.main(arguments(data, "--records=4", "--lengths", "0K", "700", "900"))
    more = times(data)
    assert more.startswith(first) and len(more.splitlines()) == 2 * 3 * 4
    (data / "other.txt").write_text(BOOK.replace("very", "rather"))
    write_rows(data / "other.jsonl", [story(task, number) for number in range(5) for task in ("qa1", "qa2")])
    for given, message in {
        "--seed=1": "seed",
        f"--books={data / 'other.txt'}": "records of qa1-700",
        f"--questions={data / 'other.jsonl'}": "records of qa1-0K",
        "--batch=2": "batch",
    }.items():
        assert message in refused(babilong.main, arguments(data, given))
    babilong.main(arguments(data, "--seed=1", "--overwrite=true"))
    assert result(data, TITLE)["settings"]["seed"] == 1


# Official records


def official(number):
    return {
        "input": f"Mary went to the {PLACES[number]}. {BOOK[:300]}",
        "question": "Where is Mary?",
        "target": PLACES[number],
    }


def write_official(folder, path, rows):
    file = folder / "official" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if path.endswith("parquet"):
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        lines = path.endswith("jsonl")
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) if lines else json.dumps(rows))


@pytest.mark.parametrize("path", ["data/qa1/4k.json", "4k/qa1-00000-of-00001.parquet", "qa1_4k.jsonl", "4K/qa1.json"])
def test_official_records(data, path):
    rows = [official(number) for number in range(5)]
    write_official(data, path, rows)
    for other in ("qa10/4k.json", "qa1/64k.json", "qa1/0k.json"):
        write_official(data, other, rows[::-1])
    stories, identity = load_official(data / "official", "qa1", 4096, 3)
    assert [(each.context, each.input, each.answers) for each in stories] == [
        (row["input"], row["question"], [row["target"]]) for row in rows[:3]
    ]
    assert {each.task for each in stories} == {"qa1-4K"} and stories[0].all_classes == list(PLACES)
    assert load_official(data / "official", "qa1", 4096, 5)[1] == identity  # more may be asked later
    assert load_official(data / "official", "qa1", 0, 5)[1] != identity


def test_a_run_on_official_records(data):
    make_reciter(data, "?kitchen.")
    write_official(data, "qa1/0k.json", [official(number) for number in range(6)])
    babilong.main(
        [f"--base={data / 'base'}", f"--data={data / 'official'}", f"--output={data / 'out'}", "--device=cpu"]
        + ["--plots=false", "--records=6", "--methods", "full", "--tasks", "qa1", "--lengths", "0k"]
    )
    assert result(data, TITLE)["accuracy"]["qa1"][0]["accuracy"] == round(100 / 6, 2)


@pytest.mark.parametrize(
    ("path", "row", "message"),
    [
        ("qa2/4k.json", {}, "holds no file for qa1 and 4K"),
        ("qa1/4k.json", {"question": None}, "has no question"),
        ("qa1/4k.json", {"target": "attic"}, "answer 'attic' is none of those of qa1"),
        ("qa1/4k.json", {}, "has 1 records of qa1-4K"),
    ],
)
def test_official_records_that_do_not_serve(data, path, row, message):
    write_official(data, path, [{**official(0), **row}])
    with pytest.raises((OSError, ValueError), match=message):
        load_official(data / "official", "qa1", 4096, 2)


# Errors, before a model is loaded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tasks", "qa1", "qa21"], "tasks: qa21; give some of qa1, qa2"),
        (["--lengths", "4G"], "'4G' is not a number of tokens"),
        (["--lengths", "16K"], "too few for a text of 16,384"),
        (["--lengths", "4K"], "qa1-4K, record"),
        (["--records=13"], "the facts of 12 of 12 questions fit into 0K tokens, which is fewer than 13"),
        (["--lengths", "120", "--records=12"], "of 12 questions fit into 120 tokens, which is fewer than 12"),
        (["--records=0"], "must be at least 1"),
        (["--questions={data}/empty.jsonl"], "There is no document in"),
        (["--questions={data}/facts.jsonl"], "no question of qa1"),
        (["--tasks", "qa3"], "no question of qa3"),
        (["--questions={data}/attic.jsonl"], "the answer 'attic' is none of those of qa1: bathroom"),
        (["--questions={data}/nothing.jsonl"], "nothing.jsonl does not exist"),
        (["--books={data}/nothing.txt"], "nothing.txt does not exist"),
        (["--data={data}"], "Give either --questions"),
        (["--methods", "memory"], "give an --adapter that has one"),
        (["--methods", "guess"], "guess is none of truncation"),
    ],
)
def test_errors(data, refused, given, message):
    (data / "empty.jsonl").write_text("")
    write_rows(data / "facts.jsonl", [{**story("qa1", 0), "task": "facts"}])
    attic = story("qa1", 0)
    attic["questions"][1]["answers"] = ["attic"]
    write_rows(data / "attic.jsonl", [attic])
    assert message in refused(babilong.main, arguments(data, *(text.format(data=data) for text in given)))
    assert not (data / "out").exists()


def test_books_are_needed_for_more_than_the_facts(data, refused):
    given = [text for text in arguments(data) if not text.startswith("--books")]
    assert "Facts are hidden in --books" in refused(babilong.main, given)
    babilong.main([*given, "--lengths", "0K"])
    assert result(data, TITLE)["lengths"] == [0]


def test_labels():
    assert [label(tokens) for tokens in (0, 700, 1024, 131072, 1024**2)] == ["0K", "700", "1K", "128K", "1M"]
