"""What ``vllmops top`` shows: looks at servers, the rows made of them, and the full screen."""
