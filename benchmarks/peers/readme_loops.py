"""The first thing each README tells one to run, for these models: the tools' defaults, and a loader over samples.

What these do differs. Trimaran's fuses the optimizer, clips, and records each step's loss; the Trainer logs, shows its
progress and keeps checkpoints; the others do none of that, and nobody but Trimaran knows the loss of all ranks.
Their optimizer is the line `torch.optim.X(model.parameters(), lr=...)`. Each draws its own order of samples.
"""

from __future__ import annotations

from typing import Any

import torch
from pacing import Pace
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workloads import Batch, Work


def train_with_trimaran(work: Work, pace: Pace) -> None:
    import trimaran as tm

    with tm.start(work.job(), run=work.folder / "run", options=tm.RunOptions(device="cpu")) as run:
        for batch in run:
            pace.next_step()
            run.step(batch)


def train_with_torch(work: Work, pace: Pace) -> None:
    """As in the tutorials of PyTorch."""
    model: nn.Module = work.build_model()
    loader = build_loader(work)
    if work.num_procs > 1:
        model = DistributedDataParallel(model)
        loader = DataLoader(work.samples, work.rank_batch, sampler=DistributedSampler(work.samples))
    optimizer = work.workload.readme_optimizer(model.parameters())
    for batch in loader:
        pace.next_step()
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()


def train_with_accelerate(work: Work, pace: Pace) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.build_model()
    optimizer = work.workload.readme_optimizer(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, build_loader(work))
    model.train()
    for batch in loader:
        pace.next_step()
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()


def train_with_fabric(work: Work, pace: Pace) -> None:
    import lightning as L

    fabric = L.Fabric(accelerator="cpu", devices=work.num_procs)
    fabric.launch()
    model = work.build_model()
    optimizer = work.workload.readme_optimizer(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(build_loader(work))
    model.train()
    for batch in loader:
        pace.next_step()
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        fabric.backward(loss)
        optimizer.step()


def train_with_trainer(work: Work, pace: Pace) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build_model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = work.loss(self.model, batch)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.workload.readme_optimizer(self.parameters())

    class Paced(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            pace.next_step()

    trainer = L.Trainer(accelerator="cpu", devices=work.num_procs, callbacks=[Paced()], default_root_dir=work.folder)
    trainer.fit(Module(), build_loader(work))


def build_loader(work: Work) -> DataLoader[Any]:
    return DataLoader(work.samples, batch_size=work.rank_batch, shuffle=True)


LOOPS = {
    "Trimaran": train_with_trimaran,
    "PyTorch": train_with_torch,
    "Accelerate": train_with_accelerate,
    "Fabric": train_with_fabric,
    "Trainer": train_with_trainer,
}
