"""Pure functions from snapshots to findings."""
