"""Files, streams, output, errors and numbers. Nothing here knows of vLLM or of servers."""
