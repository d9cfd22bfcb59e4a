"""Stacks of a server's processes, from py-spy or pasted by a person, as data."""
