"""Learning to answer: exercises from pools, lessons in lanes, a teacher with full attention, retrieval's own loss."""

import json
import re

import pytest
import torch
from peft import get_peft_model
from recipe import largest_difference, make_text, write_documents
from transformers import AutoModelForCausalLM, GenerationConfig

import cacheformers
from cacheformers import train_adapt
from cacheformers.common.documents import DataOptions, open_documents
from cacheformers.common.loss import IGNORED, token_losses
from cacheformers.evaluation.longbench.records import Record
from cacheformers.modeling.architectures import base_shape
from cacheformers.modeling.method import METHODS
from cacheformers.training.distillation import distilled, taught
from cacheformers.training.exercises import LAYOUTS, Exercises, load_pools, warn_of_short
from cacheformers.training.lanes import Lanes, Teacher, make_groups
from cacheformers.training.lessons import LessonOptions, Lessons, check_lessons, question_room

POSITIONS, SEGMENT = 1024, 256
# Methods with a loss of what questions retrieve.
LEARNING = [
    pytest.param("neurocache", {"retrieval_map": {1: 1}, "gate": "none"}, id="neurocache"),
    pytest.param("retrieval_heads", {"heads": {0: [0], 1: [0]}}, id="retrieval_heads"),
]


def document(task, number):
    """A document of a pool, whose answers are in it."""
    words = make_text(24, 1000 * len(task) + number).split()
    context = " ".join(words)
    questions = [
        {"input": f"which words are at {start}?", "answers": [" ".join(words[start : start + 2])]} for start in (3, 9)
    ]
    if task == "multihop_qa":
        context = "\n\n".join(f"Title {number} {part}\n{' '.join(words[part * 6 : part * 6 + 6])}" for part in range(4))
        questions = [{"input": "which two?", "answers": [words[13]], "passages": [0, 2]}]
    if task in ("intent", "dialogue_summary", "abstract_tldr"):
        questions = [{"input": "", "answers": [f"label {number % 3}"]}]
    if task == "babi":
        context = "\n".join(f"fact {number} {line}" for line in range(5))
        questions = [
            {"input": "where?", "answers": [f"{number}"], "lines": 3},
            {"input": "who?", "answers": ["1"], "lines": 5},
        ]
    if task == "facts":
        context = "\n".join(f"fact {number} {line}" for line in range(5))
        questions = [{"input": "who?", "answers": [f"{line}"], "supports": [line]} for line in range(5)]
    if task == "quote":
        context = " ".join(f"{make_text(24, number + place)}." for place in range(40))
        questions = []
    if task == "code":
        context = "\n".join(f"a line of code number {line}" for line in range(20))
        questions = []
    return {"task": task, "source": "made", "title": f"{task} {number}", "context": context, "questions": questions}


