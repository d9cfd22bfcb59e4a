"""vLLM's HTTP routes, and the admin routes, from the command line's side."""
