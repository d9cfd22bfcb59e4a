"""Checks that every backend passes; also for backends of others."""
