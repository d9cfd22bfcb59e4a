"""Facts about a server, a package for each kind of source."""
