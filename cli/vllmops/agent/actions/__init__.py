"""Looks for states that can be healed, and heals them: a module for each."""
