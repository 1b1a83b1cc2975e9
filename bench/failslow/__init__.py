"""The benchmark of `healthd failslow`.

generate has sets of series with known faults, baselines has plain BOCD and a sliding window, score counts what is
found, missed and blamed, alibaba reads a public trace, and cost measures time and memory.
"""
