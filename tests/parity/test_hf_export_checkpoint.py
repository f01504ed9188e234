"""`export --hf` writes what `from_pretrained` reads: equal logits, and the same files as `save_pretrained` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_jobs import VOCABULARY, gpt2, llama, lora, vit
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

from saved_checkpoints import save_by_hand
from trimaran.checkpoint.export import export_weights
from trimaran.checkpoint.hugging_face import describe_hugging_face
from trimaran.errors import CheckpointError, UsageError

IDS = torch.arange(VOCABULARY)[None]


def mixtral() -> nn.Module:
    """Experts whose weights are one tensor in memory and many in the files of old."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=3,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    )


CAUSAL = {"llama": llama, "tied-llama": partial(llama, tied=True), "gpt2": gpt2, "mixtral": mixtral}
PRETRAINED: dict[str, Callable[[], nn.Module]] = {**CAUSAL, "t5": t5, "vit": vit}


def built(model: Callable[[], nn.Module]) -> Any:
    """The model with every parameter random, biases and norms included."""
    torch.manual_seed(1)
    model = model().eval()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randn_like(each) / 3)
    return model


def save(run: Path, model: nn.Module) -> None:
    save_by_hand(run, model, hugging_face=describe_hugging_face(model))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def json_files(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json") if "index" not in path.name}


@pytest.mark.parametrize("shard_size", ["5GB", "1kB"])
@pytest.mark.parametrize("model", CAUSAL.values(), ids=CAUSAL)
def test_from_pretrained_gives_equal_logits(model: Callable[[], nn.Module], shard_size: str, tmp_path: Path) -> None:
    ours = built(model)
    save(tmp_path / "run", ours)
    written = export_weights(tmp_path / "run", tmp_path / "out", hf=True, shard_size=shard_size)
    assert ("model.safetensors" in written.files) == (shard_size == "5GB")
    read, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert type(read) is type(ours)
    assert torch.equal(logits(read), logits(ours))


def test_an_image_model_is_read_too(tmp_path: Path) -> None:
    ours = built(vit)
    save(tmp_path / "run", ours)
    export_weights(tmp_path / "run", tmp_path / "out", hf=True)
    read = ViTForImageClassification.from_pretrained(tmp_path / "out", local_files_only=True)
    assert all(torch.equal(each, read.state_dict()[name]) for name, each in ours.state_dict().items())


@pytest.mark.parametrize("model", PRETRAINED.values(), ids=PRETRAINED)
def test_configurations_are_those_of_save_pretrained(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    ours = built(model)
    if getattr(ours, "generation_config", None) is not None:
        ours.generation_config.max_new_tokens = 5
        ours.generation_config.compile_config = CompileConfig()
    described = describe_hugging_face(ours)
    ours.save_pretrained(tmp_path / "theirs")
    assert described == {"files": json_files(tmp_path / "theirs")}


def test_describing_leaves_the_model_as_it_was() -> None:
    ours = built(gpt2)
    before = ours.config.to_dict()
    describe_hugging_face(ours)
    assert ours.config.to_dict() == before
    assert before["architectures"] is None


def test_the_configuration_says_the_type_of_the_weights(tmp_path: Path) -> None:
    ours = built(llama).double()
    save(tmp_path / "run", ours)
    export_weights(tmp_path / "run", tmp_path / "out", hf=True)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, dtype="auto")
    assert torch.equal(logits(read), logits(ours))
    assert logits(read).dtype == torch.float64


def test_a_sharded_model_has_the_name_of_its_own_class() -> None:
    ours = built(gpt2)
    expected = describe_hugging_face(ours)

    class FSDPModule:
        pass

    ours.__class__ = type("FSDPGPT2LMHeadModel", (FSDPModule, type(ours)), {})
    assert describe_hugging_face(ours) == expected
    assert expected["files"]["config.json"]["architectures"] == ["GPT2LMHeadModel"]


# Adapters


def adapted(**options: Any) -> nn.Module:
    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))


