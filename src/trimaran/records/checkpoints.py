"""The schema of a checkpoint: manifest.json and state.json. A reader believes nothing that it has not checked.

A checkpoint is a directory `checkpoints/step-XXXXXXXX`. Its manifest, written last, names every other file with its
size and SHA-256, and says of every tensor where each part of it lies. What is not in the manifest does not exist.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

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
_REAL = ("F16", "F32", "F64")
_short = reprlib.repr
"""What stands in a damaged file may be long, and may hold what a terminal obeys."""

_MOST_BYTES = 2**28
_MOST_DIMS = 64  # torch's own limit
_MOST_CUT_DIMS = 4
_LARGEST_COUNT = 2**63 - 1
_UNSEALED, _MOST_UNSEALED_BYTES = "its text is not what was written", 2**20
"""So much of what is damaged is still looked at, for a format that this version does not know."""
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')
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
    """The file's content. Raises ValueError for a number that JSON does not know, CheckpointError for too long a text.

    A manifest begins with the SHA-256 of all that follows its own: nobody else vouches for it.
    """
    text = json.dumps(asdict(record), allow_nan=False, ensure_ascii=False) + "\n"
    if isinstance(record, Manifest):
        rest = text.removeprefix("{")
        text = f'{{"sha256": "{hashlib.sha256(rest.encode()).hexdigest()}", {rest}'
    if (num_bytes := len(text.encode())) > _MOST_BYTES:
        raise CheckpointError(
            f"a {MANIFEST_FILE if isinstance(record, Manifest) else STATE_FILE} would have {num_bytes} bytes.",
            f"More than {_MOST_BYTES} are never read, so that a damaged one cannot take all memory.",
            "Use fewer ranks, or keep large values in tensors.",
        )
    return text


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whose entries have the right kinds and fit each other.

    Files lie in the folder by plain names, parts lie in files that are listed, and fill their tensors exactly. Raises
    CheckpointError otherwise, and for one of a later format. The files themselves are not looked at.
    """
    path = folder / MANIFEST_FILE
    values = _read(path, is_sealed=True)
    try:
        manifest = Manifest(
            run_id=_id(values["run_id"]),
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
    values = _read(path, is_sealed=False)
    try:
        return StateRecord(
            step=_count(values["step"]),
            position=_count(values["position"]),
            num_updates=_count(values["num_updates"]),
            loss_scale=_optional(_loss_scale, values["loss_scale"]),
            optimizer=_mapping(values["optimizer"]),
            model=_mapping(values["model"]),
            trained=tuple(_text(name) for name in _list(values["trained"])),
            layout=_text(values["layout"]),
            time=_text(values["time"]),
            validation=_optional(_figures, values["validation"]),
            hugging_face=_mapping(values["hugging_face"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise _damaged(path, problem) from problem


def _read(path: Path, *, is_sealed: bool) -> Mapping[str, Any]:
    """The object in a file."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):  # a link leads away, and a pipe never ends
            raise ValueError("it is a link" if stat.S_ISLNK(about.st_mode) else "it is no file")
        if about.st_size > _MOST_BYTES:
            raise ValueError(f"it is {about.st_size} bytes long")
        data = path.read_bytes()
        is_whole = not is_sealed or _has_seal(data)
        if not is_whole and len(data) > _MOST_UNSEALED_BYTES:
            raise ValueError(_UNSEALED)
        values = _mapping(
            json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
        )
        version = values["format"]
        if version == CHECKPOINT_FORMAT and not is_whole:
            raise ValueError(_UNSEALED)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as problem:
        raise _damaged(path, problem) from problem
    if version != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path} has format {_short(version)}; this version reads format {CHECKPOINT_FORMAT}.",
            "A checkpoint is read only by a version that knows its format.",
            "Use the version that wrote it.",
        )
    return values


def _has_seal(data: bytes) -> bool:
    seal = _SEAL.match(data)
    return seal is not None and hashlib.sha256(memoryview(data)[seal.end() :]).hexdigest() == seal[1].decode()


def _damaged(path: Path, problem: Exception) -> CheckpointError:
    what = "is missing" if isinstance(problem, FileNotFoundError) else f"is damaged ({_describe(problem)})"
    return CheckpointError(
        f"{path} {what}.", "A checkpoint is known by its manifest, and read as a whole.", "Use another checkpoint."
    )


def _describe(problem: Exception) -> str:
    if isinstance(problem, KeyError):
        return f"no {problem}"
    return f"{type(problem).__name__}: {problem.strerror if isinstance(problem, OSError) else problem}"


def _check_parts(manifest: Manifest) -> None:
    if STATE_FILE not in manifest.files:
        raise ValueError(f"{STATE_FILE} is not among its files")
    if MANIFEST_FILE in manifest.files:
        raise ValueError("it names itself")
    held = dict.fromkeys(manifest.files, 0)
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            if part.file not in held:
                raise ValueError(f"{_short(name)} lies in {part.file}, which is not among its files")
            held[part.file] += _volume(part.shape) * DTYPE_BYTES[tensor.dtype]
        if (fault := find_gap(tensor)) is not None:
            raise ValueError(f"{_short(name)}: {fault}")
    for file, num_bytes in held.items():
        if num_bytes > manifest.files[file].num_bytes:
            raise ValueError(f"{file} is too short for its parts")
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            raise ValueError(f"{_short(alias)} stands for {_short(name)}, which it cannot")


def find_gap(tensor: TensorRecord) -> str | None:
    """What keeps the parts from filling the tensor exactly; None where nothing does.

    Boxes fill a whole exactly where the corners of all of them, each counted +1 or -1 by whether it has an even or an
    odd number of upper bounds, add up to those of the whole: a sum of boxes is known by its corners, as a step function
    is by its jumps. This looks at each box once, however many there are.
    """
    shape = tensor.shape
    total = 0
    for part in tensor.parts:
        if len(part.offset) != len(shape) or len(part.shape) != len(shape):
            return f"a part of shape {_short(part.shape)} at {_short(part.offset)} is none of {_short(shape)}"
        if any(start + size > whole for start, size, whole in zip(part.offset, part.shape, shape, strict=True)):
            return f"a part of shape {_short(part.shape)} at {_short(part.offset)} reaches beyond {_short(shape)}"
        total += _volume(part.shape)
    if total != _volume(shape):
        return f"its parts hold {_short(total)} of {_short(_volume(shape))} numbers"
    boxes = [part for part in tensor.parts if _volume(part.shape)]
    cut = [dim for dim, size in enumerate(shape) if any(part.shape[dim] != size for part in boxes)]
    if len(cut) > _MOST_CUT_DIMS:
        return f"it is cut along {len(cut)} dims, of which {_MOST_CUT_DIMS} can be"
    corners: Counter[tuple[int, ...]] = Counter()
    for part in boxes:
        _count_corners(corners, [part.offset[dim] for dim in cut], [part.shape[dim] for dim in cut], 1)
    if total:
        _count_corners(corners, [0] * len(cut), [shape[dim] for dim in cut], -1)
    wrong = min((corner for corner, count in corners.items() if count), default=None)
    return None if wrong is None else f"its parts overlap, and leave gaps, at {_short(wrong)} of dims {cut}"


def _count_corners(corners: Counter[tuple[int, ...]], offset: Sequence[int], shape: Sequence[int], sign: int) -> None:
    """Adds a box's corners, those with an odd number of upper bounds with the other sign."""
    for uppers in product((0, 1), repeat=len(offset)):
        corner = tuple(start + upper * size for start, upper, size in zip(offset, uppers, shape, strict=True))
        corners[corner] += -sign if sum(uppers) % 2 else sign


def _volume(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _file(values: Any) -> FileRecord:
    digest = _text(values["sha256"])
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{_short(digest)} is no SHA-256")
    return FileRecord(_count(values["num_bytes"]), digest)


def _tensor(values: Any) -> TensorRecord:
    dtype = _text(values["dtype"])
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{_short(dtype)} is no known kind of number")
    shape, is_complex = _counts(values["shape"]), values["is_complex"]
    if not isinstance(is_complex, bool) or (is_complex and (dtype not in _REAL or shape[-1:] != (2,))):
        raise ValueError(f"{dtype} of shape {shape} holds no complex numbers")
    parts = tuple(
        PartRecord(_file_name(each["file"]), _text(each["key"]), _counts(each["offset"]), _counts(each["shape"]))
        for each in _list(values["parts"])
    )
    return TensorRecord(dtype, shape, parts, is_complex)


def _id(value: Any) -> str:
    if len(_text(value)) > 64 or not value.isprintable():
        raise ValueError(f"{_short(value)} is no id")
    return str(value)


def _loss_scale(values: Any) -> Mapping[str, float]:
    return {"value": _number(values["value"]), "good_steps": _count(values["good_steps"])}


def _figures(values: Any) -> Mapping[str, float]:
    return {name: _number(each) for name, each in _mapping(values).items()}


def _file_name(value: Any) -> str:
    if not _FILE_NAME.fullmatch(_text(value)):
        raise ValueError(f"{_short(value)} is no plain file name")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_short(value)} is no string")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST_COUNT:
        raise TypeError(f"{_short(value)} is no count")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{_short(value)} is no number")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if len(_list(values)) > _MOST_DIMS:
        raise ValueError(f"{len(values)} dims are more than {_MOST_DIMS}")
    return tuple(_count(each) for each in values)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{_short(value)} is no list")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{_short(value)} is no object")
    return value


def _optional(kind: Callable[[Any], Mapping[str, Any]], value: Any) -> Mapping[str, Any] | None:
    return None if value is None else kind(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{_short(text)} is too large")
    return value
