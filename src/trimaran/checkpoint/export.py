"""Weights out of a checkpoint, whatever layout saved it: safetensors with the names of the single-device model.

Memory is that of one tensor. What is written appears under its name whole, or not at all.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimaran.checkpoint.disk import sync_folder
from trimaran.checkpoint.finding import Checkpoint, find_candidates, find_checkpoint, split_step
from trimaran.checkpoint.hugging_face import ADAPTER_CONFIG_FILE, CONFIG_FILE, GENERATION_FILE
from trimaran.checkpoint.reading import CheckpointReader, open_checkpoint
from trimaran.checkpoint.shard_file import DTYPES, Entry, digest_file, write_shard
from trimaran.checkpoint.state import MODEL
from trimaran.errors import CheckpointError, RunError, UsageError
from trimaran.records import CHECKPOINTS_FOLDER, FileRecord
from trimaran.units import parse_bytes

SHARD_SIZE = "5GB"
SUFFIX = ".safetensors"


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
    left_out: tuple[str, ...] = ()
    """Modules' own state that is no tensor of the model."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, and why."""


@dataclass(frozen=True)
class ExportRequest:
    """What is wanted, as `export_weights` is told it. Raises UsageError for what cannot be meant."""

    out: Path
    hf: bool = False
    trainable: bool = False
    shard_size: str = SHARD_SIZE

    def __post_init__(self) -> None:
        if parse_bytes(self.shard_size) < 1:
            raise UsageError(
                f"--shard-size {self.shard_size} holds nothing.",
                "A file holds one tensor or more.",
                "Give 1MB or more.",
            )
        _refuse_existing(self.out)
        if self.hf and self.one_file:
            raise UsageError(
                f"{self.out} is one file.",
                "from_pretrained reads a folder.",
                f"Name a folder, such as {self.out.with_suffix('')}.",
            )

    @property
    def one_file(self) -> bool:
        """Whether it becomes a file, and no folder."""
        return self.out.name.endswith(SUFFIX)


def export_weights(
    run: str | Path,
    out: str | Path,
    *,
    hf: bool = False,
    trainable: bool = False,
    shard_size: str = SHARD_SIZE,
) -> ExportedWeights:
    """Writes the weights of a run's checkpoint to `out`, and says what it wrote. For one process; needs no GPU.

    `run` is a run's directory, or "runs/a@100" for its checkpoint of step 100; without a step it is the newest that
    is whole. `out` ending in .safetensors becomes one file, otherwise a folder: model.safetensors, or, above
    `shard_size`, several files with an index. Tensors keep their types and the names of the model's `state_dict`; tied
    ones stand once, by their first name.

    `trainable` takes the trained parameters alone. `hf` adds what `from_pretrained` reads; with `trainable` that is
    the adapter of a PEFT model. Raises UsageError for what cannot be meant, an `out` that exists among it, RunError
    for a run without such a checkpoint, and CheckpointError for a disk that cannot be written.
    """
    request = ExportRequest(Path(out), hf=hf, trainable=trainable, shard_size=shard_size)
    checkpoint, passed_over = _find_source(str(run))
    return replace(export_checkpoint(checkpoint, request), passed_over=tuple(passed_over))


def export_checkpoint(checkpoint: Checkpoint, request: ExportRequest) -> ExportedWeights:
    """Writes the weights of a checkpoint whose bytes were verified, and says what it wrote. For one process.

    Raises UsageError where the model is not what was asked for, and CheckpointError for what cannot be read or written.
    """
    contents = _choose_contents(checkpoint, request)
    entries = [_describe_tensor(name, checkpoint, ours) for name, ours in contents.sources.items()]
    whole = request.one_file or not contents.may_be_sharded
    shards = [entries] if whole else _split(entries, parse_bytes(request.shard_size))
    out = request.out
    with _folder_beside(out) as folder, open_checkpoint(checkpoint.folder, checkpoint.manifest) as reader:
        files = _write_files(folder, shards, contents, reader)
        if request.one_file:
            ((name, record),) = files.items()
            _commit(folder / name, out)
            files = {out.name: record}
        else:
            _commit(folder, out)
    return ExportedWeights(
        out=out,
        checkpoint=checkpoint.folder,
        step=checkpoint.step,
        files=files,
        num_tensors=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
        texts=contents.texts,
        left_out=contents.left_out,
    )


def _find_source(text: str) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that RUN@step names, or a run's newest that counts and has its bytes; and why newer have not."""
    run, step = split_step(text)
    lineage, steps = find_candidates(run, step)
    found, refused = find_checkpoint(run, lineage, steps)
    if found is None:
        raise RunError(
            f"no checkpoint of {text} can be used: {' '.join(refused)}",
            "Weights are taken from a checkpoint that is whole.",
            "Name another step or another run.",
        )
    return found, refused


# What is written


@dataclass(frozen=True)
class _Contents:
    """`sources`: the name in the export -> the name in the checkpoint; `texts`: JSON files beside the weights."""

    sources: Mapping[str, str]
    texts: Mapping[str, Any] = field(default_factory=dict)
    stem: str = "model"
    may_be_sharded: bool = True
    left_out: tuple[str, ...] = ()


