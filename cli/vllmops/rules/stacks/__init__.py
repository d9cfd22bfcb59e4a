"""Finds which hang a set of stacks shows: by known signatures first, then by hypotheses."""
