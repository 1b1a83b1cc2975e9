"""Fake machines with NVIDIA GPUs, one NAME.toml each."""

import os

FOLDER = os.path.dirname(__file__)
