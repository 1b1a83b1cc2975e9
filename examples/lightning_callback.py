"""PyTorch Lightning tells healthd how long its steps take: one callback more.

    trainer = Trainer(callbacks=[HealthdSteps()])

A batch is one step. Lightning itself does not say how much of it was the rank's own work: a module that knows may set
`pl_module.healthd_busy` (seconds, from two CUDA events around forward and backward) in `on_before_optimizer_step`.
Source of the hook: lightning.ai, API of lightning.pytorch.callbacks.Callback, on_train_batch_end.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # before Lightning 2
    from pytorch_lightning.callbacks import Callback

from healthd.client import step


class HealthdSteps(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step(busy=getattr(pl_module, "healthd_busy", None))
