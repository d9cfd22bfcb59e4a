"""Keys that protect client-held conversation state: keyring, file, rotation."""
