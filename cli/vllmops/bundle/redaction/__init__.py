"""Removes secrets, and what users and models said, from everything in a bundle."""
