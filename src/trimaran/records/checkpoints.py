"""The schema of a checkpoint: manifest.json and state.json. A reader believes nothing that it has not checked.

A checkpoint is a directory `checkpoints/step-XXXXXXXX`. Its manifest, written last, names every other file with its
size and SHA-256, and says of every tensor where each part of it lies. What is not in the manifest does not exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trimaran.errors import CheckpointError

CHECKPOINT_FORMAT = 1
CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"

DTYPE_BYTES: Mapping[str, int] = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2},
    **{"I32": 4, "U32": 4, "F32": 4},
    **{"I64": 8, "U64": 8, "F64": 8},
}
"""The kinds of numbers, as safetensors name them, and their sizes."""

_MOST_BYTES = 2**28
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class FileRecord:
    """A file of the checkpoint as it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class PartRecord:
    """A box of a tensor: under which key of which file it lies, where it begins in the whole, and its shape."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor: its parts fill it exactly. `dtype` in safetensors' words.

    A complex tensor is held as real ones, with the pair of real and imaginary part as its last dim.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartRecord, ...]
    is_complex: bool = False


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. `epoch` is the number of the owner that wrote it; `aliases` name tied tensors."""

    run_id: str
    epoch: int
    step: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    aliases: Mapping[str, str]
    format: int = CHECKPOINT_FORMAT


@dataclass(frozen=True)
class StateRecord:
    """Where the run stood, apart from its tensors. Randomness is derived from seed and step, so there is none here.

    `position` counts the samples taken from the one global order; `num_updates` the steps that were not skipped,
    which the schedule follows. `optimizer` holds what the optimizer keeps besides tensors, `model` what modules keep
    as extra state. `trained` names the parameters that are trained.
    """

    step: int
    position: int
    num_updates: int
    loss_scale: Mapping[str, float] | None
    optimizer: Mapping[str, Any]
    model: Mapping[str, Any]
    trained: tuple[str, ...]
    layout: str
    time: str
    validation: Mapping[str, float] | None = None
    hugging_face: Mapping[str, Any] = field(default_factory=dict)
    format: int = CHECKPOINT_FORMAT


def name_checkpoint(step: int) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{step:08d}"


