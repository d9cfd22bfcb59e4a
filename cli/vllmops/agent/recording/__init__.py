"""Files that the agent writes all the time: the flight recorder and the heartbeat."""
