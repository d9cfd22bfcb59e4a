"""This machine: processes, users, shared memory, ports, permission to trace, GPUs."""
