"""Machines with NVIDIA GPUs that do not exist: NAME.toml each."""

import os

FOLDER = os.path.dirname(__file__)
