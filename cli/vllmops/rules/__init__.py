"""Pure functions that judge: they turn snapshots into findings."""