@pytest.fixture
def pool(byte_folder):
    """A base that reads bytes, and ten documents of every task."""
    write_documents(byte_folder / "train.jsonl", 300, 400, 300)
    (byte_folder / "pool").mkdir()
    for task in LAYOUTS:
        if task != "fewshot_qa":  # made of wiki_qa
            lines = [json.dumps(document(task, number)) for number in range(10)]
            (byte_folder / "pool" / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return byte_folder


def lessons(pool, tokenizer, seed=0, segment=SEGMENT, **options):
    chosen = LessonOptions(
        **{
            **{"questions": [str(pool / "pool")], "shortest_context": 300, "longest_context": 700},
            **{"questions_per_context": 2, "prompt_tokens": 150, **options},
        }
    )
    books = open_documents([str(pool / "train.jsonl")], tokenizer, DataOptions(train=[]))
    return Lessons(chosen, books, tokenizer, segment, POSITIONS - SEGMENT, seed)


@pytest.mark.parametrize("task", LAYOUTS)
def test_gold_passages_hold_the_answers(pool, task):
    pools = load_pools([str(pool / "pool")], len, ["a book\nof lines\n" * 50])
    exercises = Exercises({task: pools[task]}, 0, 300, 900, questions=3)
    made = [exercises.make(number) for number in range(6)]
    assert len({exercise.context for exercise in made}) > 1 and made[2] == exercises.make(2)
    for exercise in made:
        assert 1 <= len(exercise.questions) <= 3
        for question in exercise.questions:
            passages = [exercise.context[start:end] for start, end in question.gold]
            if task in ("story_qa", "wiki_qa", "paper_qa", "zh_qa", "meeting_qa", "multihop_qa"):
                assert question.answer in "".join(passages)
            if task == "babi":
                assert len(passages) in (3, 5) and all(text.startswith("fact ") for text in passages)
            if task == "facts":
                (passage,) = passages
                assert passage.startswith("fact ") and passage.endswith(question.answer)
            if task == "abstract_tldr":
                assert passages[0].startswith(question.answer) and re.fullmatch(r"Paragraph \d+", question.answer)
            if task == "intent":
                assert passages and all(text.endswith(f"Type: {question.answer}") for text in passages)
            if task == "quote":
                shown = question.input.removesuffix(" ...")
                assert passages[0].startswith(f"{shown} {question.answer}") and len(shown.split()) == 10
            if task == "code":
                assert question.answer.startswith("a line of code") and exercise.context.endswith("\n")


def test_passages_that_were_not_read_are_unanswerable(pool):
    pools = load_pools([str(pool / "pool" / "wiki_qa.jsonl")], len)
    exercises = Exercises({"wiki_qa": pools["wiki_qa"]}, 0, 300, 500, questions=4, unanswerable=0.5)
    asked = [question for number in range(20) for question in exercises.make(number).questions]
    absent = [question for question in asked if question.answer == "unanswerable"]
    assert 0.2 < len(absent) / len(asked) < 0.6 and not any(question.gold for question in absent)


def write_pool(path, *documents):
    path.write_text("".join(f"{json.dumps(each)}\n" for each in documents))
    return [str(path)]


@pytest.mark.parametrize("task", LAYOUTS)
def test_a_task_without_questions_is_refused(tmp_path, task):
    files = write_pool(tmp_path / "pool.jsonl", *({**document(task, number), "questions": []} for number in range(3)))
    if task in ("code", "quote"):
        assert Exercises(load_pools(files, len), 0, 300, 500, questions=1).make(0).questions
    elif task != "fewshot_qa":  # made of wiki_qa
        with pytest.raises(ValueError, match=f"no document of the task '{task}' has a question"):
            load_pools(files, len)
        load_pools(write_pool(tmp_path / "pool.jsonl", document(task, 0), {**document(task, 1), "questions": []}), len)


def test_a_question_needs_its_text(tmp_path):
    for question in ({"answers": ["red"]}, {"input": None, "answers": ["red"]}):
        files = write_pool(tmp_path / "pool.jsonl", {**document("wiki_qa", 0), "questions": [question]})
        with pytest.raises(ValueError, match="needs questions"):
            load_pools(files, len)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"source": None}, "a source that is not a text"),
        ({"title": 5}, "a title that is not a text"),
        ({"title": "\ud800"}, "half a surrogate pair in its context"),
        ({"lines": "4"}, "lines are not a number"),
        ({"lines": 0}, "lines are not a number from 1 to its 1"),
        ({"lines": 2}, "lines are not a number from 1 to its 1"),
        ({"supports": [1]}, "supports are not numbers below 1"),
        ({"supports": "0"}, "supports are not numbers"),
        ({"answers": [" "]}, "needs questions"),
        ({"input": "\udc00?"}, "half a surrogate pair in its questions"),
        ({"passages": None}, "passages are not numbers below 1, from 0 on"),
        ({"passages": [0, 9]}, "passages are not numbers"),
    ],
)
def test_optional_fields_of_documents(tmp_path, more, message):
    made = document("wiki_qa", 0)
    where = made if next(iter(more)) in ("source", "title") else made["questions"][0]
    where.update(more)
    with pytest.raises(ValueError, match=message):
        load_pools(write_pool(tmp_path / "pool.jsonl", made), len)


