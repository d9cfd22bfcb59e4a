"""The agent's half of the actions: each proves a stuck state in this process, and ends it."""
