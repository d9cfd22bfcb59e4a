"""What the agents of a server say, as metrics of Prometheus; pure functions."""
