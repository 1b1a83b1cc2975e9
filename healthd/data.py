"""Where the data that comes with the program lies.

facts/                  NVIDIA's codes; a running daemon reads them late, so they stay here
node_profiles/          what machines of a type have, a link to conf/profiles
nvidia/fake_machines/   machines with GPUs that do not exist
fleet/sql/              the questions that the fleet's store answers
fleet/page/             how its report looks, and what draws its charts
validation/tools/       the programs that another Python runs, which may have PyTorch
"""

from __future__ import annotations

import os


def data_folder(name: str) -> str:
    """The path of one of these folders: "facts", "nvidia/fake_machines"."""
    return os.path.join(os.path.dirname(__file__), name)