def to_text(record: Manifest | StateRecord) -> str:
    """The file's content. Raises ValueError for a number that JSON does not know."""
    return json.dumps(asdict(record), allow_nan=False, ensure_ascii=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whose entries have the right kinds and fit each other.

    Files lie in the folder by plain names, parts lie in files that are listed, and fill their tensors exactly. Raises
    CheckpointError otherwise, and for one of a later format. The files themselves are not looked at.
    """
    path = folder / MANIFEST_FILE
    values = _read(path)
    try:
        manifest = Manifest(
            run_id=_text(values["run_id"]),
            epoch=_count(values["epoch"]),
            step=_count(values["step"]),
            files={_file_name(name): _file(each) for name, each in _mapping(values["files"]).items()},
            tensors={_text(name): _tensor(each) for name, each in _mapping(values["tensors"]).items()},
            aliases={_text(name): _text(each) for name, each in _mapping(values["aliases"]).items()},
        )
        _check_parts(manifest)
    except (KeyError, TypeError, ValueError) as problem:
        raise _damaged(path, problem) from problem
    return manifest


def read_state(folder: Path) -> StateRecord:
    """The state.json of a checkpoint. Raises CheckpointError for one that is damaged or of a later format."""
    path = folder / STATE_FILE
    values = _read(path)
    try:
        return StateRecord(
            step=_count(values["step"]),
            position=_count(values["position"]),
            num_updates=_count(values["num_updates"]),
            loss_scale=_optional(_mapping, values["loss_scale"]),
            optimizer=_mapping(values["optimizer"]),
            model=_mapping(values["model"]),
            trained=tuple(_text(name) for name in values["trained"]),
            layout=_text(values["layout"]),
            time=_text(values["time"]),
            validation=_optional(_mapping, values["validation"]),
            hugging_face=_mapping(values["hugging_face"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise _damaged(path, problem) from problem


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.is_symlink() or path.stat().st_size > _MOST_BYTES:
            raise ValueError("a link" if path.is_symlink() else f"{path.stat().st_size} bytes long")
        values = _mapping(json.loads(path.read_text(encoding="utf-8")))
        version = values["format"]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as problem:
        raise _damaged(path, problem) from problem
    if version != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path} has format {version!r}; this version reads format {CHECKPOINT_FORMAT}.",
            "A checkpoint is read only by a version that knows its format.",
            "Use the version that wrote it.",
        )
    return values


def _damaged(path: Path, problem: Exception) -> CheckpointError:
    what = "is missing" if isinstance(problem, FileNotFoundError) else f"is damaged ({_describe(problem)})"
    return CheckpointError(
        f"{path} {what}.", "A checkpoint is known by its manifest, and read as a whole.", "Use another checkpoint."
    )


def _describe(problem: Exception) -> str:
    return f"no {problem}" if isinstance(problem, KeyError) else f"{type(problem).__name__}: {problem}"


def _check_parts(manifest: Manifest) -> None:
    if STATE_FILE not in manifest.files:
        raise ValueError(f"{STATE_FILE} is not among its files")
    if MANIFEST_FILE in manifest.files:
        raise ValueError("it names itself")
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            if part.file not in manifest.files:
                raise ValueError(f"{name} lies in {part.file}, which is not among its files")
        if (fault := find_gap(tensor)) is not None:
            raise ValueError(f"{name}: {fault}")
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            raise ValueError(f"{alias} stands for {name}, which it cannot")


def find_gap(tensor: TensorRecord) -> str | None:
    """What keeps the parts from filling the tensor exactly; None where nothing does.

    Boxes inside a whole fill it exactly if their sizes add up to it and no two overlap.
    """
    total = 0
    boxes = []
    for part in tensor.parts:
        if len(part.offset) != len(tensor.shape) or len(part.shape) != len(tensor.shape):
            return f"a part has {len(part.shape)} dims of {len(tensor.shape)}"
        if any(start + size > whole for start, size, whole in zip(part.offset, part.shape, tensor.shape, strict=True)):
            return f"a part at {part.offset} reaches beyond {tensor.shape}"
        if (size := _volume(part.shape)) > 0:
            total += size
            boxes.append(part)
    if total != _volume(tensor.shape):
        return f"its parts hold {total} of {_volume(tensor.shape)} numbers"
    boxes.sort(key=lambda part: part.offset)
    for index, part in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if tensor.shape and other.offset[0] >= part.offset[0] + part.shape[0]:
                break  # sorted by where they begin: no later one reaches back
            if _overlap(part, other):
                return f"parts at {part.offset} and {other.offset} overlap"
    return None


def _overlap(one: PartRecord, other: PartRecord) -> bool:
    return all(
        max(a, b) < min(a + size_a, b + size_b)
        for a, size_a, b, size_b in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )


def _volume(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _file(values: Any) -> FileRecord:
    digest = _text(values["sha256"])
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is no SHA-256")
    return FileRecord(_count(values["num_bytes"]), digest)


def _tensor(values: Any) -> TensorRecord:
    dtype = _text(values["dtype"])
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{dtype!r} is no known kind of number")
    parts = tuple(
        PartRecord(_file_name(each["file"]), _text(each["key"]), _counts(each["offset"]), _counts(each["shape"]))
        for each in _mapping(values)["parts"]
    )
    return TensorRecord(dtype, _counts(values["shape"]), parts, values["is_complex"] is True)


def _file_name(value: Any) -> str:
    if not _FILE_NAME.fullmatch(_text(value)):
        raise ValueError(f"{value!r} is no plain file name")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(each) for each in values)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value


def _optional(kind: Callable[[Any], Mapping[str, Any]], value: Any) -> Mapping[str, Any] | None:
    return None if value is None else kind(value)
