"""The same work in five tools: fused optimizer, fp32, clipping, DDP without copies of gradients or buffers sent round.

Every loop iterates over the batches as they lie in memory. Trimaran and the hand-written loop report the loss of all
ranks. Accelerate, Fabric and the Trainer report their rank's own, as is usual with them and cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from pacing import Pace
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workloads import CLIP, Batch, Work


def train_with_trimaran(work: Work, pace: Pace) -> None:
    import trimaran as tm

    with tm.start(work.job(), run=work.folder / "run", options=tm.RunOptions(device="cpu")) as run:
        # A run takes its batches from a loader of its own; the others here have theirs for nothing.
        run._loader = RankBatches(work)
        for batch in run:
            pace.next_step()
            result = run.step(batch)
            pace.report(partial(getattr, result, "loss"))  # which the run itself has read by then


def train_with_torch(work: Work, pace: Pace) -> None:
    """What a careful person writes."""
    plain = work.build_model()
    optimizer = work.build_optimizer(plain)
    model: nn.Module = plain
    if work.num_procs > 1:
        model = DistributedDataParallel(plain, forward_sync_buffers=False, gradient_as_bucket_view=True)
    parameters = list(plain.parameters())
    for batch in cycle(work.batches):
        pace.next_step()
        loss = work.loss(model, batch)
        loss.backward()
        total = loss.detach().clone()
        sum_of_ranks = dist.all_reduce(total, async_op=True) if work.num_procs > 1 else None
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pace.report(partial(read_mean, total, sum_of_ranks, work.num_procs))


def train_with_accelerate(work: Work, pace: Pace) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    plain = work.build_model()
    model, optimizer = accelerator.prepare(plain, work.build_optimizer(plain))
    for batch in cycle(work.batches):
        pace.next_step()
        loss = work.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pace.report(loss.detach().item)


def train_with_fabric(work: Work, pace: Pace) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True) if work.num_procs > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=work.num_procs, strategy=strategy)
    fabric.launch()
    plain = work.build_model()
    model, optimizer = fabric.setup(plain, work.build_optimizer(plain))
    for batch in cycle(work.batches):
        pace.next_step()
        loss = work.loss(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pace.report(loss.detach().item)


def train_with_trainer(work: Work, pace: Pace) -> None:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build_model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return work.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.build_optimizer(self.model)

    class Paced(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            pace.next_step()

        def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            pace.report(outputs["loss"].item)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=work.num_procs,
        strategy=DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True) if work.num_procs > 1 else "auto",
        max_epochs=1,
        gradient_clip_val=CLIP,
        callbacks=[Paced()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=work.folder,
    )
    trainer.fit(Module(), EndlessBatches(work))


class RankBatches:
    """The batches as Trimaran's loop takes them; `close` is asked of a loader."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __iter__(self) -> Iterator[Any]:
        from trimaran.batch import MicroBatch, RankBatch

        for index, tensors in enumerate(cycle(self._work.batches)):
            position = index * self._work.workload.global_batch
            micro_batch = MicroBatch(tensors, position, self._work.rank_batch)
            yield RankBatch(index, self._work.workload.global_batch, (micro_batch,))

    def close(self) -> None: ...


class EndlessBatches:
    """The batches as the Trainer takes them; without a length it would fetch one ahead to see the end."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __len__(self) -> int:
        return 1_000_000

    def __iter__(self) -> Iterator[Batch]:
        return cycle(self._work.batches)


def read_mean(total: Tensor, sum_of_ranks: dist.Work | None, num_procs: int) -> float:
    if sum_of_ranks is not None:
        sum_of_ranks.wait()
    return total.item() / num_procs


LOOPS = {
    "Trimaran": train_with_trimaran,
    "PyTorch": train_with_torch,
    "Accelerate": train_with_accelerate,
    "Fabric": train_with_fabric,
    "Trainer": train_with_trainer,
}
