"""`trimaran export RUN[@STEP] OUT`: weights out of a checkpoint, for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from trimaran.cli.flags import parse_whole_verb
from trimaran.units import format_bytes

if TYPE_CHECKING:
    from trimaran.checkpoint.export import ExportedWeights

_PROGRAM = "trimaran export"


@dataclass(frozen=True)
class Export:
    """Write the weights of a checkpoint as safetensors, whatever layout saved it. Nothing is overwritten."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN[@STEP]")]
    """The run's directory; RUN@STEP is its checkpoint of that step, without @STEP the newest valid one."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """A new file, where the name ends in .safetensors; otherwise a new folder."""
    hf: bool = False
    """Add what from_pretrained reads beside the weights; with --trainable, write the adapters of a PEFT model."""
    trainable: bool = False
    """Write the trained parameters alone."""
    shard_size: str = "5GB"
    """In a folder, weights above this size become several files with an index."""
    json: bool = False
    """Print one JSON object in place of lines."""
    traceback: bool = False
    """Show the whole Python traceback of an error."""


def main(words: Sequence[str]) -> int:
    """Exports in this process, and prints what was written."""
    command = parse_whole_verb(Export, words, program=_PROGRAM)
    from trimaran.checkpoint.export import export_weights

    written = export_weights(
        command.run, command.out, hf=command.hf, trainable=command.trainable, shard_size=command.shard_size
    )
    print(_as_json(written) if command.json else "\n".join(_lines(written, command)))
    return 0


def _as_json(written: ExportedWeights) -> str:
    files = [
        {"name": name, "bytes": record.num_bytes, "sha256": record.sha256} for name, record in written.files.items()
    ]
    told = {
        "out": str(written.out),
        "checkpoint": str(written.checkpoint),
        "step": written.step,
        "tensors": written.num_tensors,
        "bytes": written.num_bytes,
        "files": files,
        "left_out": list(written.left_out),
        "passed_over": list(written.passed_over),
    }
    return json.dumps(told, ensure_ascii=False)


def _lines(written: ExportedWeights, command: Export) -> list[str]:
    lines = [f"passed   {reason}" for reason in written.passed_over]
    lines.append(f"read     {written.checkpoint}")
    for name, record in written.files.items():
        path = written.out if name == written.out.name else written.out / name
        lines.append(f"wrote    {path}  {format_bytes(record.num_bytes)}")
    lines.append(f"holds    {written.num_tensors} tensors, {format_bytes(written.num_bytes)}")
    lines += [f"without  {name}: safetensors hold tensors alone" for name in written.left_out]
    return lines + _next_lines(written, command)


def _next_lines(written: ExportedWeights, command: Export) -> list[str]:
    """How what was written is read."""
    from trimaran.checkpoint.hugging_face import CONFIG_FILE

    out = str(written.out)
    if command.hf and command.trainable:
        return [f"next     peft.PeftModel.from_pretrained(model, {out!r}) puts them onto the base model"]
    if command.hf:
        architectures = written.texts[CONFIG_FILE].get("architectures")
        reader = architectures[0] if isinstance(architectures, list) and architectures else "AutoModel"
        return [
            f"next     transformers.{reader}.from_pretrained({out!r})",
            f"         a tokenizer is no part of a model: tokenizer.save_pretrained({out!r}) puts yours beside it",
        ]
    if command.trainable:
        return [f"next     trimaran.Job(weights=trimaran.Weights({out!r}, partial=True), …) starts from them"]
    return [f"next     trimaran.Job(weights={out!r}, …) starts from them; any safetensors reader reads them"]
