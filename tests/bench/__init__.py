"""Timing claims as ratios, each measured against a rival in the same run; see `run.py`."""
