"""Heals states that are proven to be stuck, one module for each, and changes nothing else."""
