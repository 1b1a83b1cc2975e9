"""The parts of PyTorch that healthd/validation/tools/pytorch_program.py uses, with GPUs that take time, fail or hang.

A matrix product takes `seconds[gpu]`. A GPU in `errors` raises that text; a GPU in `hangs` never finishes. The
program computes nothing: a tensor stores its GPU and how many of its numbers differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any


class Tensor(SimpleNamespace):
    def to(self, _dtype: Any) -> Tensor:
        return self

    def t(self) -> Tensor:
        return self

    def fill_(self, _value: int) -> Tensor:
        return self

    def sum(self) -> Tensor:
        return self

    def item(self) -> int:
        return self.wrong

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        self.torch.work(other.gpu if other.gpu >= 0 else self.gpu)
        return self


class Torch:
    """`wrong`: GPU -> how many numbers of a second product differ."""

    bfloat16, float32, uint8, float8_e4m3fn = "bf16", "fp32", "u8", "fp8"
    backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)))

    def __init__(
        self,
        seconds: Mapping[int, float],
        errors: Mapping[int, str] | None = None,
        hangs: frozenset[int] = frozenset(),
        wrong: Mapping[int, int] | None = None,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        self.seconds, self.errors, self.hangs, self.wrong = seconds, errors or {}, hangs, wrong or {}
        self.clock, self.current, self.order = dict.fromkeys(seconds, 0.0), 0, itertools.count()
        self.used_gpus: list[int] = []
        self.cuda = SimpleNamespace(
            device=self._device,
            stream=lambda stream: nullcontext(),
            Stream=lambda: SimpleNamespace(),
            Event=lambda enable_timing: Event(self),
            synchronize=lambda number: None,
            empty_cache=lambda: None,
            get_device_capability=lambda number: capability,
            can_device_access_peer=lambda first, second: first != second,
        )

    @contextmanager
    def _device(self, number: int) -> Any:
        self.current = number
        yield

    def Generator(self, device: str) -> Any:
        return SimpleNamespace(manual_seed=lambda seed: None)

    def new_tensor(self, device: str = "cpu", **_options: Any) -> Tensor:
        gpu = -1 if device == "cpu" else int(device.partition(":")[2])
        return Tensor(torch=self, gpu=gpu, wrong=0)

    def randn(self, *_size: int, **options: Any) -> Tensor:
        return self.new_tensor(options["device"])

    def zeros(self, _size: int, dtype: str, device: str = "cpu") -> Tensor:
        return self.new_tensor(device)

    def ones(self, _size: Any, **options: Any) -> Tensor:
        return self.new_tensor(options["device"])

    def empty(self, _size: int, dtype: str, device: str = "cpu", pin_memory: bool = False) -> Tensor:
        return self.new_tensor(device)

    def empty_like(self, other: Tensor) -> Tensor:
        return Tensor(torch=self, gpu=other.gpu, wrong=0)

    def mm(self, a: Tensor, _b: Tensor) -> Tensor:
        self.work(a.gpu)
        return Tensor(torch=self, gpu=a.gpu, wrong=0)

    def _scaled_mm(self, a: Tensor, b: Tensor, **_options: Any) -> Tensor:
        return self.mm(a, b)

    def ne(self, tensor: Tensor, _other: Tensor) -> Tensor:
        return Tensor(torch=self, gpu=tensor.gpu, wrong=self.wrong.get(tensor.gpu, 0))

    def work(self, gpu: int) -> None:
        self.used_gpus.append(gpu)
        if gpu in self.errors:
            raise RuntimeError(self.errors[gpu])
        self.clock[gpu] += self.seconds[gpu]


class Event:
    def __init__(self, torch: Torch) -> None:
        self.torch = torch

    def record(self) -> None:
        self.gpu = self.torch.current
        self.time = self.torch.clock[self.gpu]

    def query(self) -> bool:
        return self.gpu not in self.torch.hangs

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.time - self.time)
