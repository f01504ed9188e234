"""Weights out of a checkpoint, whatever layout saved it: safetensors with the names of the single-device model.

Memory is that of one tensor. What is written appears under its name whole, or not at all.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimaran.checkpoint.hugging_face import ADAPTER_CONFIG_FILE, CONFIG_FILE, GENERATION_FILE
from trimaran.checkpoint.reading import CheckpointReader, open_checkpoint, read_whole_manifest, verify_files
from trimaran.checkpoint.shard_file import DTYPES, Entry, digest_file, write_shard
from trimaran.errors import CheckpointError, UsageError
from trimaran.records import CHECKPOINTS_FOLDER, FileRecord, Manifest, StateRecord, name_checkpoint
from trimaran.units import parse_bytes

SHARD_SIZE = "5GB"
SUFFIX = ".safetensors"

_MODEL_PREFIX = "model."


@dataclass(frozen=True)
class ExportedWeights:
    """What an export wrote: `files` are those of `out`, by name; `num_bytes` are the tensors' alone."""

    out: Path
    checkpoint: Path
    step: int
    files: Mapping[str, FileRecord]
    num_tensors: int
    num_bytes: int
    texts: Mapping[str, Any]
    """The content of the JSON files that stand beside the weights."""
    passed_over: tuple[str, ...]
    """Newer checkpoints that could not be used, and why."""


def export_weights(
    run: str | Path,
    out: str | Path,
    *,
    hf: bool = False,
    trainable: bool = False,
    shard_size: str = SHARD_SIZE,
) -> ExportedWeights:
    """Writes the weights of a checkpoint to `out`, and says what it wrote. For one process; needs no GPU.

    `run` is a run's directory, or "runs/a@100" for its checkpoint of step 100; without a step it is the newest valid
    one. `out` ending in .safetensors becomes one file, otherwise a folder: model.safetensors, or, above `shard_size`,
    several files with an index. Tensors keep their types and the names of the model's `state_dict`; tied ones stand
    once, by their first name.

    `trainable` takes the trained parameters alone. `hf` adds what `from_pretrained` reads; with `trainable` that is
    the adapter of a PEFT model. Raises UsageError for what cannot be meant, an `out` that exists among it, and
    CheckpointError for a damaged checkpoint or a disk that cannot be written.
    """
    out, limit = Path(out), _parse_shard_size(shard_size)
    one_file = out.name.endswith(SUFFIX)
    _refuse_existing(out)
    if hf and one_file:
        raise UsageError(
            f"{out} is one file.", "from_pretrained reads a folder.", f"Name a folder, such as {out.with_suffix('')}."
        )
    found = _find_checkpoint(str(run))
    contents = _choose_contents(found, hf=hf, trainable=trainable)
    entries = [_describe_tensor(name, found.manifest, ours) for name, ours in contents.sources.items()]
    shards = [entries] if one_file or not contents.may_be_sharded else _split(entries, limit)
    with _folder_beside(out) as folder, open_checkpoint(found.folder, found.manifest) as reader:
        files = _write_files(folder, shards, contents, reader)
        if one_file:
            ((name, record),) = files.items()
            _commit(folder / name, out)
            files = {out.name: record}
        else:
            _commit(folder, out)
    return ExportedWeights(
        out=out,
        checkpoint=found.folder,
        step=found.manifest.step,
        files=files,
        num_tensors=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
        texts=contents.texts,
        passed_over=found.passed_over,
    )


# What is written


@dataclass(frozen=True)
class _Contents:
    """`sources`: the name in the export -> the name in the checkpoint; `texts`: JSON files beside the weights."""

    sources: Mapping[str, str]
    texts: Mapping[str, Any] = field(default_factory=dict)
    stem: str = "model"
    may_be_sharded: bool = True


def _choose_contents(found: _Found, *, hf: bool, trainable: bool) -> _Contents:
    if hf and trainable:
        return _choose_adapter(found)
    if trainable:
        if not found.state.trained:
            raise UsageError(f"{found.folder} has no trained parameter.", "--trainable takes those alone.", "Drop it.")
        return _Contents({name: _find_tensor(found, name) for name in found.state.trained})
    names = [name.removeprefix(_MODEL_PREFIX) for name in found.manifest.tensors if name.startswith(_MODEL_PREFIX)]
    if not names:
        raise CheckpointError(
            f"{found.folder} holds no weights.", "A checkpoint holds those of its model.", "Use another checkpoint."
        )
    texts = _choose_texts(found) if hf else {}
    return _Contents({name: _MODEL_PREFIX + name for name in names}, texts)


def _choose_texts(found: _Found) -> Mapping[str, Any]:
    """The configuration of a whole Hugging Face model."""
    files = _recorded(found, "files")
    if ADAPTER_CONFIG_FILE in files:
        raise UsageError(
            f"The model of {found.folder} is a base model with adapters.",
            "Hugging Face keeps adapters in a folder of their own, and puts them onto the base model again.",
            "Add --trainable for the adapters, or drop --hf for all weights under the module's own names.",
        )
    if CONFIG_FILE not in files:
        raise _no_hugging_face(found)
    return {name: files[name] for name in (CONFIG_FILE, GENERATION_FILE) if name in files}


