"""Hugging Face's Trainer tells healthd how long its steps take: one callback more.

    trainer = Trainer(..., callbacks=[HealthdSteps()])

A step is one of the optimizer: with gradient accumulation several batches. Evaluation and checkpoints between two steps
are counted into the next one; single long steps are no slowness. Source of the hook: huggingface.co/docs/transformers,
main_classes/callback, TrainerCallback.on_step_end. Tried with transformers 5.17.0.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from healthd.client import step


class HealthdSteps(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step()
