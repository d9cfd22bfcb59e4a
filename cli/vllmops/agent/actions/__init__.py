"""The agent's half of the actions: proves stuck states in this process and ends them."""
