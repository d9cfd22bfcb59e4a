"""The routes of the Responses API and of conversations, over HTTP and WebSockets."""
