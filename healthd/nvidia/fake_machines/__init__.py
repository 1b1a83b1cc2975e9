"""Fake machines with NVIDIA GPUs, each in a file NAME.toml."""

import os

FOLDER = os.path.dirname(__file__)
