"""Tests of the callbacks and the TaskProlog that report steps to healthd.

The base classes are fakes: Lightning and transformers are not installed for tests. With the real ones
(pytorch-lightning 2.6.6, transformers 5.17.0), each step of a small training arrived in a manual test, also with
accumulated gradients and an evaluation in between.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASK_PROLOG = ROOT / "packaging/slurm/task-prolog"


def load_example(name: str, monkeypatch, **modules: types.SimpleNamespace) -> types.ModuleType:
    for module, content in modules.items():
        parts = module.split("__")
        for end in range(1, len(parts) + 1):
            fake_module = types.ModuleType(".".join(parts[:end]))
            monkeypatch.setitem(sys.modules, fake_module.__name__, fake_module)
        vars(fake_module).update(vars(content))
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reported_steps(monkeypatch):
    from healthd import client

    steps: list[float | None] = []
    monkeypatch.setattr(client, "step", lambda busy=None, wait=None: steps.append(busy))
    return steps


def test_lightning_callback_reports_each_batch(reported_steps, monkeypatch):
    base = type("Callback", (), {})
    module = load_example(
        "lightning_callback", monkeypatch, lightning__pytorch__callbacks=types.SimpleNamespace(Callback=base)
    )
    steps = module.HealthdSteps()
    assert isinstance(steps, base)
    steps.on_train_batch_end(None, object(), None, None, 0)
    steps.on_train_batch_end(None, types.SimpleNamespace(healthd_busy=0.25), None, None, 1)
    assert reported_steps == [None, 0.25]


def test_transformers_callback_reports_each_step(reported_steps, monkeypatch):
    base = type("TrainerCallback", (), {})
    module = load_example(
        "transformers_callback", monkeypatch, transformers=types.SimpleNamespace(TrainerCallback=base)
    )
    steps = module.HealthdSteps()
    assert isinstance(steps, base)
    steps.on_step_end(None, None, None, model=None)
    assert reported_steps == [None]


def exported_variables(tmp_path: Path, **environment: str) -> dict[str, str]:
    """Return the variables that Slurm sets from the lines "export NAME=value" of the script."""
    script = TASK_PROLOG.read_text().replace("/etc/default/healthd-task-prolog", str(tmp_path / "default"))
    result = subprocess.run(
        ["/bin/sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={"SLURM_JOB_ID": "4711", **environment},
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.removeprefix("export ").partition("=") for line in result.stdout.splitlines()]
    return {name: value for name, _, value in lines}


def test_task_prolog_configures_nccl_inspector(tmp_path):
    plugin = tmp_path / "inspector.so"
    plugin.touch()
    (tmp_path / "default").write_text(f"HEALTHD_INSPECTOR_PLUGIN={plugin}\n")
    assert exported_variables(tmp_path) == {
        "NCCL_PROFILER_PLUGIN": str(plugin),
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_VERBOSE": "1",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "1000000",
        "NCCL_INSPECTOR_DUMP_DIR": f"{tmp_path}/nccl-inspector-4711",
    }
    assert exported_variables(tmp_path, NCCL_INSPECTOR_DUMP_DIR="/mine")["NCCL_INSPECTOR_DUMP_DIR"] == "/mine"


def test_task_prolog_keeps_profiler_of_user(tmp_path):
    plugin = tmp_path / "inspector.so"
    plugin.touch()
    (tmp_path / "default").write_text(f"HEALTHD_INSPECTOR_PLUGIN={plugin}\n")
    assert exported_variables(tmp_path, NCCL_PROFILER_PLUGIN="mine.so") == {}


def test_task_prolog_sets_nothing_without_plugin(tmp_path):
    (tmp_path / "default").write_text(f"HEALTHD_INSPECTOR_PLUGIN={tmp_path}/none.so\n")
    assert exported_variables(tmp_path) == {}
