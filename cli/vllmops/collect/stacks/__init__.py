"""Stacks of a server's processes: from py-spy, or as people paste them."""