def test_documents_of_which_no_exercise_comes_are_given_up(tmp_path):
    """Solved examples that take a quarter of the longest context, and quotes of short sentences."""
    long = [document("dialogue_summary", number) for number in range(4)]
    short = {"task": "quote", "context": "It rained. Nobody came.", "questions": []}
    pools = load_pools(write_pool(tmp_path / "pool.jsonl", *long, short), len)
    longest = 4 * min(len(each["context"]) for each in long)
    with pytest.raises(ValueError, match=r"dialogue_summary, quote: no context of 100 to .* tokens with a question"):
        Exercises(pools, 0, 100, longest, questions=2).make(0)
    assert Exercises(pools, 0, 100, 8 * longest, questions=2).make(0).template == "samsum"


def test_pools_of_too_little_text_are_told(tmp_path, recwarn):
    """Facts are hidden in books, which make up for what is missing."""
    pools = load_pools(write_pool(tmp_path / "pool.jsonl", document("wiki_qa", 0), document("facts", 1)), len, ["book"])
    length = len(document("wiki_qa", 0)["context"])
    warn_of_short(pools, length)
    assert not recwarn.list
    warn_of_short(pools, length + 1)
    told = sorted(str(warning.message) for warning in recwarn.list)
    assert [text.split("'")[1] for text in told] == ["fewshot_qa", "wiki_qa"]
    assert f"have {length:,} tokens in all" in told[0] and f"--shortest_context {length + 1:,}" in told[0]


def test_a_question_without_words_has_no_nearest_passage(tmp_path):
    asked = [{"input": "...", "answers": ["red"]}]
    documents = [{**document("wiki_qa", number), "questions": asked} for number in range(5)]
    pools = load_pools(write_pool(tmp_path / "pool.jsonl", *documents), len)
    exercise = Exercises({"wiki_qa": pools["wiki_qa"]}, 0, 300, 500, questions=1).make(0)
    assert exercise.questions[0].input == "..."


def test_lanes_read_a_context_and_ask_about_it(pool, byte_tokenizer):
    made = lessons(pool, byte_tokenizer, books_share=0.0)
    lanes = Lanes(made, 1, SEGMENT, 0)
    for number in range(4):
        exercise = made.exercises.make(number)
        pieces = made.pieces(number)
        steps = []
        while lanes.position[0] == number:
            steps.append(lanes.step())
        reading = [step for step in steps if not step.pieces[0].asked]
        asking = steps[len(reading) :]
        assert len(asking) == len(exercise.questions) and not any(step.targets for step in reading)
        assert reading[0].reset.all() and not any(step.reset.any() for step in steps[1:])
        assert asking[0].close == [0] and all(step.drop == [0] and not step.close for step in asking[1:])
        read = torch.cat([step.input_ids[0][step.attention_mask[0].bool()] for step in reading])
        assert torch.equal(read, pieces[0].tokens) and exercise.context in byte_tokenizer.decode(read)
        for step, question in zip(asking, exercise.questions, strict=True):
            learned = byte_tokenizer.decode(step.labels[0][step.labels[0] != IGNORED], skip_special_tokens=True)
            assert learned.strip() == question.answer[: len(learned.strip())] and learned.strip()
            gold = step.gold
            assert (gold is None) == (not question.gold)
            if gold is not None:
                found = byte_tokenizer.decode(read[gold.numbers(0)])
                assert found == "".join(exercise.context[start:end] for start, end in sorted(question.gold))
                assert gold.asking[0].sum() == step.pieces[0].asking - 1  # the last token asks nothing


def test_questions_are_asked_as_in_the_evaluation(pool, byte_tokenizer):
    made = lessons(pool, byte_tokenizer, books_share=0.0, distill=0.5)
    exercise = made.exercises.make(0)
    question = exercise.questions[0]
    form = exercise.template
    record = Record(form, "0", question.input, exercise.context, [question.answer], 0, None, form)
    prompt, asked = made.maker(record), made.pieces(0)[1]
    assert torch.equal(asked.tokens[: len(prompt.asked)], torch.tensor(prompt.asked)) and len(prompt.asked) <= 150
    assert len(asked.inputs) <= SEGMENT and asked.teacher is not None and len(asked.teacher) > len(asked.tokens)