def _choose_adapter(found: _Found) -> _Contents:
    """What PEFT saves of an adapted model. Raises UsageError where that would leave trained parameters out."""
    files, adapter = _recorded(found, "files"), _recorded(found, "adapter")
    if ADAPTER_CONFIG_FILE not in files:
        if CONFIG_FILE not in files:
            raise _no_hugging_face(found)
        raise UsageError(
            f"The model of {found.folder} has no adapters.",
            "from_pretrained reads a whole model, or the adapters of one.",
            "Drop --trainable for the whole model, or --hf for the trained parameters under their own names.",
        )
    sources = {name: _find_tensor(found, ours) for name, ours in adapter.items()}
    held = set(sources.values())
    if outside := [name for name in found.state.trained if _find_tensor(found, name) not in held]:
        raise UsageError(
            f"{outside[0]} of {found.folder} was trained, and is no part of the adapters"
            + (f"; nor are {len(outside) - 1} others." if outside[1:] else "."),
            "PEFT reads adapters alone, and would leave it as it was before.",
            "Drop --hf: all trained parameters are then written, under their own names.",
        )
    texts = {ADAPTER_CONFIG_FILE: files[ADAPTER_CONFIG_FILE]}
    return _Contents(sources, texts, stem="adapter_model", may_be_sharded=False)  # PEFT reads one file


def _recorded(found: _Found, key: str) -> Mapping[str, Any]:
    values = found.state.hugging_face
    if "problem" in values:
        raise CheckpointError(
            f"{found.folder} does not know how Hugging Face keeps its model: {values['problem']}.",
            "That is asked of the model itself when it is saved.",
            "Drop --hf: the weights are then written under the module's own names.",
        )
    recorded = values.get(key, {})
    kind = Mapping if key == "files" else str
    if not isinstance(recorded, Mapping) or not all(isinstance(each, kind) for each in recorded.values()):
        raise CheckpointError(
            f"{found.folder} is damaged: what it says of Hugging Face has no such {key}.",
            "A checkpoint is read whole, as it was written, or not at all.",
            "Use another checkpoint.",
        )
    return recorded


def _no_hugging_face(found: _Found) -> UsageError:
    return UsageError(
        f"The model of {found.folder} is none of transformers or PEFT.",
        "from_pretrained reads their configuration beside the weights; this model has none.",
        "Drop --hf: the weights are then written under the model's own names.",
    )


def _find_tensor(found: _Found, name: str) -> str:
    """The tensor of the checkpoint that holds a tensor of the model."""
    whole = _MODEL_PREFIX + name
    source = whole if whole in found.manifest.tensors else found.manifest.aliases.get(whole)
    if source is None:
        raise CheckpointError(
            f"{found.folder} holds no {name}, which its own state names.",
            "A checkpoint is read whole, as it was written, or not at all.",
            "Use another checkpoint.",
        )
    return source


def _describe_tensor(name: str, manifest: Manifest, source: str) -> Entry:
    record = manifest.tensors[source]
    num_bytes = math.prod(record.shape) * DTYPES[record.dtype].itemsize
    return Entry(name, record.dtype, record.shape, num_bytes)


def _parse_shard_size(text: str) -> int:
    if (size := parse_bytes(text)) < 1:
        raise UsageError(f"--shard-size {text} holds nothing.", "A file holds one tensor or more.", "Give 1MB or more.")
    return size


