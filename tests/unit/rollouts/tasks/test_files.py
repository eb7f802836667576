"""Tasks from Parquet and Arrow files, and from folders with splits. What JSONL files promise is in `test_sources.py`."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from redline.config.sections.tasks import FileTask
from redline.errors import TaskError
from redline.rollouts.rewards.math import MathVerifier
from redline.rollouts.tasks.files import FileTasks
from redline.types import Failure, Task

Rows = list[dict[str, Any]]


def sums(count: int, first: int = 0) -> Rows:
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(first, first + count)]


def write(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def saved(folder: Path, *shards: Rows) -> Path:
    """A folder as `datasets.Dataset.save_to_disk` writes it."""
    names = [f"data-{shard:05d}-of-{len(shards):05d}.arrow" for shard in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write(folder / name, rows)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None}))
    return folder


def open_tasks(path: Path, seed: int = 0, **config: Any) -> FileTasks:
    return FileTasks(FileTask(**{"kind": "file", "path": path, **config}), seed)


def refusal(path: Path, **config: Any) -> tuple[str, str]:
    with pytest.raises(TaskError) as caught:
        open_tasks(path, **config)
    return caught.value.message.replace(f"{path.parent}/", ""), caught.value.hint


def question(task: Task) -> str:
    return str(task.messages[-1]["content"])


def questions(source: FileTasks) -> tuple[set[str], set[str]]:
    """Those of training and those held out."""
    return {question(source.train(index)) for index in range(200)}, {question(task) for task in source.held_out(200)}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_every_format_gives_the_tasks_that_the_same_rows_of_jsonl_give(tmp_path: Path, suffix: str) -> None:
    lines, other = (open_tasks(write(tmp_path / f"rows{suffix}", sums(50))) for suffix in (".jsonl", suffix))
    for index in range(100):
        assert other.train(index) == lines.train(index)
    assert other.held_out(100) == lines.held_out(100)


def test_an_arrow_file_with_a_footer_is_read_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(sums(20))
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=7)
    assert len(set.union(*questions(open_tasks(tmp_path / "rows.arrow")))) == 20


def test_a_saved_data_set_is_read_from_all_its_files(tmp_path: Path) -> None:
    source = open_tasks(saved(tmp_path / "sums", sums(20), sums(20, first=20)))
    train, held_out = questions(source)
    assert len(train | held_out) == 40
    assert not train & held_out
    ids = {task.id for task in (source.train(index) for index in range(40))} | {task.id for task in source.held_out(40)}
    assert {"data-00000-of-00002/1", "data-00001-of-00002/20"} <= ids


def test_a_saved_data_set_with_splits_is_trained_on_train_unless_the_recipe_names_another(tmp_path: Path) -> None:
    saved(tmp_path / "train", sums(20))
    saved(tmp_path / "test", sums(10, first=100))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert set.union(*questions(open_tasks(tmp_path))) == {row["prompt"] for row in sums(20)}
    assert set.union(*questions(open_tasks(tmp_path, split="test"))) == {row["prompt"] for row in sums(10, first=100)}


@pytest.mark.parametrize(
    "files",
    [
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"],
        ["data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl"],
        ["train/0.parquet", "train/1.parquet", "test/0.parquet"],
        ["main/my_training_part1.jsonl", "main/my_training_part2.jsonl", "main/eval.jsonl"],
    ],
)
def test_a_folder_of_shards_has_the_splits_that_its_names_say(tmp_path: Path, files: list[str]) -> None:
    for index, file in enumerate(files):
        write(tmp_path / file, sums(10, first=10 * index))
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / "dataset_infos.json").write_text("{}")
    source = open_tasks(tmp_path, held_out_split="test")
    train, held_out = questions(source)
    assert train == {row["prompt"] for row in sums(20)}
    assert held_out == {row["prompt"] for row in sums(10, first=20)}


def test_a_question_of_the_held_out_split_is_never_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", sums(20))
    write(tmp_path / "test.jsonl", [*sums(3), *sums(2, first=50), *sums(3)])
    train, held_out = questions(open_tasks(tmp_path, held_out_split="test"))
    assert held_out == {row["prompt"] for row in [*sums(3), *sums(2, first=50)]}
    assert train == {row["prompt"] for row in sums(17, first=3)}


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    for name in ("test", "validation"):
        write(folder / f"{name}.jsonl", sums(5))
    assert refusal(folder) == ("sums has several splits", "set rollouts.task.split to one of: test, validation")
    assert refusal(folder, split="train")[0] == "rollouts.task.split = 'train': sums has no such split"
    assert refusal(folder, split="test", held_out_split="dev") == (
        "rollouts.task.held_out_split = 'dev': sums has no such split",
        "set rollouts.task.held_out_split to one of: test, validation",
    )
    assert refusal(folder / "test.jsonl", split="train") == (
        "rollouts.task.split = 'train': test.jsonl has no splits",
        "leave split out",
    )


def test_a_field_inside_another_is_named_by_a_path(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + 1"}], "reward_model": {"style": "rule", "ground_truth": str(i + 1)}}
        for i in range(10)
    ]
    source = open_tasks(write(tmp_path / "verl.parquet", rows), answer_field="reward_model.ground_truth")
    task = source.train(0)
    assert source.score(task, task.answer) == {"correct": 1.0}
    assert task.data["reward_model"]["style"] == "rule"
    assert refusal(tmp_path / "verl.parquet", answer_field="reward_model.truth") == (
        "verl.parquet:1: no field 'reward_model.truth'",
        "add it, or set rollouts.task.answer_field to one of: prompt, reward_model; "
        "null where an environment or a reward model scores",
    )


@pytest.mark.parametrize("name", ["open.jsonl", "open.parquet"])
def test_rows_without_answers_are_tasks_for_whoever_scores_them(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"Tell me of {number}.", "level": number} for number in range(20)]
    source = open_tasks(write(tmp_path / name, rows), answer_field=None)
    task = source.train(0)
    assert (task.answer, task.data["level"]) == ("", int(question(task)[11:-1]))
    assert source.score(task, "anything") == {}
    assert source.held_out(5)


def test_messages_of_a_column_may_have_nulls_where_others_have_more_fields(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add.", "name": None}, {"role": "user", "content": "1 + 1", "name": None}]
    source = open_tasks(write(tmp_path / "rows.parquet", [{"prompt": messages, "answer": 2}, *sums_of_messages(5)]))
    tasks = [*(source.train(index) for index in range(5)), *source.held_out(1)]
    assert [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}] in [task.messages for task in tasks]


def sums_of_messages(count: int) -> Rows:
    return [{"prompt": [{"role": "user", "content": f"{i} + 2"}], "answer": i + 2} for i in range(count)]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_bad_row_is_refused_with_its_file_its_row_and_the_fix(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", [*sums(9), {"prompt": None, "answer": "1"}])
    assert refusal(path) == (
        f"rows{suffix}:10: prompt: neither a text nor a list of messages, or empty",
        'write "a question" or [{"role": "user", "content": "a question"}]',
    )
    path = write(path, [{"question": "1 + 1", "answer": "2"}])
    assert refusal(path) == (
        f"rows{suffix}:1: no field 'prompt'",
        "add it, or set rollouts.task.prompt_field to one of: question, answer",
    )


@pytest.mark.parametrize(("suffix", "kind"), [(".parquet", "a Parquet"), (".arrow", "an Arrow")])
def test_a_damaged_file_is_refused(tmp_path: Path, suffix: str, kind: str) -> None:
    path = write(tmp_path / f"rows{suffix}", sums(100))
    path.write_bytes(path.read_bytes()[:300])
    assert refusal(path)[0].startswith(f"rows{suffix}: cannot be read as {kind} file: ")


def test_a_column_that_python_has_no_values_for_is_a_text(tmp_path: Path) -> None:
    columns = pa.Table.from_pylist(sums(5)).append_column("when", pa.array([1] * 5, pa.timestamp("ns")))
    parquet.write_table(columns, tmp_path / "rows.parquet")
    source = open_tasks(tmp_path / "rows.parquet")
    assert str(source.train(0).data["when"]) == "1970-01-01 00:00:00.000000001"


def test_a_packed_file_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    write(tmp_path / "train-0.jsonl", sums(5))
    (tmp_path / "train-1.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(TaskError, match=r"(?s)train-1.jsonl.gz: packed files are not read.*hint: unpack it"):
        open_tasks(tmp_path)
    with pytest.raises(TaskError, match="packed files are not read"):
        open_tasks(tmp_path / "train-1.jsonl.gz")


def test_a_csv_file_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    write(tmp_path / "train-0.jsonl", sums(5))
    (tmp_path / "train-1.csv").write_text("prompt,answer\n1+1,2\n")
    with pytest.raises(TaskError, match=r"(?s)train-1.csv: .csv files are not read.*hint: write it as .jsonl or .parquet"):
        open_tasks(tmp_path)
    with pytest.raises(TaskError, match=r"\.csv files are not read"):
        open_tasks(tmp_path / "train-1.csv")


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_reference_is_refused_since_an_empty_reply_would_equal_it(tmp_path: Path, answer: str) -> None:
    path = write(tmp_path / "rows.jsonl", [*sums(5), {"prompt": "1+1", "answer": answer}])
    message, hint = refusal(path)
    assert message == "rows.jsonl:6: answer: empty, which an empty reply would equal"
    assert hint == "write the right answer, or leave the row out"


@pytest.mark.parametrize("answer", ["NaN", "Infinity"])
def test_a_reference_that_is_no_number_is_refused_since_no_reply_equals_it(tmp_path: Path, answer: str) -> None:
    path = write(tmp_path / "rows.jsonl", sums(5))
    with path.open("a") as file:
        file.write(f'{{"prompt": "1+1", "answer": {answer}}}\n')
    assert refusal(path)[0] == f"rows.jsonl:6: answer = {float(answer)}: no number that an answer could equal"


def test_a_file_that_names_no_split_beside_one_that_does_is_left_out_with_a_note(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", sums(5))
    assert not open_tasks(tmp_path).notes
    write(tmp_path / "extra.jsonl", sums(5, first=50))
    source = open_tasks(tmp_path)
    assert set.union(*questions(source)) == {row["prompt"] for row in sums(5)}
    assert source.notes == [
        f"{tmp_path}: 1 file(s) left out, since others name their split and these do not: extra.jsonl",
    ]
    assert refusal(tmp_path, split="x")[1] == "set rollouts.task.split to one of: train"


def test_files_that_differ_by_their_suffix_alone_name_different_tasks(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", sums(10))
    write(tmp_path / "train.parquet", sums(10, first=10))
    source = open_tasks(tmp_path)
    ids = [task.id for task in [*(source.train(index) for index in range(18)), *source.held_out(2)]]
    assert len(set(ids)) == 20
    assert {"train.jsonl/1", "train.parquet/1"} <= set(ids)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty")[0] == "empty: no data in this folder"
    (tmp_path / "empty" / "state.json").write_text("{}")
    assert refusal(tmp_path / "empty") == (
        "empty/state.json: cannot be read: KeyError: '_data_files'",
        "save the data set again with `save_to_disk`",
    )


def test_rows_that_cannot_be_posed_are_left_out_of_both_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", sums(20))
    write(tmp_path / "test.jsonl", sums(10, first=50))
    source = open_tasks(tmp_path, held_out_split="test")
    left_out = source.leave_out(lambda task: Failure("prompt", "too long") if question(task).startswith(("7", "57")) else None)
    assert {task.id for task, _ in left_out} == {"train/8", "test/8"}
    assert not any(text.startswith(("7", "57")) for text in set.union(*questions(source)))


def test_threads_may_ask_for_tasks_at_once(tmp_path: Path) -> None:
    source, alone = (open_tasks(write(tmp_path / "rows.jsonl", sums(300))) for _ in range(2))
    expected = [alone.train(index) for index in range(270)]
    found: list[list[Task]] = []
    threads = [threading.Thread(target=lambda: found.append([source.train(index) for index in range(270)])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_what_is_inside_the_last_answer_tag_is_compared(tmp_path: Path) -> None:
    source = open_tasks(write(tmp_path / "rows.jsonl", sums(5)), extract="answer_tag")
    task = source.train(0)
    assert source.score(task, f"<answer>x</answer> no: <answer> {task.answer}\n</answer>.") == {"correct": 1.0}
    assert source.score(task, task.answer) == {"correct": 0.0}


def test_mathematical_answers_compare_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    path = write(tmp_path / "rows.jsonl", [{"prompt": str(i), "answer": r"\frac{1}{2}"} for i in range(5)])
    source = open_tasks(path, extract="math")
    assert source.score_is_thread_safe
    assert source.score(source.train(0), r"therefore \boxed{0.5}") == {"correct": 1.0}
    assert source.score(source.train(0), r"therefore \boxed{0.6}") == {"correct": 0.0}
    monkeypatch.setattr(MathVerifier, "can_read", lambda self, reference: False)  # spares a second process
    assert refusal(path, extract="math")[0] == r"rows.jsonl:1: answer = '\\frac{1}{2}': math-verify finds no expression in it"


def test_folders_that_datasets_itself_saves_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    train, test = (datasets.Dataset.from_list(rows) for rows in (sums(30), sums(10, first=100)))
    both = datasets.DatasetDict({"train": train.shuffle(seed=1), "test": test})
    both.save_to_disk(tmp_path / "sums", num_shards={"train": 3, "test": 1})
    source = open_tasks(tmp_path / "sums", held_out_split="test")
    assert questions(source) == ({row["prompt"] for row in sums(30)}, {row["prompt"] for row in sums(10, first=100)})
    train.to_parquet(tmp_path / "shards" / "train.parquet")
    assert len(set.union(*questions(open_tasks(tmp_path / "shards")))) == 30