def test_passages_of_lessons_may_be_in_the_order_of_the_text(pool, byte_tokenizer):
    """The same passages by nearness and in the text's order: another prompt, and only with the option."""
    how = {"prompt": "retrieved", "chunk_words": 5, "chunks": 3, "books_share": 0.0, "prompt_tokens": 900}
    nearest, ordered = (lessons(pool, byte_tokenizer, segment=1024, text_order=order, **how) for order in (False, True))
    moved = 0
    for index in range(40):
        exercise = nearest.exercises.make(index)
        for number in range(len(exercise.questions)):
            shown = []
            for made in (nearest, ordered):
                prompt, _ = made.asked(exercise, number)
                text = byte_tokenizer.decode(prompt.asked)
                chosen = [part for part in text.split("\n\n") if part and part in exercise.context][:3]
                shown.append([exercise.context.index(part) for part in chosen])
            assert shown[1] == sorted(shown[1])
            moved += shown[0] != sorted(shown[0])
    assert moved


def test_stories_are_asked_about_as_by_babilong(pool, byte_tokenizer):
    facts = ["Mary moved to the bathroom.", "John went to the hallway.", "Mary went to the office."]
    asked = {"input": "Where is Mary?", "answers": ["office"], "lines": 3, "supports": [0, 2]}
    story = {"task": "babi", "source": "babi_qa1", "context": "\n".join(facts), "questions": [asked]}
    (pool / "story.jsonl").write_text(json.dumps(story) + "\n")
    made = lessons(pool, byte_tokenizer, books_share=0.0, prompt="question", questions=[str(pool / "story.jsonl")])
    context, question = made.pieces(0)
    read, prompt = byte_tokenizer.decode(context.tokens), byte_tokenizer.decode(question.tokens)
    where = [read.index(fact) for fact in facts]
    assert where == sorted(where) and "If a person was in different locations" in read[: where[0]]
    assert prompt.split()[1:] == ["Question:", "Where", "is", "Mary?", "office<eos>"] and "</context>" in read + prompt
    assert "".join(byte_tokenizer.decode(context.tokens[found]) for found in question.gold) == facts[0] + facts[2]


def test_questions_about_a_story_are_asked_after_their_own_facts(pool, byte_tokenizer):
    rooms = ["bathroom", "office", "garden", "kitchen"]
    asked = [{"input": "Where is Mary?", "answers": [room], "lines": line} for line, room in enumerate(rooms, 1)]
    facts = "\n".join(f"Mary went to the {room}." for room in rooms)
    story = {"task": "babi", "source": "babi_qa1", "context": facts, "questions": asked}
    (pool / "story.jsonl").write_text(json.dumps(story) + "\n")
    made = lessons(pool, byte_tokenizer, questions=[str(pool / "story.jsonl")], questions_per_context=4)
    ends = set()
    for number in range(20):
        exercise = made.exercises.make(number)
        [question] = exercise.questions
        told = [room for room in rooms if f"Mary went to the {room}." in exercise.context]
        assert told == rooms[: len(told)] and question.answer == told[-1]
        ends.add(len(told))
    assert ends == {1, 2, 3, 4}


def test_lanes_go_on_in_the_middle_of_a_lesson(pool, byte_tokenizer):
    made = lessons(pool, byte_tokenizer, books_share=0.3)
    lanes = Lanes(made, 2, SEGMENT, 0)
    for _ in range(7):
        lanes.step()
    other = Lanes(lessons(pool, byte_tokenizer, books_share=0.3), 2, SEGMENT, 0)
    other.load_state_dict(json.loads(json.dumps(lanes.state_dict())))
    kinds = set()
    for _ in range(20):
        one, two = lanes.step(), other.step()
        assert torch.equal(one.input_ids, two.input_ids) and torch.equal(one.labels, two.labels)
        assert (one.close, one.drop) == (two.close, two.drop)
        kinds |= {piece.asked or piece.context for piece in one.pieces}
    assert kinds == {True, False}  # books among them


