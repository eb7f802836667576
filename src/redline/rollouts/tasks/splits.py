"""Which files belong to which split of a data set: a file, a folder that `datasets` has saved, or a folder of shards."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from redline.errors import TaskError

Files = Sequence[Path]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
"""Files of a folder that are read. A file that is named by itself and has another suffix is read as JSONL."""
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split → words in the names of its files or folders, as `datasets.load_dataset` knows them."""
_TABLES = (".csv", ".tsv")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
LEFT_OUT = "\0left out"
"""Instead of a split's name: no recipe can ask for it."""
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def find_splits(path: Path) -> Mapping[str, Files]:
    """The files of each split, by its name; a single file is a data set without splits, named by an empty text. Beside splits
    with names, files that name none are under `LEFT_OUT`."""
    if path.is_file():
        _refuse_unread(path)
        return {"": [path]}
    if not path.is_dir():
        raise TaskError(
            f"{path}: no such file or folder",
            "give rollouts.task.path a file (.jsonl, .parquet or .arrow), or a folder of such files",
        )
    if (path / "dataset_dict.json").is_file():
        return {split: _saved_files(path / split) for split in _read(path / "dataset_dict.json", "splits")}
    if (path / "state.json").is_file():
        return {"": _saved_files(path)}
    return _shards(path)


def choose_split(path: Path, splits: Mapping[str, Files], wanted: str | None, key: str) -> Files:
    """The files of the split that the recipe's `key` names; where it names none, of `train` or of the only one."""
    splits = {name: files for name, files in splits.items() if name != LEFT_OUT}
    if wanted is None:
        wanted = "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else None
    if wanted in splits and wanted is not None:
        return splits[wanted]
    named = ", ".join(name for name in splits if name)
    if not named:
        raise TaskError(f"rollouts.task.{key} = {wanted!r}: {path} has no splits", f"leave {key} out")
    what = f"rollouts.task.{key} = {wanted!r}: {path} has no such split" if wanted else f"{path} has several splits"
    raise TaskError(what, f"set rollouts.task.{key} to one of: {named}")


def _saved_files(folder: Path) -> Files:
    """The files of a split that `Dataset.save_to_disk` wrote."""
    return [folder / entry["filename"] for entry in _read(folder / "state.json", "_data_files")]


def _read(file: Path, key: str) -> list:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(
            f"{file}: cannot be read: {type(error).__name__}: {error}", "save the data set again with `save_to_disk`"
        ) from error
    return list(found)


def _shards(folder: Path) -> Mapping[str, Files]:
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or not file.is_file() or file.name in _NOT_DATA:
            continue
        _refuse_unread(file)
        if file.suffix in SUFFIXES:
            splits.setdefault(_split_of(relative), []).append(file)
    if not splits:
        raise TaskError(f"{folder}: no data in this folder", f"put files into it that end in {', '.join(SUFFIXES)}")
    if len(splits) > 1 and "" in splits:  # as `load_dataset` does, which then looks at the files that name a split alone
        splits[LEFT_OUT] = splits.pop("")
    return splits


def _refuse_unread(file: Path) -> None:
    """Raise TaskError for data that is not read: a run without it would train on a part of the data, and not say so."""
    if file.suffix.lower() in _TABLES:
        raise TaskError(
            f"{file}: {file.suffix} files are not read",
            "write it as .jsonl or .parquet (with pandas: read_csv(...).to_parquet(...)), or move it out of the folder",
        )
    if file.suffix in _PACKED and Path(file.stem).suffix in SUFFIXES:
        raise TaskError(f"{file}: packed files are not read", "unpack it (such as with gunzip), or move it out of the folder")


def _split_of(file: Path) -> str:
    """By the words of a name: `train-00000-of-00002.parquet`, `data/test.jsonl`, `validation/part-1.parquet`."""
    for part in (file.stem, *reversed(file.parts[:-1])):
        words = re.split(r"[^a-z]+", part.lower())
        for split, keywords in _KEYWORDS.items():
            if not set(words).isdisjoint(keywords):
                return split
    return ""
