from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.config.sections.tasks import FileTask, ImportTask, ReasoningGymTask
from redline.errors import TaskError
from redline.ports import TaskSource
from redline.rollouts.tasks.files import FileTasks
from redline.rollouts.tasks.held_out import held_out_count, is_held_out, split_held_out, stable_hash
from redline.rollouts.tasks.sources import make_task_source
from redline.types import Failure, Task

TINY_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Only 200 distinct questions."""


def question(task: Task) -> str:
    return task.messages[-1]["content"]


# ── the split ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_hash_of_a_text_never_changes() -> None:
    assert stable_hash("1 + 1 =") == 0xFA15A81362F32525


def test_the_share_of_texts_held_out_is_the_fraction_asked_for() -> None:
    held_out = sum(is_held_out(f"question {i}", 0.2) for i in range(10_000))
    assert held_out == pytest.approx(2000, abs=200)


@pytest.mark.parametrize(
    ("rows", "fraction", "expected"), [(10, 0.25, 2), (10, 0.01, 1), (2, 0.99, 1), (3, 0.9, 2), (1, 0.5, 0)]
)
def test_a_finite_split_leaves_something_on_both_sides(rows: int, fraction: float, expected: int) -> None:
    assert held_out_count(rows, fraction) == expected


def test_a_question_stays_on_its_side_whatever_the_order_and_the_duplicates() -> None:
    questions = [f"What is {n} + {n}?" for n in range(50)]
    train, held_out = split_held_out(questions, 0.2)
    assert (len(train), len(held_out)) == (40, 10)
    assert sorted([*train, *held_out]) == sorted(questions)
    assert split_held_out([*reversed(questions), *questions], 0.2) == (train, held_out)


@pytest.mark.parametrize(
    ("questions", "fraction"), [(["one", "one"], 0.5), ([], 0.5), (["one", "two"], 0.0), (["one", "two"], 1)]
)
def test_what_cannot_be_split_is_refused(questions: list[str], fraction: float) -> None:
    with pytest.raises(TaskError, match="cannot be split"):
        split_held_out(questions, fraction)


# ── reasoning_gym ──────────────────────────────────────────────────────────────────────────────────────────────────────


def gym(seed: int = 0, **config: Any) -> TaskSource:
    return make_task_source(
        ReasoningGymTask(**{"kind": "reasoning_gym", "dataset": "chain_sum", "params": TINY_SUMS, **config}), seed
    )


def test_held_out_tasks_are_fewer_when_the_data_set_has_no_more() -> None:
    assert len(gym().held_out(1000)) == 34


def test_another_seed_gives_other_tasks() -> None:
    params = {"min_terms": 5, "max_terms": 5, "min_digits": 4, "max_digits": 4}
    first, second = ({question(gym(seed, params=params).train(i)) for i in range(500)} for seed in (0, 1))
    assert len(first) == len(second) == 500
    assert not first & second


def test_training_goes_on_without_end_and_any_index_is_at_hand() -> None:
    assert gym().train(10**9).id == "chain_sum/1000000000"


def test_task_ids_are_unique() -> None:
    source = gym()
    tasks = [source.train(i) for i in range(1000)] + list(source.held_out(30))
    assert len({task.id for task in tasks}) == len(tasks)


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "list_functions"])
def test_a_data_set_that_prepares_its_items_up_front_is_endless_too(dataset: str) -> None:
    source = gym(dataset=dataset, params={})
    assert len({question(source.train(i)) for i in range(1000, 1100)}) == 100


def test_the_last_number_is_scored() -> None:
    source = gym()
    task = source.train(0)
    assert source.score(task, f"3 + 4 = {task.answer}") == {"correct": 1.0}
    assert source.score(task, f"The answer is {task.answer}.00.") == {"correct": 1.0}
    assert source.score(task, f"{task.answer}, no, 99") == {"correct": 0.0}


def test_a_data_set_whose_answers_are_no_numbers_is_scored_by_the_whole_answer() -> None:
    source = gym(dataset="caesar_cipher", params={})
    task = source.train(0)
    assert source.score(task, f" {task.answer}\n") == {"correct": 1.0}
    with pytest.raises(TaskError, match=r"(?s)extract = 'last_number': an answer of caesar_cipher is '.*hint: leave it out"):
        gym(dataset="caesar_cipher", params={}, extract="last_number")
    tagged = gym(dataset="caesar_cipher", params={}, extract="answer_tag")
    assert tagged.score(task, f"It is <answer>{task.answer}</answer>.") == {"correct": 1.0}


def test_data_sets_can_be_mixed() -> None:
    specs = ["caesar_cipher", {"name": "chain_sum", "weight": 3, "config": TINY_SUMS}]
    source = gym(dataset="composite", params={"datasets": specs})
    tasks = [source.train(index) for index in range(40)]
    assert {task.data["metadata"]["source_dataset"] for task in tasks} == {"caesar_cipher", "chain_sum"}
    assert all(source.score(task, task.answer) == {"correct": 1.0} for task in tasks)


def test_an_answer_that_a_scorer_chokes_on_is_wrong() -> None:
    source = gym(dataset="prime_factorization", params={})
    assert source.score(source.train(0), "I do not know") == {"correct": 0.0}


def test_a_data_set_whose_scorer_takes_anything_for_right_is_refused() -> None:
    with pytest.raises(TaskError, match="game_of_life_halting: its own scorer takes any answer for right"):
        gym(dataset="game_of_life_halting", params={})


def test_an_answer_without_a_number_scores_zero() -> None:
    assert gym().score(gym().train(0), "I do not know") == {"correct": 0.0}


def test_the_whole_text_is_scored_when_asked_for() -> None:
    source = gym(extract="text")
    task = source.train(0)
    assert source.score(task, f" {task.answer}\n") == {"correct": 1.0}
    assert source.score(task, f"it is {task.answer}") == {"correct": 0.0}


def test_partial_credit_counts_as_wrong() -> None:
    source = gym(dataset="letter_counting", params={}, extract="text")
    task = source.train(0)
    assert source.score(task, task.answer) == {"correct": 1.0}
    assert source.score(task, f"{task.answer} letters") == {"correct": 0.0}


def test_a_mistyped_data_set_is_corrected() -> None:
    with pytest.raises(TaskError) as caught:
        gym(dataset="chain_sums")
    assert caught.value.message == "rollouts.task.dataset = 'chain_sums': reasoning_gym has no such data set"
    assert "did you mean chain_sum" in caught.value.hint


def test_a_data_set_like_no_other_gets_the_list() -> None:
    with pytest.raises(TaskError, match=r"(?s)hint: one of ab, .*chain_sum"):
        gym(dataset="zzzzzzzz")


def test_a_mistyped_parameter_is_corrected_with_the_valid_names() -> None:
    with pytest.raises(TaskError) as caught:
        gym(params={"min_term": 2})
    assert caught.value.message == "rollouts.task.params.min_term: chain_sum has no such parameter"
    assert caught.value.hint == (
        "did you mean min_terms? parameters of chain_sum: allow_negation, max_digits, max_terms, min_digits, min_terms"
    )


def test_a_parameter_the_data_set_refuses_is_reported_in_its_words() -> None:
    with pytest.raises(TaskError) as caught:
        gym(params={"min_terms": 3, "max_terms": 2})
    assert "chain_sum(min_terms=3, max_terms=2): AssertionError: max_terms must be >= min_terms" in caught.value.message
    assert caught.value.hint.startswith("change rollouts.task.params; parameters of chain_sum: ")


@pytest.mark.parametrize("name", ["seed", "size"])
def test_seed_and_size_are_not_the_recipes_to_set(name: str) -> None:
    with pytest.raises(TaskError, match=r"(?s)params.\w+: redline sets it.*hint: remove it; run.seed decides what is drawn"):
        gym(params={name: 3})


TEN_QUESTIONS = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
"""The numbers 0 to 9."""


def test_a_data_set_without_a_held_out_question_is_refused() -> None:
    with pytest.raises(TaskError, match=r"(?s)no held-out question in 10,000 draws.*hint: raise .*held_out_fraction"):
        gym(params=TEN_QUESTIONS, held_out_fraction=1e-9).held_out(4)


def test_a_data_set_without_a_training_question_is_refused() -> None:
    with pytest.raises(TaskError, match=r"(?s)all of 10,000 draws are held out.*hint: lower .*held_out_fraction"):
        gym(params=TEN_QUESTIONS, held_out_fraction=0.999999).train(0)


def test_reasoning_gym_is_not_loaded_before_it_is_used() -> None:
    code = "import sys, redline.rollouts.tasks.sources; sys.exit('reasoning_gym' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ── JSONL ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def jsonl(folder: Path, rows: list[Any], seed: int = 0, **config: Any) -> TaskSource:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "sums.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return make_task_source(FileTask(**{"kind": "file", "path": folder / "sums.jsonl", **config}), seed)


def sums(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(count)]


def refusal(folder: Path, rows: list[Any], **config: Any) -> tuple[str, str]:
    with pytest.raises(TaskError) as caught:
        jsonl(folder, rows, **config)
    return caught.value.message.replace(f"{folder}/", ""), caught.value.hint


def test_an_epoch_has_every_training_row_once_and_no_held_out_row(tmp_path: Path) -> None:
    source = jsonl(tmp_path, sums(50), held_out_fraction=0.2)
    held_out = {question(task) for task in source.held_out(1000)}
    epoch = Counter(question(source.train(i)) for i in range(40, 80))
    assert len(held_out) == 10
    assert set(epoch.values()) == {1}
    assert len(epoch) == 40
    assert not held_out & set(epoch)


def test_the_order_changes_with_the_epoch_and_with_the_seed_but_not_otherwise(tmp_path: Path) -> None:
    first, again, other = (jsonl(tmp_path, sums(50), seed) for seed in (0, 0, 1))
    epochs = [[first.train(i).id for i in range(start, start + 45)] for start in (0, 45)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != [other.train(i).id for i in range(45)]
    assert epochs[0] == [again.train(i).id for i in reversed(range(45))][::-1]


def test_the_rows_held_out_depend_on_neither_seed_nor_order(tmp_path: Path) -> None:
    first = jsonl(tmp_path, sums(50), seed=0).held_out(100)
    second = jsonl(tmp_path, sums(50)[::-1], seed=1).held_out(100)
    assert [question(task) for task in first] == [question(task) for task in second]


def test_rows_with_the_same_prompt_are_on_the_same_side(tmp_path: Path) -> None:
    source = jsonl(tmp_path, sums(10) * 3, held_out_fraction=0.3)
    held_out = {question(task) for task in source.held_out(100)}
    assert len(held_out) == len(source.held_out(100)) == 3
    assert not held_out & {question(source.train(i)) for i in range(21)}


def test_a_file_that_is_held_out_whole_gives_each_prompt_once_and_none_to_train_on(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [*sums(20), *sums(3)], held_out_fraction=1)
    assert {question(task) for task in source.held_out(1000)} == {row["prompt"] for row in sums(20)}
    assert len(source.held_out(1000)) == 20
    assert "3 row(s) ask what another row asks" in source.notes[0]
    with pytest.raises(TaskError, match=r"(?s)every row is held out.*set it to less than 1"):
        source.train(0)
    too_long = Failure("prompt", "too long")
    assert len(source.leave_out(lambda task: too_long if question(task) == "1 + 1 =" else None)) == 1
    assert len(source.held_out(1000)) == 19
    assert len(jsonl(tmp_path, sums(1), held_out_fraction=1).held_out(9)) == 1


def test_two_rows_are_enough(tmp_path: Path) -> None:
    source = jsonl(tmp_path, sums(2))
    assert question(source.held_out(9)[0]) != question(source.train(0))


def test_a_task_is_named_by_its_line(tmp_path: Path) -> None:
    source = jsonl(tmp_path, ["", *sums(3), ""])
    ids = {source.train(i).id for i in range(2)} | {task.id for task in source.held_out(9)}
    assert ids == {"sums/2", "sums/3", "sums/4"}


def test_a_prompt_may_be_a_conversation(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    source = jsonl(tmp_path, [{"q": messages, "a": 2}, {"q": "2 + 2", "a": 4}], prompt_field="q", answer_field="a")
    tasks = [source.train(0), *source.held_out(1)]
    assert messages in [task.messages for task in tasks]
    assert {task.answer for task in tasks} == {"2", "4"}


def test_text_must_equal_the_reference_after_trimming(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"prompt": "a", "answer": " Paris\n"}, {"prompt": "b", "answer": "Paris"}])
    assert source.score(source.train(0), "Paris ") == {"correct": 1.0}
    assert source.score(source.train(0), "paris") == {"correct": 0.0}


HALF = "write both halves of it, or leave it out"
TOO_DEEP = "a field is nested too deep to be read"
TOO_LONG = (
    "a number is too long to be read: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits"
)


def test_numbers_compare_as_numbers(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "answer": "… so #### 1,000"} for prompt in "ab"]
    source = jsonl(tmp_path, rows, extract="last_number")
    assert source.score(source.train(0), "it is 1000.0") == {"correct": 1.0}
    assert source.score(source.train(0), "it is 1001") == {"correct": 0.0}
    assert source.score(source.train(0), "no idea") == {"correct": 0.0}


@pytest.mark.parametrize(
    ("row", "problem", "hint"),
    [
        (
            "{not json",
            "not valid JSON: Expecting property name enclosed in double quotes at column 2",
            "one JSON object per line",
        ),
        (
            '{"prompt":"bad"',
            "not valid JSON: the line ends before the object does at column 16",
            "one JSON object per line",
        ),
        ([1, 2], "a list, not an object", 'write {"prompt": ..., "answer": ...}'),
        ({"answer": "1"}, "no field 'prompt'", "add it, or set rollouts.task.prompt_field to one of: answer"),
        (
            {"prompt": "1", "reply": "1"},
            "no field 'answer'",
            "add it, or set rollouts.task.answer_field to one of: prompt, reply; "
            "null where an environment or a reward model scores",
        ),
        (
            {"prompt": 3, "answer": "1"},
            "prompt: neither a text nor a list of messages, or empty",
            'write "a question" or [{"role": "user", "content": "a question"}]',
        ),
        (
            {"prompt": [{"role": "user"}], "answer": "1"},
            "prompt: neither a text nor a list of messages, or empty",
            'write "a question" or [{"role": "user", "content": "a question"}]',
        ),
        (
            {"prompt": " ", "answer": "1"},
            "prompt: neither a text nor a list of messages, or empty",
            'write "a question" or [{"role": "user", "content": "a question"}]',
        ),
        (
            {"prompt": "1", "answer": None},
            "answer: a NoneType, not a text or a number",
            'write "answer": "42" or "answer": 42',
        ),
        ('{"prompt": "\\uD800", "answer": "1"}', "half a character, \\ud800, which no text can hold", HALF),
        ('{"prompt": "1", "answer": "1", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", TOO_DEEP, "flatten it"),
        ('{"prompt": "1", "answer": ' + "9" * 5000 + "}", TOO_LONG, 'write it as a text: "answer": "123..."'),
        ({"prompt": "1", "answer": True}, "answer: a bool, not a text or a number", 'write "answer": "42" or "answer": 42'),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_the_fix(tmp_path: Path, row: Any, problem: str, hint: str) -> None:
    assert refusal(tmp_path, [*sums(3), row]) == (f"sums.jsonl:4: {problem}", hint)


def test_a_reference_without_a_number_is_refused_when_numbers_are_compared(tmp_path: Path) -> None:
    assert refusal(tmp_path, [{"prompt": "1", "answer": "one"}], extract="last_number") == (
        "sums.jsonl:1: answer = 'one': has no number to compare with",
        "set rollouts.task.extract=text",
    )


@pytest.mark.parametrize("answer", ["1/2", "10^6", "3:30", "2 + 2 #### 1/2", "1 000"])
def test_a_reference_of_several_numbers_is_refused_when_numbers_are_compared(tmp_path: Path, answer: str) -> None:
    assert refusal(tmp_path, [{"prompt": "1", "answer": answer}], extract="last_number") == (
        f"sums.jsonl:1: answer = {answer!r}: 2 numbers, and one is compared",
        "set rollouts.task.extract=text or math; or write the number by itself, or after ####",
    )


@pytest.mark.parametrize(("answer", "right", "wrong"), [(".5", "0.5", "5"), ("1e5", "100,000", "5"), (1e22, "1e22", "22")])
def test_points_and_powers_of_ten_belong_to_a_number(tmp_path: Path, answer: Any, right: str, wrong: str) -> None:
    source = jsonl(tmp_path, [{"prompt": prompt, "answer": answer} for prompt in "ab"], extract="last_number")
    assert source.score(source.train(0), f"it is {right}.") == {"correct": 1.0}
    assert source.score(source.train(0), f"it is {wrong}.") == {"correct": 0.0}


@pytest.mark.parametrize("rows", [[], ["", "  "]])
def test_a_file_without_rows_is_refused(tmp_path: Path, rows: list[str]) -> None:
    assert refusal(tmp_path, rows) == ("sums.jsonl: the file is empty", "write one JSON object per line")


def test_a_file_with_one_prompt_cannot_be_split(tmp_path: Path) -> None:
    assert refusal(tmp_path, sums(1) * 2) == (
        "sums.jsonl: 2 row(s) with the same prompt; training and evaluation need one each",
        "add rows with other prompts",
    )


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match=r"(?s)binary.jsonl:1: not UTF-8 text.*hint: save the file as UTF-8"):
        make_task_source(FileTask(kind="file", path=tmp_path / "binary.jsonl"), 0)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"(?s)none.jsonl: no such file.*hint: give rollouts.task.path a file"):
        make_task_source(FileTask(kind="file", path=tmp_path / "none.jsonl"), 0)


# ── import paths ───────────────────────────────────────────────────────────────────────────────────────────────────────

MY_TASKS = """
from redline.errors import TaskError
from redline.types import Task