def test_books_are_learned_where_they_are_without_questions(pool, byte_tokenizer):
    """Chats' answers alone, up to the longest context."""
    byte_tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    turns = [
        ("user", make_text(20, 1)),
        ("assistant", "Boris paints."),
        ("user", make_text(200, 2)),
        ("assistant", "No."),
    ]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    write_pool(pool / "train.jsonl", chat)
    made = lessons(pool, byte_tokenizer, books_share=0.5)
    [piece] = made.pieces(next(index for index in range(100) if made.book(index) is not None))
    assert len(made.books.tokens(0)) > len(piece.tokens) == 700
    labels = piece.labels(0, len(piece.inputs), IGNORED)
    assert byte_tokenizer.decode(labels[labels != IGNORED]) == "Boris paints."


def asked(model, made, questions):
    """Read the first context and ask about it, `questions` at once: losses, gradients, and rows of each step."""
    [group] = make_groups(model, made, 1, SEGMENT, 0, remembers=True, questions=questions)
    assert group.asked is group.memory is not None, "the memory is read before any batch has begun, too"
    losses, own, targets, rows = [], [], [], []
    while group.lanes.position[0] == 0:
        batch = group.lanes.step()
        group.begin(model, batch)
        if batch.pieces[0].context:
            with torch.no_grad():
                train_adapt.read_segment(model, group, batch, torch.device("cpu"))
            continue
        found = train_adapt.read_segment(model, group, batch, torch.device("cpu"))
        losses += list(found.sum(1))
        targets.append(group.own_targets(batch))
        own.append(group.own_loss() * targets[-1])
        rows.append(len(batch.pieces))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = sum(losses) + sum(own)
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    return torch.stack(losses), sum(own), gradients, rows


@pytest.mark.parametrize("room, prompt_tokens", ((SEGMENT, 150), (700, 600)), ids=("a segment", "longer"))
@pytest.mark.parametrize(("method", "more"), LEARNING)
def test_questions_side_by_side_are_questions_one_after_another(
    pool, byte_tokenizer, room, prompt_tokens, method, more
):
    """The same losses and gradients in float64, retrieval's own loss included; the memory is the context's alone."""
    options = {"questions_per_context": 5, "books_share": 0.0, "questions": [str(pool / "pool" / "facts.jsonl")]}
    made = lessons(pool, byte_tokenizer, segment=room, prompt_tokens=prompt_tokens, **options)
    base = AutoModelForCausalLM.from_pretrained(pool / "base", dtype=torch.float64)
    settings = {"segment_tokens": SEGMENT, "cache_size": 800, "topk": 4, "retrieval_weight": 0.5, **more}
    config = METHODS[method].adapter_config(r=4, **settings)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    one, other = asked(model, made, 1), asked(model, made, 3)
    assert one[3] == [1] * 5 and other[3] == [3, 2] and float(one[1].detach()) > 0
    torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one[1], other[1], rtol=1e-9, atol=1e-9)
    moved = 0
    for single, together in zip(one[2], other[2], strict=True):
        assert (single is None) == (together is None)
        if single is not None:
            torch.testing.assert_close(single, together, rtol=1e-7, atol=1e-9)
            moved += bool(single.any())
    assert moved > 4


@pytest.mark.parametrize(("method", "more"), LEARNING)
def test_lanes_that_ask_beside_lanes_that_read(pool, byte_tokenizer, method, more):
    """The memory's own loss is the same one lane at a time, and in one batch of several pieces."""
    options = {"questions_per_context": 1, "books_share": 0.0, "questions": [str(pool / "pool" / "facts.jsonl")]}
    made = lessons(pool, byte_tokenizer, segment=SEGMENT, prompt_tokens=150, **options)
    base = AutoModelForCausalLM.from_pretrained(pool / "base", dtype=torch.float64)
    settings = {"segment_tokens": SEGMENT, "cache_size": 2000, "topk": 4, "retrieval_weight": 0.5, **more}
    config = METHODS[method].adapter_config(r=4, **settings)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    sums = []
    for divided in (1, 2):
        groups = make_groups(model, made, 2, 2 * SEGMENT, 0, remembers=True, groups=divided)
        sums.append([])
        for _ in range(10):
            batches = [group.lanes.step() for group in groups]
            own = 0.0
            for group, batch in zip(groups, batches, strict=True):
                group.begin(model, batch)
                train_adapt.read_segment(model, group, batch, torch.device("cpu"))
                own += float(group.own_loss()) * group.own_targets(batch)
            sums[-1].append((own, sum(batch.targets for batch in batches)))
    assert sum(own > 0 for own, _ in sums[0]) > 2
    assert sums[0] == [pytest.approx(pair, rel=1e-9) for pair in sums[1]]


