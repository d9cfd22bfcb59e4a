"""What the agents of a server say, as metrics of Prometheus; alert rules and dashboards."""
