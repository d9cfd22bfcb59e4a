"""What the agent reads of its process when it is asked."""
