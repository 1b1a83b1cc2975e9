"""PyTorch Lightning tells healthd how long its steps take: one callback more.

    trainer = Trainer(callbacks=[HealthdSteps()])

A batch is one step, also where gradients are accumulated. Validation and checkpoints between two batches are counted
into the next one; single long steps are no slowness. Lightning itself does not say how much of a batch was the rank's
own work: a module that knows may set `pl_module.healthd_busy` (seconds, from two CUDA events around forward and
backward) in `on_before_optimizer_step`. Source of the hook: lightning.ai, API of lightning.pytorch.callbacks.Callback,
on_train_batch_end. Tried with pytorch-lightning 2.6.6.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the same library by its older name, as a package of its own
    from pytorch_lightning.callbacks import Callback

from healthd.client import step


class HealthdSteps(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step(busy=getattr(pl_module, "healthd_busy", None))
