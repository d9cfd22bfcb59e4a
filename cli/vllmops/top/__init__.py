"""The full screen of ``vllmops top``: it follows servers and shows a row for each."""
