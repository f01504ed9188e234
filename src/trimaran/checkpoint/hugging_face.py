"""What `from_pretrained` reads beside the weights: the configuration of a `transformers` or PEFT model, read off it.

A checkpoint keeps it as JSON, so that an export needs neither the job nor those packages.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"

_ADAPTER_PREFIX = "base_model.model."


def describe_hugging_face(model: nn.Module) -> dict[str, Any]:
    """JSON that an export puts beside the weights of a `transformers` or PEFT model; empty for any other.

    "files" maps a file's name to its content, as `save_pretrained` would write it. For a model with adapters there is
    "adapter", too: the name in the adapters' file -> the name in `state_dict`. Where the model cannot be described,
    "problem" says why: training goes on, and the export is refused.

    Reads names and configuration and no tensor, so that any rank can call it alone; the model must be whole, not cut
    into stages.
    """
    try:
        if _has_adapters(model):
            return _check_json(_describe_adapter(model))
        if _is_pretrained(model):
            return _check_json({"files": _describe_config(model)})
    except Exception as problem:  # the model's own code: a run does not end because of what an export may need
        return {"problem": f"{type(problem).__name__}: {problem}"}
    return {}


def _is_pretrained(model: nn.Module) -> bool:
    """A model with a `transformers` configuration; one that merely holds such a configuration cannot save itself."""
    return hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "to_json_string")


def _has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "save_pretrained") and bool(getattr(model, "peft_config", None))


def _describe_config(model: Any) -> dict[str, Any]:
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [_plain_class(model).__name__]
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    config["dtype"] = str(dtype).removeprefix("torch.")
    files = {CONFIG_FILE: config}
    if (generation := getattr(model, "generation_config", None)) is not None:
        values = json.loads(generation.to_json_string())
        values.pop("compile_config", None)  # belongs to this machine, and is left out by `save_pretrained`, too
        files[GENERATION_FILE] = values
    return files


def _describe_adapter(model: Any) -> dict[str, Any]:
    if len(model.peft_config) != 1:
        return {"problem": f"the model has {len(model.peft_config)} adapters: {', '.join(model.peft_config)}"}
    (adapter, config), *_ = model.peft_config.items()
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning:
        return {"problem": f"{kind} computes what it saves"}
    names = _name_adapter_tensors(model, adapter)
    if (computed := next((name for name, ours in names.items() if ours is None), None)) is not None:
        return {"problem": f"{kind} computes {computed} when it saves"}
    return {"files": {ADAPTER_CONFIG_FILE: _adapter_config(model, config)}, "adapter": names}


def _name_adapter_tensors(model: Any, adapter: str) -> dict[str, str | None]:
    """Name in the adapter's file -> name in the model; None for what is no tensor of the model.

    Only PEFT knows which tensors each of its methods saves, and how it calls them. It is asked about stand-ins without
    memory, which it hands back under the names of the file.
    """
    peft = importlib.import_module("peft")  # there, since the model is made of it
    marks = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in model.state_dict().items()
        if isinstance(each, Tensor)
    }
    name_of = {id(mark): name for name, mark in marks.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Without the embeddings, which it would look up on the network to decide about.
        saved = peft.get_peft_model_state_dict(model, marks, adapter_name=adapter, save_embedding_layers=False)
    return {_with_prefix(name): name_of.get(id(mark)) for name, mark in saved.items()}


def _with_prefix(name: str) -> str:
    """Adapters that `transformers` added itself have no prefix in memory, and the same one in files."""
    return name if name.startswith(_ADAPTER_PREFIX) else _ADAPTER_PREFIX + name


def _adapter_config(model: Any, config: Any) -> dict[str, Any]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    values = {name: sorted(each) if isinstance(each, set) else each for name, each in config.to_dict().items()}
    values["inference_mode"] = True
    values["base_model_name_or_path"] = values["base_model_name_or_path"] or base.__dict__.get("name_or_path") or None
    if values["task_type"] is None:
        kind = _plain_class(base)
        values["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return values


def _plain_class(module: nn.Module) -> type:
    """The module's class as it was written: sharding puts a subclass of its own in its place."""
    kind = type(module)
    return kind.__bases__[-1] if any(base.__name__ == "FSDPModule" for base in kind.__bases__) else kind


def _check_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same as plain JSON. Raises TypeError or ValueError for what JSON does not know."""
    plain: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return plain
