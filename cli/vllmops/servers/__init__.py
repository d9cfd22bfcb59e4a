"""Finds the servers of this machine, reads their records and logs, reaches their supervisors."""
