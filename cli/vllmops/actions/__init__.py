"""What changes a server: healing, a module for each stuck state, cache repair, attaching."""