def _split(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """In order, as many as fit into `limit` bytes; one that is larger stands alone."""
    shards: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not shards or entry.num_bytes > room:
            shards.append([])
            room = limit
        shards[-1].append(entry)
        room -= entry.num_bytes
    return shards


# How it is written


def _write_files(
    folder: Path, shards: Sequence[Sequence[Entry]], contents: _Contents, reader: CheckpointReader
) -> dict[str, FileRecord]:
    texts = dict(contents.texts)
    names = [f"{contents.stem}{_shard_number(index, len(shards))}{SUFFIX}" for index in range(len(shards))]
    if len(shards) > 1:
        texts[f"{contents.stem}{SUFFIX}.index.json"] = {
            "metadata": {"total_size": sum(entry.num_bytes for shard in shards for entry in shard)},
            "weight_map": {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard},
        }
    files = {}
    for name, shard in zip(names, shards, strict=True):
        files[name] = write_shard(folder / name, shard, (reader.read(contents.sources[entry.key]) for entry in shard))
        # A checkpoint's files are its owner's alone. These are made to be passed on: as the user's umask says.
        (folder / name).chmod(folder.stat().st_mode & 0o666)
    return files | {name: _write_json(folder / name, value) for name, value in texts.items()}


def _shard_number(index: int, count: int) -> str:
    return f"-{index + 1:05d}-of-{count:05d}" if count > 1 else ""


def _write_json(path: Path, value: Any) -> FileRecord:
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return digest_file(path)


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """A new folder on the same disk, gone afterwards. What the system refuses inside becomes a CheckpointError."""
    folder = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
    except OSError as problem:
        raise CheckpointError(
            f"{out} cannot be written: {problem.strerror or problem}.",
            "An export is written whole, or not at all.",
            "Make room on that disk, or give another place.",
        ) from problem
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _commit(written: Path, out: Path) -> None:
    """Gives what was written its name. The files are on disk already."""
    _refuse_existing(out)  # again: the writing took its time
    if written.is_dir():
        _flush_folder(written)
    written.rename(out)
    _flush_folder(out.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_existing(out: Path) -> None:
    """Raises UsageError for whatever is there, but for an empty folder in a folder's place."""
    if not out.name:
        raise UsageError(
            f"{str(out)!r} names no file or folder of its own.",
            "An export has a name, under which it appears when it is whole.",
            "Give a name such as model.safetensors.",
        )
    if os.path.lexists(out) and (out.name.endswith(SUFFIX) or not _is_empty_folder(out)):
        raise UsageError(
            f"{out} exists.", "An export is written to a new place: nothing is overwritten.", "Give another name."
        )


def _is_empty_folder(path: Path) -> bool:
    try:
        return not path.is_symlink() and not os.listdir(path)
    except OSError:
        return False


# Which checkpoint


@dataclass(frozen=True)
class _Found:
    """A checkpoint all of whose files are as they were written."""

    folder: Path
    manifest: Manifest
    state: StateRecord
    passed_over: tuple[str, ...] = ()


def _find_checkpoint(text: str) -> _Found:
    """The checkpoint that RUN or RUN@STEP names; of a run's the newest valid one, and why newer ones are not."""
    run, step = _split_step(text)
    folders = _list_checkpoints(run)
    if step is not None:
        if step not in folders:
            raise CheckpointError(
                f"{run} has no checkpoint of step {step}.",
                f"It has those of {', '.join(map(str, sorted(folders)))}.",
                f"Name one of them, such as {run}@{max(folders)}, or none for the newest.",
            )
        return _verify(folders[step], step)
    passed_over: list[str] = []
    for newest in sorted(folders, reverse=True):
        try:
            found = _verify(folders[newest], newest)
        except CheckpointError as problem:
            passed_over.append(problem.value)
            continue
        return _Found(found.folder, found.manifest, found.state, tuple(passed_over))
    raise CheckpointError(
        f"None of the {len(folders)} checkpoints of {run} can be used: {' '.join(passed_over)}",
        "A checkpoint is read whole, as it was written, or not at all.",
        "Use another run.",
    )


def _split_step(text: str) -> tuple[Path, int | None]:
    """Directory and step. A directory that has an @ in its own name is found, too."""
    run, at, step = text.rpartition("@")
    if not at or Path(text).is_dir():
        return Path(text), None
    if not re.fullmatch(r"[0-9]{1,18}", step):
        raise UsageError(
            f"{text!r} names step {step!r}.", "A checkpoint of a run is named RUN@STEP.", f"Write, say, {run}@100."
        )
    return Path(run), int(step)


def _list_checkpoints(run: Path) -> dict[int, Path]:
    """Step -> folder, of whatever has the name of a checkpoint. Raises where there is none."""
    if not os.path.isdir(run):
        what = "is no run's directory" if os.path.lexists(run) else "does not exist"
        raise UsageError(
            f"{run} {what}.", "Weights are taken from the checkpoints of a run.", "Give its directory, such as runs/a."
        )
    folder = run / CHECKPOINTS_FOLDER
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        names = []
    except OSError as problem:
        raise CheckpointError(
            f"{folder} cannot be read: {problem.strerror}.",
            f"A run keeps its checkpoints in {CHECKPOINTS_FOLDER}/.",
            "Give another run, or have its owner export it.",
        ) from problem
    steps = [int(digits) for name in names if (digits := name.removeprefix("step-")).isdecimal()]
    folders = {step: folder / name_checkpoint(step) for step in steps if name_checkpoint(step) in names}
    if not folders:
        raise CheckpointError(
            f"{run} has no checkpoints.",
            f"A run saves them in {CHECKPOINTS_FOLDER}/ as it goes; one that ended before its first has none.",
            "Give another run, or run this one again.",
        )
    return folders


def _verify(folder: Path, step: int) -> _Found:
    manifest, state = read_whole_manifest(folder)
    if manifest.step != step:
        raise CheckpointError(
            f"{folder} holds step {manifest.step}.",
            "A checkpoint is named by its step.",
            "Do not rename checkpoints; use another.",
        )
    verify_files(folder, manifest, list(manifest.files))
    return _Found(folder, manifest, state)
