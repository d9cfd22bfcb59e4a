"""Where responses are stored: a module for each kind of database."""
