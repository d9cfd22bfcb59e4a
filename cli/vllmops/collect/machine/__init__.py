"""Facts about this machine: processes, users, shared memory, ports, GPUs, permission to trace."""
