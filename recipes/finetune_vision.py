"""A pretrained ResNet on a new task with few samples: first its head alone, then all of it.

    trimaran train recipes/resnet.py --procs 2 --run runs/upright
    trimaran train recipes/finetune_vision.py --weights runs/upright/model.safetensors --run runs/head
    trimaran train recipes/finetune_vision.py --weights runs/head/model.safetensors --stage all --run runs/all

The first line makes weights without a download: of a network that reads digits. The second trains a new head to read
them upside down, on features that stay as they are, from five samples of each; the third trains everything from there,
at a lower rate. `--images DIR` is for a folder of images, and the weights are any safetensors file with the names of
torchvision's ResNets. This file stands beside resnet.py, from which it takes model and data.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn

import trimaran as tm
from resnet import ResNet, describe_mistakes, load_task, metrics_for

# At a batch of 32. What is pretrained is only adjusted, at a lower rate.
RATES = {"head": 0.1, "all": 0.02, "scratch": 0.05}


def freeze_backbone(model: nn.Module, head: str = "fc.") -> nn.Module:
    """Only the head is trained. Norms use the statistics that they were pretrained with, and keep them.

    A module put in eval mode here stays in it: the engine changes modes for an evaluation only, and restores them.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(head)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def job(
    weights: Path | None = None,
    stage: Literal["head", "all", "scratch"] = "head",
    images: Path | None = None,
    depth: Literal[18, 50] = 18,
    norm: Literal["batch", "group"] = "batch",
    width: int | None = None,
    stem: Literal["small", "imagenet"] | None = None,
    size: int | None = None,
    epochs: float = 200,
    lr: float | None = None,
    per_class: int | None = 5,
) -> tm.Job:
    """A pretrained ResNet on a new task: its head alone, then all of it; or from scratch, to compare.

    weights: a safetensors file or folder; of any task for stage head, of this one for stage all. lr: belongs to a batch
    of 32 (0.1 for the head, 0.02 for all, 0.05 from scratch). per_class: train on the first so many samples of each
    class. The rest as in resnet.py.
    """
    if (weights is None) != (stage == "scratch"):
        raise tm.errors.JobError(
            f"stage={stage} {'without' if weights is None else 'with'} weights.",
            "The head and all are trained from pretrained weights, and from scratch means without.",
            "Give --weights FILE." if weights is None else "Drop --weights, or choose --stage head or all.",
        )
    task = load_task(images, size, per_class=per_class, turned=images is None)

    def build_model() -> nn.Module:
        model = ResNet(
            len(task.classes),
            depth=depth,
            width=task.width if width is None else width,
            channels=task.channels,
            stem=stem or task.stem,
            norm=norm,
        )
        return freeze_backbone(model) if stage == "head" else model

    first_weights = weights
    if weights is not None and stage == "head":
        # The file's head is of another task: it is left out, and ours keeps its first values.
        first_weights = tm.Weights(weights, rename={"fc.*": None}, partial=True)
    return tm.Job(
        model=build_model,
        weights=first_weights,
        data=task.train,
        valid=task.valid,
        inputs=("image",),
        loss=tm.losses.cross_entropy(label_smoothing=0.1),
        metrics=metrics_for(task),
        optimizer=tm.optim.sgd(
            lr=RATES[stage] if lr is None else lr, momentum=0.9, nesterov=True, weight_decay=1e-4, at_batch=32
        ),
        schedule=tm.optim.cosine(warmup=0.05, final=0.0),
        global_batch=32,
        epochs=epochs,
        sample=partial(describe_mistakes, task=task),
        baselines=task.baselines,
    )
