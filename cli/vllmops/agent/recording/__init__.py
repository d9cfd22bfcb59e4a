"""What the agent writes to files while its process runs: steps and heartbeat."""