def test_a_method_that_cannot_forget_is_asked_in_a_copy(pool, byte_tokenizer, refused):
    """CacheFormer's second question knows nothing of the first one; two lanes that would mix are refused."""
    options = {"questions_per_context": 2, "books_share": 0.0, "questions": [str(pool / "pool" / "facts.jsonl")]}
    made = lessons(pool, byte_tokenizer, prompt="question", **options)
    base = AutoModelForCausalLM.from_pretrained(pool / "base", dtype=torch.float64)
    config = cacheformers.CacheFormerAdapterConfig(window_tokens=32, pool_tokens=8, topk=2, segment_tokens=64, r=4)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    one, other = asked(model, made, 1), asked(model, made, 2)
    assert (one[3], other[3]) == ([1, 1], [2])
    torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-9)

    memory = cacheformers.new_memory(model.eval(), 1)
    with torch.no_grad():
        model(made.pieces(0)[0].tokens[None, :40], past_key_values=memory)
    with pytest.raises(ValueError, match="cannot forget tokens"):
        memory.drop([0])
    given = [f"--{name}={value}" for name, value in TAUGHT.items()]
    given += [f"--base={pool / 'base'}", f"--train={pool / 'train.jsonl'}", f"--output={pool / 'bad'}", "--lanes=2"]
    given += [
        "--questions",
        str(pool / "pool"),
        "--method=cacheformer_on_base",
        "--prompt=question",
        "--max_tokens=1024",
    ]
    said = refused(train_adapt.main, [*given, "--segment_tokens=256", "--window_tokens=32", "--pool_tokens=8"])
    assert "cannot forget the question of one lane" in said


def test_a_question_longer_than_a_segment_is_read_at_once(pool, byte_tokenizer):
    """With closed gates its loss is the base's on the prompt alone."""
    options = {"questions_per_context": 1, "books_share": 0.0, "questions": [str(pool / "pool" / "facts.jsonl")]}
    made = lessons(pool, byte_tokenizer, segment=700, prompt_tokens=600, **options)
    base = AutoModelForCausalLM.from_pretrained(pool / "base", dtype=torch.float64)
    _, question = made.pieces(0)
    assert len(question.inputs) > SEGMENT + 50
    logits = base(input_ids=question.inputs[None]).logits
    wanted = token_losses(logits, question.labels(0, len(question.inputs), IGNORED)[None]).sum(1)
    config = cacheformers.NeurocacheAdapterConfig(segment_tokens=SEGMENT, cache_size=800, gate="zero", r=4)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    found = asked(model, made, 1)
    assert found[3] == [1]
    torch.testing.assert_close(found[0], wanted, rtol=1e-9, atol=1e-9)


def test_the_number_of_chunks_is_drawn_for_each_context(pool, byte_tokenizer):
    how = {"prompt": "retrieved", "chunk_words": 1, "chunks": 8, "books_share": 0.0, "prompt_tokens": 900}
    made = lessons(pool, byte_tokenizer, segment=1024, fewest_chunks=2, **how)
    exercises = [made.exercises.make(index) for index in range(200)]
    counts = [made.chosen_maker(exercise).options.chunks for exercise in exercises]
    assert set(counts) == set(range(2, 9)) and sum(count < 5 for count in counts) > 100
    assert counts[:5] == [made.chosen_maker(exercise).options.chunks for exercise in exercises[:5]]
    shown = {byte_tokenizer.decode(made.pieces(index)[1].tokens).count("\n\n") for index in range(20)}
    assert len(shown) > 3, "prompts have more or fewer chunks"


