"""Checks that every backend passes, also those that others write."""