class Sums:
    def __init__(self, seed, digits=1):
        if digits == 0:
            raise TaskError("no digits", "give some")
        if digits < 0:
            raise ValueError("digits < 0")
        self.seed, self.digits = seed, digits
    def train(self, index):
        return Task(f"sums/{index}", [{"role": "user", "content": f"{self.seed} {self.digits}"}])
    def held_out(self, count):
        return []
    def score(self, task, text):
        return {"correct": 1.0}

class Half:
    def __init__(self, seed): ...
    def train(self, index): ...

class Outer:
    Sums = Sums

not_callable = 3
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the user's modules in it; imports are undone afterwards."""
    (tmp_path / "my_tasks.py").write_text(MY_TASKS)
    (tmp_path / "needs_more.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "broken.py").write_text("1 +\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_tasks", "needs_more", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def imported(path: str, **params: Any) -> TaskSource:
    return make_task_source(ImportTask(kind="import", path=path, params=params), seed=7)


def import_refusal(path: str, **params: Any) -> tuple[str, str]:
    with pytest.raises(TaskError) as caught:
        imported(path, **params)
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize("path", ["my_tasks:Sums", "my_tasks:Outer.Sums"])
def test_a_class_beside_the_recipe_is_called_with_seed_and_params(in_folder: Path, path: str) -> None:
    assert question(imported(path, digits=2).train(0)) == "7 2"


def test_a_module_that_is_not_there_is_refused(in_folder: Path) -> None:
    message, hint = import_refusal("my_taks:Sums")
    assert message == "rollouts.task.path: no module 'my_taks'"
    assert hint == f"start redline where my_taks.py is (it was looked for in {in_folder}), or install the package"


@pytest.mark.usefixtures("in_folder")
def test_a_file_that_is_given_for_a_module_gets_the_way_to_write_it() -> None:
    message, hint = import_refusal("my_tasks.py:Sums")
    assert message == "rollouts.task.path: no module 'my_tasks.py'"
    assert hint == "a module is named without .py: write my_tasks:Sums"


def test_a_module_that_lacks_a_package_of_its_own_is_refused_with_that_package(in_folder: Path) -> None:
    message, hint = import_refusal("needs_more:Sums")
    assert "importing needs_more raised ModuleNotFoundError: No module named 'a_package_nobody_has'" in message
    assert hint == f"`python -c 'import needs_more'` must work in {in_folder}"


def test_a_module_that_is_broken_is_refused_with_its_error(in_folder: Path) -> None:
    message, _ = import_refusal("broken:Sums")
    assert "importing broken raised SyntaxError: invalid syntax (broken.py, line 1)" in message


def test_a_name_that_is_not_there_is_refused_with_the_names_that_are(in_folder: Path) -> None:
    message, hint = import_refusal("my_tasks:Sum")
    assert message == f"rollouts.task.path = 'my_tasks:Sum': my_tasks ({in_folder / 'my_tasks.py'}) has no Sum"
    assert hint == "did you mean Sums?"
    assert import_refusal("my_tasks:Riddles")[1] == "it has Sums, Half, Outer, not_callable"


def test_a_parameter_it_does_not_take_is_refused_with_its_signature(in_folder: Path) -> None:
    message, hint = import_refusal("my_tasks:Sums", digts=2)
    assert message == "my_tasks:Sums could not be made: TypeError: Sums.__init__() got an unexpected keyword argument 'digts'"
    assert hint == "it is called as Sums(seed=7, digts=2) with rollouts.task.params; it takes (seed, digits=1)"


def test_something_that_cannot_be_called_is_refused(in_folder: Path) -> None:
    message, _ = import_refusal("my_tasks:not_callable")
    assert message == "my_tasks:not_callable could not be made: TypeError: 'int' object is not callable"


def test_any_other_error_of_its_own_is_reported(in_folder: Path) -> None:
    message, _ = import_refusal("my_tasks:Sums", digits=-1)
    assert message == "my_tasks:Sums could not be made: ValueError: digits < 0"


def test_a_task_error_of_its_own_is_passed_on(in_folder: Path) -> None:
    assert import_refusal("my_tasks:Sums", digits=0) == ("no digits", "give some")


def test_an_object_without_the_methods_of_a_task_source_is_refused(in_folder: Path) -> None:
    message, hint = import_refusal("my_tasks:Half")
    assert message == "my_tasks:Half gives a Half without held_out, score"
    assert hint.startswith("a task source has the methods train(index), held_out(count) and score(task, text)")


def write_words(folder: Path, word: str) -> Path:
    """A module whose tasks ask for a word that it has from the module beside it, and score by one they import late."""
    folder.mkdir(exist_ok=True)
    (folder / "words_beside.py").write_text(f"WORD = {word!r}\n")
    (folder / "words_late.py").write_text(f"LENGTH = {len(word)}.0\n")
    (folder / "word_tasks.py").write_text(WORD_TASKS)
    return folder


WORD_TASKS = """
from redline.types import Task
from words_beside import WORD

class Words:
    def __init__(self, seed): ...
    def train(self, index):
        return Task(f"words/{index}", [{"role": "user", "content": WORD}])
    def held_out(self, count):
        return []
    def score(self, task, text):
        from words_late import LENGTH
        return {"length": LENGTH}
"""


def word_and_length(folder: Path) -> tuple[str, float]:
    source = make_task_source(ImportTask(kind="import", path="word_tasks:Words", folder=folder), seed=7)
    task = source.train(0)
    return question(task), source.score(task, "")["length"]


@pytest.fixture
def no_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("word_tasks", "words_beside", "words_late"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("no_words")
def test_each_of_two_folders_gives_its_own_module_of_the_same_name(tmp_path: Path) -> None:
    first, second = write_words(tmp_path / "a", "one"), write_words(tmp_path / "b", "three")
    assert [word_and_length(folder) for folder in (first, second, first)] == [("one", 3.0), ("three", 5.0), ("one", 3.0)]


@pytest.mark.usefixtures("no_words")
def test_a_module_that_has_changed_is_imported_afresh_and_another_is_not(tmp_path: Path) -> None:
    folder = write_words(tmp_path / "a", "one")
    assert word_and_length(folder)[0] == "one"
    module = sys.modules["word_tasks"]
    assert word_and_length(folder)[0] == "one"
    assert sys.modules["word_tasks"] is module
    write_words(folder, "three")
    assert word_and_length(folder) == ("three", 5.0)


@pytest.mark.usefixtures("no_words")
def test_a_module_that_the_caller_imported_from_elsewhere_is_kept_and_the_folders_refused(tmp_path: Path) -> None:
    first, second = write_words(tmp_path / "a", "one"), write_words(tmp_path / "b", "three")
    sys.path.insert(0, str(first))
    for why in ("comes first on sys.path", "is imported already"):
        with pytest.raises(TaskError) as caught:
            word_and_length(second)
        assert f"{first / 'word_tasks.py'} {why}, and {second / 'word_tasks.py'} is in" in caught.value.message
        module = importlib.import_module("word_tasks")
    assert sys.modules["word_tasks"] is module
    assert word_and_length(first) == ("one", 3.0)
    assert sys.modules["word_tasks"] is module


def test_an_installed_package_comes_before_a_module_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text("1 / 0\n")
    with pytest.raises(TaskError, match="has no Tasks"):
        make_task_source(ImportTask(kind="import", path="pytest:Tasks", folder=tmp_path), seed=7)
    assert sys.modules["pytest"] is pytest


# ── rows that no prompt can be made of ─────────────────────────────────────────────────────────────────────────────────


def rows_of(folder: Path, count: int) -> FileTasks:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}", "answer": str(i)}) + "\n" for i in range(count)))
    return FileTasks(FileTask(kind="file", path=path, held_out_fraction=0.2), seed=0)


def asked(source: FileTasks, count: int) -> set[str]:
    return {question(task) for task in [*(source.train(i) for i in range(count)), *source.held_out(count)]}


def test_rows_that_cannot_be_posed_are_left_out_of_training_and_evaluation(tmp_path: Path) -> None:
    whole = [rows_of(tmp_path, 40).train(i).id for i in range(40)]
    source = rows_of(tmp_path, 40)
    assert source.leave_out(lambda task: None) == []
    assert [source.train(i).id for i in range(40)] == whole, "a file without such rows is read as ever"
    left_out = source.leave_out(lambda task: Failure("prompt", "too long") if question(task).endswith("7") else None)
    assert {question(task) for task, _ in left_out} == {f"question {i}" for i in (7, 17, 27, 37)}
    assert asked(source, 80) == {f"question {i}" for i in range(40) if i % 10 != 7}


def test_a_file_of_which_no_row_can_be_posed_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no row is left to train on: rows/[0-9]+: too long"):
        rows_of(tmp_path, 40).leave_out(lambda task: Failure("prompt", "too long"))
