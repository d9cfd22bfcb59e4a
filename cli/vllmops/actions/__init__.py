"""Changes a running server: heals one stuck state each, repairs caches, attaches the agent."""
