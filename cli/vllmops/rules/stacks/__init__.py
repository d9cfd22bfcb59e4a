"""Which hang a set of stacks shows: signatures first, then hypotheses."""
