"""Tests of nodes that a job excluded, from submit line and script. test_node_facts.py tests those of squeue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.sources.exclusions import NO_EXCLUSIONS, UNKNOWN, Exclusions, parse_script, parse_submit_line

N1, N12 = Exclusions(True, ("n1",)), Exclusions(True, ("n1", "n2"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sbatch --exclude=n1 run.sh", N1),
        ("sbatch --exclude n[1-2] run.sh", N12),
        ("sbatch --exclud=n1 run.sh", N1),
        ("sbatch -x n1 run.sh", N1),
        ("sbatch -xn1,n2 run.sh", N12),
        ("sbatch -Qx n1 run.sh", N1),
        ("sbatch -HQxn1 run.sh", N1),
        ("sbatch -N 2 -x n1 --gpus-per-node=8 run.sh --lr 0.1", N1),
        ("sbatch -x n9 --exclude=n1 run.sh", N1),
        ("/usr/bin/sbatch -W -x n1 run.sh -x other", N1),
        ("srun -x n1 python train.py -x 3", N1),
        ("srun -W 0 -x n1 hostname", N1),
        ("salloc --exclude=n1", N1),
        ("srun -N2 hostname", NO_EXCLUSIONS),
        ("srun --exclusive -n 4 hostname", NO_EXCLUSIONS),
        ("salloc", NO_EXCLUSIONS),
        ("sbatch --wrap hostname", NO_EXCLUSIONS),
        ("sbatch -N 2 --wrap=python train.py", NO_EXCLUSIONS),
        # the script may exclude more
        ("sbatch run.sh", UNKNOWN),
        ("sbatch --exclusive run.sh", UNKNOWN),
        ("sbatch run.sh --exclude=n1", UNKNOWN),
        ("sbatch run.sh -x n1", UNKNOWN),
        ("sbatch -- -x n1", UNKNOWN),
        # it is not clear which command these words belong to
        ("sbatch --wrap python train.py -x n1", UNKNOWN),
        ("srun -J my job -x n1 hostname", UNKNOWN),
        ("srun hostname -x", UNKNOWN),
        # a file of names, an invalid list, nothing, another command
        ("sbatch --exclude=/home/u/bad_nodes run.sh", UNKNOWN),
        ("sbatch --exclude=n[1-99999999] run.sh", UNKNOWN),
        ("sbatch -x n[1 run.sh", UNKNOWN),
        ("", UNKNOWN),
        ("flux submit -x n1", UNKNOWN),
    ],
)
def test_submit_line_gives_exclusions_or_unknown(line: str, expected: Exclusions) -> None:
    assert parse_submit_line(line) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#!/bin/bash\n#SBATCH --exclude=n1\nsrun x\n", N1),
        ("#!/bin/bash\n#SBATCH -x n1\n", N1),
        ("#!/bin/bash\n#SBATCH -x 'n1,n2' # bad ones\n", N12),
        ('#!/bin/bash\n#SBATCH --job-name "a b" --exclude="n[1-2]"\n', N12),
        ("#!/bin/bash\n\n  # words\n#SBATCH --exclude=n1\n", N1),
        ("#!/bin/bash\n#SBATCH -N 2\n", NO_EXCLUSIONS),
        ("#!/bin/bash\n# #SBATCH --exclude=n1\nhostname\n", NO_EXCLUSIONS),
        ("#!/bin/bash\nhostname\n#SBATCH --exclude=n1\n", NO_EXCLUSIONS),
        ("#!/bin/bash\n##SBATCH --exclude=n1\n", NO_EXCLUSIONS),
        ("#!/bin/bash\n#SBATCH -x n9\n#SBATCH --exclude=n1\n", N1),
        ("#!/bin/bash\n#SBATCH -x n1\n#SBATCH hetjob\n#SBATCH -x n2\n", UNKNOWN),
        ("#!/bin/bash\n#SBATCH --exclude=./bad_nodes\n", UNKNOWN),
        ("", NO_EXCLUSIONS),
    ],
)
def test_script_gives_exclusions_above_first_command(script: str, expected: Exclusions) -> None:
    assert parse_script(script) == expected


@given(st.text("-x=n1[], wrapsbatchexclude\"'\\#", max_size=60))
def test_any_words_give_exclusions(words: str) -> None:
    for answer in (parse_submit_line(f"sbatch {words}"), parse_submit_line(words), parse_script(f"#SBATCH {words}")):
        assert answer.is_complete or answer.nodes == ()
