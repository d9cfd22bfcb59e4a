"""The keys that a server's processes hold: loaded from the keyring, and shown to operators."""