def _choose_contents(checkpoint: Checkpoint, request: ExportRequest) -> _Contents:
    if request.hf and request.trainable:
        return _choose_adapter(checkpoint)
    if request.trainable:
        if not checkpoint.state.trained:
            raise UsageError(
                f"{checkpoint.folder} has no trained parameter.", "--trainable takes those alone.", "Drop it."
            )
        return _Contents({name: _find_tensor(checkpoint, name) for name in checkpoint.state.trained})
    names = [name.removeprefix(MODEL) for name in checkpoint.manifest.tensors if name.startswith(MODEL)]
    # What a module keeps as extra state may hold tensors, which are none of the model's own.
    extra = tuple(checkpoint.state.model)
    names = [name for name in names if not any(name == each or name.startswith(f"{each}.") for each in extra)]
    if not names:
        raise CheckpointError(
            f"{checkpoint.folder} holds no weights.",
            "A checkpoint holds those of its model.",
            "Use another checkpoint.",
        )
    texts = _choose_texts(checkpoint) if request.hf else {}
    return _Contents({name: MODEL + name for name in names}, texts, left_out=extra)


def _choose_texts(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The configuration of a whole Hugging Face model."""
    files = _recorded(checkpoint, "files")
    if ADAPTER_CONFIG_FILE in files:
        raise UsageError(
            f"The model of {checkpoint.folder} is a base model with adapters.",
            "Hugging Face keeps adapters in a folder of their own, and puts them onto the base model again.",
            "Add --trainable for the adapters, or drop --hf for all weights under the module's own names.",
        )
    if CONFIG_FILE not in files:
        raise _no_hugging_face(checkpoint)
    return {name: files[name] for name in (CONFIG_FILE, GENERATION_FILE) if name in files}


def _choose_adapter(checkpoint: Checkpoint) -> _Contents:
    """What PEFT saves of an adapted model. Raises UsageError where that would leave trained parameters out."""
    files, adapter = _recorded(checkpoint, "files"), _recorded(checkpoint, "adapter")
    if ADAPTER_CONFIG_FILE not in files:
        if CONFIG_FILE not in files:
            raise _no_hugging_face(checkpoint)
        raise UsageError(
            f"The model of {checkpoint.folder} has no adapters.",
            "from_pretrained reads a whole model, or the adapters of one.",
            "Drop --trainable for the whole model, or --hf for the trained parameters under their own names.",
        )
    sources = {name: _find_tensor(checkpoint, ours) for name, ours in adapter.items()}
    held = set(sources.values())
    if outside := [name for name in checkpoint.state.trained if _find_tensor(checkpoint, name) not in held]:
        raise UsageError(
            f"{outside[0]} of {checkpoint.folder} was trained, and is no part of the adapters"
            + (f"; nor are {len(outside) - 1} others." if outside[1:] else "."),
            "PEFT reads adapters alone, and would leave it as it was before.",
            "Drop --hf: all trained parameters are then written, under their own names.",
        )
    texts = {ADAPTER_CONFIG_FILE: files[ADAPTER_CONFIG_FILE]}
    return _Contents(sources, texts, stem="adapter_model", may_be_sharded=False)  # PEFT reads one file


def _recorded(checkpoint: Checkpoint, key: str) -> Mapping[str, Any]:
    values = checkpoint.state.hugging_face
    if "problem" in values:
        raise CheckpointError(
            f"{checkpoint.folder} does not know how Hugging Face keeps its model: {values['problem']}.",
            "That is asked of the model itself when it is saved.",
            "Drop --hf: the weights are then written under the module's own names.",
        )
    recorded = values.get(key, {})
    kind = Mapping if key == "files" else str
    if not isinstance(recorded, Mapping) or not all(isinstance(each, kind) for each in recorded.values()):
        raise CheckpointError(
            f"{checkpoint.folder} is damaged: what it says of Hugging Face has no such {key}.",
            "A checkpoint is read whole, as it was written, or not at all.",
            "Use another checkpoint.",
        )
    return recorded


def _no_hugging_face(checkpoint: Checkpoint) -> UsageError:
    return UsageError(
        f"The model of {checkpoint.folder} is none of transformers or PEFT.",
        "from_pretrained reads their configuration beside the weights; this model has none.",
        "Drop --hf: the weights are then written under the model's own names.",
    )


def _find_tensor(checkpoint: Checkpoint, name: str) -> str:
    """The tensor of the checkpoint that holds a tensor of the model."""
    manifest = checkpoint.manifest
    source = MODEL + name if MODEL + name in manifest.tensors else manifest.aliases.get(MODEL + name)
    if source is None:
        raise CheckpointError(
            f"{checkpoint.folder} holds no {name}, which its own state names.",
            "A checkpoint is read whole, as it was written, or not at all.",
            "Use another checkpoint.",
        )
    return source


def _describe_tensor(name: str, checkpoint: Checkpoint, source: str) -> Entry:
    record = checkpoint.manifest.tensors[source]
    if record.is_complex:
        raise UsageError(
            f"{name} of {checkpoint.folder} holds complex numbers.",
            "Other programs read real ones from safetensors.",
            "Keep it in the model as a real tensor (torch.view_as_real), or as a buffer that is not persistent.",
        )
    num_bytes = math.prod(record.shape) * DTYPES[record.dtype].itemsize
    return Entry(name, record.dtype, record.shape, num_bytes)


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
        sync_folder(written)
    written.rename(out)
    sync_folder(out.parent)


def _refuse_existing(out: Path) -> None:
    """Raises UsageError for whatever is there, but for an empty folder in a folder's place."""
    if not out.name:
        raise UsageError(
            f"{str(out)!r} names no file or folder of its own.",
            "An export has a name, under which it appears when it is whole.",
            "Give a name such as model.safetensors.",
        )
    if out.resolve().parent.name == CHECKPOINTS_FOLDER:
        raise UsageError(
            f"{out} lies among the checkpoints of a run.",
            "What lies there is read as a checkpoint.",
            "Give a place outside the run's directory.",
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
