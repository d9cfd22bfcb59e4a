"""How a supervisor hands a listening socket to a server that it starts."""

from __future__ import annotations

# In the environment: the number of the open file, the port, the host as it was given.
LISTEN = "VLLMOPS_LISTEN"