def test_a_teacher_is_the_base_with_full_attention(make_model, make_base):
    model, base = make_model("llama_gqa", torch.float64), make_base("llama_gqa", torch.float64)
    frozen = [name for name, parameter in model.named_parameters() if "gate" in name]
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    ids = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(0))
    logits = base(input_ids=ids[None]).logits[0, -5:-1]
    places = torch.arange(56, 60)
    torch.testing.assert_close(taught(model, ids, places), logits)
    assert before == {name: parameter.requires_grad for name, parameter in model.named_parameters()} and frozen
    opt = get_peft_model(make_base("opt", torch.float64), cacheformers.NeurocacheAdapterConfig(segment_tokens=16, r=4))
    opt.base_model.model.model.decoder.layers[0].dropout = 0.5
    opt.train()
    assert torch.equal(taught(opt, ids, places), taught(opt, ids, places)) and opt.training
    assert all(module.training for module in opt.modules())

    labels = torch.full((2, 9), IGNORED)
    labels[0, 3:7] = ids[-4:]
    mine = torch.randn(2, 9, 128, dtype=torch.float64, requires_grad=True)
    losses = token_losses(mine, labels)
    found = distilled(model, losses, mine, labels, [Teacher(ids, places), None], 0.25)
    wanted, own = torch.softmax(logits, -1), torch.softmax(mine[0, 3:7], -1)
    divergence = (wanted * (wanted / own).log()).sum(-1)
    torch.testing.assert_close(
        found[0, 3:7].double(), 0.75 * losses[0, 3:7].double() + 0.25 * divergence, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(found[1], losses[1]) and not found[0, :3].any()


GIVEN = {"segment_tokens": SEGMENT, "cache_size": 800, "topk": 4, "retrieval_map": 1, "r": 4, "steps": 4}
TAUGHT = {"shortest_context": 300, "longest_context": 600, "questions_per_context": 2, "prompt_tokens": 150}


def given(pool, output, **more):
    """The recipe's arguments."""
    options = {"base": pool / "base", "train": pool / "train.jsonl", "output": pool / output, **GIVEN, **TAUGHT, **more}
    return [*(f"--{name}={value}" for name, value in options.items()), "--questions", str(pool / "pool")]


def train(pool, output, finished=True, **more):
    """Run the recipe; return its result, if it is to come to its end."""
    train_adapt.main(given(pool, output, **more))
    assert (pool / output / "train_result.json").exists() == finished
    return json.loads((pool / output / "train_result.json").read_text()) if finished else {}


def test_a_method_that_sees_all_of_a_context_is_asked_in_segments(pool, byte_tokenizer):
    """A question longer than its segments needs no window of its own: they bound activations alone."""
    options = {"questions_per_context": 1, "books_share": 0.0, "questions": [str(pool / "pool" / "facts.jsonl")]}
    made = lessons(pool, byte_tokenizer, prompt="question", **options)
    losses = []
    for segment_tokens in (32, SEGMENT):
        base = AutoModelForCausalLM.from_pretrained(pool / "base", dtype=torch.float64)
        config = cacheformers.GatedAttentionAdapterConfig(segment_tokens=segment_tokens, window_tokens=16, r=4)
        chosen = made.options
        assert question_room(chosen, config.resolve(base_shape(base.config))) == segment_tokens
        model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
        losses.append(asked(model, made, 1)[0])
    assert len(made.pieces(0)[1].inputs) > 32
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)


def test_a_run_learns_from_questions(pool):
    """Stopped and resumed it is the same run; the memory of contexts is trained with distillation and gold passages."""
    more = {"distill": 0.5, "retrieval_weight": 0.1, "log_every": 1, "books_share": 0.2, "distill_all": True}
    whole = train(pool, "whole", **more)
    assert len(whole["losses"]) == 4 and any("gold_hits" in entry for entry in whole["log"])
    for _ in range(3):
        train(pool, "parts", **more, stop_after=1e-6, resume=(pool / "parts").exists(), finished=False)
    parts = train(pool, "parts", **more, resume=True)
    assert parts["losses"] == whole["losses"] and largest_difference(pool / "parts", pool / "whole") == 0


