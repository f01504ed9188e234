"""Small models of `transformers`, from config, as jobs: the same through the engine and in plain PyTorch."""

# Shapes: B samples, T positions.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from parity_engine import start, whole_gradients, whole_state, whole_weights
from parity_plain import Trace, optimizer_state
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import trimaran as tm
from trimaran.data import Order
from trimaran.layout import Precision

SEED = 3
VOCABULARY, LONGEST = 13, 9
CLASSES, PIXELS = 5, 8
GLOBAL_BATCH, NUM_SAMPLES, EPOCHS = 7, 9, 2.0  # the last of three steps has four samples

Name = Literal["llama", "gpt2", "vit", "lora"]

# A key's bias has a true gradient of zero. AdamW divides its noise, 1e-17, by eps = 1e-8 and multiplies by the rate:
# at this one the result stays below 1e-12 of the weights.
ADAM_LR = 3e-4


@dataclass(frozen=True)
class HFCase:
    """Three steps of one model on `dp` ranks, clipped."""

    name: Name
    dp: int = 1
    micro_batch: int | None = None
    precision: Precision = "fp64"
    adam: bool = False
    tp: int = 1
    layout: str = ""

    def __str__(self) -> str:
        cut = f"dp{self.dp}-" + (f"tp{self.tp}-" if self.tp > 1 else "") + f"{self.layout}-" * bool(self.layout)
        return f"{self.name}-{cut}micro{self.micro_batch or 'whole'}{'-adam' if self.adam else ''}"


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    """Grouped queries, rotary positions in buffers, norms that compute in float32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    """Head and embedding tied, weights stored transposed; no dropout, whose masks depend on the cut of a batch."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def vit() -> ViTForImageClassification:
    """A classifier of images; dropout is off by default."""
    config = ViTConfig(
        image_size=PIXELS,
        patch_size=4,
        num_channels=3,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


def lora() -> nn.Module:
    """Adapters on a frozen Llama; both of their factors random, so that both have gradients at once."""
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, each in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(each, std=0.1)
    return model


BUILDERS = {"llama": llama, "gpt2": gpt2, "vit": vit, "lora": lora}


def token_samples() -> list[dict[str, Tensor]]:
    """Ragged; some labels ignored, one sample's all."""
    draw = torch.Generator().manual_seed(1)
    samples = []
    for index in range(NUM_SAMPLES):
        ids = torch.randint(VOCABULARY, (2 + (5 * index) % (LONGEST - 1),), generator=draw)
        labels = ids.clone()
        labels[: len(ids) if index == 4 else index % 3] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def image_samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {"pixel_values": torch.randn(3, PIXELS, PIXELS, generator=draw), "label": torch.tensor(index % CLASSES)}
        for index in range(NUM_SAMPLES)
    ]


def build_job(case: HFCase) -> tm.Job:
    optimizer = (
        tm.optim.adamw(lr=ADAM_LR, weight_decay=0.0) if case.adam else tm.optim.sgd(lr=0.1, momentum=0.9, rule=None)
    )
    common: dict[str, Any] = {
        "model": BUILDERS[case.name],
        "optimizer": optimizer,
        "clip": 0.5,
        "global_batch": GLOBAL_BATCH,
        "epochs": EPOCHS,
        "seed": SEED,
        "tp_plan": LlamaConfig.base_model_tp_plan,
    }
    if case.name == "vit":
        return tm.Job(data=image_samples(), inputs=("pixel_values",), loss=tm.losses.cross_entropy(), **common)
    return tm.Job(
        data=token_samples(),
        collate=tm.data.pad({"input_ids": 0}, attention_mask_of="input_ids"),
        inputs=("input_ids", "attention_mask"),
        loss=tm.losses.next_token(),
        **common,
    )


def engine_run(case: HFCase) -> Trace:
    """Trains the case to its end on this rank."""
    engine, loader, _ = start(
        build_job(case),
        precision=case.precision,
        micro_batch=case.micro_batch,
        layout=f"dp={case.dp} tp={case.tp} {case.layout}",
    )
    trace = Trace()
    for batch in loader:
        engine.accumulate(batch)
        if batch.index == 0:
            trace.first_gradients = whole_gradients(engine)
        result = engine.update()
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    trace.weights, trace.state = whole_weights(engine), whole_state(engine)
    return trace


def plain_run(case: HFCase) -> Trace:
    """One process, the whole batch, the model's output used as Hugging Face documents it."""
    torch.manual_seed(SEED)
    model = BUILDERS[case.name]().train()
    if case.precision == "fp64":
        model.double()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = _optimizer(case, trained)
    data = image_samples() if case.name == "vit" else token_samples()
    _, ids = Order(NUM_SAMPLES, SEED).at(np.arange(round(EPOCHS * NUM_SAMPLES)))
    trace = Trace()
    for first in range(0, len(ids), GLOBAL_BATCH):
        optimizer.zero_grad()
        loss = _mean_loss(case, model, [data[index] for index in ids[first : first + GLOBAL_BATCH].tolist()])
        loss.backward()
        if not trace.losses:
            trace.first_gradients = {name: each.grad.clone() for name, each in trained.items()}
        trace.norms.append(float(nn.utils.clip_grad_norm_(trained.values(), 0.5)))
        trace.losses.append(float(loss.detach()))
        optimizer.step()
    return _finish(trace, model, optimizer, trained)


def _mean_loss(case: HFCase, model: nn.Module, samples: list[dict[str, Tensor]]) -> Tensor:
    if case.name == "vit":
        images = torch.stack([sample["pixel_values"] for sample in samples])
        labels = torch.stack([sample["label"] for sample in samples])
        return F.cross_entropy(model(pixel_values=images.to(next(model.parameters()).dtype)).logits, labels)
    pad = nn.utils.rnn.pad_sequence
    ids_BT = pad([sample["input_ids"] for sample in samples], batch_first=True)
    labels_BT = pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    mask_BT = pad([torch.ones_like(sample["input_ids"]) for sample in samples], batch_first=True)
    logits = model(input_ids=ids_BT, attention_mask=mask_BT).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100)


def _optimizer(case: HFCase, trained: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    if case.adam:
        return torch.optim.AdamW(trained.values(), lr=ADAM_LR, weight_decay=0.0, foreach=False)
    return torch.optim.SGD(trained.values(), lr=0.1, momentum=0.9, foreach=False)


def _finish(
    trace: Trace, model: nn.Module, optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]
) -> Trace:
    trace.weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    trace.state = optimizer_state(optimizer, trained)
    return trace