ADAPTED: dict[str, Callable[[], nn.Module]] = {
    "lora": lora,
    "dora": partial(adapted, use_dora=True),
    "with-head": partial(adapted, modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "tokens": partial(adapted, trainable_token_indices=[1, 2]),
}


def base_of(model: Any, tmp_path: Path) -> Any:
    """The model without adapters, as it was before they were put onto it."""
    base = llama().eval()
    names = {name.removeprefix("base_model.model."): each for name, each in model.state_dict().items()}
    plain = {name: next(names[each] for each in _names_of(name) if each in names) for name in base.state_dict()}
    base.load_state_dict(plain)
    return base


def _names_of(name: str) -> list[str]:
    module, _, kind = name.rpartition(".")
    inner = ("", ".base_layer", ".original_module", ".token_adapter.base_layer")
    return [f"{module}{each}.{kind}" for each in inner]


@pytest.mark.parametrize("model", ADAPTED.values(), ids=ADAPTED)
def test_adapters_are_read_by_peft_with_equal_logits(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    ours = built(model)
    save(tmp_path / "run", ours)
    written = export_weights(tmp_path / "run", tmp_path / "out", hf=True, trainable=True, shard_size="1B")
    assert set(written.files) == {"adapter_model.safetensors", "adapter_config.json"}
    base = base_of(ours, tmp_path)
    assert not torch.equal(logits(base), logits(ours))
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "out")), logits(ours))
    ours.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert tensors.keys() == theirs.keys()
    assert all(torch.equal(each, theirs[name]) for name, each in tensors.items())
    sets = {"target_modules"}  # PEFT writes them in no order
    mine, other = json_files(tmp_path / "out")["adapter_config.json"], json_files(tmp_path / "theirs")
    assert {name: sorted(each) if name in sets else each for name, each in mine.items()} == {
        name: sorted(each) if name in sets else each for name, each in other["adapter_config.json"].items()
    }


def test_adapters_put_into_the_model_itself(tmp_path: Path) -> None:
    ours = built(lambda: inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), llama()))
    assert type(ours) is type(llama())
    save(tmp_path / "run", ours)
    export_weights(tmp_path / "run", tmp_path / "out", hf=True, trainable=True)
    base = llama()
    names = {name.replace(".base_layer", ""): each for name, each in ours.state_dict().items() if "lora_" not in name}
    base.load_state_dict(names)
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "out")), logits(ours))


def test_all_weights_of_an_adapted_model_go_back_into_its_module(tmp_path: Path) -> None:
    ours = built(lora)
    save(tmp_path / "run", ours)
    export_weights(tmp_path / "run", tmp_path / "a.safetensors")
    other = lora()
    other.load_state_dict(load_file(tmp_path / "a.safetensors"))
    assert torch.equal(logits(other), logits(ours))
    with pytest.raises(UsageError, match="a base model with adapters"):
        export_weights(tmp_path / "run", tmp_path / "out", hf=True)


def test_what_was_trained_beside_the_adapters_is_not_left_out(tmp_path: Path) -> None:
    ours = built(lora)
    ours.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    save(tmp_path / "run", ours)
    with pytest.raises(UsageError, match=r"model\.norm\.weight .* no part of the adapters"):
        export_weights(tmp_path / "run", tmp_path / "out", hf=True, trainable=True)
    export_weights(tmp_path / "run", tmp_path / "t.safetensors", trainable=True)
    assert "base_model.model.model.norm.weight" in load_file(tmp_path / "t.safetensors")


def test_a_whole_model_has_no_adapters(tmp_path: Path) -> None:
    save(tmp_path / "run", built(gpt2))
    with pytest.raises(UsageError, match="has no adapters"):
        export_weights(tmp_path / "run", tmp_path / "out", hf=True, trainable=True)


# What cannot be described does not end a run, and is told by the export


def two_adapters() -> Any:
    ours = lora()
    ours.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    return ours


def broken() -> Any:
    ours = gpt2()
    ours.config.own = object()
    return ours


PROBLEMS: dict[str, tuple[Callable[[], Any], str]] = {
    "two adapters": (two_adapters, "2 adapters: default, second"),
    "prompt": (
        lambda: get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "PROMPT_TUNING computes what it saves",
    ),
    "no json": (broken, "TypeError: "),
}


@pytest.mark.parametrize(("model", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_cannot_be_described(model: Callable[[], Any], expected: str, tmp_path: Path) -> None:
    ours = model()
    described = describe_hugging_face(ours)
    assert described.keys() == {"problem"}
    save_by_hand(tmp_path / "run", ours, hugging_face=described)
    with pytest.raises(CheckpointError, match=expected):
        export_weights(tmp_path / "run", tmp_path / "out", hf=True)
    export_weights(tmp_path / "run", tmp_path / "a.safetensors")


def test_other_models_have_nothing_to_say() -> None:
    holder = nn.Linear(2, 2)
    holder.config = llama().config  # holds one, is none
    assert describe_hugging_face(holder) == {}
    assert describe_hugging_face(nn.Sequential(llama())) == {}