def test_contexts_are_read_by_the_layers_that_store(pool, monkeypatch):
    """Contexts have no labels: leaving out what is above the layers that store changes no loss."""
    more = {"books_share": 0.0, "lora_dropout": 0.0, "retrieval_map": 0, "attention_layers": 1}
    depths, kept, lower, read_segment = [], [], train_adapt.reader, train_adapt.read_segment

    def noted(decoder, memory):
        depths.append((len(lower(decoder, memory).layers), len(decoder.layers)))
        return lower(decoder, memory)

    def asked(model, group, *more):
        kept.append(group.memory.tokens_kept[0])
        return read_segment(model, group, *more)

    monkeypatch.setattr(train_adapt, "reader", noted)
    monkeypatch.setattr(train_adapt, "read_segment", asked)
    short = train(pool, "short", **more)
    monkeypatch.setattr(train_adapt, "reader", lambda decoder, memory: decoder)
    whole = train(pool, "whole_depth", **more)
    assert depths and all(some < all_layers for some, all_layers in depths)
    assert len(kept) == 8 and min(kept) > 150, "what was read is in the memory when a question comes"
    assert short["losses"] == whole["losses"] and largest_difference(pool / "short", pool / "whole_depth") == 0


def test_lora_alone_learns_from_the_same_questions(pool, capsys):
    result = train(pool, "lora", method="lora", books_share=0.0, questions_per_step=2)
    assert "4 steps ask at most 8 questions." in capsys.readouterr().out
    result = train(pool, "lora", method="lora", books_share=0.0, overwrite=True)
    memory = train(pool, "memory", books_share=0.0)
    assert result["losses"][0] == pytest.approx(memory["losses"][0], rel=1e-3)  # gates are closed at first


def test_what_cannot_be_learned_is_refused(pool, byte_tokenizer, refused):
    for more, message in (
        ({"prompt_tokens": 1000}, "fewer than 64 of 1024 positions"),
        ({"prompt_tokens": 250, "lanes": 2}, "questions take segments of 762 tokens"),
        ({"fewest_chunks": 8}, "fewest_chunks must be from 1 to chunks 7"),
        ({"shortest_context": 900}, "shortest_context 900"),
        ({"prompt": "all"}, "prompt must be one of"),
        ({"distill": 2.0}, "distill must be between"),
        ({"chat": True}, "no chat template"),
        ({"questions_per_step": 2, "lanes": 2}, "2 lanes go through the model together"),
        ({"distill": 0.5, "segment_tokens": 1000}, "leaves it nothing: choose smaller segments"),
        ({"prompt": "question", "segment_tokens": 32}, "Questions leave no room for their answers in 32 tokens"),
    ):
        assert message in refused(train_adapt.main, given(pool, "bad", **more))
    byte_tokenizer.chat_template = "{{ 'Be kind. ' * 12 }}{{ messages[0].content }}"
    with pytest.raises(ValueError, match="chat template takes 109 tokens.*prompt_tokens of at most 115"):
        lessons(pool, byte_tokenizer, chat=True)
    base = AutoModelForCausalLM.from_pretrained(pool / "base")
    gated = cacheformers.GatedAttentionAdapterConfig().resolve(base_shape(base.config))
    with pytest.raises(ValueError, match="at most"):
        check_lessons(LessonOptions(questions=["pool"], prompt="question"), gated)
    far = cacheformers.GatedAttentionAdapterConfig(far_distance=512).resolve(base_shape(base.config))
    check_lessons(LessonOptions(questions=["pool"], prompt="question"), far)
    with pytest.raises(ValueError, match="ask with --prompt question"):
        check_lessons(LessonOptions(questions=["pool"]), far)
    (pool / "pool" / "wiki_qa.jsonl").write_text('{"task": "other", "context": "a", "questions": []}\n')
    assert "has no task of" in refused(train_adapt.main, given(pool, "bad"))
    GenerationConfig(eos_token_id=7).save_pretrained(pool / "base")
    assert "answers would be learned with an end that it goes on after" in refused(train_adapt.main, given(pool, "bad"))
    assert cacheformers.NeurocacheAdapterConfig().retrieval_weight == 0
