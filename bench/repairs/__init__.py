"""Trials of repair mode "act", which `repair_trials.py` runs: times, races, kills and the limit."""
